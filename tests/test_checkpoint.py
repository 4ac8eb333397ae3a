"""Training that is cut off and continued ends with the same model."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from skorch.callbacks import Callback, EarlyStopping, EpochTimer, LRScheduler

from sklearn_mr2 import MR2Classifier
from sklearn_mr2.checkpoint import fingerprint


class PowerCut(Exception):
    pass


class Cut(Callback):
    """Ends the process, as far as a test can, in the middle of an epoch."""

    def __init__(self, after=None):
        self.after = after

    def on_epoch_begin(self, net, **kwargs):
        if self.after is not None and len(net.history) > self.after:
            raise PowerCut


@pytest.fixture(scope="module")
def data():
    X, y = load_digits(return_X_y=True)
    return X[:300].astype(np.float32) / 16, y[:300]


def network(path, after=None, **kwargs):
    callbacks = [
        LRScheduler(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.7),
        EarlyStopping("train_loss", patience=4, load_best=True),
        Cut(after),
    ]
    options = {
        "module__hidden_layer_sizes": (12,),
        "module__dropout": 0.3,
        "max_epochs": 7,
        "lr": 0.02,
        "random_state": 3,
        "callbacks": callbacks,
        "checkpoint": path,
    }
    return MR2Classifier("mlp", **{**options, **kwargs})


def test_continues_to_the_same_model(data, tmp_path):
    path = tmp_path / "new folder" / "run.pt"
    whole = network(None).fit(*data)
    with pytest.raises(PowerCut):
        network(path, after=3).fit(*data)
    assert path.exists()
    with pytest.raises(PowerCut):
        network(path, after=5).fit(*data)
    continued = network(path).fit(*data)
    np.testing.assert_array_equal(continued.predict_proba(data[0]), whole.predict_proba(data[0]))
    np.testing.assert_array_equal(continued.margins_, whole.margins_)
    np.testing.assert_array_equal(continued.history_["train_loss"], whole.history_["train_loss"])
    assert not path.exists()


@pytest.mark.parametrize("change", [{"random_state": 4}, {"C": 2.0}, {"max_epochs": 9}])
def test_does_not_continue_another_fit(data, tmp_path, change):
    path = tmp_path / "run.pt"
    with pytest.raises(PowerCut):
        network(path, after=2).fit(*data)
    with pytest.raises(ValueError, match="other data, parameters or random_state"):
        network(path, **change).fit(*data)
    with pytest.raises(ValueError, match="other data, parameters or random_state"):
        network(path).fit(data[0] + 1, data[1])
    assert path.exists()


def test_does_not_continue_with_other_weights(data, tmp_path):
    path, weight = tmp_path / "run.pt", np.linspace(0.5, 2, len(data[1]))
    with pytest.raises(PowerCut):
        network(path, after=2).fit(*data, sample_weight=weight)
    with pytest.raises(ValueError, match="other data, parameters or random_state"):
        network(path).fit(*data, sample_weight=weight[::-1])
    network(path).fit(*data, sample_weight=weight)


def test_does_not_continue_with_rows_in_another_order(data, tmp_path):
    X, y = data
    same = np.flatnonzero(y == y[0])[:2]
    swapped = X.copy()
    swapped[same] = X[same[::-1]]
    with pytest.raises(PowerCut):
        network(tmp_path / "run.pt", after=2).fit(X, y)
    with pytest.raises(ValueError, match="other data, parameters or random_state"):
        network(tmp_path / "run.pt").fit(swapped, y)


def test_addresses_of_functions_do_not_count(data):
    X, y = (torch.as_tensor(part) for part in data)

    def mark(activation):
        return fingerprint(MR2Classifier("mlp", module__activation=activation), X, y, None, 0)

    def another():
        return lambda x: x

    assert mark(another()) == mark(another())
    assert mark(another()) != mark(torch.relu)


def test_callbacks_and_weights_of_modules_count(data):
    X, y = (torch.as_tensor(part) for part in data)

    def mark(**parameters):
        return fingerprint(MR2Classifier("mlp", **parameters), X, y, None, 0)

    assert mark(callbacks=[("a", Cut())]) == mark(callbacks=[("a", Cut(2))])
    assert mark(callbacks=[("a", Cut())]) != mark(callbacks=[("a", EpochTimer())])
    assert mark(callbacks=[Cut()]) != mark(callbacks=[EpochTimer()])
    assert mark(callbacks=[EpochTimer]) == mark(callbacks=[EpochTimer()])
    assert mark(callbacks=[EpochTimer]) != mark(callbacks=[Cut])
    assert mark(callbacks=[["a", Cut()]]) != mark(callbacks=[["a", EpochTimer()]])

    def layer(width=3, bias=0.0):
        module = torch.nn.Sequential(
            torch.nn.Linear(X.shape[1], width), torch.nn.BatchNorm1d(width)
        )
        for p in module.parameters():
            torch.nn.init.constant_(p, bias)
        return fingerprint(MR2Classifier(module), X, y, None, 0)

    assert layer() == layer()
    assert layer() != layer(bias=1.0)
    assert layer() != layer(width=4)


def test_lazy_layers(data, tmp_path):
    module = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.ReLU())
    model = MR2Classifier(module, max_epochs=2, checkpoint=tmp_path / "a.pt", random_state=0)
    first = model.fit(*data).coef_
    np.testing.assert_array_equal(clone(model).fit(*data).coef_, first)


def test_folds_of_class_errors_leave_the_checkpoint_alone(data, tmp_path):
    path, options = tmp_path / "run.pt", {"margin_statistic": "error", "error_cv": 2}
    whole = network(None, **options).fit(*data)
    with pytest.raises(PowerCut):
        network(path, after=3, **options).fit(*data)
    continued = network(path, **options).fit(*data)
    np.testing.assert_array_equal(continued.margins_, whole.margins_)
    np.testing.assert_array_equal(continued.predict_proba(data[0]), whole.predict_proba(data[0]))


def test_refuses_what_is_no_checkpoint(data, tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        network(path).fit(*data)
    assert path.read_bytes() == b"something else"


def test_is_not_for_the_full_batch_probe(data, tmp_path):
    with pytest.raises(ValueError, match="set checkpoint=None"):
        MR2Classifier(checkpoint=tmp_path / "run.pt").fit(*data)
