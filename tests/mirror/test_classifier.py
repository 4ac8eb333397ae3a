"""MirrorFlowClassifier against exact solvers, the flow written down again in numpy, and the API."""

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale
from skorch.callbacks import Callback, EarlyStopping
from torch import nn

from sklearn_mr2 import MirrorFlowClassifier
from sklearn_mr2.mirror import Euclidean, HyperbolicEntropy, SmoothedPower
from sklearn_mr2.mirror.networks import HomogeneousCNN, HomogeneousMLP
from sklearn_mr2.mirror.neurons import hidden_layers
from sklearn_mr2.mirror.theory import active_count

POTENTIALS = ["hyperbolic_entropy", "euclidean", "smoothed_power", "power"]


def linear_problem(n=40, d=20, seed=0):
    """Separable through the origin, by a few of the features."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    w = rng.normal(size=d) * (rng.random(d) < 0.3)
    return X, (X @ w > 0).astype(int)


def teacher_problem(seed=0, n=60, d=5):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    W, a = rng.normal(size=(3, d)), rng.choice([-1, 1], 3)
    f = np.maximum(X @ W.T, 0) @ a
    return X, (f > np.median(f)).astype(int)


def two_classes():
    X, y = load_iris(return_X_y=True)
    return scale(X[:100]), y[:100]


def global_numpy_state():
    return np.random.get_state()[1].copy()  # noqa: NPY002


def quiet(model, *args, **kwargs):
    """Fit a model that is not meant to converge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(*args, **kwargs)


def largest_margin(X, y, p):
    """The largest margin of a linear model whose L_p norm is 1, by an exact solver."""
    A = (2 * y - 1)[:, None] * X
    n, d = A.shape
    # Weights are differences of two non-negative vectors.
    program = linprog(np.ones(2 * d), A_ub=-np.hstack([A, -A]), b_ub=-np.ones(n))
    if p == 1:
        return 1 / program.fun
    start = program.x[:d] - program.x[d:]
    result = minimize(
        lambda w: np.sum(np.abs(w) ** p) / p,
        start,
        jac=lambda w: np.sign(w) * np.abs(w) ** (p - 1),
        constraints={"type": "ineq", "fun": lambda w: A @ w - 1, "jac": lambda w: A},
        method="SLSQP",
        options={"maxiter": 2000, "ftol": 1e-14},
    )
    assert result.success
    return 1 / np.linalg.norm(result.x, ord=p)


class TestLinearModel:
    # The path is that of steps of finite size, whose distance from the limit falls like 1 / margin;
    # for p = 3 the margin grows most slowly.
    @pytest.mark.parametrize(
        ("potential", "p", "max_epochs", "at_least"),
        [
            ("hyperbolic_entropy", 1, 1500, 0.99),
            ("euclidean", 2, 1500, 0.99),
            ("smoothed_power", 3, 3000, 0.95),
        ],
    )
    def test_margin_against_exact_solver(self, potential, p, max_epochs, at_least):
        X, y = linear_problem()
        model = MirrorFlowClassifier(
            (), potential=potential, fit_intercept=False, step_size=1.0, target_margin=1000, tol=0,
            max_epochs=max_epochs,
        )  # fmt: skip
        quiet(model, X, y)
        w = model.coefs_[0].ravel()
        margin = ((2 * y - 1) * (X @ w)).min() / np.linalg.norm(w, ord=p)
        ratio = margin / largest_margin(X, y, p)
        assert at_least <= ratio <= 1 + 1e-6
        assert model.kkt_ratio(X, y) == pytest.approx(ratio, abs=1e-3)

    def test_intercept_is_the_weight_of_a_constant_feature(self):
        X, y = linear_problem(n=30, d=5)
        X, options = X + 0.3, {"max_epochs": 200, "target_margin": 1000}
        with_bias = quiet(MirrorFlowClassifier((), **options), X, y)
        constant = np.hstack([X, np.ones((len(X), 1))])
        without = quiet(MirrorFlowClassifier((), fit_intercept=False, **options), constant, y)
        got = np.append(with_bias.coefs_[0], with_bias.intercepts_[0])
        np.testing.assert_allclose(got, without.coefs_[0].ravel(), rtol=1e-9)

    @pytest.mark.parametrize("loss", ["logistic", "exponential"])
    @pytest.mark.parametrize("potential", ["hyperbolic_entropy", "euclidean"])
    def test_path_against_numpy(self, potential, loss):
        X, y = linear_problem(n=30, d=8)
        c, lam, n_steps = 0.1, 0.1, 30
        A = (2 * y - 1)[:, None] * X
        z, log_time = np.zeros(8), -np.inf
        for _ in range(n_steps):
            theta = lam * np.sinh(z) if potential == "hyperbolic_entropy" else z
            q = A @ theta
            terms = -q if loss == "exponential" else np.log(np.log1p(np.exp(-q)))
            slope = -np.ones_like(q)
            if loss == "logistic":
                slope = -1 / (1 + np.exp(q)) / np.log1p(np.exp(-q))
            log_loss = np.logaddexp.reduce(terms)
            g = -A.T @ (np.exp(terms - log_loss) * slope)
            curvature = 1 / np.hypot(theta, lam) if potential == "hyperbolic_entropy" else 1.0
            h = c / np.sum(g * g / curvature)
            if potential == "hyperbolic_entropy":
                h = min(h, 0.3 / np.abs(g).max())
            z = z + h * g
            log_time = np.logaddexp(log_time, np.log(h) - log_loss)
        theta = lam * np.sinh(z) if potential == "hyperbolic_entropy" else z

        model = MirrorFlowClassifier(
            (), potential=potential, loss=loss, fit_intercept=False, max_epochs=n_steps, tol=0,
            target_margin=1000,
        )  # fmt: skip
        quiet(model, X, y)
        np.testing.assert_allclose(model.coefs_[0].ravel(), theta, rtol=1e-9)
        assert model.log_time_ == pytest.approx(log_time, rel=1e-9)

    def test_data_that_cannot_be_separated(self):
        X, y = make_classification(200, 5, flip_y=0.2, random_state=0)
        model = MirrorFlowClassifier((), potential="euclidean")
        with pytest.warns(ConvergenceWarning) as record:
            model.fit(X, y)
        message = str(record[0].message)
        n_wrong = int((model.predict(X) != y).sum())
        assert f"{n_wrong} of 200 samples" in message
        assert f"smallest margin is {model.margin_:.3g}" in message
        assert "does not get any lower" in message
        assert model.n_iter_ < 1000
        assert model.margin_ < 0
        assert model.q_margin_ < 0
        reference = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(X, y)
        optimum = -reference.predict_log_proba(X)[np.arange(200), y].mean()
        got = -model.predict_log_proba(X)[np.arange(200), y].mean()
        assert optimum <= got <= optimum * (1 + 1e-6)
        with pytest.raises(ValueError, match="margin must be positive"):
            model.kkt_ratio(X, y)

    def test_exhausted_keeps_the_best(self):
        X, y = make_classification(100, 5, flip_y=0.3, random_state=1)
        with pytest.warns(ConvergenceWarning, match="still falling"):
            model = MirrorFlowClassifier((), max_epochs=10).fit(X, y)
        got = -model.predict_log_proba(X)[np.arange(100), y].mean()
        assert got == pytest.approx(model.history_["train_loss"].min())
        assert model.n_iter_ == 10

    def test_warns_when_the_target_is_not_reached(self):
        with pytest.warns(ConvergenceWarning, match="not yet target_margin=30.0"):
            MirrorFlowClassifier((), max_epochs=20).fit(*two_classes())

    def test_stops_where_the_direction_has_converged(self):
        X, y = two_classes()
        loose, tight = (
            quiet(MirrorFlowClassifier((), tol=tol, target_margin=np.inf, step_size=0.5), X, y)
            for tol in (0.2, 0.03)
        )
        assert loose.n_iter_ < tight.n_iter_ < 1000
        assert loose.horizon_margin_ < tight.horizon_margin_
        best = largest_margin(np.hstack([X, np.ones((100, 1))]), y, 1)
        assert loose.horizon_margin_ > 0.93 * best
        assert tight.horizon_margin_ > 0.98 * best


class TestNetwork:
    def test_sparsity_by_potential(self):
        X, y = teacher_problem()
        active = {}
        for potential in ("hyperbolic_entropy", "euclidean", "smoothed_power"):
            model = MirrorFlowClassifier(
                (30,), potential=potential, init_scale=0.3, max_epochs=500, random_state=0
            )
            quiet(model, X, y)
            assert model.score(X, y) == 1
            effective = hidden_layers(model.net_.module_)[0].effective_weights()
            active[potential] = active_count(effective)
        assert active["hyperbolic_entropy"] <= 10
        assert 20 <= active["euclidean"] <= 27
        assert active["smoothed_power"] >= 29

    def test_kkt_ratio(self):
        X, y = teacher_problem(n=40)
        model = MirrorFlowClassifier(
            (10,), potential="euclidean", init_scale=0.3, random_state=0, step_size=0.3
        ).fit(X, y)
        assert 0.9 < model.kkt_ratio(X, y) <= 1
        early = MirrorFlowClassifier(
            (10,), potential="euclidean", init_scale=0.3, random_state=0, target_margin=2
        ).fit(X, y)
        assert early.kkt_ratio(X, y) < model.kkt_ratio(X, y)

    def test_q_margin_does_not_decrease(self):
        X, y = teacher_problem()
        for potential in ("hyperbolic_entropy", "euclidean"):
            model = MirrorFlowClassifier(
                (20,), potential=potential, loss="exponential", step_size=0.03, random_state=0,
                target_margin=7,
            ).fit(X, y)  # fmt: skip
            recorded = model.history_.dropna()
            smoothed = recorded["q_margin"] * -recorded["log_loss"] / recorded["margin"]
            smoothed = smoothed[recorded["log_loss"] < 0].to_numpy()
            assert len(smoothed) >= 8
            assert (np.diff(smoothed) >= 0).all()

    def test_history(self):
        X, y = teacher_problem()
        model = MirrorFlowClassifier((20,), random_state=0, target_margin=10).fit(X, y)
        history = model.history_
        assert len(history) == model.n_iter_
        every_epoch = history[["train_loss", "log_loss", "log_time", "margin"]]
        assert np.isfinite(every_epoch).all(axis=None)
        assert (history["log_time"].diff().dropna() >= 0).all()
        np.testing.assert_allclose(
            history["log_loss"], np.log(history["train_loss"] * len(y)), atol=1e-9
        )
        recorded = np.flatnonzero(history["Q"].notna())
        assert recorded[0] == 0
        assert recorded[-1] == len(history) - 1
        assert len(recorded) < 70
        for column in ("q_margin", "horizon_margin", "sparsity"):
            np.testing.assert_array_equal(np.flatnonzero(history[column].notna()), recorded)
        last = history.iloc[-1]
        assert last["margin"] == pytest.approx(model.margin_)
        assert last["margin"] >= 10 > history["margin"].iloc[-2]
        assert last["q_margin"] == pytest.approx(model.q_margin_)
        assert last["horizon_margin"] == pytest.approx(model.horizon_margin_)
        assert last["log_time"] == model.log_time_

    def test_margins_against_the_definition(self):
        X, y = load_iris(return_X_y=True)
        X, y = X[:, [2, 3, 0]], np.where(y == 2, 2, y)
        keep = np.r_[0:60, 100:120]
        X, y = scale(X[keep]), y[keep]
        model = MirrorFlowClassifier((10,), potential="euclidean", random_state=0, max_epochs=200)
        quiet(model, X, y)
        f = model.decision_function(X)
        own = f[np.arange(len(y)), y].copy()
        f[np.arange(len(y)), y] = -np.inf
        margin = (own - f.max(1)).min()
        assert model.margin_ == pytest.approx(margin)
        squared = sum((w**2).sum() for w in [*model.coefs_, *model.intercepts_])
        assert model.q_margin_ == pytest.approx(margin / squared)  # L / alpha = 1
        assert model.horizon_margin_ == pytest.approx(margin / squared)

    @pytest.mark.parametrize("potential", ["euclidean", "hyperbolic_entropy"])
    def test_balance_drifts_less_with_smaller_steps(self, potential):
        X, y = teacher_problem()
        coarse, fine = (
            abs(
                MirrorFlowClassifier(
                    (10,), potential=potential, step_size=step, target_margin=3, random_state=0
                )
                .fit(X, y)
                .balance_[0]
            )
            for step in (0.1, 0.03)
        )
        assert coarse < 5e-3
        assert fine < 0.35 * coarse

    @pytest.mark.parametrize(("sizes", "n_classes"), [((), 3), ((7,), 2), ((8, 6), 3), (5, 3)])
    def test_coefs_are_the_network(self, sizes, n_classes):
        X, y = load_iris(return_X_y=True)
        X, y = X[y < n_classes], y[y < n_classes]
        model = quiet(MirrorFlowClassifier(sizes, random_state=0, max_epochs=30), X, y)
        hidden = X
        for W, b in zip(model.coefs_[:-1], model.intercepts_[:-1], strict=True):
            hidden = np.maximum(hidden @ W + b, 0)
        np.testing.assert_allclose(model.transform(X), hidden, atol=1e-12)
        outputs = hidden @ model.coefs_[-1] + model.intercepts_[-1]
        expected = outputs[:, 0] if n_classes == 2 else outputs
        np.testing.assert_allclose(model.decision_function(X), expected, atol=1e-12)
        assert model.degree_ == len(model.coefs_)
        assert not any(b.any() for b in model.intercepts_[1:])
        assert len(model.get_feature_names_out()) == hidden.shape[1]

    def test_potential_for_each_layer(self):
        X, y = teacher_problem()
        chosen = [HyperbolicEntropy(0.3), Euclidean()]
        options = {"random_state": 0, "max_epochs": 100}
        model = quiet(MirrorFlowClassifier((10,), potential=chosen, **options), X, y)
        got = [group["potential"] for group in model.net_.optimizer_.param_groups]
        assert got == chosen
        by_name = {"output": "euclidean", "hidden1": HyperbolicEntropy(0.3)}
        named = quiet(MirrorFlowClassifier((10,), potential=by_name, **options), X, y)
        np.testing.assert_array_equal(named.coefs_[0], model.coefs_[0])
        assert np.isfinite(model.q_margin_)

    @pytest.mark.parametrize("potential", POTENTIALS)
    def test_every_potential_separates(self, potential):
        X, y = two_classes()
        model = MirrorFlowClassifier(
            (16,), potential=potential, random_state=0, target_margin=5, max_epochs=1500
        ).fit(X, y)
        assert model.score(X, y) == 1
        assert model.margin_ >= 5
        assert 0 < model.q_margin_ <= model.horizon_margin_ * (1 + 1e-9)

    def test_large_margins_do_not_underflow(self):
        X, y = two_classes()
        model = MirrorFlowClassifier((), step_size=5.0, target_margin=2000, tol=0).fit(X, y)
        assert model.margin_ >= 2000
        assert model.history_["log_loss"].iloc[-1] < -1990
        assert model.history_["train_loss"].iloc[-1] == 0

    def test_huge_initial_loss(self):
        X, y = two_classes()
        model = MirrorFlowClassifier(
            (16,), potential="euclidean", loss="exponential", random_state=0, max_epochs=50
        )
        quiet(model, 1e3 * X, y)
        log_loss = model.history_["log_loss"]
        assert log_loss.iloc[0] > 1000  # the loss itself is beyond the range of float64
        assert log_loss.iloc[-1] < log_loss.iloc[0] - 1
        assert np.isfinite(model.history_["train_loss"]).all()


class TestWeights:
    @pytest.mark.parametrize("sizes", [(), (8,)])
    def test_weights_are_repetitions(self, sizes):
        # Few steps: where classes overlap, large steps amplify rounding.
        X, y = load_iris(return_X_y=True)
        w = np.random.default_rng(0).integers(0, 4, size=len(y))
        options = {"random_state": 0, "max_epochs": 10}
        weighted = quiet(MirrorFlowClassifier(sizes, **options), X, y, sample_weight=w)
        repeated = quiet(
            MirrorFlowClassifier(sizes, **options), np.repeat(X, w, axis=0), np.repeat(y, w)
        )
        np.testing.assert_allclose(weighted.coefs_[-1], repeated.coefs_[-1], rtol=1e-9)
        assert weighted.log_time_ == pytest.approx(repeated.log_time_, rel=1e-9)
        for column in ("log_loss", "train_loss", "margin"):
            np.testing.assert_allclose(
                weighted.history_[column], repeated.history_[column], rtol=1e-9
            )

    def test_equal_weights_count_in_time_only(self):
        X, y = two_classes()
        one, five = (
            quiet(MirrorFlowClassifier((), max_epochs=50), X, y, sample_weight=np.full(100, w))
            for w in (1.0, 5.0)
        )
        np.testing.assert_allclose(one.coefs_[0], five.coefs_[0], rtol=1e-12)
        assert one.log_time_ == pytest.approx(five.log_time_ + np.log(5))

    def test_chunks_do_not_matter(self):
        X, y = load_iris(return_X_y=True)
        w = np.random.default_rng(0).uniform(0.1, 3, size=len(y))
        options = {"random_state": 0, "max_epochs": 20}
        whole = quiet(MirrorFlowClassifier((8,), **options), X, y, w)
        chunks = quiet(MirrorFlowClassifier((8,), iterator_train__batch_size=7, **options), X, y, w)
        np.testing.assert_allclose(whole.coefs_[0], chunks.coefs_[0], rtol=1e-9)
        assert whole.log_time_ == pytest.approx(chunks.log_time_, rel=1e-9)


class TestMiniBatches:
    @pytest.mark.parametrize(("potential", "lr"), [("hyperbolic_entropy", 2.0), ("euclidean", 0.5)])
    def test_digits(self, potential, lr):
        X, y = load_digits(return_X_y=True)
        X = X / 16
        model = MirrorFlowClassifier(
            (32,), potential=potential, batch_size=64, max_epochs=8, random_state=0, lr=lr
        ).fit(X[:1000], y[:1000])
        assert model.score(X[1000:], y[1000:]) > 0.85
        assert np.isnan(model.log_time_)
        history = model.history_
        assert history["train_loss"].iloc[-1] < 0.5 * history["train_loss"].iloc[0]
        assert {"margin", "Q", "q_margin", "sparsity"} <= set(history)

    def test_stops_at_the_target_margin(self):
        X, y = two_classes()
        model = MirrorFlowClassifier(
            (8,), batch_size=20, target_margin=1, max_epochs=500, random_state=0
        ).fit(X, y)
        assert model.n_iter_ < 500
        assert model.history_["margin"].iloc[-1] >= 1

    def test_one_batch_is_mirror_descent(self):
        X, y = linear_problem(n=20, d=4)
        model = MirrorFlowClassifier(
            (), batch_size=100, lr=0.5, max_epochs=30, fit_intercept=False, potential="euclidean"
        ).fit(X, y)
        w, A = np.zeros(4), (2 * y - 1)[:, None] * X
        for _ in range(30):
            w = w + 0.5 * A.T @ (1 / (1 + np.exp(A @ w))) / len(y)
        np.testing.assert_allclose(model.coefs_[0].ravel(), w, rtol=1e-9)

    def test_divergence_is_caught(self):
        X, y = make_classification(100, 5, flip_y=0.2, random_state=0)
        model = MirrorFlowClassifier(
            (), potential="euclidean", batch_size=10, lr=1e8, loss="exponential", random_state=0
        )
        with pytest.warns(ConvergenceWarning, match="Lower lr"):
            model.fit(X, y)
        assert np.isfinite(model.coefs_[0]).all()

    def test_partial_fit(self):
        X, y = load_digits(return_X_y=True)
        X = X / 16
        model = MirrorFlowClassifier((32,), random_state=0, lr=3.0)
        for _ in range(5):
            for part in np.array_split(np.arange(1000), 4):
                model.partial_fit(X[part], y[part], classes=range(10))
        assert model.n_iter_ == 20
        assert model.score(X[1000:], y[1000:]) > 0.8

    def test_partial_fit_continues_a_fit(self):
        X, y = load_iris(return_X_y=True)
        model = quiet(MirrorFlowClassifier((8,), random_state=0, lr=1e-6, max_epochs=50), X, y)
        coefs = model.coefs_
        model.partial_fit(X[::2], y[::2])
        assert (model.coefs_[0] != coefs[0]).any()
        np.testing.assert_allclose(model.coefs_[0], coefs[0], rtol=1e-3, atol=1e-5)


class Product(nn.Module):
    """A diagonal linear network: parameters at the root, no layer."""

    def __init__(self, d):
        super().__init__()
        self.u, self.v = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d) / 2)

    def forward(self, X):
        return X @ (self.u * self.v)


class TestModule:
    def test_instance_is_copied(self):
        X, y = two_classes()
        network = HomogeneousMLP(4, (6,), generator=torch.Generator().manual_seed(0))
        before = copy.deepcopy(network.state_dict())
        hooks = len(network.output._forward_pre_hooks)
        model = MirrorFlowClassifier(module=network, target_margin=3)
        first = model.fit(X, y).decision_function(X)
        np.testing.assert_array_equal(model.fit(X, y).decision_function(X), first)
        for name, value in network.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)
            assert value.dtype == torch.float32
        assert network.training
        assert len(network.output._forward_pre_hooks) == hooks
        assert model.module is network
        assert model.margin_ >= 3
        assert not hasattr(model, "coefs_")

    def test_is_the_same_as_hidden_layer_sizes(self):
        X, y = two_classes()
        own = MirrorFlowClassifier((6,), target_margin=3, random_state=0).fit(X, y)
        network = HomogeneousMLP(4, (6,)).double()
        seed = int(np.random.RandomState(0).randint(2**31 - 1))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = HomogeneousMLP(4, (6,))
        given = MirrorFlowClassifier(module=network, target_margin=3).fit(X, y)
        np.testing.assert_allclose(given.decision_function(X), own.decision_function(X))
        np.testing.assert_allclose(given.transform(X), own.transform(X))
        assert given.degree_ == own.degree_ == 2
        assert given.q_margin_ == pytest.approx(own.q_margin_)

    def test_class_with_parameters(self):
        X, y = load_iris(return_X_y=True)
        model = MirrorFlowClassifier(
            module=HomogeneousMLP, module__n_features=4, module__n_outputs=3,
            module__hidden_layer_sizes=(5,), max_epochs=20, random_state=0,
        )  # fmt: skip
        quiet(model, X, y)
        assert model.transform(X).shape == (150, 5)
        again = quiet(clone(model), X, y)
        np.testing.assert_array_equal(again.decision_function(X), model.decision_function(X))

    @pytest.mark.parametrize("n_outputs", [1, 2])
    def test_two_classes_with_one_or_two_outputs(self, n_outputs):
        X, y = two_classes()
        model = MirrorFlowClassifier(
            module=HomogeneousMLP(4, (6,), n_outputs, weight_init=0.5), target_margin=2
        ).fit(X, y)
        assert model.decision_function(X).shape == (100,)
        np.testing.assert_array_equal(model.predict(X), y)
        assert 0 < model.kkt_ratio(X, y) <= 1

    def test_images(self):
        X, y = load_digits(return_X_y=True)
        images = (X / 16).reshape(-1, 1, 8, 8).astype(np.float32)
        network = HomogeneousCNN(
            1, 10, block_channels=(8, 16), convolutions_per_block=1,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        model = MirrorFlowClassifier(
            module=network, batch_size=32, max_epochs=8, lr=2.0, random_state=0
        ).fit(images[:600], y[:600])
        assert model.score(images[600:900], y[600:900]) > 0.6
        assert model.degree_ == 3
        assert model.transform(images[:3]).shape == (3, 16)
        assert model.transform(images[:3]).dtype == np.float32
        assert model.history_["sparsity"].notna().any()

    def test_parameters_without_layers(self):
        X, y = linear_problem(n=20, d=4)
        model = quiet(MirrorFlowClassifier(module=Product(4), max_epochs=200), X, y)
        assert model.degree_ == 2
        assert "sparsity" not in model.history_
        np.testing.assert_array_equal(model.transform(X), X)

    def test_warns_of_the_layer_that_breaks_homogeneity(self):
        X, y = two_classes()
        network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
        model = MirrorFlowClassifier(module=network, target_margin=3)
        with pytest.warns(UserWarning, match="layer '2'"):
            model.fit(X, y)
        assert np.isnan([model.degree_, model.q_margin_, model.horizon_margin_]).all()
        assert model.margin_ >= 3
        with pytest.raises(ValueError, match="homogeneous"):
            model.kkt_ratio(X, y)

    @pytest.mark.parametrize(
        ("module", "options", "error", "message"),
        [
            (nn.Linear(4, 2), {}, ValueError, r"\(8, 3\), got \(8, 2\)"),
            (nn.Linear(4, 3), {"module__bias": False}, ValueError, "instance of Linear"),
            (None, {"module__bias": False}, ValueError, "need a class"),
            (lambda: 3, {}, TypeError, "makes a int"),
            (nn.Linear(4, 3).requires_grad_(False), {}, ValueError, "no trainable"),
        ],
    )
    def test_bad_module(self, module, options, error, message):
        model = MirrorFlowClassifier(module=module, **options)
        with pytest.raises(error, match=message):
            model.fit(*load_iris(return_X_y=True))

    def test_frozen_part_in_evaluation_mode_stays_in_it(self):
        X, y = two_classes()
        encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        encoder[1].running_mean.fill_(0.3)
        encoder.requires_grad_(False).eval()
        network = nn.Sequential(encoder, nn.Linear(6, 1, bias=False))
        for batch_size in (None, 20):
            model = MirrorFlowClassifier(module=network, batch_size=batch_size, max_epochs=3)
            trained = quiet(model, X, y).net_.module_.network
            assert torch.equal(trained[0][1].running_mean, torch.full((6,), 0.3))
            encoder.train()
            quiet(model, X, y)
            assert model.net_.module_.network[0][1].running_mean.max() != 0.3
            encoder.eval()

    @pytest.mark.parametrize("batch_size", [None, 20])
    def test_prints_what_is_asked_for(self, batch_size, capfd):
        X, y = two_classes()
        model = MirrorFlowClassifier((8,), batch_size=batch_size, max_epochs=3, random_state=0)
        quiet(model, X, y, X_val=X, y_val=y).predict(X)
        model.partial_fit(X, y)
        assert capfd.readouterr() == ("", "")
        quiet(model.set_params(verbose=1), X, y, X_val=X, y_val=y)
        out, err = capfd.readouterr()
        assert out == ""
        last = err.strip().split("\r")[-1]
        for name in ("train_loss", "valid_loss", "margin"):
            assert f"{name}={model.history_[name].iloc[-1]:.4g}" in last
        assert "| 3/3 [" in last
        quiet(model.set_params(verbose=2), X, y)
        assert len(capfd.readouterr().out.strip().splitlines()) == 3 + 2

    def test_dropout_is_deterministic(self):
        X, y = two_classes()
        network = nn.Sequential(
            nn.Linear(4, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 1, bias=False)
        )
        model = MirrorFlowClassifier(module=network, max_epochs=30, random_state=0)
        state = torch.get_rng_state()
        a, b = (quiet(clone(model), X, y).decision_function(X) for _ in range(2))
        np.testing.assert_array_equal(a, b)
        assert torch.equal(torch.get_rng_state(), state)


class TestParameters:
    @pytest.mark.parametrize("potential", ["smoothed_power", SmoothedPower(4, 0.5)])
    def test_parameters_of_the_potential(self, potential):
        X, y = two_classes()
        model = MirrorFlowClassifier((4,), potential=potential, max_epochs=3, potential__lam=0.3)
        model.set_params(potential__p=3.5)
        assert model.get_params()["potential__lam"] == 0.3
        fitted = quiet(clone(model), X, y)
        used = fitted.net_.optimizer_.param_groups[0]["potential"]
        assert used == SmoothedPower(3.5, 0.3)
        assert fitted.potential == potential

    @pytest.mark.parametrize("potential", ["hyperbolic_entropy", HyperbolicEntropy()])
    def test_grid_search(self, potential):
        X, y = two_classes()
        model = MirrorFlowClassifier((8,), max_epochs=50, random_state=0)
        grid = [
            {"potential": [potential], "potential__lam": [0.1, 1.0]},
            {"potential": ["euclidean", SmoothedPower()]},
        ]
        search = quiet(GridSearchCV(model, grid, cv=2, error_score="raise"), X, y)
        assert len(search.cv_results_["params"]) == 4
        assert search.best_score_ > 0.9
        lams = search.cv_results_["param_potential__lam"]
        assert [lam for lam in lams if not np.ma.is_masked(lam)] == [0.1, 1.0]

    def test_changing_parameters_leaves_the_fitted_net(self):
        X, y = two_classes()
        model = quiet(MirrorFlowClassifier((8,), max_epochs=20, random_state=0), X, y)
        before = model.decision_function(X)
        model.set_params(potential="euclidean", hidden_layer_sizes=(3,))
        np.testing.assert_array_equal(model.decision_function(X), before)
        assert 0 < model.kkt_ratio(X, y) <= 1 if model.margin_ > 0 else True

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"potential": "entropy"}, ValueError, "unknown potential"),
            ({"potential": "euclidean", "potential__lam": 1.0}, TypeError, "no parameter lam"),
            ({"potential__lam": -1.0}, ValueError, "lam"),
            ({"potential": ["power"] * 2, "potential__p": 3}, ValueError, "potential__p need"),
            ({"potential": ["power"] * 3}, ValueError, "3 entries for 2 layers"),
            ({"potential": 2}, ValueError, "potential"),
            ({"hidden_layer_sizes": (4, 0)}, ValueError, "hidden_layer_sizes must be integers"),
            ({"hidden_layer_sizes": (4.5,)}, ValueError, "hidden_layer_sizes must be integers"),
            ({"init_scale": "zeros"}, ValueError, "linear model"),
            ({"loss": "hinge"}, ValueError, "loss"),
            ({"step_size": 0}, ValueError, "step_size"),
            ({"target_margin": -1}, ValueError, "target_margin"),
        ],
    )
    def test_bad_parameters(self, options, error, message):
        model = MirrorFlowClassifier(**options)
        with pytest.raises(error, match=message):
            model.fit(*two_classes())

    def test_init_scale(self):
        X, y = two_classes()
        model = MirrorFlowClassifier(
            (400,), init_scale=0.5, max_epochs=1, random_state=0, step_size=1e-6
        )
        quiet(model, X, y)
        assert model.coefs_[0].std() == pytest.approx(0.5, rel=0.05)

    @pytest.mark.parametrize("batch_size", [None, 16])
    def test_float32(self, batch_size):
        X, y = two_classes()
        options = {"random_state": 0, "max_epochs": 40, "batch_size": batch_size}
        single = quiet(MirrorFlowClassifier((8,), **options), X.astype(np.float32), y)
        double = quiet(MirrorFlowClassifier((8,), **options), X, y)
        assert single.coefs_[0].dtype == single.intercepts_[-1].dtype == np.float32
        assert single.decision_function(X).dtype == np.float32
        assert double.coefs_[0].dtype == np.float64
        np.testing.assert_allclose(single.coefs_[0], double.coefs_[0], rtol=1e-2, atol=1e-3)


class TestEstimator:
    @pytest.mark.parametrize("batch_size", [None, 20])
    def test_deterministic(self, batch_size):
        X, y = two_classes()
        torch_state, numpy_state = torch.get_rng_state(), global_numpy_state()
        model = MirrorFlowClassifier((8,), max_epochs=30, batch_size=batch_size)
        a, b, c = (
            quiet(clone(model).set_params(random_state=seed), X, y).decision_function(X)
            for seed in (0, 0, 1)
        )
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()
        assert torch.equal(torch.get_rng_state(), torch_state)
        np.testing.assert_array_equal(global_numpy_state(), numpy_state)

    def test_pipeline(self):
        X, y = load_iris(return_X_y=True)
        model = make_pipeline(
            StandardScaler(), MirrorFlowClassifier((16,), max_epochs=100, random_state=0)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            assert cross_val_score(model, X, y, cv=3).mean() > 0.9

    def test_labels(self):
        X, y = load_iris(return_X_y=True)
        names = np.array(["setosa", "versicolor", "virginica"])[y]
        model = quiet(MirrorFlowClassifier((8,), max_epochs=100, random_state=0), X, names)
        assert set(model.predict(X)) == set(names)
        assert model.decision_function(X).shape == (150, 3)
        with pytest.raises(ValueError, match="not seen in fit"):
            model.kkt_ratio(X[:2], ["setosa", "rose"])

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    @pytest.mark.parametrize("batch_size", [None, 20])
    def test_pickle(self, batch_size, copied):
        X, y = two_classes()
        model = MirrorFlowClassifier(
            (8,), max_epochs=30, batch_size=batch_size, random_state=0, warm_start=True
        )
        quiet(model, X, y)
        other = copied(model)
        np.testing.assert_array_equal(other.decision_function(X), model.decision_function(X))
        np.testing.assert_array_equal(other.transform(X), model.transform(X))
        for m in (model, other):
            quiet(m, X, y).partial_fit(X, y)
        np.testing.assert_array_equal(other.coefs_[0], model.coefs_[0])
        np.testing.assert_array_equal(other.balance_, model.balance_)

    def test_warm_start_continues_the_flow(self):
        X, y = two_classes()
        options = {"hidden_layer_sizes": (8,), "random_state": 0, "tol": 0}
        whole = quiet(MirrorFlowClassifier(max_epochs=60, **options), X, y)
        parts = MirrorFlowClassifier(max_epochs=30, warm_start=True, **options)
        quiet(quiet(parts, X, y), X, y)
        np.testing.assert_allclose(parts.coefs_[0], whole.coefs_[0], rtol=1e-9, atol=1e-12)
        assert parts.log_time_ == pytest.approx(whole.log_time_)
        np.testing.assert_allclose(parts.balance_, whole.balance_)
        parts.set_params(hidden_layer_sizes=(5,))
        with pytest.raises(ValueError, match="same shape"):
            parts.fit(X, y)

    def test_early_stopping_keeps_its_best(self):
        X, y = make_classification(150, 10, flip_y=0.2, random_state=0)
        model = MirrorFlowClassifier(
            (16,), random_state=0, max_epochs=400,
            callbacks=[EarlyStopping("valid_loss", patience=10, load_best=True)],
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.fit(X[:100], y[:100], X_val=X[100:], y_val=y[100:])
        assert model.n_iter_ < 400
        loss = -model.predict_log_proba(X[100:])[np.arange(50), y[100:]].mean()
        assert loss == pytest.approx(model.history_["valid_loss"].min())

    def test_callbacks_see_gradients(self):
        class Watch(Callback):
            def __init__(self):
                self.norms = []

            def on_grad_computed(self, net, named_parameters, **kwargs):
                self.norms.append(sum(p.grad.norm().item() for _, p in named_parameters))

        X, y = two_classes()
        model = MirrorFlowClassifier((4,), max_epochs=5, random_state=0, callbacks=[Watch()])
        quiet(model, X, y)
        watch = next(c for _, c in model.net_.callbacks_ if isinstance(c, Watch))
        assert len(watch.norms) == 6  # of the start, and after each step
        assert all(norm > 0 for norm in watch.norms)

    def test_predicting_in_many_threads(self):
        X, y = load_digits(return_X_y=True)
        model = quiet(MirrorFlowClassifier((16,), max_epochs=3, random_state=0), X[:200], y[:200])
        parts = np.array_split(X, 40)
        alone = [model.transform(part) for part in parts]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(model.transform, parts))
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a, b)


class TestCompact:
    @pytest.fixture(scope="class")
    @staticmethod
    def fitted():
        X, y = teacher_problem()
        model = MirrorFlowClassifier((30,), init_scale=0.3, random_state=0, target_margin=20)
        return model.fit(X, y), X, y

    @pytest.mark.parametrize("threshold", [1e-3, 1e-2, 0.1])
    def test_stated_tolerance(self, fitted, threshold):
        model, X, _ = fitted
        small = model.compact(threshold)
        width = small.hidden_layer_sizes[0]
        assert width < 30
        assert small.coefs_[0].shape == (5, width)
        assert small.transform(X).shape == (60, width)
        incoming = np.vstack([model.coefs_[0], model.intercepts_[0]])
        c = np.linalg.norm(incoming, axis=0) * np.linalg.norm(model.coefs_[1], axis=1)
        bound = c[c <= threshold * c.max()].sum() * np.sqrt(1 + (X**2).sum(1))
        change = np.abs(small.decision_function(X) - model.decision_function(X))
        assert change.max() > 0
        assert (change <= bound + 1e-12).all()
        if bound.max() < model.margin_:
            np.testing.assert_array_equal(small.predict(X), model.predict(X))

    def test_default_keeps_all_predictions(self, fitted):
        model, X, _ = fitted
        small = model.compact()
        np.testing.assert_array_equal(small.predict(X), model.predict(X))
        np.testing.assert_allclose(
            small.decision_function(X), model.decision_function(X), atol=1e-2 * model.margin_
        )

    def test_leaves_the_model_alone(self, fitted):
        model, X, y = fitted
        before = model.decision_function(X), model.log_time_
        small = model.compact(0.1)
        assert small.log_time_ == model.log_time_
        small.partial_fit(X, y)
        assert model.hidden_layer_sizes == (30,)
        np.testing.assert_array_equal(model.decision_function(X), before[0])

    def test_is_an_estimator_of_its_own(self, fitted):
        model, X, y = fitted
        small = model.compact(0.01)
        reloaded = pickle.loads(pickle.dumps(small))
        np.testing.assert_array_equal(reloaded.predict(X), small.predict(X))
        assert 0 < small.kkt_ratio(X, y) <= 1
        quiet(small.set_params(warm_start=True, max_epochs=5), X, y)
        assert small.coefs_[0].shape[1] == small.hidden_layer_sizes[0]

    def test_several_layers(self):
        X, y = teacher_problem()
        model = MirrorFlowClassifier((20, 10), random_state=0, target_margin=20).fit(X, y)
        small = model.compact(0.03)
        assert sum(small.hidden_layer_sizes) < 27
        np.testing.assert_array_equal(small.predict(X), y)

    def test_linear_model_and_refusals(self):
        X, y = two_classes()
        linear = MirrorFlowClassifier((), target_margin=3).fit(X, y)
        np.testing.assert_array_equal(linear.compact().coefs_[0], linear.coefs_[0])
        with pytest.raises(ValueError, match="threshold"):
            linear.compact(1)
        module = MirrorFlowClassifier(module=nn.Linear(4, 1), target_margin=3).fit(X, y)
        with pytest.raises(ValueError, match="module"):
            module.compact()


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [None, 20])
def test_cuda_gives_the_same_model(batch_size):
    X, y = two_classes()
    options = {"random_state": 0, "max_epochs": 50, "batch_size": batch_size}
    cpu = quiet(MirrorFlowClassifier((8,), device="cpu", **options), X, y)
    gpu = quiet(MirrorFlowClassifier((8,), device="cuda", **options), X, y)
    np.testing.assert_allclose(gpu.coefs_[0], cpu.coefs_[0], rtol=1e-6, atol=1e-9)
    assert gpu.margin_ == pytest.approx(cpu.margin_, rel=1e-6)
    assert gpu.compact().predict(X).shape == (100,)
    assert 0 < gpu.kkt_ratio(X, y) <= 1
    pickle.loads(pickle.dumps(gpu)).predict(X)
