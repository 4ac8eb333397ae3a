"""load_embeddings: every kind of file read back, every bad file refused in one line."""

import io
import pickle
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sklearn_mr2.datasets import load_embeddings

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
Y = np.array(["cat", "dog", "cat", "emu"])


def frame(**columns):
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], **columns})


def write_csv(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def refused(path, *words, error=ValueError, **options):
    """Assert one line that names the file and contains the words."""
    with pytest.raises(error) as caught:
        load_embeddings(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in (path.name, *words):
        assert word in message
    return message


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (open, (str(self.trace), "w"))


# --- arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_name", ["X", "features", "embeddings", "data"])
@pytest.mark.parametrize("y_name", ["y", "labels", "target", "targets"])
def test_npz_usual_names(tmp_path, x_name, y_name):
    path = tmp_path / "e.npz"
    np.savez_compressed(path, **{x_name: X, y_name: Y, "target_names": np.unique(Y)})
    features, labels, names = load_embeddings(str(path))
    np.testing.assert_array_equal(features, X)
    np.testing.assert_array_equal(labels, Y)
    assert names is None


def test_npz_positional_and_upper_case_suffix(tmp_path):
    path = tmp_path / "e.NPZ"
    with path.open("wb") as file:
        np.savez(file, X, Y)
    features, labels, _ = load_embeddings(path)
    np.testing.assert_array_equal(features, X)
    np.testing.assert_array_equal(labels, Y)


def test_npz_label_names_the_array(tmp_path):
    path = tmp_path / "e.npz"
    np.savez(path, X=X, y=Y, coarse=[0, 1, 0, 1])
    assert load_embeddings(path, label="coarse")[1].tolist() == [0, 1, 0, 1]


def test_npz_without_the_arrays_lists_those_found(tmp_path):
    path = tmp_path / "e.npz"
    np.savez(path, X_train=X, y=Y)
    refused(path, "no array for the features", "'X_train', 'y'")
    np.savez(path, X=X, species=Y)
    refused(path, "no array for the labels", "'X', 'species'")
    np.savez(path, X=X, data=X, y=Y)
    refused(path, "several arrays for the features")
    np.savez(path)
    refused(path, "found nothing")


@given(
    features=hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, ">f4", ">f8"]),
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(-1000, 1000, width=16),
    ),
    data=st.data(),
)
def test_floats_come_back_as_stored_in_native_order(tmp_path_factory, features, data):
    labels = data.draw(
        hnp.arrays(st.sampled_from([np.uint8, np.int64, ">i4", np.bool_]), len(features))
    )
    folder = tmp_path_factory.mktemp("roundtrip")
    np.savez(folder / "e.npz", X=features, y=labels)
    np.save(folder / "e.npy", features)
    np.save(folder / "e_y.npy", labels)
    for name in ("e.npz", "e.npy"):
        read, read_labels, _ = load_embeddings(folder / name)
        assert read.dtype == features.dtype.newbyteorder("=")
        assert read.dtype.isnative
        assert read_labels.dtype.isnative
        np.testing.assert_array_equal(read, features)
        np.testing.assert_array_equal(read_labels, labels)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_])
def test_integers_become_float64(tmp_path, dtype):
    path = tmp_path / "e.npz"
    np.savez(path, X=(X > 0.5).astype(dtype), y=Y)
    features = load_embeddings(path)[0]
    assert features.dtype == np.float64
    np.testing.assert_array_equal(features, X > 0.5)


@pytest.mark.parametrize("name", ["e_labels.npy", "e_y.npy", "labels.npy", "y.npy"])
def test_npy_finds_labels_beside_it(tmp_path, name):
    np.save(tmp_path / "e.npy", X)
    np.save(tmp_path / name, Y)
    features, labels, names = load_embeddings(tmp_path / "e.npy")
    np.testing.assert_array_equal(features, X)
    np.testing.assert_array_equal(labels, Y)
    assert names is None


def test_npy_labels_of_the_same_stem_come_first(tmp_path):
    np.save(tmp_path / "e.npy", X)
    np.save(tmp_path / "labels.npy", np.zeros(4))
    np.save(tmp_path / "e_labels.npy", Y)
    np.testing.assert_array_equal(load_embeddings(tmp_path / "e.npy")[1], Y)


def test_npy_without_labels_says_what_to_give(tmp_path):
    path = tmp_path / "e.npy"
    np.save(path, X)
    refused(path, "e_labels.npy", "labels_path", error=FileNotFoundError)
    refused(path, "labels_path", label="y")
    missing = tmp_path / "gone.txt"
    with pytest.raises(FileNotFoundError, match=r"gone\.txt"):
        load_embeddings(path, labels_path=missing)
    other = write_csv(tmp_path / "labels.json", "[1, 2]")
    with pytest.raises(ValueError, match=r"labels\.json.*\.npy, \.csv or \.txt"):
        load_embeddings(path, labels_path=other)


def test_mmap_maps_and_does_not_read(tmp_path):
    path = tmp_path / "e.npy"
    np.save(path, X)
    np.save(tmp_path / "e_y.npy", Y)
    features = load_embeddings(path, mmap=True)[0]
    assert isinstance(features, np.memmap)
    assert not features.flags.writeable
    np.testing.assert_array_equal(features, X)
    assert not isinstance(load_embeddings(path)[0], np.memmap)

    np.save(path, X.astype(np.int32))
    features = load_embeddings(path, mmap=True)[0]
    assert features.dtype == np.float64
    assert not isinstance(features, np.memmap)


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".parquet"])
def test_arguments_for_npy_alone(tmp_path, suffix):
    path = tmp_path / f"e{suffix}"
    refused(path, "mmap", mmap=True)
    refused(path, "labels_path", labels_path="labels.npy")


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat\ndog\ncat\nemu\n", ["cat", "dog", "cat", "emu"]),
        ("label\ncat\ndog\ncat\nemu", ["cat", "dog", "cat", "emu"]),
        ("3\n-1\n3\n0\n", [3, -1, 3, 0]),
        ("1.0\n2e0\n1.0\n5.\n", [1, 2, 1, 5]),
        ("007\n7\n007\n7\n", ["007", "7", "007", "7"]),
        ("y\nn\nn\ny\n", ["y", "n", "n", "y"]),
        ("None\nNA\nnull\nNone\n", ["None", "NA", "null", "None"]),
        ("\ufeffcat\r\n dog \r\ncat\r\nemu\r\n", ["cat", "dog", "cat", "emu"]),
        ("99999999999999999999\n1\n1\n1\n", ["99999999999999999999", "1", "1", "1"]),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".csv"])
def test_text_labels(tmp_path, text, expected, suffix):
    np.save(tmp_path / "e.npy", X)
    labels_path = write_csv(tmp_path / f"names{suffix}", text)
    labels = load_embeddings(tmp_path / "e.npy", labels_path=labels_path)[1]
    assert labels.tolist() == expected


def test_commas_in_text_labels(tmp_path):
    np.save(tmp_path / "e.npy", X[:2])
    txt = write_csv(tmp_path / "l.txt", "cat, black\ndog\n")
    assert load_embeddings(tmp_path / "e.npy", labels_path=txt)[1].tolist() == ["cat, black", "dog"]
    quoted = write_csv(tmp_path / "l.csv", '"cat, black"\ndog\n')
    labels = load_embeddings(tmp_path / "e.npy", labels_path=quoted)[1]
    assert labels.tolist() == ["cat, black", "dog"]
    several = write_csv(tmp_path / "m.csv", "cat,0\ndog,1\n")
    with pytest.raises(ValueError, match=r"m\.csv.*several fields.*one label a line"):
        load_embeddings(tmp_path / "e.npy", labels_path=several)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0.0, np.nan, 1.0, 1.0], ["1 of 4 labels are missing", "row 1"]),
        (["a", "b", "", "nan"], ["2 of 4 labels are missing", "row 2"]),
        ([0.5, 1.0, 2.0, 1.0], ["not whole numbers"]),
        ([np.inf, 1.0, 2.0, 1.0], ["not whole numbers"]),
        ([1, 2, 3], ["3 labels for 4 samples"]),
        (np.eye(4), ["shape (4, 4)", "one label a sample"]),
        (np.array(5), ["shape ()"]),
        (np.array(["2020-01-01"] * 4, dtype="datetime64[D]"), ["datetime64[D]"]),
        (np.array([b"\xff"] * 4), ["utf-8", "y.astype(str)"]),
    ],
)
def test_labels_that_are_no_classes(tmp_path, labels, words):
    path = tmp_path / "e.npz"
    np.savez(path, X=X, y=labels)
    refused(path, *words)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([[1], [2], [1], [2]], [1, 2, 1, 2]),
        ([1.0, 2.0, -1.0, 2.0], [1, 2, -1, 2]),
        ([b"cat", "dög".encode(), b"cat", b"emu"], ["cat", "dög", "cat", "emu"]),
        ([True, False, True, True], [True, False, True, True]),
    ],
)
def test_labels_brought_to_a_plain_type(tmp_path, labels, expected):
    path = tmp_path / "e.npz"
    np.savez(path, X=X, y=labels)
    assert load_embeddings(path)[1].tolist() == expected


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("column", ["label", "target", "class", "y", "Label"])
def test_table_with_a_usual_label_column(tmp_path, suffix, column):
    path = tmp_path / f"e{suffix}"
    table = frame(**{column: Y}, c=X[:, 2])
    table.to_csv(path, index=False) if suffix == ".csv" else table.to_parquet(path)
    features, labels, names = load_embeddings(path)
    np.testing.assert_allclose(features, X)
    assert labels.tolist() == Y.tolist()
    assert names == ["a", "b", "c"]
    assert features.dtype == (np.float64 if suffix == ".csv" else np.float32)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_table_label_given_or_needed(tmp_path, suffix):
    path = tmp_path / f"e{suffix}"

    def write(table):
        table.to_csv(path, index=False) if suffix == ".csv" else table.to_parquet(path)

    write(frame(species=Y))
    assert load_embeddings(path, label="species")[1].tolist() == Y.tolist()
    refused(path, "no label column", "'a', 'b', 'species'", "give label")
    refused(path, "'kind'", "'a', 'b', 'species'", label="kind")
    write(frame(y=Y, target=[0, 1, 0, 1]))
    refused(path, "several label columns", "'y', 'target'")
    assert load_embeddings(path, label="y")[2] == ["a", "b", "target"]
    write(frame(y=Y, colour=["red"] * 4))
    refused(path, "'colour' is not numeric")
    write(frame(y=Y).drop(columns=["a", "b"]))
    refused(path, "no feature columns")


def test_csv_labels_keep_words_that_pandas_takes_for_missing(tmp_path):
    path = write_csv(tmp_path / "e.csv", "a,label\n1,None\n2, NA \n3,None\n4,n/a\n")
    assert load_embeddings(path)[1].tolist() == ["None", "NA", "None", "n/a"]
    path = write_csv(tmp_path / "e.csv", "a,label\n1,0\n2,\n3,1\n4,\n")
    refused(path, "2 of 4 labels are missing", "row 1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b,label\n1,2,x\n3,4,y\n5,", ["row 2"]),  # cut short: no label
        ("label,a,b\nx,1,2\ny,3,4\nx,5", ["row 2", "column 'b'"]),  # cut short: no feature
        ("a,label\n1,x,9\n2,y,9\n", ["Length of header"]),
        ("a,label\n1,x\n2,y,9\n", ["line 3"]),
        ("a;b;label\n1;2;x\n", ["'a;b;label'"]),
        ("1.5,2.5,3\n1.5,2.5,4\n", ["no label column", "'1.5'"]),
        ("\n\n", ["comma-separated"]),
        ("a,label\n", ["no rows"]),
        (",a,label\n0,1,x\n1,2,y\n", ["Unnamed", "without its index"]),
        ("a,label\n1,x\nabc,y\n", ["'a' is not numeric"]),
        ("a,label\n1,x\ninf,y\n", ["infinite", "row 1", "column 'a'"]),
    ],
)
def test_bad_csv(tmp_path, text, words):
    refused(write_csv(tmp_path / "e.csv", text), *words)


def test_csv_with_byte_order_mark(tmp_path):
    path = write_csv(tmp_path / "e.csv", "\ufefflabel,a\r\nx,1\r\ny,2\r\n")
    features, labels, names = load_embeddings(path)
    assert (features.tolist(), labels.tolist(), names) == ([[1], [2]], ["x", "y"], ["a"])


def test_csv_in_another_encoding(tmp_path):
    path = tmp_path / "e.csv"
    path.write_bytes("größe,label\n1,x\n".encode("latin-1"))
    refused(path, "UTF-8")


@pytest.mark.parametrize("fixed_size", [True, False])
def test_parquet_list_column_is_expanded(tmp_path, fixed_size):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    kind = pa.list_(pa.float32(), 3) if fixed_size else pa.list_(pa.float32())
    table = pa.table(
        {
            "age": pa.array([1, 2, 3, 4], pa.int16()),
            "emb": pa.array(X.tolist(), kind),
            "label": pa.array(Y.tolist()).dictionary_encode(),
        }
    )
    path = tmp_path / "e.parquet"
    pq.write_table(table, path)
    features, labels, names = load_embeddings(path)
    np.testing.assert_array_equal(features, np.column_stack([[1, 2, 3, 4], X]))
    assert features.dtype == np.float32
    assert labels.tolist() == Y.tolist()
    assert names == ["age", "emb_0", "emb_1", "emb_2"]


@pytest.mark.parametrize(
    "column",
    [
        [[1.0, 2.0], [3.0], [4.0, 5.0], [6.0, 7.0]],
        [[1.0, 2.0], None, [4.0, 5.0], [6.0, 7.0]],
        [[[1.0]], [[2.0]], [[3.0]], [[4.0]]],
        [["a"], ["b"], ["c"], ["d"]],
    ],
)
def test_parquet_bad_lists(tmp_path, column):
    path = tmp_path / "e.parquet"
    frame(emb=column, y=Y).to_parquet(path)
    refused(path, "lists in column 'emb'")


def test_parquet_nullable_columns(tmp_path):
    path = tmp_path / "e.parquet"
    frame(c=pd.array([1, 2, 3, 4], "Int32"), y=pd.array([3, 1, 3, 1], "Int64")).to_parquet(path)
    features, labels, _ = load_embeddings(path)
    np.testing.assert_array_equal(features[:, 2], [1, 2, 3, 4])
    assert labels.tolist() == [3, 1, 3, 1]
    assert labels.dtype == np.int64
    frame(c=pd.array([1, None, 3, 4], "Int32"), y=Y).to_parquet(path)
    refused(path, "NaN", "row 1", "column 'c'")
    frame(y=pd.array([3, None, 3, 1], "Int64")).to_parquet(path)
    refused(path, "1 of 4 labels in column 'y' are missing", "row 1")
    frame(y=pd.to_datetime(["2020-01-01"] * 4)).to_parquet(path)
    refused(path, "are no classes")


def test_parquet_unnamed_index_is_not_a_feature(tmp_path):
    path = tmp_path / "e.parquet"
    frame(y=Y).iloc[::-1].to_parquet(path)
    assert load_embeddings(path)[2] == ["a", "b"]
    assert load_embeddings(path)[1].tolist() == Y[::-1].tolist()


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "e.parquet"
    frame(y=Y).to_parquet(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(path, "pip install pyarrow", error=ImportError)


# --- files that are not what they seem ------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".csv", ".parquet"])
def test_missing_empty_and_folder(tmp_path, suffix):
    path = tmp_path / f"e{suffix}"
    refused(path, "no such file", error=FileNotFoundError)
    path.touch()
    refused(path, "empty")
    path.unlink()
    path.mkdir()
    refused(path, "not a file")


def test_unknown_suffix(tmp_path):
    refused(write_csv(tmp_path / "e.xlsx", "a"), "'.xlsx'", ".parquet")


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".parquet"])
def test_text_under_a_binary_suffix(tmp_path, suffix):
    refused(write_csv(tmp_path / f"e{suffix}", "a,label\n1,x\n"), "cannot be read", "again")


def test_numpy_files_under_each_others_suffix(tmp_path):
    np.save(tmp_path / "e.npy", X)
    refused((tmp_path / "e.npy").rename(tmp_path / "e.npz"), "zip")
    np.savez(tmp_path / "f.npz", X=X, y=Y)
    refused((tmp_path / "f.npz").rename(tmp_path / "f.npy"), "numpy's mark")


def test_pickles_are_never_run(tmp_path):
    trace = tmp_path / "trace"
    bomb = np.array([Bomb(trace)] * 4, dtype=object)
    np.savez(tmp_path / "x.npz", X=bomb, y=Y)
    refused(tmp_path / "x.npz", "allow_pickle", "without Python objects")
    np.savez(tmp_path / "y.npz", X=X, y=bomb)
    refused(tmp_path / "y.npz", "without Python objects")
    np.save(tmp_path / "x.npy", bomb)
    np.save(tmp_path / "labels.npy", bomb)
    refused(tmp_path / "x.npy", "not as Python objects")
    refused(tmp_path / "x.npy", mmap=True)
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Bomb(trace)))
    refused(tmp_path / "raw.npy", "numpy's mark")
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as archive:
        archive.writestr("X.npy", pickle.dumps(Bomb(trace)))
        archive.writestr("y.npy", pickle.dumps(Bomb(trace)))
    refused(tmp_path / "raw.npz")
    assert not trace.exists()


@pytest.mark.parametrize(
    "features",
    [X[0], X[None], np.array(1.0), X[:0], X[:, :0], X.astype(complex), X.astype(str)],
    ids=["1-D", "3-D", "0-D", "no samples", "no features", "complex", "text"],
)
def test_features_of_another_shape_or_type(tmp_path, features):
    path = tmp_path / "e.npz"
    np.savez(path, X=features, y=Y)
    refused(path, "features")
    path = tmp_path / "e.npy"
    np.save(path, features)
    np.save(tmp_path / "e_y.npy", Y)
    refused(path, "features")


def test_infinite_features_name_the_place(tmp_path):
    path = tmp_path / "e.npz"
    bad = X.copy()
    bad[2, 1] = np.inf
    bad[3, 0] = np.nan
    np.savez(path, X=bad, y=Y)
    refused(path, "2, the first in row 2", "column 1")


def whole_file(suffix):
    buffer = io.BytesIO()
    if suffix == ".npz":
        np.savez_compressed(buffer, X=X, y=Y)
    elif suffix == ".npy":
        np.save(buffer, X)
    elif suffix == ".csv":
        frame(label=Y).to_csv(buffer, index=False)
    else:
        frame(label=Y).to_parquet(buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".parquet"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.99])
def test_truncated(tmp_path, suffix, kept):
    content = whole_file(suffix)
    path = tmp_path / f"e{suffix}"
    path.write_bytes(content[: int(len(content) * kept)])
    np.save(tmp_path / "e_y.npy", Y)
    refused(path, "cannot be read")
    if suffix == ".npy":
        refused(path, "cannot be read", mmap=True)


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".csv", ".parquet"])
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_damaged_bytes_give_a_result_or_one_line(tmp_path, suffix, data):
    content = bytearray(whole_file(suffix))
    places = data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8))
    for place in places:
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path / f"e{suffix}"
    path.write_bytes(content)
    np.save(tmp_path / "e_y.npy", Y)
    try:
        features, labels, _ = load_embeddings(path)
    except ValueError as error:
        message = str(error)
    else:
        message = None
        assert features.ndim == 2
        assert features.dtype.kind == "f"
        assert labels.shape == (len(features),)
    assert message is None or (message.startswith(str(tmp_path)) and "\n" not in message)
