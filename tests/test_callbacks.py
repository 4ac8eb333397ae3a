"""skorch's callbacks, and training as they see it: history, printing, early ends."""

import warnings

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, log_loss
from skorch.callbacks import (
    BatchScoring,
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochScoring,
    Freezer,
    GradientNormClipping,
    Initializer,
    LoadInitState,
    LRScheduler,
    ProgressBar,
    TrainEndCheckpoint,
)

from sklearn_mr2 import MR2Classifier

RNG = np.random.default_rng(0)
Y = np.repeat([3, 5, 9], 30)
X = RNG.normal(size=(90, 4)) + 1.5 * np.eye(3, 4)[Y // 4]
X_VAL, Y_VAL = X[::4], Y[::4]

ADAM = MR2Classifier(
    optimizer=torch.optim.Adam, max_epochs=6, lr=0.05, batch_size=32, random_state=0
)
KINDS = {"mini-batches": ADAM, "full batch": MR2Classifier(random_state=0)}
every_kind = pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)


def train(model, *callbacks, validate=True, **params):
    model = clone(model).set_params(callbacks=list(callbacks), **params)
    return model.fit(X, Y, X_val=X_VAL, y_val=Y_VAL) if validate else model.fit(X, Y)


def callback_of(model, name):
    return dict(model.net_.callbacks_)[name]


class Predicts(Callback):
    """Keeps the logits of the given data at the end of each epoch, by a way of its own."""

    def __init__(self, X):
        self.X = X

    def initialize(self):
        self.logits_ = []
        return self

    def on_epoch_end(self, net, **kwargs):
        with torch.no_grad():
            head = net.module_.head
            self.logits_.append((torch.tensor(self.X) @ head.weight.T + head.bias).numpy())


class Stops(Callback):
    def __init__(self, epoch, error, at="on_epoch_end"):
        self.epoch, self.error, self.at = epoch, error, at

    def _act(self, net, when):
        if when == self.at and len(net.history) == self.epoch:
            raise self.error

    def on_epoch_end(self, net, **kwargs):
        self._act(net, "on_epoch_end")

    def on_batch_end(self, net, **kwargs):
        self._act(net, "on_batch_end")


# ---------------------------------------------------------------------------- history


@every_kind
def test_history_has_a_row_an_epoch(model):
    model = train(model)
    history = model.history_
    assert history.columns.tolist() == [
        "epoch", "train_loss", "train_loss_best", "valid_loss", "valid_loss_best", "dur",
    ]  # fmt: skip
    assert_array_equal(history["epoch"], np.arange(model.n_iter_) + 1)
    for name in ("train_loss", "valid_loss"):
        best = history[name] < np.r_[np.inf, np.minimum.accumulate(history[name])[:-1]]
        assert_array_equal(history[name + "_best"], best)
    assert (history["dur"] > 0).all()
    assert "valid_loss" not in train(model, validate=False).history_


def test_training_loss_is_the_objective():
    # Of the full batch: the mean loss and the penalty, at the parameters after the iteration.
    model = train(KINDS["full batch"], margin_statistic=None, C=0.7, validate=False)
    expected = log_loss(Y, model.predict_proba(X)) + np.square(model.coef_).sum() / (1.4 * len(X))
    assert_allclose(model.history_["train_loss"].iloc[-1], expected, rtol=1e-9)


def test_training_loss_of_mini_batches_is_weighted_by_their_size():
    class Losses(Callback):
        def initialize(self):
            self.pairs_ = []
            return self

        def on_batch_end(self, net, batch, training, loss, **kwargs):
            if training:
                self.pairs_.append((len(batch[0]), loss.item()))

    model = train(ADAM, Losses(), max_epochs=1)
    sizes, losses = zip(*callback_of(model, "Losses").pairs_, strict=True)
    assert sizes == (32, 32, 26)
    assert_allclose(model.history_["train_loss"], np.average(losses, weights=sizes))


def test_listening_to_batches_changes_nothing():
    class Listens(Callback):
        def on_batch_end(self, net, **kwargs):
            pass

        def on_grad_computed(self, net, **kwargs):
            pass

    for model in KINDS.values():
        plain, heard = train(model), train(model, Listens())
        assert_array_equal(plain.coef_, heard.coef_)
        assert_array_equal(plain.history_["train_loss"], heard.history_["train_loss"])


@every_kind
def test_batches_are_announced_in_order(model):
    class Order(Callback):
        def initialize(self):
            self.calls_ = []
            return self

        def on_epoch_begin(self, net, **kwargs):
            self.calls_.append("epoch")

        def on_batch_begin(self, net, batch, training, **kwargs):
            self.calls_.append(("begin", training, len(batch[0])))

        def on_batch_end(self, net, batch, training, y_pred, **kwargs):
            assert y_pred.shape == (len(batch[0]), 3)
            assert not y_pred.requires_grad
            self.calls_.append(("end", training, len(batch[0])))

        def on_epoch_end(self, net, **kwargs):
            self.calls_.append("end of epoch")

    calls = callback_of(train(model, Order(), batch_size=40), "Order").calls_
    one_epoch = ["epoch"]
    for training, sizes in ((True, [40, 40, 10]), (False, [23])):
        for size in sizes:
            one_epoch += [("begin", training, size), ("end", training, size)]
    one_epoch.append("end of epoch")
    assert calls[: len(one_epoch)] == one_epoch
    assert len(calls) % len(one_epoch) == 0


# ---------------------------------------------------------------------------- scores


@every_kind
def test_epoch_scoring_on_validation_data(model):
    model = train(
        model,
        Predicts(X_VAL),
        EpochScoring("accuracy", lower_is_better=False),
        EpochScoring("neg_log_loss", lower_is_better=False),
        EpochScoring("roc_auc_ovr", lower_is_better=False),
    )
    logits = callback_of(model, "Predicts").logits_
    accuracy = [accuracy_score(Y_VAL, model.classes_[z.argmax(1)]) for z in logits]
    assert_allclose(model.history_["accuracy"], accuracy)
    assert len(set(accuracy)) > 1
    odds = [np.exp(z) for z in logits]
    losses = [-log_loss(Y_VAL, o / o.sum(1, keepdims=True)) for o in odds]
    assert_allclose(model.history_["neg_log_loss"], losses, rtol=1e-6)
    assert (model.history_["roc_auc_ovr"] > 0.8).all()
    assert model.history_["accuracy_best"].iloc[0]


@every_kind
def test_epoch_scoring_on_training_data(model):
    scoring = EpochScoring("accuracy", lower_is_better=False, on_train=True, name="seen")
    model = train(model, scoring, validate=False)
    assert "seen" in model.history_
    if model.optimizer == "auto":  # the logits the optimiser saw last are those of the result
        assert_allclose(model.history_["seen"].iloc[-1], model.score(X, Y))
    assert model.history_["seen"].iloc[-1] > 0.7


@every_kind
def test_scoring_by_a_function_or_by_batch(model):
    def error(net, data, y):
        return 1 - accuracy_score(data.y.numpy(), net.predict(data))

    model = train(
        model,
        EpochScoring(error, name="error", use_caching=False),
        EpochScoring("accuracy"),
        BatchScoring("accuracy", name="by_batch"),
    )
    assert_allclose(model.history_["error"], 1 - model.history_["accuracy"])
    assert_allclose(model.history_["by_batch"], model.history_["accuracy"])


def test_scoring_with_two_classes():
    y = (Y > 4) * 10
    model = clone(ADAM).set_params(callbacks=[EpochScoring(s) for s in ("f1", "roc_auc")])
    model.fit(X, y, X_val=X_VAL, y_val=y[::4])
    # skorch's scorers see codes, of which 1 is the second class.
    assert model.history_["f1"].between(0.5, 1).all()
    assert model.history_["roc_auc"].iloc[-1] > 0.9


# ---------------------------------------------------------------------------- the end


@every_kind
def test_early_stopping_on_validation_loss(model):
    stop = EarlyStopping(patience=2, threshold=0.05, load_best=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an early end was asked for
        model = train(model, stop, max_epochs=500, tol=0)
    loss = model.history_["valid_loss"].to_numpy()
    assert 2 < model.n_iter_ < 500
    # skorch's rule, replayed: so many epochs in a row without a large enough improvement.
    best, waited = np.inf, []
    for value in loss:
        waited.append(0 if value < best * (1 - 0.05) else waited[-1] + 1)
        best = best if waited[-1] else value
    assert waited.index(2) + 1 == model.n_iter_


@every_kind
def test_early_stopping_restores_the_best(model):
    # Labels of validation data that training cannot please: the loss there rises at once.
    model = clone(model).set_params(
        callbacks=[
            Predicts(X_VAL),
            EpochScoring("accuracy", lower_is_better=False),
            EarlyStopping("accuracy", patience=3, lower_is_better=False, load_best=True),
        ],
        max_epochs=50,
    )
    model.fit(X, Y, X_val=X_VAL, y_val=np.roll(Y_VAL, 4))
    best = model.history_["accuracy"].argmax()
    assert best < model.n_iter_ - 1
    logits = callback_of(model, "Predicts").logits_
    assert_allclose(model.decision_function(X_VAL), logits[best], rtol=1e-12)
    assert not np.allclose(logits[best], logits[-1])
    assert_allclose(model.coef_, model.net_.module_.head.weight.detach())


def test_an_interrupt_of_the_user_is_passed_on():
    stops = Stops(2, KeyboardInterrupt(), at="on_batch_end")
    with pytest.raises(KeyboardInterrupt):
        train(ADAM, stops)


def test_an_interrupt_by_a_callback_ends_training():
    model = train(ADAM, Stops(2, KeyboardInterrupt()))
    assert model.n_iter_ == 2
    assert model.score(X, Y) > 0.5


def test_an_error_in_a_callback_is_passed_on():
    with pytest.raises(ZeroDivisionError):
        train(ADAM, Stops(2, ZeroDivisionError()))


def test_convergence_warning_only_where_iterations_run_out():
    probe = KINDS["full batch"]
    with pytest.warns(ConvergenceWarning, match=r"max_epochs=3.*Raise max_epochs"):
        train(probe, max_epochs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(probe)
        train(probe, Stops(3, KeyboardInterrupt()))


# ---------------------------------------------------------------------------- divergence


class Poison(Callback):
    """Makes the loss of an epoch infinite, or leaves parameters that are not a number."""

    def __init__(self, epoch, at, value):
        self.epoch, self.at, self.value = epoch, at, value

    def _act(self, net, when):
        if (len(net.history), when) == (self.epoch, self.at):
            with torch.no_grad():
                net.module_.head.weight[0, 0] = self.value

    def on_epoch_begin(self, net, **kwargs):
        self._act(net, "epoch begin")

    def on_epoch_end(self, net, **kwargs):
        self._act(net, "epoch end")


@pytest.mark.parametrize(
    ("epoch", "at"), [(4, "epoch begin"), (3, "epoch end"), (6, "epoch end"), (1, "epoch begin")]
)
def test_divergence_keeps_the_last_good_parameters(epoch, at):
    with pytest.warns(ConvergenceWarning, match=r"diverged in epoch.*Lower lr") as caught:
        model = train(ADAM, Predicts(X), Poison(epoch, at, np.nan))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert np.isfinite(model.coef_).all()
    assert np.isfinite(model.predict_proba(X)).all()
    # The poisoned epoch is lost, and at most the one before.
    logits = callback_of(model, "Predicts").logits_
    found = [i for i, z in enumerate(logits) if np.array_equal(z, model.decision_function(X))]
    expected = epoch - 3 if at == "epoch begin" else epoch - 2
    assert found == ([expected] if expected >= 0 else [])
    assert model.n_iter_ == min(6, epoch + (at == "epoch end"))


def test_a_step_size_that_diverges():
    model = clone(ADAM).set_params(optimizer=torch.optim.SGD, dtype="float32", max_epochs=10)
    with pytest.warns(ConvergenceWarning, match="Lower lr"):
        model.set_params(lr=1e38, margin=1e-3).fit(X, Y)
    assert np.isfinite(model.coef_).all()
    assert np.isfinite(model.predict_proba(X)).all()
    assert not np.isfinite(model.history_["train_loss"]).all()


def test_divergence_of_one_large_batch():
    # The loss of an epoch is that of the parameters before its only step.
    model = MR2Classifier(
        optimizer=torch.optim.SGD, lr=1e30, margin=1e-3, batch_size=90, dtype="float32"
    )
    with pytest.warns(ConvergenceWarning, match="Lower lr"):
        model.set_params(max_epochs=8, random_state=0).fit(X, Y)
    fresh = MR2Classifier(optimizer=torch.optim.SGD, lr=1e-30, batch_size=90, dtype="float32")
    start = fresh.set_params(max_epochs=1, random_state=0).fit(X, Y)
    finite = np.isfinite(model.history_["train_loss"])
    assert not finite.all()
    assert finite.any()
    assert np.isfinite(model.decision_function(X)).all()
    if finite.sum() == 1:
        assert_allclose(model.coef_, start.coef_, atol=1e-6)


# ---------------------------------------------------------------------------- other callbacks


@every_kind
def test_checkpoint(model, tmp_path):
    model = train(model, Checkpoint(dirname=tmp_path, load_best=True))
    assert {p.name for p in tmp_path.iterdir()} >= {"params.pt", "history.json", "optimizer.pt"}
    assert model.history_["event_cp"].any()
    saved = torch.load(tmp_path / "params.pt", weights_only=True)
    assert_array_equal(saved["head.weight"], model.coef_)
    best = model.history_["valid_loss"].argmin()
    valid_loss = -model.predict_log_proba(X_VAL)[np.arange(len(X_VAL)), Y_VAL // 4]
    assert valid_loss.shape == Y_VAL.shape
    assert model.history_["event_cp"].to_numpy().nonzero()[0][-1] == best


def test_checkpoints_of_every_epoch_and_of_the_end(tmp_path):
    every = Checkpoint(
        monitor=None, dirname=tmp_path, f_params="params_{last_epoch[epoch]}.pt", f_optimizer=None,
        f_criterion=None, f_history=None,
    )  # fmt: skip
    model = train(ADAM, every, TrainEndCheckpoint(dirname=tmp_path, fn_prefix="end_"))
    names = {p.name for p in tmp_path.iterdir()}
    assert names >= {f"params_{i}.pt" for i in range(1, 7)} | {"end_params.pt"}
    saved = torch.load(tmp_path / "end_params.pt", weights_only=True)
    assert_array_equal(saved["head.weight"], model.coef_)


def test_training_goes_on_from_a_checkpoint(tmp_path):
    first = train(ADAM, TrainEndCheckpoint(dirname=tmp_path))
    checkpoint = TrainEndCheckpoint(dirname=tmp_path)
    second = train(ADAM, LoadInitState(checkpoint), checkpoint)
    last = first.history_["train_loss"].iloc[-1]
    assert second.history_["train_loss"].iloc[6] < last < second.history_["train_loss"].iloc[0]


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (LRScheduler("StepLR", step_size=2, gamma=0.1), [0.05, 0.05, 5e-3, 5e-3, 5e-4, 5e-4]),
        (
            LRScheduler("ReduceLROnPlateau", monitor="train_loss", patience=0, threshold=0.9),
            [0.05, 0.05, 5e-3, 5e-4, 5e-5, 5e-6],
        ),
        (LRScheduler("StepLR", step_size=3, gamma=0.1, step_every="batch"), None),
    ],
    ids=["epochs", "plateau", "batches"],
)
def test_learning_rate_schedules(scheduler, rates):
    class Rates(Callback):
        def initialize(self):
            self.rates_ = []
            return self

        def on_epoch_begin(self, net, **kwargs):
            self.rates_.append(net.optimizer_.param_groups[0]["lr"])

    model = train(ADAM, Rates(), scheduler)
    expected = rates or 0.05 * 10.0 ** -np.arange(6)  # 3 batches an epoch
    assert_allclose(callback_of(model, "Rates").rates_, expected)
    assert not np.allclose(model.coef_, train(ADAM).coef_)


def test_the_full_batch_has_no_learning_rate_to_schedule():
    schedule = ("schedule", LRScheduler("StepLR", step_size=2))
    with pytest.raises(ValueError, match=r"callback schedule changes.*set optimizer"):
        train(KINDS["full batch"], schedule)


@every_kind
def test_patterns_of_callbacks_match_something(model):
    message = "callback Freezer: the pattern 'backbone.*' matches no parameter.*head.weight, head.b"
    with pytest.raises(ValueError, match=message):
        train(model, Freezer(["head.bias", "backbone.*"]))
    with pytest.raises(ValueError, match=r"pattern <function.*matches no parameter"):
        train(model, Freezer(lambda name: name.startswith("layer")))


@pytest.mark.parametrize("pattern", ["head.w*", lambda name: name == "head.weight"])
def test_patterns_and_functions_freeze(pattern):
    first, last = (train(ADAM, Freezer(pattern), max_epochs=n) for n in (1, 6))
    assert_array_equal(first.coef_, last.coef_)
    assert not np.allclose(first.intercept_, last.intercept_)


def test_gradients_are_clipped():
    class Norms(Callback):
        def initialize(self):
            self.norms_ = []
            return self

        def on_batch_end(self, net, training, **kwargs):
            if training:
                grads = [p.grad.flatten() for p in net.module_.parameters()]
                self.norms_.append(torch.cat(grads).norm().item())

    free = train(ADAM, Norms(), optimizer=torch.optim.SGD)
    clipped = train(ADAM, GradientNormClipping(0.01), Norms(), optimizer=torch.optim.SGD)
    assert min(callback_of(free, "Norms").norms_) > 0.011
    assert_allclose(callback_of(clipped, "Norms").norms_, 0.01, rtol=1e-4)


def test_initial_values_can_be_set():
    zero = Initializer("head.*", torch.nn.init.zeros_)
    model = train(ADAM, zero, max_epochs=1, lr=1e-12)
    assert_allclose(model.coef_, 0, atol=1e-9)


# ---------------------------------------------------------------------------- printing


@every_kind
def test_silence_is_the_default(model, capfd):
    train(model, EpochScoring("accuracy"), EarlyStopping(patience=50, sink=lambda text: None))
    model = clone(model).fit(X, Y)
    model.partial_fit(X, Y).predict(X)
    assert capfd.readouterr() == ("", "")


@every_kind
def test_verbose_shows_losses_and_scores(model, capfd):
    fitted = train(model, EpochScoring("accuracy", lower_is_better=False), verbose=1)
    out, err = capfd.readouterr()
    assert out == ""
    last = err.strip().split("\r")[-1]
    assert f"{fitted.n_iter_}/{fitted.net_.n_epochs_asked}" in last
    for name in ("train_loss", "valid_loss", "accuracy"):
        assert f"{name}={fitted.history_[name].iloc[-1]:.4g}" in last
    for _ in range(2):
        fitted.partial_fit(X, Y)
        assert "| 1/1 [" in capfd.readouterr().err


@every_kind
def test_verbose_prints(model, capfd):
    fitted = train(model, verbose=2)
    out, _ = capfd.readouterr()
    assert "train_loss" in out
    assert "valid_loss" in out
    assert len(out.strip().splitlines()) == fitted.n_iter_ + 2


def test_the_table_can_be_sent_elsewhere(capfd):
    lines = []
    train(ADAM, verbose=2, callbacks__print_log__sink=lines.append)
    assert len(lines) == ADAM.max_epochs + 2
    assert capfd.readouterr().out == ""


@every_kind
def test_progress_bar(model, capfd):
    train(model, ProgressBar(detect_notebook=False), batch_size=32)
    assert "/4 [" in capfd.readouterr().err  # three batches to train on, one to validate on


def test_overflow_of_a_probe_is_reported_to_the_caller():
    with pytest.warns(ConvergenceWarning, match=r"probe's weights or loss overflow") as caught:
        model = MR2Classifier(callbacks=[Poison(3, "epoch end", np.nan)], max_epochs=3).fit(X, Y)
    assert {warning.filename for warning in caught} == {__file__}
    assert np.isfinite(model.coef_).all()
