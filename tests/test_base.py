"""The contract every classifier of the package keeps with scikit-learn."""

import copy
import gc
import itertools
import pickle
import random
import warnings

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from skorch.callbacks import Callback, EarlyStopping, EpochScoring
from skorch.exceptions import DeviceWarning
from torch import nn

from sklearn_mr2 import MR2Classifier
from sklearn_mr2.base import TorchClassifier
from sklearn_mr2.net import TensorNet

RNG = np.random.default_rng(0)
Y = np.repeat([0, 1, 2], 20)
X = RNG.normal(size=(60, 4)) + 1.5 * np.eye(3, 4)[Y]
# What partial_fit and mini-batch training share, in a form that takes milliseconds.
ADAM = {"optimizer": torch.optim.Adam, "max_epochs": 4, "lr": 0.05, "batch_size": 16}
LOGISTIC = {"margin_statistic": None, "tol": 1e-10}


class Headed(nn.Module):
    def __init__(self, n_features, n_classes, rate, dtype):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_features, 5), nn.ReLU(), nn.Dropout(rate)).to(dtype)
        self.head = nn.Linear(5, n_classes).to(dtype)

    def forward(self, X):
        features = self.body(X)
        return self.head(features), features


class CrossEntropy(nn.Module):
    def forward(self, logits, features, y, weight):
        loss = nn.functional.cross_entropy(logits, y, reduction="none")
        return (loss if weight is None else loss * weight).mean()


class DropoutClassifier(TorchClassifier):
    """The smallest subclass that draws random numbers: initialisation, batches, dropout."""

    def __init__(
        self, *, rate=0.5, max_epochs=3, device="cpu", dtype="auto", warm_start=False,
        callbacks=None, verbose=0, class_weight=None, validation_fraction=None, random_state=None,
        **kwargs,
    ):  # fmt: skip
        self.rate = rate
        self.max_epochs = max_epochs
        self.device = device
        self.dtype = dtype
        self.warm_start = warm_start
        self.callbacks = callbacks
        self.verbose = verbose
        self.class_weight = class_weight
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self._set_passthrough(kwargs)

    def _build_net(self, data, rng, seed, *, by_parts):
        with rng.scope():
            module = Headed(data.X.shape[1], data.n_classes, self.rate, data.X.dtype)
        return TensorNet(
            module, criterion=CrossEntropy(), rng=rng, optimizer=torch.optim.SGD, lr=0.1,
            max_epochs=self.max_epochs, batch_size=16, callbacks=self._fresh_callbacks(),
            verbose=self.verbose, device=self.device_, iterator_train__shuffle=True,
            iterator_train__generator=torch.Generator().manual_seed(seed), **self._passthrough(),
        ).initialize()  # fmt: skip


class Watch(Callback):
    """Keeps the data sets that training saw, which is where a test can see the split."""

    def on_epoch_begin(self, net, dataset_train=None, dataset_valid=None, **kwargs):
        self.train_, self.valid_ = dataset_train, dataset_valid


def watched(model):
    return dict(model.net_.callbacks_)["Watch"]


def fitted(**params):
    return MR2Classifier(**{"random_state": 0, **params}).fit(X, Y)


KINDS = {
    "probe": MR2Classifier(random_state=0),
    "mini-batches": MR2Classifier(random_state=0, **ADAM),
    "dropout": DropoutClassifier(random_state=0),
    "network": MR2Classifier(
        "mlp", module__dropout=0.5, max_epochs=3, lr=0.01, batch_size=16, random_state=0
    ),
}
every_kind = pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)


# ---------------------------------------------------------------------------- X


def _read_only(X):
    X = X.copy()
    X.flags.writeable = False
    return X


def _padded(X):
    """Rows that are not next to each other in memory."""
    wide = np.zeros((2 * len(X), X.shape[1] + 3), X.dtype)
    wide[::2, 1:-2] = X
    return wide[::2, 1:-2]


CONTAINERS = {
    "fortran": np.asfortranarray,
    "negative strides": lambda X: X[::-1, ::-1].copy()[::-1, ::-1],
    "padded": _padded,
    "big endian": lambda X: X.astype(X.dtype.newbyteorder(">")),
    "read-only": _read_only,
    "read-only, reversed": lambda X: _read_only(X[::-1])[::-1],
    "lists": lambda X: X.tolist(),
    "list of arrays": list,
    "objects": lambda X: X.astype(object),
    "pandas": pd.DataFrame,
    "pandas by column": lambda X: pd.DataFrame({f"x{i}": x for i, x in enumerate(X.T)}),
    "pandas nullable": lambda X: pd.DataFrame(X).astype("Float64"),
    "polars": lambda X: pl.DataFrame(X, schema=[f"x{i}" for i in range(X.shape[1])]),
    "tensor": torch.tensor,
    "tensor with gradient": lambda X: torch.tensor(X, requires_grad=True),
    "tensor with history": lambda X: 1 * torch.tensor(X, requires_grad=True),
    "transposed tensor": lambda X: torch.tensor(X.T.copy()).T,
}


@pytest.mark.parametrize("convert", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_of_X_make_no_difference(convert):
    expected, given_X = fitted(), convert(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MR2Classifier(random_state=0).fit(given_X, Y)
        decision = model.decision_function(given_X)
    assert model.dtype_ == np.float64
    assert_allclose(decision, expected.decision_function(X), rtol=1e-7, atol=1e-9)
    assert_allclose(model.transform(given_X), X)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_memory_maps_are_read_without_a_copy_and_never_written(tmp_path, mode, dtype):
    path = tmp_path / "X.npy"
    np.save(path, X.astype(dtype))
    before = path.read_bytes()
    mapped = np.load(path, mmap_mode=mode)
    watch = DropoutClassifier(random_state=0, callbacks=[Watch()]).fit(mapped, Y)
    assert watched(watch).train_.X.data_ptr() == mapped.ctypes.data
    model = MR2Classifier(random_state=0).fit(mapped, Y)
    model.partial_fit(mapped, Y)
    model.transform(mapped)[:] = 0
    assert_array_equal(mapped, X.astype(dtype))
    assert path.read_bytes() == before
    assert_array_equal(model.predict(mapped), model.predict(X.astype(dtype)))


DTYPES = {
    **{d: ("float32", lambda X, d=d: X.astype(d)) for d in ["float16", "float32", ">f2", ">f4"]},
    **{
        d: ("float64", lambda X, d=d: (4 * X).astype(d))
        for d in ["float64", ">f8", "longdouble", "int8", "int64", ">i4", "bool", "object"]
    },
    **{
        f"tensor {d}": ("float32", lambda X, d=d: torch.tensor(X).to(getattr(torch, d)))
        for d in ["float16", "bfloat16", "float32"]
    },
    **{
        f"tensor {d}": ("float64", lambda X, d=d: torch.tensor(4 * X).to(getattr(torch, d)))
        for d in ["float64", "uint8", "int32", "bool"]
    },
    **{
        f"pandas {d}": ("float32", lambda X, d=d: pd.DataFrame(X).astype(d))
        for d in ["float16", "float32", "Float32", "float32[pyarrow]", "halffloat[pyarrow]"]
    },
    **{
        f"pandas {d}": ("float64", lambda X, d=d: pd.DataFrame((4 * X).round()).astype(d))
        for d in ["float64", "Float64", "Int32", "double[pyarrow]", "int64"]
    },
    "pandas float16 and float32": (
        "float32",
        lambda X: pd.DataFrame(X).astype({0: "float16", 1: "float32", 2: "float32", 3: "float16"}),
    ),
    "pandas float32 and float64": ("float64", lambda X: pd.DataFrame(X).astype({0: "float32"})),
    "pandas float32 and int": (
        "float64",
        lambda X: pd.DataFrame(X.astype("float32")).astype({0: "int64"}),
    ),
    "polars float32": ("float32", lambda X: pl.DataFrame(X.astype("float32"))),
    "polars float64": ("float64", lambda X: pl.DataFrame(X)),
    "polars int": ("float64", lambda X: pl.DataFrame((4 * X).astype("int16"))),
    "lists": ("float64", lambda X: X.tolist()),
    "lists of float32": ("float64", lambda X: list(X.astype("float32"))),
}


@pytest.mark.parametrize(("expected", "convert"), DTYPES.values(), ids=DTYPES)
def test_dtype_follows_X(expected, convert):
    model = MR2Classifier(random_state=0).fit(convert(X), Y)
    results = (
        model.coef_,
        model.intercept_,
        model.decision_function(convert(X)),
        model.predict_proba(convert(X)),
        model.predict_log_proba(convert(X)),
        model.transform(convert(X)),
        next(model.net_.module_.parameters()).detach().numpy(),
    )
    assert {str(result.dtype) for result in results} == {expected}


@pytest.mark.parametrize("convert", [lambda X, d: X.astype(d), lambda X, d: torch.tensor(X)])
@pytest.mark.parametrize(("of_X", "asked"), [("float32", "float64"), ("float64", "float32")])
def test_dtype_can_be_asked_for(of_X, asked, convert):
    model = MR2Classifier(random_state=0, dtype=asked).fit(convert(X, of_X), Y)
    assert model.coef_.dtype == model.predict_proba(convert(X, of_X)).dtype == asked


def test_bfloat16_keeps_its_values():
    model = MR2Classifier(random_state=0).fit(torch.tensor(X).bfloat16(), Y)
    rounded = torch.tensor(X).bfloat16().float().numpy()
    assert_array_equal(model.coef_, MR2Classifier(random_state=0).fit(rounded, Y).coef_)


@pytest.mark.parametrize("convert", CONTAINERS.values(), ids=CONTAINERS)
def test_predicting_needs_not_the_container_of_fit(convert):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "X has feature names")
        assert_allclose(fitted().predict_proba(convert(X)), fitted().predict_proba(X))


def test_one_row_predicts_as_many():
    model = fitted()
    rows = np.concatenate([model.predict_proba(X[i : i + 1]) for i in range(len(X))])
    assert_allclose(rows, model.predict_proba(X), rtol=1e-12)


def test_more_rows_than_a_batch_of_prediction():
    model, many = fitted(), np.tile(X, (200, 1))
    assert_allclose(model.predict_proba(many), np.tile(model.predict_proba(X), (200, 1)))


# ---------------------------------------------------------------------------- y

NAMES = np.array(["b", "ä", "long name"])
LABELS = {
    "gaps": (np.array([-7, 3, 1000])[Y], [-7, 3, 1000]),
    "uint8": (Y.astype("uint8") + 200, [200, 201, 202]),
    "big endian": (Y.astype(">i4"), [0, 1, 2]),
    "whole floats": (Y * 2.0, [0.0, 2.0, 4.0]),
    "strings": (NAMES[Y], ["b", "long name", "ä"]),
    "objects": (NAMES.astype(object)[Y], ["b", "long name", "ä"]),
    "booleans": (Y > 0, [False, True]),
    "list of str": (NAMES[Y].tolist(), ["b", "long name", "ä"]),
    "list of int": ((Y - 1).tolist(), [-1, 0, 1]),
    "list of bool": ((Y > 0).tolist(), [False, True]),
    "tuple": (tuple(Y.tolist()), [0, 1, 2]),
    "pandas int": (pd.Series(Y, index=np.arange(60)[::-1]), [0, 1, 2]),
    "pandas Int64": (pd.Series(Y, dtype="Int64"), [0, 1, 2]),
    "pandas boolean": (pd.Series(Y > 0, dtype="boolean"), [False, True]),
    "pandas string": (pd.Series(NAMES[Y], dtype="string"), ["b", "long name", "ä"]),
    "pandas pyarrow": (pd.Series(NAMES[Y], dtype="string[pyarrow]"), ["b", "long name", "ä"]),
    "pandas str": (pd.Series(NAMES[Y]), ["b", "long name", "ä"]),
    "pandas object": (pd.Series(NAMES[Y], dtype=object), ["b", "long name", "ä"]),
    "pandas category": (
        pd.Series(NAMES[Y]).astype(pd.CategoricalDtype(["never", *NAMES.tolist(), "x"])),
        ["b", "long name", "ä"],
    ),
    "pandas ordered": (
        pd.Categorical(NAMES[Y], ["ä", "long name", "b"], ordered=True),
        ["b", "long name", "ä"],
    ),
    "pandas int category": (pd.Series(Y * 5, dtype="category"), [0, 5, 10]),
    "pandas index": (pd.Index(NAMES[Y]), ["b", "long name", "ä"]),
    "polars string": (pl.Series(NAMES[Y]), ["b", "long name", "ä"]),
    "polars int": (pl.Series(Y), [0, 1, 2]),
    "polars boolean": (pl.Series(Y > 0), [False, True]),
    "polars categorical": (pl.Series(NAMES[Y], dtype=pl.Categorical), ["b", "long name", "ä"]),
    "tensor": (torch.tensor(Y), [0, 1, 2]),
    "tensor uint8": (torch.tensor(Y, dtype=torch.uint8), [0, 1, 2]),
    "tensor bool": (torch.tensor(Y > 0), [False, True]),
}


@pytest.mark.parametrize(("y", "classes"), LABELS.values(), ids=LABELS)
def test_kinds_of_labels(y, classes):
    model = MR2Classifier(random_state=0).fit(X, y, X_val=X, y_val=y)
    plain = np.array(y.tolist() if hasattr(y, "tolist") else list(y))
    assert model.classes_.tolist() == classes
    predicted = model.predict(X)
    assert predicted.dtype == model.classes_.dtype
    assert type(predicted.tolist()[0]) is type(plain.tolist()[0])
    # The codes are those of scikit-learn, so the labels must be as good as there.
    codes = np.searchsorted(classes, plain)
    expected = MR2Classifier(random_state=0).fit(X, codes).predict(X)
    assert_array_equal(predicted, np.array(classes)[expected])
    assert model.score(X, y) == np.mean(expected == codes) > 0.8
    parts = MR2Classifier(random_state=0, **ADAM).partial_fit(X, y, classes=y)
    assert parts.classes_.tolist() == classes
    assert parts.partial_fit(X, y, classes=model.classes_).classes_.dtype == model.classes_.dtype


def test_a_column_of_labels_warns_and_works():
    with pytest.warns(DataConversionWarning):
        model = MR2Classifier(random_state=0).fit(X, Y[:, None])
    assert_array_equal(model.coef_, fitted().coef_)


# ---------------------------------------------------------------------------- weights

WEIGHT = np.random.default_rng(1).integers(0, 4, 60).astype(float)
CLASS_WEIGHT = {0: 0.5, 2: 3.0}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"margin_statistic": "dispersion", "margin_mode": "subtract"},
        {"class_weight": "balanced"},
        {"class_weight": CLASS_WEIGHT},
        LOGISTIC,
    ],
)
def test_weights_are_repetitions(params):
    times = WEIGHT.astype(int)
    weighted = MR2Classifier(**{"tol": 1e-10, **params}).fit(X, Y, WEIGHT)
    repeated = MR2Classifier(**{"tol": 1e-10, **params}).fit(X.repeat(times, 0), Y.repeat(times))
    assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-5, atol=1e-7)
    assert_allclose(weighted.intercept_, repeated.intercept_, rtol=1e-5, atol=1e-7)
    assert_allclose(weighted.margins_, repeated.margins_, rtol=1e-10)


def _balanced(weight):
    totals = np.bincount(Y, weight)
    return weight * (totals.sum() / (3 * totals))[Y]


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["unweighted", "weighted"])
@pytest.mark.parametrize(
    ("class_weight", "product"),
    [
        (None, lambda w: w),
        (CLASS_WEIGHT, lambda w: w * np.array([0.5, 1.0, 3.0])[Y]),
        ("balanced", _balanced),
    ],
)
def test_weights_are_those_of_logistic_regression(class_weight, product, weight):
    imbalanced = slice(0, 50)
    y, X_ = Y[imbalanced], X[imbalanced]
    w = np.ones(60) if weight is None else weight
    w = np.where(np.arange(60) < 50, w, 0)
    model = MR2Classifier(C=0.3, class_weight=class_weight, **LOGISTIC)
    model.fit(X_, y, None if weight is None else weight[imbalanced])
    oracle = LogisticRegression(C=0.3, tol=1e-10, max_iter=10_000)
    oracle.fit(X_, y, product(w)[imbalanced])
    assert_allclose(model.coef_, oracle.coef_, atol=1e-5)
    assert_allclose(model.predict_proba(X), oracle.predict_proba(X), atol=1e-5)


@pytest.mark.parametrize("params", [{"tol": 1e-10}, {**ADAM, "batch_size": 64}])
def test_scaling_all_weights_is_scaling_C(params):
    weight = 1 + WEIGHT
    one = MR2Classifier(C=0.1, random_state=0, **params).fit(X, Y, 10 * weight)
    other = MR2Classifier(C=1.0, random_state=0, **params).fit(X, Y, weight)
    assert_allclose(one.coef_, other.coef_, rtol=1e-5, atol=1e-7)


@every_kind
def test_weight_zero_is_absence(model):
    kept = WEIGHT > 0
    noise = np.where(kept[:, None], X, 1e6)
    one = clone(model).fit(noise, Y, WEIGHT)
    other = clone(model).fit(X[kept], Y[kept], WEIGHT[kept])
    assert_array_equal(one.predict_proba(X), other.predict_proba(X))
    one, other = clone(model), clone(model)
    for _ in range(2):
        one.partial_fit(noise, Y, [0, 1, 2], WEIGHT)
        other.partial_fit(X[kept], Y[kept], [0, 1, 2], WEIGHT[kept])
    assert_array_equal(one.predict_proba(X), other.predict_proba(X))


@every_kind
def test_class_weight_is_a_weight(model):
    one = clone(model).set_params(class_weight=CLASS_WEIGHT).fit(X, Y)
    other = clone(model).fit(X, Y, np.array([0.5, 1.0, 3.0])[Y])
    plain = clone(model).fit(X, Y)
    assert_array_equal(one.predict_proba(X), other.predict_proba(X))
    assert np.abs(one.predict_proba(X) - plain.predict_proba(X)).max() > 1e-4


@pytest.mark.parametrize(
    "convert",
    [list, pd.Series, pl.Series, torch.tensor, lambda w: w.astype(int), lambda w: w.astype("f4")],
)
def test_kinds_of_weights(convert):
    expected = fitted().fit(X, Y, WEIGHT)
    model = MR2Classifier(random_state=0).fit(X, Y, convert(WEIGHT))
    assert_allclose(model.coef_, expected.coef_, rtol=1e-6)


def test_one_number_as_weight_is_for_all():
    expected = MR2Classifier(C=2.0, tol=1e-10).fit(X, Y)
    assert_allclose(MR2Classifier(tol=1e-10).fit(X, Y, 2.0).coef_, expected.coef_, rtol=1e-5)


def test_class_weight_zero_leaves_a_class_out():
    model = MR2Classifier(class_weight={1: 0.0}).fit(X, Y)
    assert model.classes_.tolist() == [0, 1, 2]
    assert set(model.predict(X)) == {0, 2}
    assert np.isnan(model.class_spread_[1])


def test_balanced_ignores_classes_without_weight():
    weight = np.where(Y == 1, 0.0, 1.0)
    one = MR2Classifier(class_weight="balanced", tol=1e-10).fit(X, Y, weight)
    other = MR2Classifier(tol=1e-10).fit(X, Y, weight)
    assert_allclose(one.coef_, other.coef_, atol=1e-6)


# ---------------------------------------------------------------------------- validation data


@given(
    counts=st.lists(st.integers(1, 40), min_size=2, max_size=8).filter(lambda c: max(c) > 1),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 1000),
)
def test_every_class_trains_and_validates(counts, fraction, seed):
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    rows = np.arange(len(y), dtype=float)[:, None]
    model = DropoutClassifier(
        validation_fraction=fraction, max_epochs=1, callbacks=[Watch()], random_state=seed
    ).fit(rows, y)
    train, valid = watched(model).train_, watched(model).valid_
    both = torch.cat([train.X, valid.X])[:, 0].sort().values
    assert_array_equal(both.numpy(), rows[:, 0])  # disjoint, and nothing lost
    for part in (train, valid):
        assert_array_equal(part.y.numpy(), y[part.X[:, 0].int().numpy()])
    n_train = np.bincount(train.y.numpy(), minlength=len(counts))
    n_valid = np.bincount(valid.y.numpy(), minlength=len(counts))
    for count, n_t, n_v in zip(counts, n_train, n_valid, strict=True):
        assert n_t >= 1
        assert n_v >= min(1, count - 1)
        assert abs(n_v - fraction * count) <= 1  # stratified
    clipped = any(not 1 <= fraction * count <= count - 1 for count in counts)
    assert clipped or n_valid.sum() == round(sum(fraction * count for count in counts))


def test_which_samples_validate_is_random():
    def chosen(seed):
        model = DropoutClassifier(
            validation_fraction=0.3, callbacks=[Watch()], max_epochs=1, random_state=seed
        )
        return {tuple(row) for row in watched(model.fit(X, Y)).valid_.X.tolist()}

    assert chosen(0) == chosen(0)
    assert chosen(0) != chosen(1)


def test_samples_without_weight_do_not_validate():
    # Class 2 has a single sample that counts: it must be trained on.
    weight = np.where(Y == 2, 0.0, 1.0 + Y)
    weight[-1] = 7.0
    for seed in range(5):
        model = DropoutClassifier(
            validation_fraction=0.4, callbacks=[Watch()], max_epochs=1, random_state=seed
        ).fit(np.arange(60.0)[:, None], Y, weight)
        train, valid = watched(model).train_, watched(model).valid_
        assert train.X.max() == 59
        assert valid.y.max() == 1
        for part in (train, valid):
            own = weight[part.X[:, 0].int().numpy()]
            assert_allclose(part.sample_weight.numpy(), own / own.mean())


@every_kind
def test_validation_loss_is_that_of_the_model(model):
    watch = clone(model).set_params(validation_fraction=0.3, callbacks=[Watch()])
    if isinstance(model, MR2Classifier):
        watch.set_params(margin_statistic=None, representation_weight=0)
    watch.fit(X, Y, 1 + WEIGHT)
    valid = watched(watch).valid_
    loss = -watch.predict_log_proba(valid.X)[np.arange(len(valid.y)), valid.y]
    expected = np.average(loss, weights=valid.sample_weight)
    assert_allclose(watch.history_["valid_loss"].iloc[-1], expected, rtol=1e-6)


def test_given_validation_data_come_first():
    model = DropoutClassifier(callbacks=[Watch()], validation_fraction=0.5, random_state=0)
    model.fit(X, Y, X_val=X[::3].tolist(), y_val=Y[::3])
    train, valid = watched(model).train_, watched(model).valid_
    assert_array_equal(train.X.numpy(), X)
    assert_array_equal(valid.X.numpy(), X[::3])
    assert_array_equal(valid.y.numpy(), Y[::3])


def test_validation_data_do_not_change_a_fit_without_callbacks():
    expected = clone(KINDS["dropout"]).fit(X, Y).predict_proba(X)
    model = clone(KINDS["dropout"]).fit(X, Y, X_val=X[::2], y_val=Y[::2])
    assert_array_equal(model.predict_proba(X), expected)


# ---------------------------------------------------------------------------- training in parts


def test_many_parts_come_close_to_one_fit():
    rng = np.random.default_rng(5)
    y = rng.integers(0, 3, 6000)
    big = rng.normal(size=(6000, 4)) + 1.2 * np.eye(3, 4)[y]
    whole = MR2Classifier(margin=0.5).fit(big, y)
    parts = MR2Classifier(margin=0.5, lr=0.01, random_state=0)
    gaps = []
    for part in np.array_split(np.arange(6000), 30):
        parts.partial_fit(big[part], y[part], classes=[0, 1, 2])
        gaps.append(np.abs(parts.predict_proba(big) - whole.predict_proba(big)).mean())
    assert gaps[-1] < 0.02 < 0.1 < gaps[0]
    assert_allclose(parts.margins_, whole.margins_, rtol=1e-5)
    assert parts.n_iter_ == len(parts.history_) == 30


@every_kind
def test_fit_then_partial_fit_goes_on(model):
    model = clone(model).fit(X, Y)
    before = model.predict_proba(X)
    model.partial_fit(X[:30], Y[:30])
    after = model.predict_proba(X)
    assert 0 < np.abs(after - before).max() < 0.3
    assert_array_equal(model.classes_, [0, 1, 2])


@every_kind
def test_a_part_may_hold_one_class_or_one_sample(model):
    model = clone(model).partial_fit(X[:1], Y[:1], classes=[2, 1, 0])
    model.partial_fit(X[20:40], Y[20:40])
    assert model.predict_proba(X).shape == (60, 3)
    assert_array_equal(model.classes_, [0, 1, 2])


def test_fit_forgets_the_parts():
    model = clone(KINDS["dropout"]).partial_fit(X, Y, classes=[0, 1, 2]).fit(X, Y)
    assert_array_equal(model.predict_proba(X), clone(KINDS["dropout"]).fit(X, Y).predict_proba(X))


def test_the_penalty_of_weighted_parts_is_on_one_scale():
    # The loss of parts is a mean over n samples of w l, so 1 / C belongs to n, not to the sum of w.
    model = MR2Classifier(C=0.5, random_state=0, **ADAM)
    penalties = []
    for _ in range(3):
        model.partial_fit(X, Y, classes=[0, 1, 2], sample_weight=np.full(60, 5.0))
        penalties.append(model.net_.head_l2)
    assert_allclose(penalties, [1 / (0.5 * 60 * k) for k in (1, 2, 3)])


def test_parts_need_class_weights_that_do_not_depend_on_the_data():
    model = DropoutClassifier(class_weight="balanced")
    assert not hasattr(model, "partial_fit")
    with pytest.raises(AttributeError) as caught:
        model.partial_fit(X, Y, classes=[0, 1, 2])
    assert "Give class_weight as a dictionary" in str(caught.value.__cause__)
    assert hasattr(model.set_params(class_weight={0: 2}), "partial_fit")


# ---------------------------------------------------------------------------- warm start


def test_warm_start_saves_iterations():
    # Badly scaled features make the way from zero long.
    scaled = X * 10.0 ** np.arange(-2, 2)
    warm, cold = MR2Classifier(C=1e4, warm_start=True), MR2Classifier(C=1e4)
    warm.fit(scaled, Y)
    first = warm.n_iter_
    nearby = scaled * 1.001
    warm.fit(nearby, Y)
    cold.fit(nearby, Y)
    assert warm.n_iter_ < 0.8 * min(first, cold.n_iter_)
    assert_allclose(warm.predict_proba(X), cold.predict_proba(X), atol=1e-3)


def test_warm_start_continues_in_mini_batches():
    model = MR2Classifier(warm_start=True, random_state=0, **ADAM).fit(X, Y)
    last = model.history_["train_loss"].iloc[-1]
    assert model.fit(X, Y).history_["train_loss"].iloc[0] < last
    cold = MR2Classifier(random_state=0, **ADAM).fit(X, Y).fit(X, Y)
    assert cold.history_["train_loss"].iloc[0] > last


def test_warm_start_goes_on_from_parts_and_from_another_dtype():
    model = MR2Classifier(warm_start=True, random_state=0, **ADAM)
    for _ in range(10):
        model.partial_fit(X, Y, classes=[0, 1, 2])
    first, last = model.history_["train_loss"].iloc[[0, -1]]
    model.fit(X.astype("float32"), Y)
    assert model.history_["train_loss"].iloc[0] < (first + last) / 2
    assert model.coef_.dtype == np.float32


# ---------------------------------------------------------------------------- errors


def _bad(value, dtype=float):
    out = X.astype(dtype)
    out[3, 1] = value
    return out


def _missing(value, dtype=object):
    return pd.Series([value, *NAMES[Y[1:]]], dtype=dtype)


WRONG_INPUT = {
    # call, exception, what its message must say: the argument and the cure
    "NaN": (lambda m: m.fit(_bad(np.nan), Y), ValueError, "X contains NaN", "imputer"),
    "NaN, float32": (lambda m: m.fit(_bad(np.nan, "f4"), Y), ValueError, "X contains NaN", "drop"),
    "infinity": (lambda m: m.fit(_bad(np.inf), Y), ValueError, "X contains infinity"),
    "too large": (
        lambda m: m.set_params(dtype="float32").fit(_bad(1e300), Y),
        ValueError,
        "X contains infinity or a value too large",
    ),
    "missing in frame": (
        lambda m: m.fit(pd.DataFrame(X).astype("Float64").mask(X > 2), Y),
        ValueError,
        "X contains NaN",
    ),
    "NaN in prediction": (lambda m: m.fit(X, Y).predict(_bad(np.nan)), ValueError, "X contains"),
    "sparse array": (lambda m: m.fit(scipy.sparse.csr_array(X), Y), TypeError, "X", "toarray"),
    "sparse matrix": (lambda m: m.fit(scipy.sparse.coo_matrix(X), Y), TypeError, "X", "toarray"),
    "sparse tensor": (lambda m: m.fit(torch.tensor(X).to_sparse(), Y), TypeError, "X.to_dense()"),
    "sparse frame": (
        lambda m: m.fit(pd.DataFrame(X).astype(pd.SparseDtype(float)), Y),
        TypeError,
        "X.sparse.to_dense()",
    ),
    "sparse in prediction": (
        lambda m: m.fit(X, Y).predict(scipy.sparse.csr_array(X)),
        TypeError,
        "X",
        "toarray",
    ),
    "text": (lambda m: m.fit(np.full((60, 2), "a"), Y), ValueError, "string to float"),
    "complex": (lambda m: m.fit(X * 1j, Y), ValueError, "Complex data not supported"),
    "one dimension": (lambda m: m.fit(X[:, 0], Y), ValueError, "2D array", "reshape"),
    "three dimensions": (lambda m: m.fit(X[:, :, None], Y), ValueError, "dim 3"),
    "no sample": (lambda m: m.fit(X[:0], Y[:0]), ValueError, "0 sample"),
    "no feature": (lambda m: m.fit(X[:, :0], Y), ValueError, "0 feature"),
    "no sample to predict": (lambda m: m.fit(X, Y).predict(X[:0]), ValueError, "0 sample"),
    "one class": (
        lambda m: m.fit(X, np.full(60, "a")),
        ValueError,
        "one class: 'a'",
        "Add samples of another class",
    ),
    "one sample": (lambda m: m.fit(X[:1], Y[:1]), ValueError, "one class: 0", "Add samples"),
    "one class with weight": (
        lambda m: m.fit(X, Y, Y == 1),
        ValueError,
        "one class: 1",
        "weight 0",
    ),
    "wrong feature count": (
        lambda m: m.fit(X, Y).predict(X[:, :3]),
        ValueError,
        "X has 3 features",
        "expecting 4",
    ),
    "wrong feature count in a part": (
        lambda m: m.fit(X, Y).partial_fit(X[:, :3], Y),
        ValueError,
        "X has 3 features",
        "expecting 4",
    ),
    "lengths": (lambda m: m.fit(X, Y[1:]), ValueError, r"[60, 59]"),
    "no y": (lambda m: m.fit(X, None), ValueError, "requires y"),
    "targets": (lambda m: m.fit(X, X[:, 0]), ValueError, "continuous", "discrete classes"),
    "indicators": (lambda m: m.fit(X, np.eye(3)[Y]), ValueError, "y should be a 1d array"),
    "mixed list": (
        lambda m: m.fit(X, ["a", *Y[1:].tolist()]),
        ValueError,
        "y holds",
        "type int, str",
        "y.astype(str)",
    ),
    "mixed array": (
        lambda m: m.fit(X, np.array(["a", *Y[1:]], dtype=object)),
        ValueError,
        "y holds",
        "int64, str",
        "y.astype(str)",
    ),
    "integers as objects": (
        lambda m: m.fit(X, Y.astype(object)),
        ValueError,
        "y holds",
        "y.astype(int)",
    ),
    "y None": (lambda m: m.fit(X, [None, *NAMES[Y[1:]]]), ValueError, "y contains 1 missing"),
    "y None in array": (lambda m: m.fit(X, _missing(None).to_numpy()), ValueError, "y", "Remove"),
    "y NaN": (lambda m: m.fit(X, np.where(Y == 1, np.nan, Y)), ValueError, "y contains 20 missing"),
    "y NaN, object": (lambda m: m.fit(X, _missing(np.nan)), ValueError, "y contains 1", "Remove"),
    "y NA, string": (lambda m: m.fit(X, _missing(pd.NA, "string")), ValueError, "y contains 1"),
    "y NA, object": (lambda m: m.fit(X, _missing(pd.NA)), ValueError, "y contains 1", "Remove"),
    "y missing category": (
        lambda m: m.fit(X, _missing(None, "category")),
        ValueError,
        "y contains 1",
    ),
    "y NA, Int64": (
        lambda m: m.fit(X, pd.Series([pd.NA, *Y[1:]], dtype="Int64")),
        ValueError,
        "y contains 1",
    ),
    "y NA, boolean": (
        lambda m: m.fit(X, pd.Series([pd.NA, *(Y[1:] > 1)], dtype="boolean")),
        ValueError,
        "y contains 1",
    ),
    "y null, polars": (
        lambda m: m.fit(X, pl.Series([None, *NAMES[Y[1:]]])),
        ValueError,
        "y contains 1",
    ),
    "y NaN, tensor": (
        lambda m: m.fit(X, torch.tensor(np.where(Y == 1, np.nan, Y))),
        ValueError,
        "y contains 20",
    ),
    "y infinite": (lambda m: m.fit(X, np.where(Y == 1, np.inf, Y)), ValueError, "y contains inf"),
    "weight negative": (
        lambda m: m.fit(X, Y, np.where(Y == 1, -1.0, 1.0)),
        ValueError,
        "sample_weight must not be negative",
        "weight 0",
    ),
    "weight zero": (lambda m: m.fit(X, Y, np.zeros(60)), ValueError, "sample_weight", "zero"),
    "weight zero in a part": (
        lambda m: m.partial_fit(X, Y, [0, 1, 2], np.zeros(60)),
        ValueError,
        "sample_weight",
        "zero",
    ),
    "weight NaN": (lambda m: m.fit(X, Y, np.full(60, np.nan)), ValueError, "sample_weight", "NaN"),
    "weight inf": (lambda m: m.fit(X, Y, np.full(60, np.inf)), ValueError, "sample_weight", "inf"),
    "weight text": (lambda m: m.fit(X, Y, ["a"] * 60), ValueError, "sample_weight", "numbers"),
    "weight shape": (lambda m: m.fit(X, Y, np.ones((60, 1))), ValueError, "sample_weight", "60"),
    "weight length": (lambda m: m.fit(X, Y, np.ones(59)), ValueError, "sample_weight", "60"),
    "no classes": (
        lambda m: m.partial_fit(X, Y),
        ValueError,
        "classes must be given at the first call",
    ),
    "unseen label": (
        lambda m: m.partial_fit(X, Y, classes=[0, 1]),
        ValueError,
        "not in classes: [2]",
        "Name all classes",
    ),
    "unseen label later": (
        lambda m: m.fit(X, Y).partial_fit(X, Y + 1),
        ValueError,
        "not in classes: [3]",
        "Name all classes",
    ),
    "label of another type": (
        lambda m: m.partial_fit(X, Y.astype(str), classes=[0, 1, 2]),
        ValueError,
        "not in classes: ['0', '1', '2']",
    ),
    "other classes": (
        lambda m: m.fit(X, Y).partial_fit(X, Y, classes=[0, 1, 2, 3]),
        ValueError,
        "classes=[0, 1, 2, 3] differs",
        "Leave it out",
    ),
    "classes of another type": (
        lambda m: m.fit(X, Y).partial_fit(X, Y, classes=["a", "b"]),
        ValueError,
        "classes=['a', 'b'] differs",
    ),
    "one name": (lambda m: m.partial_fit(X, Y, classes=[0]), ValueError, "classes", "at least 2"),
    "missing name": (
        lambda m: m.partial_fit(X, Y, classes=[0, 1, None]),
        ValueError,
        "classes contains 1 missing",
    ),
    "y_val alone": (lambda m: m.fit(X, Y, y_val=Y), ValueError, "X_val and y_val", "together"),
    "X_val alone": (lambda m: m.fit(X, Y, X_val=X), ValueError, "X_val and y_val", "together"),
    "X_val NaN": (
        lambda m: m.fit(X, Y, X_val=_bad(np.nan), y_val=Y),
        ValueError,
        "X_val",
        "contains NaN",
    ),
    "X_val features": (
        lambda m: m.fit(X, Y, X_val=X[:, :3], y_val=Y),
        ValueError,
        "X_val",
        "3 features",
        "expecting 4",
    ),
    "X_val sparse": (
        lambda m: m.fit(X, Y, X_val=scipy.sparse.csr_array(X), y_val=Y),
        TypeError,
        "X_val",
        "toarray",
    ),
    "y_val unseen": (
        lambda m: m.fit(X, Y, X_val=X, y_val=Y + 1),
        ValueError,
        "y_val contains labels that are not in y: [3]",
        "Leave out",
    ),
    "y_val of another type": (
        lambda m: m.fit(X, Y, X_val=X, y_val=Y.astype(str)),
        ValueError,
        "y_val contains labels that are not in y: ['0', '1', '2']",
    ),
    "y_val missing": (
        lambda m: m.fit(X, NAMES[Y], X_val=X, y_val=_missing(None)),
        ValueError,
        "y_val",
        "1 missing",
    ),
    "warm start, classes": (
        lambda m: m.set_params(warm_start=True).fit(X, Y).fit(X, Y + 1),
        ValueError,
        "[0, 1, 2], got [1, 2, 3]",
        "warm_start=False",
    ),
    "warm start, type of classes": (
        lambda m: m.set_params(warm_start=True).fit(X, Y).fit(X, NAMES[Y]),
        ValueError,
        "warm_start=False",
    ),
    "warm start, features": (
        lambda m: m.set_params(warm_start=True).fit(X, Y).fit(X[:, :2], Y),
        ValueError,
        "same shape",
        "warm_start=False",
    ),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("kind", ["probe", "dropout"])
@pytest.mark.parametrize("case", WRONG_INPUT)
def test_wrong_input_is_named_with_its_cure(case, kind):
    call, exception, *says = WRONG_INPUT[case]
    with pytest.raises(exception) as caught:
        call(clone(KINDS[kind]))
    for words in says:
        assert words in str(caught.value)


WRONG_PARAMETERS = {
    "device='cuda'": ({"device": "cuda"}, ValueError, "device='cuda'", "device='auto'"),
    "device=torch's": ({"device": torch.device("cuda:1")}, ValueError, "device='cuda:1'", "cpu"),
    "device='nonsense'": ({"device": "nonsense"}, ValueError, "device='nonsense'", "device='auto'"),
    "device='meta'": ({"device": "meta"}, ValueError, "device='meta'", "device='auto'"),
    "device=3": ({"device": 3}, ValueError, "'device'", "'str'"),
    "dtype": ({"dtype": "float16"}, ValueError, "'dtype'", "'float32'"),
    "max_epochs": ({"max_epochs": 0}, ValueError, "'max_epochs'", "[1, inf)"),
    "warm_start": ({"warm_start": "yes"}, ValueError, "'warm_start'", "bool"),
    "verbose": ({"verbose": -1}, ValueError, "'verbose'", "[0, inf)"),
    "random_state": ({"random_state": "x"}, ValueError, "'random_state'", "RandomState"),
    "callbacks": ({"callbacks": "x"}, ValueError, "'callbacks'", "list"),
    "a callback": ({"callbacks": [3]}, TypeError, "callbacks", "got 3"),
    "class_weight": ({"class_weight": [1, 2, 3]}, ValueError, "'class_weight'", "'balanced'"),
    "class_weight, key": ({"class_weight": {5: 1}}, ValueError, "class_weight", "[0, 1, 2]"),
    "class_weight, text": ({"class_weight": {0: "a"}}, ValueError, "class_weight", "got 'a' for 0"),
    "class_weight, NaN": ({"class_weight": {0: np.nan}}, ValueError, "class_weight", "from 0 up"),
    "class_weight, < 0": ({"class_weight": {0: -1}}, ValueError, "class_weight", "from 0 up"),
    "class_weight, 0": (
        {"class_weight": dict.fromkeys(range(3), 0)},
        ValueError,
        "weight zero",
        "positive class_weight",
    ),
    "validation_fraction": ({"validation_fraction": 1.0}, ValueError, "(0.0, 1.0)"),
    "unknown": ({"max_epoch": 3}, TypeError, "'max_epoch'", "Did you mean 'max_epochs'?"),
    "unknown, far": ({"zzz": 3}, TypeError, "'zzz'", "optimizer__"),
    "unknown, fitted": ({"coefs_": 3}, TypeError, "'coefs_'"),
    "unknown, private": ({"_device_": 3}, TypeError, "'_device_'"),
    "unknown, method": ({"fit": 3}, TypeError, "'fit'"),
    "unknown prefix": ({"criterion__x": 3}, TypeError, "'criterion__x'", "optimizer__"),
    "unknown callback": (
        {"callbacks__stop__patience": 3},
        ValueError,
        "callbacks__stop__patience refers to no callback",
        "('stop', EarlyStopping())",
    ),
    "unknown callback parameter": (
        {"callbacks": [("stop", EarlyStopping("train_loss"))], "callbacks__stop__pa": 3},
        ValueError,
        "'pa'",
        "patience",
    ),
    "no validation data": (
        {"callbacks": [EarlyStopping()]},
        ValueError,
        "EarlyStopping monitors 'valid_loss'",
        "validation_fraction",
        "'train_loss'",
    ),
}


@pytest.mark.parametrize("cls", [MR2Classifier, DropoutClassifier])
@pytest.mark.parametrize("case", WRONG_PARAMETERS)
def test_wrong_parameters_are_named_with_their_cure(case, cls):
    params, exception, *says = WRONG_PARAMETERS[case]
    if torch.cuda.is_available() and "cuda" in str(params):
        pytest.skip("there is a CUDA device")
    with pytest.raises(exception) as caught:
        cls(**params).fit(X, Y)
    for words in says:
        assert words in str(caught.value)


WRONG_FOR_MR2 = {
    "optimizer": ({"optimizer": int}, ValueError, "optimizer must be 'auto' or a subclass"),
    "optimizer, text": (
        {"optimizer": "adam"},
        ValueError,
        "optimizer must be 'auto' or a subclass of torch.optim.Optimizer, got 'adam'",
        "torch.optim.Adam",
    ),
    "optimizer, instance": (
        {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
        ValueError,
        "optimizer must be",
        "Pass the class itself",
    ),
    "optimizer's": ({"optimizer__betas": (0.5, 0.5)}, ValueError, "optimizer__betas", "optimizer"),
    "iterator's": ({"iterator_train__shuffle": True}, ValueError, "iterator_train__shuffle"),
    "unknown to optimizer": ({**ADAM, "optimizer__x": 3}, TypeError, "Adam", "'x'"),
    "unknown to iterator": ({**ADAM, "iterator_train__x": 3}, TypeError, "'x'"),
}


@pytest.mark.parametrize("case", WRONG_FOR_MR2)
def test_wrong_parameters_for_skorch_are_not_ignored(case):
    params, exception, *says = WRONG_FOR_MR2[case]
    with pytest.raises(exception) as caught:
        MR2Classifier(**params).fit(X, Y)
    for words in says:
        assert words in str(caught.value)


@pytest.mark.parametrize("statistic", ["second_moment", "error"])
def test_a_learning_rate_that_the_full_batch_ignores(statistic):
    model = MR2Classifier(lr=0.1, margin_statistic=statistic, random_state=0)
    with pytest.warns(UserWarning, match=r"lr=0\.1 has no effect in fit.*optimizer") as caught:
        model.fit(X, Y)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_params(margin_statistic="second_moment").partial_fit(X, Y)
        model.set_params(**ADAM).fit(X, Y)


def test_validation_needs_two_samples_of_some_class():
    with pytest.raises(ValueError, match=r"validation_fraction=0.5.*Give X_val and y_val"):
        DropoutClassifier(validation_fraction=0.5).fit(X[::20], Y[::20])


@every_kind
@pytest.mark.parametrize(
    "use", ["predict", "predict_proba", "predict_log_proba", "decision_function", "transform"]
)
def test_use_before_fit(model, use):
    with pytest.raises(NotFittedError, match="Call 'fit'"):
        getattr(clone(model), use)(X)


def test_feature_names_before_fit():
    with pytest.raises(NotFittedError, match="Call 'fit'"):
        MR2Classifier().get_feature_names_out()


def test_feature_names_must_agree():
    model = MR2Classifier().fit(pd.DataFrame(X, columns=list("abcd")), Y)
    assert_array_equal(model.feature_names_in_, list("abcd"))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(pd.DataFrame(X, columns=list("abdc")))
    with pytest.raises(ValueError, match=r"X_val.*feature names"):
        model.fit(
            pd.DataFrame(X, columns=list("abcd")),
            Y,
            X_val=pd.DataFrame(X, columns=list("abce")),
            y_val=Y,
        )


# ---------------------------------------------------------------------------- random numbers


def _states():
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return (
        torch.get_rng_state().numpy().tobytes(),
        (kind, keys.tobytes(), *rest),
        random.getstate(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
    )


@every_kind
def test_global_random_state_has_no_influence(model):
    def probabilities():
        m = clone(model).set_params(validation_fraction=0.2).fit(X, Y)
        return m.predict_proba(X), m.partial_fit(X, Y).predict_proba(X)

    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = probabilities()
    torch.manual_seed(2)
    torch.rand(7)
    np.random.seed(2)  # noqa: NPY002
    assert_array_equal(probabilities(), expected)


@every_kind
@pytest.mark.parametrize("random_state", [0, None])
def test_global_state_is_left_alone(model, random_state):
    model = clone(model).set_params(random_state=random_state)
    uses = [
        lambda: model.set_params(validation_fraction=0.2).fit(X, Y),
        lambda: model.partial_fit(X, Y),
        lambda: model.predict(X),
        lambda: model.predict_proba(X),
        lambda: model.transform(X),
        lambda: pickle.loads(pickle.dumps(model)),
    ]
    for use in uses:
        before = _states()
        use()
        assert _states() == before


class Fails(Callback):
    def on_batch_end(self, net, **kwargs):
        raise RuntimeError("as planned")


def test_global_state_is_left_alone_when_training_fails():
    before = _states()
    with pytest.raises(RuntimeError, match="as planned"):
        DropoutClassifier(callbacks=[Fails()]).fit(X, Y)
    assert _states() == before


@pytest.mark.parametrize("prefer", ["threads", "processes"])
def test_parallel_fits_are_those_in_sequence(prefer):
    kinds = [KINDS["probe"], KINDS["mini-batches"]]
    if prefer == "threads":  # a class of this file cannot be imported by another process
        kinds.append(KINDS["dropout"].__class__(max_epochs=20))
    models = [
        clone(m).set_params(random_state=seed) for m, seed in itertools.product(kinds, range(3))
    ]
    expected = [clone(m).fit(X, Y).predict_proba(X) for m in models]
    before = _states()
    parallel = joblib.Parallel(n_jobs=2, prefer=prefer)
    done = parallel(joblib.delayed(clone(m).fit)(X, Y) for m in models)
    assert _states() == before
    for model, probabilities in zip(done, expected, strict=True):
        assert_allclose(model.predict_proba(X), probabilities, rtol=1e-9, atol=1e-12)


@every_kind
def test_fits_repeat_bit_for_bit(model):
    one, other = (clone(model).set_params(validation_fraction=0.2).fit(X, Y) for _ in range(2))
    assert_array_equal(one.predict_proba(X), other.predict_proba(X))
    pd.testing.assert_frame_equal(
        one.history_.drop(columns="dur"), other.history_.drop(columns="dur")
    )


def test_random_state_decides():
    def probabilities(random_state):
        return DropoutClassifier(random_state=random_state).fit(X, Y).predict_proba(X)

    assert not np.array_equal(probabilities(0), probabilities(1))
    assert not np.array_equal(probabilities(None), probabilities(None))
    assert_array_equal(
        probabilities(np.random.RandomState(3)),
        probabilities(np.random.RandomState(3)),
    )
    shared = np.random.RandomState(3)
    assert not np.array_equal(probabilities(shared), probabilities(shared))


# ---------------------------------------------------------------------------- what is the user's


class Counts(Callback):
    """A callback with state."""

    def initialize(self):
        self.seen_ = []
        return self

    def on_epoch_end(self, net, **kwargs):
        self.seen_.append(len(net.history))


class PlainCounts(Callback):
    """The same as people write it, with state that looks like a parameter."""

    def __init__(self):
        self.seen = []

    def on_epoch_end(self, net, **kwargs):
        self.seen.append(len(net.history))


@every_kind
@pytest.mark.parametrize("order", ["C", "F"])
def test_training_alters_nothing_of_the_user(model, order):
    arrays = [np.array(a, order=order) for a in (X, Y, 1 + WEIGHT, X[:9], Y[:9])]
    copies = [a.copy() for a in arrays]
    counts, class_weight = PlainCounts(), {0: 2.0}
    model = clone(model).set_params(
        callbacks=[("mine", counts)], class_weight=class_weight, validation_fraction=0.2
    )
    params = model.get_params()
    state = {name: copy.deepcopy(value) for name, value in params.items() if name != "callbacks"}
    model.fit(arrays[0], arrays[1], arrays[2], X_val=arrays[3], y_val=arrays[4])
    model.partial_fit(arrays[0], arrays[1], sample_weight=arrays[2])
    model.transform(arrays[0])[:] = 0
    model.predict_proba(arrays[0])[:] = 0
    for array, original in zip(arrays, copies, strict=True):
        assert_array_equal(array, original)
    assert all(value is params[name] for name, value in model.get_params().items())
    assert {name: params[name] for name in state} == state
    assert counts.seen == []
    assert dict(model.net_.callbacks_)["mine"].seen


def test_tensors_of_the_user_keep_their_gradients():
    given_X = torch.tensor(X, requires_grad=True)
    model = fitted().fit(given_X, Y)
    model.transform(given_X)[:] = 0
    assert given_X.requires_grad
    assert given_X.grad is None
    assert_array_equal(given_X.detach().numpy(), X)


def test_transform_returns_memory_of_its_own():
    for dtype in ("float32", "float64"):
        given_X = X.astype(dtype)
        assert not np.shares_memory(fitted().fit(given_X, Y).transform(given_X), given_X)


# ---------------------------------------------------------------------------- predictions


SMALL = {
    (n_classes, dtype): MR2Classifier(random_state=0).fit(
        X.astype(dtype), np.array(list("dabc"))[np.arange(60) % n_classes]
    )
    for n_classes in (2, 3, 4)
    for dtype in ("float32", "float64")
}


@given(
    data=st.data(),
    n_classes=st.integers(2, 4),
    dtype=st.sampled_from(["float32", "float64"]),
    # From ties over plain logits to softmax's saturation at both ends.
    scale=st.sampled_from([0.0, 1e-30, 1e-8, 1.0, 1e3, 1e30]),
)
def test_predict_is_the_most_probable_class(data, n_classes, dtype, scale):
    model = copy.deepcopy(SMALL[n_classes, dtype])
    width = 32 if dtype == "float32" else 64
    entries = st.floats(-4, 4, width=width) | st.sampled_from([-1.0, 0.0, 1.0])
    head = model.net_.module_.head
    with torch.no_grad():
        for p in head.parameters():
            drawn = data.draw(hnp.arrays(dtype, tuple(p.shape), elements=entries))
            p.copy_(torch.from_numpy(drawn))
        head.weight.mul_(scale)
        if data.draw(st.booleans()):
            head.bias.zero_()
    rows = data.draw(hnp.arrays(dtype, (6, 4), elements=entries))
    proba = model.predict_proba(rows)
    assert_array_equal(model.predict(rows), model.classes_[proba.argmax(1)])
    assert_allclose(proba.sum(1), 1, rtol=1e-5)
    assert ((proba >= 0) & (proba <= 1)).all()
    log_proba, decision = model.predict_log_proba(rows), model.decision_function(rows)
    assert np.isfinite(log_proba).all()  # also where the probability is 0
    assert_allclose(np.exp(log_proba), proba, rtol=1e-4, atol=1e-6)
    assert decision.shape == ((6,) if n_classes == 2 else (6, n_classes))


def test_ties_go_to_the_first_class():
    model = fitted()
    with torch.no_grad():
        for p in model.net_.module_.parameters():
            p.zero_()
    assert_array_equal(model.predict_proba(X), np.full((60, 3), 1 / 3))
    assert_array_equal(model.predict(X), np.zeros(60))


def test_decision_function_of_many_classes():
    model = fitted(**LOGISTIC)
    assert model.coef_.shape == (3, 4)
    assert model.intercept_.shape == (3,)
    assert_allclose(model.decision_function(X), X @ model.coef_.T + model.intercept_, rtol=1e-9)
    softmax = np.exp(model.decision_function(X))
    assert_allclose(model.predict_proba(X), softmax / softmax.sum(1, keepdims=True), rtol=1e-9)


def test_decision_function_of_two_classes():
    model = MR2Classifier().fit(X, Y > 0)
    decision = model.decision_function(X)
    assert decision.shape == (60,)
    assert_allclose(model.predict_proba(X)[:, 1], 1 / (1 + np.exp(-decision)), rtol=1e-9)
    assert_array_equal(model.predict(X), decision > 0)


def test_transform_has_names_and_frames():
    frame = pd.DataFrame(X, columns=list("abcd"), index=np.arange(60)[::-1])
    model = MR2Classifier().fit(frame, Y)
    names = [f"mr2classifier{i}" for i in range(4)]
    assert_array_equal(model.get_feature_names_out(), names)
    out = model.set_output(transform="pandas").transform(frame)
    assert out.columns.tolist() == names
    assert_array_equal(out.index, frame.index)
    assert_array_equal(out.to_numpy(), X)
    assert isinstance(model.set_output(transform="polars").transform(frame), pl.DataFrame)
    assert isinstance(model.predict_proba(frame), np.ndarray)
    network = DropoutClassifier(random_state=0).fit(X, Y)
    assert network.transform(X).shape == (60, 5)
    assert_array_equal(network.get_feature_names_out(), [f"dropoutclassifier{i}" for i in range(5)])
    assert_allclose(network.transform(X), network.transform(X))  # dropout is off


# ---------------------------------------------------------------------------- copies


def _joblib(model, tmp_path):
    joblib.dump(model, tmp_path / "model.joblib", compress=3)
    return joblib.load(tmp_path / "model.joblib")


def _torch_save(model, tmp_path):
    torch.save(model, tmp_path / "model.pt")
    return torch.load(tmp_path / "model.pt", weights_only=False)


COPIES = {
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "pickle 2": lambda model, _: pickle.loads(pickle.dumps(model, protocol=2)),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "joblib": _joblib,
    "torch": _torch_save,
}


@every_kind
@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
def test_copies_predict_the_same_and_go_on(model, how, tmp_path):
    callbacks = [
        ("mine", Counts()),
        EpochScoring("accuracy", lower_is_better=False),
        EarlyStopping(patience=50, load_best=True),
    ]
    model = clone(model).set_params(callbacks=callbacks, validation_fraction=0.2).fit(X, Y)
    other = how(model, tmp_path)
    assert other.net_ is not model.net_
    for use in ("predict", "predict_proba", "decision_function", "transform"):
        assert_array_equal(getattr(other, use)(X), getattr(model, use)(X))
    pd.testing.assert_frame_equal(other.history_, model.history_)
    seen = dict(other.net_.callbacks_)["mine"].seen_
    assert seen == dict(model.net_.callbacks_)["mine"].seen_ == list(range(1, model.n_iter_ + 1))
    # Dropout and shuffling go on from where they were.
    for m in (model, other):
        m.set_params(callbacks=None)
        dict(m.net_.callbacks_)["EarlyStopping"].monitor = "train_loss"
    assert_array_equal(
        model.partial_fit(X, Y).predict_proba(X), other.partial_fit(X, Y).predict_proba(X)
    )


def test_a_copy_is_independent():
    model = fitted()
    expected = model.predict_proba(X)
    copy.deepcopy(model).partial_fit(X, Y[::-1])
    assert_array_equal(model.predict_proba(X), expected)


@every_kind
def test_no_data_in_a_pickle(model):
    callbacks = [
        EpochScoring("accuracy", lower_is_better=False),
        EpochScoring("accuracy", name="train", lower_is_better=False, on_train=True),
    ]
    model = clone(model).set_params(callbacks=callbacks, validation_fraction=0.2, max_epochs=2)
    if isinstance(model, MR2Classifier):
        model.set_params(batch_size=64)

    def size(times):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(np.tile(X, (times, 1)), np.tile(Y, times))
        return len(pickle.dumps(model))

    data = 20 * X.nbytes
    assert size(21) - size(1) < data / 4
    assert size(1) < 60_000


def test_clone_has_parameters_and_nothing_else():
    counts = Counts()
    model = fitted(callbacks=[("mine", counts)], optimizer__eps=1e-7, **ADAM)
    copied = clone(model)
    assert not hasattr(copied, "net_")
    assert not hasattr(copied, "classes_")
    params, original = copied.get_params(), model.get_params()
    assert original.pop("callbacks")[0][1] is counts is not params.pop("callbacks")[0][1]
    assert params == original
    assert params["optimizer__eps"] == 1e-7


def test_parameters_of_skorch_are_parameters():
    model = MR2Classifier(
        callbacks=[("stop", EarlyStopping("train_loss", patience=50))],
        callbacks__stop__patience=1,
        callbacks__stop__threshold=0.9,
        iterator_train__shuffle=False,
        optimizer__betas=(0.5, 0.5),
        random_state=0,
        **{**ADAM, "max_epochs": 20},
    )
    assert model.get_params()["callbacks__stop__patience"] == 1
    assert model.fit(X, Y).n_iter_ == 2
    assert model.net_.optimizer_.param_groups[0]["betas"] == (0.5, 0.5)
    assert model.net_.iterator_train__shuffle is False
    model.set_params(callbacks__stop__patience=3, optimizer__betas=(0.6, 0.6)).fit(X, Y)
    assert model.n_iter_ == 4
    assert model.net_.optimizer_.param_groups[0]["betas"] == (0.6, 0.6)
    assert model.callbacks[0][1].patience == 50
    model.set_params(iterator_train__drop_last=True)
    assert model.get_params(deep=False)["iterator_train__drop_last"] is True


def test_set_params_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="'max_epoch'"):
        MR2Classifier().set_params(max_epoch=3)


@every_kind
def test_setting_parameters_leaves_a_fitted_model_alone(model):
    model = clone(model).fit(X, Y)
    other = {
        "C": 1e-3, "margin": 7.0, "margin_statistic": None, "margin_mode": "subtract", "tol": 0.1,
        "fit_intercept": False, "batch_size": 3, "lr": 5.0, "optimizer": torch.optim.SGD,
        "max_epochs": 1, "dtype": "float32", "device": "nonsense", "class_weight": "balanced",
        "callbacks": [EarlyStopping()], "validation_fraction": 0.5, "warm_start": True,
        "verbose": 3, "random_state": 9, "rate": 0.9, "optimizer__momentum": 0.5,
        "callbacks__x__y": 3, "module__x": 1, "iterator_train__batch_size": 2,
    }  # fmt: skip
    known = model.get_params()
    uses = ("predict", "predict_proba", "decision_function", "transform")
    before = [getattr(model, use)(X) for use in uses]
    for name, value in other.items():
        if name in known or "__" in name:
            model.set_params(**{name: value})
    for use, expected in zip(uses, before, strict=True):
        result = getattr(model, use)(X)
        assert_array_equal(result, expected)
        assert result.dtype == expected.dtype


# ---------------------------------------------------------------------------- devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="simulates a machine without CUDA")
@every_kind
def test_a_model_saved_on_a_gpu_loads_without_one(model, monkeypatch):
    callbacks = [EarlyStopping(patience=50, load_best=True)]
    model = clone(model).set_params(callbacks=callbacks, validation_fraction=0.2).fit(X, Y)
    expected = model.predict_proba(X)
    # A file written on a GPU differs in that each storage carries the tag of its device.
    model.device_ = model.net_.device = "cuda"
    model.net_.rng._devices = [torch.device("cuda")]
    model.net_.rng._cuda = [model.net_.rng._cpu]
    # Random states are bytes on the CPU there too; what is floating point is on the GPU.
    tensor = torch.ones(2)
    # By their exact types: lazy parameters and those of a compiler have no storage.
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    on_gpu = {t.untyped_storage().data_ptr() for t in tensors if t.is_floating_point()}
    tag = torch.serialization.location_tag
    with monkeypatch.context() as patch:
        patch.setattr(
            "torch.serialization.location_tag",
            lambda storage: "cuda:0" if storage.data_ptr() in on_gpu else tag(storage),
        )
        saved, tensor = pickle.dumps(model), pickle.dumps(tensor)
    with pytest.raises(RuntimeError, match="CUDA"):
        pickle.loads(tensor)
    with pytest.warns(DeviceWarning):
        loaded = pickle.loads(saved)
    assert str(loaded.net_.device) == loaded.device_ == "cpu"
    assert_array_equal(loaded.predict_proba(X), expected)
    loaded.set_params(callbacks=None)
    dict(loaded.net_.callbacks_)["EarlyStopping"].monitor = "train_loss"
    loaded.partial_fit(X, Y)
    assert_array_equal(pickle.loads(pickle.dumps(loaded)).predict(X), loaded.predict(X))


@pytest.mark.gpu
@every_kind
def test_a_model_fitted_on_a_gpu(model):
    import subprocess
    import sys

    on_cpu = clone(model).set_params(device="cpu").fit(X, Y).predict_proba(X)
    for given_X in (X, torch.tensor(X), torch.tensor(X, device="cuda")):
        on_gpu = clone(model).set_params(device="cuda").fit(given_X, Y)
        assert next(on_gpu.net_.module_.parameters()).is_cuda
        if model is KINDS["probe"]:
            assert_allclose(on_gpu.predict_proba(given_X), on_cpu, atol=1e-5)
    if isinstance(model, DropoutClassifier):
        return  # a class of this file cannot be imported by another process
    script = (
        "import os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "import pickle, numpy as np\n"
        "model, X, expected = pickle.load(sys.stdin.buffer)\n"
        "assert model.device_ == 'cpu'\n"
        "np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-6)\n"
    )
    expected = on_gpu.predict_proba(X)
    subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps((on_gpu, X, expected)),
        check=True,
        timeout=120,
    )


@pytest.mark.gpu
@every_kind
def test_cuda_random_state_is_left_alone(model):
    before = torch.cuda.get_rng_state()
    model = clone(model).set_params(device="cuda").fit(X, Y)
    torch.cuda.manual_seed(3)
    again = clone(model).fit(X, Y)
    assert_allclose(again.predict_proba(X), model.predict_proba(X), atol=1e-6)
    torch.cuda.set_rng_state(before)
    model.partial_fit(X, Y)
    assert torch.equal(torch.cuda.get_rng_state(), before)
