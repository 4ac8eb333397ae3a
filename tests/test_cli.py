import importlib.util
import io
import json
import subprocess
import sys

import joblib
import numpy as np
import pandas as pd
import pytest

from sklearn_mr2 import MR2Classifier, __version__, cli
from sklearn_mr2._probe import Settings, files, job

FAST = ["--Cs", "0.1", "1", "--cv", "2"]
NAMES = {"summary.json", "per_class.csv", "comparison.png", "model.joblib"}


def make_data(labels=("cat", "dog", "eel", "fox"), n_per_class=12, seed=0):
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(len(labels)), n_per_class)
    means = rng.normal(size=(len(labels), 3))
    X = means[codes] + rng.normal(size=(len(codes), 3)) * (0.5 + 0.3 * codes)[:, None]
    return X.astype(np.float32), np.array(labels)[codes]


def write_csv(path, X, y, label="label"):
    frame = pd.DataFrame(X, columns=[f"x{k}" for k in range(X.shape[1])])
    frame.assign(**{label: y}).to_csv(path, index=False)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def npz(folder):
    X, y = make_data()
    np.savez(folder / "pets.npz", X=X, y=y)
    return "pets.npz"


def without(monkeypatch, package):
    """Make a package look as if it were not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: None if name == package else find_spec(name, *args),
    )


def refused(capsys, *argv):
    """Run a command that must fail, and return the one line it says."""
    assert cli.main(["probe", *map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("sklearn-mr2: ")
    assert err.count("\n") == 1
    return err


# ---------------------------------------------------------------------- what it finds and says


def test_writes_and_reports(npz, folder, capsys):
    assert cli.main(["probe", npz, *FAST]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert {path.name for path in (folder / "probe-results").iterdir()} == NAMES
    assert {path.name for path in folder.iterdir()} == {npz, "probe-results"}
    assert max(map(len, out.splitlines())) <= 80
    for words in (
        "pets.npz: 48 samples, 3 features, 4 classes",
        "overall accuracy",
        "hardest third",
        "easiest third",
        "worst: ",
        "never on the test part",
        "joblib.load('probe-results/model.joblib')",
    ):
        assert words in out
    assert (folder / "probe-results/comparison.png").read_bytes().startswith(b"\x89PNG")


def test_files_agree_with_each_other_and_with_the_model(npz, folder, capsys):
    assert cli.main(["probe", npz, *FAST, "--seed", "3"]) == 0
    out = capsys.readouterr().out
    X, y = make_data()
    train, test = job._split(*np.unique(y, return_inverse=True), Settings(seed=3, cv=2))
    model = joblib.load("probe-results/model.joblib")
    hit = model.predict(X[test]) == y[test]
    table = pd.read_csv("probe-results/per_class.csv")
    assert table["class"].tolist() == ["cat", "dog", "eel", "fox"]
    for row in table.itertuples():
        assert row.test_samples == (y[test] == row[1]).sum()
        assert row.train_samples == (y[train] == row[1]).sum()
        assert row.recall_mr2 == pytest.approx(hit[y[test] == row[1]].mean(), abs=1e-5)
    summary = json.loads((folder / "probe-results/summary.json").read_text())
    overall = summary["comparisons"]["overall accuracy"]
    assert overall["mr2"] == pytest.approx(hit.mean())
    assert f"{100 * overall['cross_entropy']:6.1f}{100 * overall['mr2']:7.1f}" in out
    assert summary["settings"]["seed"] == 3
    assert summary["settings"]["Cs"] == [0.1, 1.0]
    assert summary["versions"]["sklearn-mr2"] == __version__
    fitted = model[-1]
    assert isinstance(fitted, MR2Classifier)
    assert summary["mr2"]["C"] == fitted.C
    assert summary["mr2"]["C_fitted"] == fitted.C_
    np.testing.assert_allclose(fitted.margins_, table["margin_mr2"], rtol=1e-5)
    assert summary["difficulty"]["hard"] == table["class"][table["difficulty"] == "hard"].tolist()


def test_same_seed_same_numbers(npz, folder):
    def results(out, *argv):
        assert cli.main(["probe", npz, *FAST, "--out", out, *argv]) == 0
        summary = json.loads((folder / out / "summary.json").read_text())
        del summary["seconds"]
        return summary, (folder / out / "per_class.csv").read_text()

    first = results("a")
    assert results("b") == first
    assert results("c", "--seed", "1")[1] != first[1]


def test_default_data(folder, capsys):
    assert cli.main(["probe", "--Cs", "0.01", "--cv", "2", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "Fashion-MNIST features (bundled): 6000 samples, 128 features, 10 classes" in out
    assert "worst: Shirt" in out
    table = pd.read_csv("probe-results/per_class.csv")
    assert (table["test_samples"] == 150).all()


def test_error_rule_lifts_the_margin_of_hard_classes(npz, capsys):
    assert cli.main(["probe", npz, *FAST, "--rule", "error"]) == 0
    assert "by construction" in capsys.readouterr().out
    model = joblib.load("probe-results/model.joblib")[-1]
    assert model.get_params()["margin_statistic"] == "error"
    assert model.margin_error_correlation_ == pytest.approx(1)


def test_says_no_clear_difference_where_predictions_agree(folder, capsys):
    # So far apart that both models are always right.
    X = np.repeat(np.eye(3), 8, axis=0) * 100
    write_csv("easy.csv", X, np.repeat(["a", "b", "c"], 8))
    assert cli.main(["probe", "easy.csv", *FAST]) == 0
    out = capsys.readouterr().out
    assert out.count("no clear difference") == 4
    assert "better" not in out
    assert "worse" not in out
    assert "No class has another recall under MR2 than under CE." in out


def test_notes_a_choice_at_the_end_of_the_grid(npz, capsys):
    assert cli.main(["probe", npz, "--Cs", "1", "2", "--cv", "2"]) == 0
    assert "Note: for CE and MR2 that is the end of the values tried, 1 to 2" in (
        capsys.readouterr().out.replace("\n        ", " ")
    )


def test_counts_fits_that_did_not_converge(npz, capsys, monkeypatch):
    fit = MR2Classifier.fit
    monkeypatch.setattr(
        MR2Classifier,
        "fit",
        lambda self, *args, **kwargs: fit(self.set_params(max_epochs=1), *args, **kwargs),
    )
    assert cli.main(["probe", npz, *FAST]) == 0
    out, err = capsys.readouterr()
    assert "Note: 10 of 10 fits stopped before the optimum" in out.replace("\n        ", " ")
    assert err == ""


# ---------------------------------------------------------------------- what it reads


def write_npy(X, y):
    np.save("x.npy", X)
    np.save("x_labels.npy", y)
    return ["x.npy"]


def write_npy_and_text(X, y):
    np.save("x.npy", X)
    with open("names.txt", "w", encoding="utf-8") as file:
        file.write("\n".join(map(str, y)))
    return ["x.npy", "--labels-file", "names.txt"]


def write_csv_column(X, y):
    return [str(write_csv("x.csv", X, y, label="breed")), "--label", "breed"]


def write_parquet(X, y):
    pd.DataFrame({"embedding": list(X), "label": y}).to_parquet("x.parquet")
    return ["x.parquet"]


def write_npz_arrays(X, y):
    np.savez("x.npz", features=X, breed=y)
    return ["x.npz", "--label", "breed"]


@pytest.mark.parametrize(
    "write", [write_npy, write_npy_and_text, write_csv_column, write_parquet, write_npz_arrays]
)
def test_formats(write, folder, capsys):
    X, y = make_data()
    assert cli.main(["probe", *write(X, y), *FAST]) == 0
    assert "48 samples, 3 features, 4 classes" in capsys.readouterr().out
    assert pd.read_csv("probe-results/per_class.csv")["class"].tolist() == sorted(set(y))


@pytest.mark.parametrize(
    "labels",
    [
        (False, True),
        (-7, 0, 1, 40),
        ("Äpfel und Birnen in einem sehr langen Namen", "苹果", r"$\frac$", "a\nb\x1b[31m"),
        ("007", "7", "None"),
    ],
)
def test_labels(labels, folder, capsys):
    X, y = make_data(labels)
    np.savez("x.npz", X=X, y=y)
    assert cli.main(["probe", "x.npz", *FAST]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    X, y = make_data(labels)
    predicted = joblib.load("probe-results/model.joblib").predict(X)
    assert predicted.dtype == y.dtype
    assert set(predicted) <= set(y)
    summary = json.loads((folder / "probe-results/summary.json").read_text(encoding="utf-8"))
    named = [name for third in summary["difficulty"].values() for name in third]
    assert sorted(named) == sorted(map(str, labels))


def test_terminal_without_the_letters_of_a_class(folder, monkeypatch):
    X, y = make_data(("Äpfel", "苹果", "plum"))
    np.savez("x.npz", X=X, y=y)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["probe", "x.npz", *FAST]) == 0
    out = terminal.buffer.getvalue().decode("latin-1")
    assert "Äpfel" in out
    assert "??" in out


def test_many_classes_fit_the_terminal(folder, capsys):
    X, y = make_data([f"class number {k} of many" for k in range(60)], n_per_class=8)
    np.savez("x.npz", X=X, y=y)
    assert cli.main(["probe", "x.npz", *FAST]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "and 14 more." in out
    assert len(out.splitlines()) < 50


def test_half_precision(folder):
    X, y = make_data()
    np.savez("x.npz", X=(X * 1000).astype(np.float16), y=y)
    assert cli.main(["probe", "x.npz", *FAST]) == 0
    half = json.loads((folder / "probe-results/summary.json").read_text())
    np.savez("x.npz", X=X, y=y)
    assert cli.main(["probe", "x.npz", *FAST, "--out", "full"]) == 0
    full = json.loads((folder / "full/summary.json").read_text())
    assert half["mr2"]["cv_accuracy"] == full["mr2"]["cv_accuracy"]


# ---------------------------------------------------------------------- what it refuses


def test_bad_files(folder, capsys):
    X, y = make_data()
    (folder / "damaged.npz").write_bytes(b"PK\x03\x04 no archive")
    np.save("alone.npy", X)
    write_csv("x.csv", X, y, label="breed")
    X[3, 1] = np.nan
    np.savez("nan.npz", X=X, y=y)
    assert "missing.npz: no such file" in refused(capsys, "missing.npz")
    assert "damaged.npz" in refused(capsys, "damaged.npz")
    assert "give --labels-file, a .npy" in refused(capsys, "alone.npy")
    assert "give --label, the name" in refused(capsys, "x.csv")
    assert "row 3" in refused(capsys, "nan.npz")
    assert ".csv" in refused(capsys, folder)
    assert "--label goes with a FILE" in refused(capsys, "--label", "breed")
    assert "--labels-file goes with .npy" in refused(capsys, "x.csv", "--labels-file", "alone.npy")
    assert not (folder / "probe-results").exists()
    assert not list(folder.glob(".*"))


def test_missing_reader_of_parquet(folder, capsys, monkeypatch):
    def load(*args, **kwargs):
        raise ImportError("x.parquet needs pyarrow; pip install pyarrow")

    monkeypatch.setattr(cli, "load_embeddings", load)
    assert "pip install pyarrow" in refused(capsys, "x.parquet")


def test_too_few_samples_of_a_class(folder, capsys):
    X, y = make_data()
    write_csv("x.csv", X[:-9], y[:-9])
    err = refused(capsys, "x.csv")
    assert "class 'fox' has 3 samples" in err
    assert "at least 4 of every class (1 of 4 classes have fewer)" in err
    assert cli.main(["probe", "x.csv", *FAST]) == 0
    write_csv("one.csv", X[:12], y[:12])
    assert "one class, 'cat'" in refused(capsys, "one.csv", "--out", "other")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--Cs", "0"], "'0' is not a positive number"),
        (["--Cs", "x"], "'x' is not a positive number"),
        (["--Cs", "inf"], "'inf' is not a positive number"),
        (["--cv", "1"], "'1' is not a whole number of at least 2"),
        (["--repeats", "0"], "at least 1"),
        (["--test-size", "1"], "'1' is not a number between 0 and 1"),
        (["--test-size", "nan"], "between 0 and 1"),
        (["--seed", "-1"], "from 0 to 4294967295"),
        (["--rule", "best"], "paper"),
        (["a.csv", "b.csv"], "unrecognized arguments"),
    ],
)
def test_wrong_usage(argv, reason, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["probe", *argv])
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


def test_help_and_version(capsys):
    for argv in (["--version"], ["probe", "--help"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(argv)
        assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert f"sklearn-mr2 {__version__}" in out
    assert "sklearn-mr2 probe clip.parquet --label breed" in out


def test_module_is_the_command(folder):
    command = [sys.executable, "-m", "sklearn_mr2", "probe", "missing.npz"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "sklearn-mr2: missing.npz: no such file; check the name and the folder\n"
    )


# ---------------------------------------------------------------------- what it leaves behind


def test_never_overwrites_silently(npz, folder, capsys, monkeypatch):
    results = folder / "probe-results"
    results.mkdir()
    assert cli.main(["probe", npz, *FAST]) == 0  # an empty folder is as good as none
    (results / "mine.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    capsys.readouterr()
    err = refused(capsys, npz, *FAST)
    assert "probe-results: is not empty" in err
    assert "--out" in err
    assert "--force" in err
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before
    # With --force it replaces its own files and no others; none of an earlier run stays.
    without(monkeypatch, "matplotlib")
    assert cli.main(["probe", npz, *FAST, "--force", "--seed", "1"]) == 0
    assert {path.name for path in results.iterdir()} == NAMES - {"comparison.png"} | {"mine.txt"}
    assert (results / "mine.txt").read_text() == "mine"
    assert json.loads((results / "summary.json").read_text())["settings"]["seed"] == 1


def test_output_folders(npz, folder, capsys):
    assert cli.main(["probe", npz, *FAST, "--out", "deep/er/results"]) == 0
    assert {path.name for path in (folder / "deep/er/results").iterdir()} == NAMES
    assert [path.name for path in (folder / "deep/er").iterdir()] == ["results"]
    assert "pets.npz: is a file, not a folder" in refused(capsys, npz, "--out", npz)
    assert "cannot be written" in refused(capsys, npz, "--out", f"{npz}/results")


def test_without_matplotlib(npz, folder, capsys, monkeypatch):
    without(monkeypatch, "matplotlib")
    assert cli.main(["probe", npz, *FAST]) == 0
    assert "pip install 'sklearn-mr2[plot]'" in capsys.readouterr().out
    assert {path.name for path in (folder / "probe-results").iterdir()} == NAMES - {
        "comparison.png"
    }


@pytest.mark.parametrize("stage", ["fit", "write"])
def test_interrupt_leaves_nothing(stage, npz, folder, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    if stage == "fit":
        monkeypatch.setattr(MR2Classifier, "fit", interrupt)
    else:
        monkeypatch.setattr(files, "_plot", interrupt)
    assert cli.main(["probe", npz, *FAST, "--out", "new/results"]) == 130
    assert capsys.readouterr().err == "sklearn-mr2: interrupted, nothing was written\n"
    assert [path.name for path in folder.iterdir()] == [npz]


def test_full_disk_leaves_nothing(npz, folder, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "model.joblib")

    monkeypatch.setattr(files.joblib, "dump", full)
    assert "model.joblib: No space left on device" in refused(capsys, npz, *FAST)
    assert [path.name for path in folder.iterdir()] == [npz]


# ---------------------------------------------------------------------- progress


def test_progress_is_shown_to_a_terminal_only(npz, capsys, monkeypatch):
    assert cli.main(["probe", npz, *FAST, "--out", "a"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["probe", npz, *FAST, "--out", "b"]) == 0
    assert "Fitting" in capsys.readouterr().err
    assert cli.main(["probe", npz, *FAST, "--out", "c", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
