"""Fitted models outside of the package: ONNX, skops and safetensors give the same predictions."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import make_classification
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler
from torch import nn

from sklearn_mr2 import MirrorFlowClassifier, MR2Classifier, MR2ClassifierCV, __version__
from sklearn_mr2.export import _row, to_onnx
from sklearn_mr2.mirror.networks import HomogeneousMLP
from sklearn_mr2.mr2.heads import LinearHead
from sklearn_mr2.mr2.modules import MLP, HeadedModule

LABELS = np.array(["ant", "bee", "<cat>"])
TOLERANCE = {"float32": 2e-6, "float64": 1e-13}

KINDS = {
    "probe": MR2Classifier(C=0.1),
    "cosine": MR2Classifier(head="cosine"),
    "mlp": MR2Classifier(
        "mlp", module__hidden_layer_sizes=(8,), module__dropout=0.3, max_epochs=3, random_state=0
    ),
    "mirror": MirrorFlowClassifier((8,), batch_size=50, max_epochs=2, random_state=0),
}


def data(dtype="float64", n_classes=3):
    X, y = make_classification(
        150, 5, n_informative=4, n_redundant=0, n_classes=n_classes, random_state=0
    )
    return (3 + 2 * X).astype(dtype), LABELS[y]


class Convolutions(nn.Sequential):
    """Images to features, through layers that behave differently in training."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()
        )


def fit(kind, X, y, pipeline=False):
    model = clone(KINDS[kind])
    return make_pipeline(StandardScaler(), model).fit(X, y) if pipeline else model.fit(X, y)


def run(model, X):
    """Labels and probabilities by ONNX Runtime."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    table = isinstance(X, pd.DataFrame)
    feed = {name: X[[name]].to_numpy() for name in X} if table else {"X": X}
    return session.run(["label", "probabilities"], feed)


@pytest.fixture
def onnx():
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnx")


@pytest.mark.usefixtures("onnx")
class TestToONNX:
    @pytest.mark.parametrize("kind", KINDS)
    def test_same_predictions_for_any_number_of_rows(self, kind):
        X, y = data("float32")
        model = fit(kind, X, y)
        expected, training = model.predict_proba(X), model.net_.module_.training
        weights = {k: v.clone() for k, v in model.net_.module_.state_dict().items()}
        torch_state = torch.get_rng_state()
        numpy_state = np.random.get_state()[1].copy()  # noqa: NPY002
        exported = to_onnx(model, X[:1])
        for n in (1, 2, 150):
            label, probabilities = run(exported, X[:n])
            assert probabilities.dtype == np.float32
            assert_allclose(probabilities, expected[:n], atol=TOLERANCE["float32"])
            assert_array_equal(label, model.predict(X[:n]))
        # The model and the global random state are as they were.
        assert_array_equal(torch.get_rng_state(), torch_state)
        assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
        assert model.net_.module_.training == training
        for name, value in model.net_.module_.state_dict().items():
            assert torch.equal(value, weights[name])
        assert_array_equal(model.predict_proba(X), expected)

    @pytest.mark.parametrize(
        ("kind", "dtype"), [("probe", "float32"), ("mlp", "float64"), ("mirror", "float32")]
    )
    def test_pipeline(self, kind, dtype):
        pytest.importorskip("skl2onnx")
        X, y = data(dtype)
        model = fit(kind, X, y, pipeline=True)
        label, probabilities = run(to_onnx(model, X), X)
        assert_allclose(probabilities, model.predict_proba(X), atol=TOLERANCE[dtype])
        assert_array_equal(label, model.predict(X))

    @pytest.mark.parametrize("convert", [np.ndarray.tolist, torch.from_numpy])
    def test_pipeline_of_what_is_no_array(self, convert):
        pytest.importorskip("skl2onnx")
        X, y = data()
        model = fit("probe", X, y, pipeline=True)
        assert_array_equal(run(to_onnx(model, convert(X)), X)[1], run(to_onnx(model, X), X)[1])

    def test_pipeline_of_half_precision(self):
        pytest.importorskip("skl2onnx")
        X, y = data("float32")
        model = fit("probe", X, y, pipeline=True)
        probabilities = run(to_onnx(model, X.astype(np.float16)), X)[1]
        assert_allclose(probabilities, model.predict_proba(X), atol=1e-6)

    def test_pipeline_of_a_frame_of_polars(self):
        pytest.importorskip("skl2onnx")
        polars = pytest.importorskip("polars")
        X, y = data()
        frame = polars.DataFrame(X, schema=list("abcde"))
        model = fit("probe", frame, y, pipeline=True)
        _, probabilities = run(to_onnx(model, frame), pd.DataFrame(X, columns=frame.columns))
        assert_allclose(probabilities, model.predict_proba(frame), atol=1e-6)

    @pytest.mark.parametrize("kind", ["pandas", "pyarrow", "sparse"])
    def test_sample_of_what_skl2onnx_does_not_read(self, kind):
        half = data("float16")[0]
        frame = pd.DataFrame(half, columns=list("abcde"))
        if kind == "pyarrow":
            pyarrow = pytest.importorskip("pyarrow")
            frame = pyarrow.table({name: half[:, i] for i, name in enumerate("abcde")})
        rows = _row(csr_array(half.astype("float32")) if kind == "sparse" else frame)
        np.testing.assert_array_equal(np.asarray(rows), half[:1])
        assert np.asarray(rows).dtype == np.float32
        assert hasattr(rows, "columns") == (kind != "sparse")

    def test_pipeline_of_a_data_frame_with_categories(self):
        pytest.importorskip("skl2onnx")
        X, y = data()
        frame = pd.DataFrame(X[:, :2], columns=["length", "X"])
        frame["colour"] = np.where(X[:, 2] > 3, "red", "blue").astype(object)
        transformer = make_column_transformer(
            (StandardScaler(), ["length", "X"]),
            (OneHotEncoder(sparse_output=False), ["colour"]),
        )
        model = make_pipeline(transformer, MR2Classifier()).fit(frame, y)
        label, probabilities = run(to_onnx(model, frame), frame)
        assert_allclose(probabilities, model.predict_proba(frame), atol=1e-6)
        assert_array_equal(label, model.predict(frame))

    def test_two_classes(self):
        X, y = data(n_classes=2)
        model = fit("mirror", X, y)
        label, probabilities = run(to_onnx(model, X), X)
        assert_allclose(probabilities, model.predict_proba(X), atol=1e-13)
        assert_array_equal(label, model.predict(X))

    @pytest.mark.parametrize(
        ("classes", "dtype"),
        [
            (np.array([-3, 5, 7], dtype=np.int16), np.int64),
            (np.array([0.0, 1.0, 2.0]), np.float64),
            (np.array([False, True]), np.bool_),
        ],
        ids=["int", "float", "bool"],
    )
    def test_labels_of_any_type_and_the_classes_in_the_metadata(self, classes, dtype):
        X, y = data(n_classes=len(classes))
        y = classes[np.unique(y, return_inverse=True)[1]]
        model = MR2ClassifierCV(Cs=[0.01, 1.0], cv=2).fit(X, y)
        exported = to_onnx(model, X)
        label, probabilities = run(exported, X)
        assert label.dtype == dtype
        assert_array_equal(label, model.predict(X))
        assert_allclose(probabilities, model.predict_proba(X), atol=1e-13)
        metadata = {entry.key: entry.value for entry in exported.metadata_props}
        assert json.loads(metadata["classes"]) == model.classes_.tolist()
        assert (exported.producer_name, exported.producer_version) == ("sklearn-mr2", __version__)

    def test_images_and_layers_that_behave_differently_in_training(self):
        rng = np.random.default_rng(0)
        X, y = rng.normal(size=(60, 1, 6, 6)).astype("float32"), LABELS[np.arange(60) % 3]
        model = MR2Classifier(Convolutions, max_epochs=2, random_state=0).fit(X, y)
        label, probabilities = run(to_onnx(model, X), X)
        assert_allclose(probabilities, model.predict_proba(X), atol=2e-6)
        assert_array_equal(label, model.predict(X))

    def test_input_type_is_that_of_the_rows(self):
        X, y = data()
        model = make_pipeline("passthrough", MR2Classifier()).fit(X, y)
        single = X.astype("float32")
        _, probabilities = run(to_onnx(model, single), single)
        # The computation stays in float64, as that of predict_proba does.
        assert_allclose(probabilities, model.predict_proba(single), atol=1e-13)

    def test_search_over_a_pipeline_in_a_pipeline(self):
        pytest.importorskip("skl2onnx")
        X, y = data("float32")
        inner = make_pipeline(StandardScaler(), MR2Classifier())
        search = GridSearchCV(inner, {"mr2classifier__C": [0.01, 1.0]}, cv=2)
        model = make_pipeline(MinMaxScaler(), search).fit(X, y)
        label, probabilities = run(to_onnx(model, X), X)
        assert_allclose(probabilities, model.predict_proba(X), atol=5e-6)
        assert_array_equal(label, model.predict(X))

    def test_compiled_network(self):
        X, y = data("float32")
        model = fit("mlp", X, y)
        model.net_.module_.compile(backend="eager")
        _, probabilities = run(to_onnx(model, X), X)
        assert_allclose(probabilities, model.predict_proba(X), atol=2e-6)

    def test_refuses_what_it_cannot_convert(self, onnx):
        X, y = data()
        with pytest.raises(NotFittedError):
            to_onnx(MR2Classifier(), X)
        with pytest.raises(NotFittedError):
            to_onnx(MR2ClassifierCV(), X)
        with pytest.raises(NotFittedError):
            to_onnx(make_pipeline(StandardScaler(), MR2Classifier()), X)
        with pytest.raises(TypeError, match="got LogisticRegression"):
            to_onnx(LogisticRegression().fit(X, y), X)
        with pytest.raises(ValueError, match="5 features"):
            to_onnx(MR2Classifier().fit(X, y), X[:, :3])
        frame = pd.DataFrame(X, columns=["a", "b", "c", "d", "label"])
        with pytest.raises(onnx.checker.ValidationError, match="label"):
            to_onnx(make_pipeline(StandardScaler(), MR2Classifier()).fit(frame, y), frame)

    @pytest.mark.gpu
    @pytest.mark.parametrize("kind", KINDS)
    def test_model_on_a_gpu(self, kind):
        X, y = data("float32")
        model = fit(kind, X, y)
        assert model.device_.startswith("cuda")
        label, probabilities = run(to_onnx(model, X), X)
        assert_allclose(probabilities, model.predict_proba(X), atol=1e-4)
        assert (label == model.predict(X)).mean() > 0.98
        assert next(model.net_.module_.parameters()).is_cuda


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "skl2onnx"])
def test_missing_dependencies_are_named(missing, monkeypatch):
    pytest.importorskip("onnx")
    X, y = data()
    model = make_pipeline(StandardScaler(), MR2Classifier()).fit(X, y)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"needs {missing};.*sklearn-mr2\[export\]"):
        to_onnx(model, X)


class TestToSklearn:
    """A linear probe is a LogisticRegression, which every tool for scikit-learn knows."""

    @staticmethod
    def plain(dtype, n_classes=3):
        X, y = data(dtype, n_classes)
        model = fit("probe", X, y, pipeline=True)
        return X, model, make_pipeline(*model[:-1], model[-1].to_sklearn())

    @pytest.mark.parametrize("n_classes", [2, 3])
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_skl2onnx(self, dtype, n_classes):
        skl2onnx = pytest.importorskip("skl2onnx")
        X, model, plain = self.plain(dtype, n_classes)
        exported = skl2onnx.to_onnx(plain, X[:1], options={"zipmap": False})
        label, probabilities = run(exported, X)
        # skl2onnx computes linear classifiers in float32, whatever the input.
        assert_allclose(probabilities, model.predict_proba(X), atol=2e-6)
        assert_array_equal(label, model.predict(X))

    @pytest.mark.parametrize("n_classes", [2, 3])
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_skops_without_trusting_any_type(self, dtype, n_classes, tmp_path):
        skops_io = pytest.importorskip("skops.io")
        X, model, plain = self.plain(dtype, n_classes)
        skops_io.dump(plain, tmp_path / "model.skops")
        assert skops_io.get_untrusted_types(file=tmp_path / "model.skops") == []
        loaded = skops_io.load(tmp_path / "model.skops", trusted=[])
        assert_allclose(loaded.predict_proba(X), model.predict_proba(X), atol=TOLERANCE[dtype])
        assert_array_equal(loaded.predict(X), model.predict(X))


class TestSafetensors:
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_weights_into_a_new_network(self, dtype, tmp_path):
        safetensors = pytest.importorskip("safetensors.torch")
        X, y = data(dtype)
        model = fit("mlp", X, y)
        safetensors.save_file(model.net_.module_.state_dict(), tmp_path / "weights")
        network = HeadedModule(MLP(5, (8,), dropout=0.3), LinearHead(8, 3)).to(
            torch.from_numpy(X).dtype
        )
        network.load_state_dict(safetensors.load_file(tmp_path / "weights"))
        with torch.no_grad():
            logits, features = network.eval()(torch.from_numpy(X))
        atol = TOLERANCE[dtype]
        assert_allclose(logits.softmax(1), model.predict_proba(X), atol=atol)
        assert_array_equal(model.classes_[logits.argmax(1)], model.predict(X))
        assert_allclose(features, model.transform(X), rtol=1e-5, atol=atol)

    def test_weights_of_a_homogeneous_network(self, tmp_path):
        safetensors = pytest.importorskip("safetensors.torch")
        X, y = data()
        model = fit("mirror", X, y)
        safetensors.save_file(model.net_.module_.network.state_dict(), tmp_path / "weights")
        network = HomogeneousMLP(5, (8,), 3).double()
        network.load_state_dict(safetensors.load_file(tmp_path / "weights"))
        with torch.no_grad():
            probabilities = network(torch.from_numpy(X)).softmax(1)
        assert_allclose(probabilities, model.predict_proba(X), atol=1e-13)

    @pytest.mark.parametrize("kind", KINDS)
    def test_weights_into_another_estimator(self, kind, tmp_path):
        pytest.importorskip("safetensors")
        X, y = data()
        model = fit(kind, X, y)
        expected = model.predict_proba(X)
        model.net_.save_params(f_params=tmp_path / "weights", use_safetensors=True)
        other = fit(kind, X[::-1] ** 2, np.roll(y, 1))
        assert not np.allclose(other.predict_proba(X), expected)
        other.net_.load_params(f_params=tmp_path / "weights", use_safetensors=True)
        assert_array_equal(other.predict_proba(X), expected)
