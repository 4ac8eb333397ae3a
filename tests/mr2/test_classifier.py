"""MR2Classifier as a linear probe, against scikit-learn and the mathematics written down again."""

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, load_wine, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, StratifiedKFold, cross_val_predict
from sklearn.preprocessing import StandardScaler

from sklearn_mr2 import MR2Classifier
from sklearn_mr2.datasets import load_fashion_mnist_features


def problem(n_classes, mean=0.0, n=300, d=12, seed=0, weighted=False):
    X, y = make_classification(
        n, d, n_informative=8, n_redundant=2, n_classes=n_classes, random_state=seed
    )
    rng = np.random.default_rng(seed)
    return X + mean, y, rng.integers(1, 4, size=n).astype(float) if weighted else None


def probe_objective(parameters, X, y, w, C, margins, mode="divide"):
    """The objective of a multinomial probe, in numpy: the reference for every solver test."""
    K, d = len(margins), X.shape[1]
    W, b = parameters[: K * d].reshape(K, d), parameters[K * d :]
    Z = X @ W.T + b
    margin = margins[y]
    if mode == "divide":
        Z = Z / margin[:, None]
    else:
        Z = Z.copy()
        Z[np.arange(len(y)), y] -= margin
    loss = -log_softmax(Z, axis=1)[np.arange(len(y)), y]
    return (w @ loss + (W**2).sum() / (2 * C)) / w.sum()


def objective_of(model, X, y, w=None):
    w = np.ones(len(y)) if w is None else w
    parameters = np.concatenate([model.coef_.ravel(), model.intercept_]).astype(float)
    return probe_objective(parameters, X, y, w, model.C, model.margins_, model.margin_mode)


class TestAgainstLogisticRegression:
    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("n_classes", [2, 4])
    @pytest.mark.parametrize("mean", [0.0, 1000.0])
    @pytest.mark.parametrize("C", [0.01, 1.0])
    def test_same_model(self, n_classes, mean, weighted, C):
        X, y, w = problem(n_classes, mean, weighted=weighted)
        ours = MR2Classifier(margin_statistic=None, C=C, tol=1e-13).fit(X, y, w)
        # The reference sees centred features: a large mean is what it does not converge with.
        reference = LogisticRegression(C=C, tol=1e-11, max_iter=10_000, solver="newton-cholesky")
        reference.fit(X - mean, y, w)
        np.testing.assert_allclose(ours.coef_, reference.coef_, atol=1e-4)
        np.testing.assert_allclose(
            ours.predict_proba(X), reference.predict_proba(X - mean), atol=1e-5
        )
        np.testing.assert_allclose(
            ours.decision_function(X), reference.decision_function(X - mean), atol=1e-4
        )

    def test_without_intercept(self):
        X, y, _ = problem(3, mean=0.5)
        ours = MR2Classifier(margin_statistic=None, fit_intercept=False, tol=1e-13).fit(X, y)
        reference = LogisticRegression(fit_intercept=False, tol=1e-11, max_iter=10_000).fit(X, y)
        np.testing.assert_allclose(ours.coef_, reference.coef_, atol=1e-4)
        assert not ours.intercept_.any()

    def test_more_features_than_samples(self):
        X, y = make_classification(60, 200, n_informative=20, n_classes=3, random_state=0)
        ours = MR2Classifier(margin_statistic=None, C=10, tol=1e-13).fit(X, y)
        reference = LogisticRegression(C=10, tol=1e-10, max_iter=20_000).fit(X, y)
        np.testing.assert_allclose(ours.coef_, reference.coef_, atol=1e-4)

    @pytest.mark.parametrize("class_weight", ["balanced", {0: 3.0, 2: 0.5}])
    def test_class_weight(self, class_weight):
        X, y, w = problem(3, weighted=True)
        keep = (y != 1) | (np.arange(len(y)) % 3 == 0)
        X, y, w = X[keep], y[keep], w[keep]
        ours = MR2Classifier(margin_statistic=None, class_weight=class_weight, tol=1e-13)
        ours.fit(X, y, w)
        if class_weight == "balanced":
            totals = np.bincount(y, w)
            class_weight = dict(enumerate(w.sum() / (3 * totals)))
        reference = LogisticRegression(class_weight=class_weight, tol=1e-11, max_iter=10_000)
        reference.fit(X, y, w)
        np.testing.assert_allclose(ours.coef_, reference.coef_, atol=1e-4)


@pytest.fixture(scope="module")
def embeddings():
    data = load_fashion_mnist_features()
    X = StandardScaler().fit_transform(data.data[::4]).astype(np.float64)
    return X, np.unique(data.target[::4], return_inverse=True)[1]


class TestOptimum:
    @pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_default_tol_reaches_the_optimum(self, embeddings, C, dtype):
        X, y = embeddings
        model = MR2Classifier(C=C, dtype=dtype, max_epochs=5000).fit(X, y)
        best = MR2Classifier(C=C, dtype="float64", tol=1e-12, max_epochs=20_000).fit(X, y)
        # The same margins, so that only the optimisation is compared.
        best.margins_ = model.margins_ = best.margins_.astype(float)
        optimum = objective_of(best, X, y)
        limit = 1e-6 if dtype == "float64" else 1e-5
        assert -1e-9 <= objective_of(model, X, y) / optimum - 1 <= limit

    @pytest.mark.parametrize("C", [1.0, 100.0])
    def test_small_data_of_bad_scale_in_single_precision(self, C):
        X, y = load_wine(return_X_y=True)
        X = (X * np.geomspace(1, 1e3, 13)).astype(np.float32)
        model = MR2Classifier(C=C, max_epochs=20_000).fit(X, y)
        assert model.coef_.dtype == model.decision_function(X).dtype == np.float32
        exact = MR2Classifier(C=C, tol=1e-12, max_epochs=20_000).fit(X.astype(np.float64), y)
        exact.margins_ = model.margins_ = exact.margins_.astype(float)
        optimum = objective_of(exact, X.astype(np.float64), y)
        assert objective_of(model, X.astype(np.float64), y) / optimum - 1 <= 1e-5

    @pytest.mark.parametrize("mode", ["divide", "subtract"])
    def test_objective_with_margins(self, mode):
        X, y = load_iris(return_X_y=True)
        X = StandardScaler().fit_transform(X)
        model = MR2Classifier(margin_mode=mode, margin=0.7, C=2.0, tol=1e-13).fit(X, y)
        start = np.zeros(model.coef_.size + 3)
        arguments = (X, y, np.ones(len(y)), 2.0, model.margins_, mode)
        reference = minimize(probe_objective, start, arguments, method="L-BFGS-B", tol=1e-14)
        assert objective_of(model, X, y) <= reference.fun * (1 + 1e-9)
        np.testing.assert_allclose(model.coef_.ravel(), reference.x[:12], atol=2e-3)

    def test_subtracted_margins_of_0_are_cross_entropy(self):
        X, y, _ = problem(3, n=200)
        none, plain = (
            MR2Classifier(tol=1e-12, random_state=0, **options).fit(X, y)
            for options in (
                {"margin": 0.0, "margin_mode": "subtract", "margin_statistic": "error"},
                {"margin_statistic": None},
            )
        )
        assert not none.margins_.any()
        np.testing.assert_allclose(none.coef_, plain.coef_, atol=1e-5)
        with pytest.raises(ValueError, match="margin_mode='subtract'"):
            MR2Classifier(margin=0.0).fit(X, y)

    def test_warns_when_it_does_not_converge(self):
        X, y = load_digits(return_X_y=True)
        with pytest.warns(ConvergenceWarning, match="Raise max_epochs"):
            model = MR2Classifier(max_epochs=3).fit(X, y)
        assert model.n_iter_ == 3
        assert len(model.history_) == 3

    def test_does_not_warn_when_it_does(self):
        X, y = load_iris(return_X_y=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            MR2Classifier().fit(X, y)

    def test_deterministic(self):
        X, y = load_digits(return_X_y=True)
        a, b = (MR2Classifier(random_state=seed).fit(X, y) for seed in (0, 1))
        np.testing.assert_array_equal(a.coef_, b.coef_)

    def test_batch_size_only_sets_how_many_rows_are_handled_at_a_time(self):
        X, y = load_iris(return_X_y=True)
        a, b = (MR2Classifier(batch_size=size, tol=1e-12).fit(X, y) for size in (7, 1000))
        np.testing.assert_allclose(a.coef_, b.coef_, atol=1e-6)


class TestMargins:
    def test_the_papers_rule(self):
        X, y, w = problem(4, weighted=True)
        model = MR2Classifier(margin=1.5).fit(X, y, w)
        r2 = np.array([np.average((X[y == k] ** 2).sum(1), weights=w[y == k]) for k in range(4)])
        np.testing.assert_allclose(model.class_spread_, r2)
        np.testing.assert_allclose(model.margins_, 1.5 * 4 * r2 ** (1 / 3) / (r2 ** (1 / 3)).sum())

    def test_dispersion_and_exponent(self):
        X, y, _ = problem(3, mean=5.0)
        model = MR2Classifier(margin_statistic="dispersion", margin_exponent=1.0).fit(X, y)
        spread = np.array([X[y == k].var(0).sum() for k in range(3)])
        np.testing.assert_allclose(model.class_spread_, spread)
        np.testing.assert_allclose(model.margins_, spread / spread.mean())

    def test_norm(self):
        X, y, _ = problem(3, mean=1.0)
        model = MR2Classifier(margin_norm=3).fit(X, y)
        expected = []
        for k in range(3):
            mean = X[y == k].mean(0)
            deviation = np.linalg.norm(X[y == k] - mean, ord=3, axis=1)
            expected.append(np.linalg.norm(mean, ord=3) ** 2 + (deviation**2).mean())
        np.testing.assert_allclose(model.class_spread_, expected)

    def test_largest_entry_as_norm(self):
        X, y, _ = problem(3, mean=1.0)
        largest = MR2Classifier(margin_norm=np.inf).fit(X, y).margins_
        np.testing.assert_allclose(largest, MR2Classifier(margin_norm=500).fit(X, y).margins_, 0.02)

    def test_without_statistic(self):
        X, y, _ = problem(3)
        model = MR2Classifier(margin_statistic=None, margin=2.0).fit(X, y)
        np.testing.assert_array_equal(model.margins_, 2.0)
        assert np.isnan(model.class_spread_).all()

    def test_uniform_margin_is_a_temperature_of_the_penalty(self):
        # z / c with penalty on W equals cross-entropy in W / c with penalty c^2 ||W / c||^2.
        X, y, _ = problem(3)
        scaled = MR2Classifier(margin_statistic=None, margin=2.0, C=1.0, tol=1e-13).fit(X, y)
        plain = MR2Classifier(margin_statistic=None, C=1.0 / 4, tol=1e-13).fit(X, y)
        np.testing.assert_allclose(scaled.coef_, 2 * plain.coef_, atol=1e-5)

    def test_error_statistic_is_the_out_of_fold_error(self):
        X, y, _ = problem(4, n=200)
        folds = StratifiedKFold(4, shuffle=True, random_state=3)
        model = MR2Classifier(
            margin_statistic="error", margin_exponent=1.0, margin_mode="subtract", error_cv=folds
        ).fit(X, y)
        plain = LogisticRegression(tol=1e-10, max_iter=10_000)
        predicted = cross_val_predict(plain, X, y, cv=folds)
        error = np.array([(predicted[y == k] != k).mean() for k in range(4)])
        np.testing.assert_allclose(model.class_spread_, error)
        np.testing.assert_allclose(model.margins_, error / error.mean())
        assert model.margin_error_source_ == "out_of_fold"
        assert model.margin_error_correlation_ == pytest.approx(1.0)

    @pytest.mark.parametrize("module", ["linear", "mlp"])
    def test_auto_margin_follows_the_error(self, module):
        X, y, _ = problem(4, n=200)
        rule = {"margin_statistic": "error", "margin_exponent": 1.0, "margin_mode": "subtract"}
        auto, by_hand = (
            MR2Classifier(module, **rule, error_cv=3, max_epochs=30, random_state=0)
            for _ in range(2)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            auto.set_params(margin="auto", C=0.5).fit(X, y)
            precision = 1e-12 if module == "linear" else 1e-5
            np.testing.assert_allclose(auto.margins_, 8 * auto.class_spread_, rtol=precision)
            assert auto.margins_.min() > 0
            np.testing.assert_allclose(auto.C_, 0.5 * (1 + auto.margins_.mean() / 2), rtol=1e-6)
            # The same errors, since they come from fits with the C given.
            by_hand.set_params(margin=float(auto.margins_.mean()), C=auto.C_)
            by_hand._out_of_fold_error = lambda data: auto.class_spread_
            by_hand.fit(X, y)
        np.testing.assert_allclose(auto.coef_, by_hand.coef_, atol=1e-5)
        if module == "linear":
            assert auto.to_sklearn().C == auto.C_

    def test_auto_margin_without_errors_is_cross_entropy(self):
        X, y = load_iris(return_X_y=True)
        X, y = X[:100], y[:100]  # separable
        rule = {"margin_statistic": "error", "margin_mode": "subtract", "margin": "auto"}
        auto = MR2Classifier(**rule, tol=1e-12, random_state=0).fit(X, y)
        plain = MR2Classifier(margin_statistic=None, tol=1e-12).fit(X, y)
        assert not auto.margins_.any()
        assert auto.C_ == plain.C_ == 1.0
        np.testing.assert_allclose(auto.coef_, plain.coef_, atol=1e-5)

    @pytest.mark.parametrize(
        "options", [{}, {"margin_statistic": "error"}, {"margin_mode": "subtract"}]
    )
    def test_auto_margin_needs_errors_and_subtraction(self, options):
        X, y, _ = problem(3)
        with pytest.raises(ValueError, match="margin='auto' is for margin_statistic='error'"):
            MR2Classifier(margin="auto", **options).fit(X, y)

    def test_more_folds_than_samples_of_any_class(self):
        X, y, _ = problem(4, n=200)
        rows = np.concatenate([np.flatnonzero(y == k)[:3] for k in range(4)])
        with pytest.raises(ValueError, match="Lower error_cv"):
            MR2Classifier(margin_statistic="error").fit(X[rows], y[rows])

    @pytest.mark.parametrize("module", ["linear", "mlp"])
    def test_warns_of_dividing_by_errors(self, module):
        X, y, _ = problem(3, n=200)
        X[y == 0] += 20  # a class without any error
        options = {"module": module, "margin_statistic": "error", "margin_exponent": 1.0}
        with pytest.warns(UserWarning, match="margin_mode='subtract'"):
            MR2Classifier(**options, random_state=0).fit(X, y)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            MR2Classifier(**options, margin_mode="subtract", random_state=0).fit(X, y)

    def test_error_folds_follow_the_random_state(self):
        X, y, _ = problem(4, n=200)
        fit = [
            clone(MR2Classifier(margin_statistic="error", random_state=seed)).fit(X, y)
            for seed in (0, 0, 1)
        ]
        np.testing.assert_array_equal(fit[0].class_spread_, fit[1].class_spread_)
        assert (fit[0].class_spread_ != fit[2].class_spread_).any()

    def test_weights_count_in_the_out_of_fold_error(self):
        X, y, _ = problem(3, n=150)
        folds = StratifiedKFold(3)
        model = MR2Classifier(margin_statistic="error", error_cv=folds)
        rng = np.random.default_rng(0)
        w = rng.uniform(0.1, 5, size=len(y))
        wrong, seen = np.zeros(3), np.zeros(3)
        for train, test in folds.split(X, y):
            plain = LogisticRegression(tol=1e-10, max_iter=10_000).fit(X[train], y[train], w[train])
            missed = plain.predict(X[test]) != y[test]
            wrong += np.bincount(y[test], w[test] * missed, 3)
            seen += np.bincount(y[test], w[test], 3)
        np.testing.assert_allclose(model.fit(X, y, w).class_spread_, wrong / seen)

    def test_correlation_on_validation_data(self):
        X, y, _ = problem(5, n=600)
        train, valid = slice(0, 400), slice(400, 600)
        model = MR2Classifier().fit(X[train], y[train], X_val=X[valid], y_val=y[valid])
        predicted = model.predict(X[valid])
        error = [(predicted[y[valid] == k] != k).mean() for k in range(5)]
        assert model.margin_error_source_ == "validation"
        expected = spearmanr(model.margins_, error).statistic
        assert model.margin_error_correlation_ == pytest.approx(expected)

    def test_a_class_unknown_to_a_fold_does_not_count_there(self):
        X, y, _ = problem(3, n=90)
        last = np.arange(90) >= 60
        fold = np.where(last & (y == 2), 1, np.arange(90) % 2)
        fold[y == 2] = np.where(last, 1, 0)[y == 2]
        splits = PredefinedSplit(fold)
        model = MR2Classifier(margin_statistic="error", margin_mode="subtract", error_cv=splits)
        one_sided = fold.copy()
        one_sided[y == 2] = 1  # never in training where it is tested
        model.fit(X, y)
        assert np.isfinite(model.class_spread_).all()
        model.set_params(error_cv=PredefinedSplit(one_sided), margin=2.0).fit(X, y)
        assert np.isnan(model.class_spread_[2])
        assert np.isfinite(model.class_spread_[:2]).all()
        assert model.margins_[2] == 2.0

    def test_folds_that_share_no_class(self):
        X, y, _ = problem(4, n=80)
        model = MR2Classifier(margin_statistic="error", error_cv=PredefinedSplit(y % 2))
        with pytest.raises(ValueError, match="No fold of error_cv has two classes in its training"):
            model.fit(X, y)

    @pytest.mark.filterwarnings("ignore:The least populated class")
    def test_a_fold_that_trains_on_one_class_does_not_count(self):
        rng = np.random.default_rng(0)
        X, y = rng.normal(size=(41, 3)), np.array(["a"] * 40 + ["b"])
        model = MR2Classifier(margin_statistic="error", margin_mode="subtract").fit(X, y)
        assert np.isfinite(model.class_spread_[0])
        assert np.isnan(model.class_spread_[1])

    def test_correlation_of_networks_by_folds(self):
        X, y, _ = problem(4, n=200)
        options = {"max_epochs": 5, "lr": 0.01, "random_state": 0}
        model = MR2Classifier("mlp", error_cv=3, **options).fit(X, y)
        assert model.margin_error_source_ == "out_of_fold"
        error = model._out_of_fold_error(model._clean(X, y, None, by_parts=False))
        expected = spearmanr(model.margins_, error).statistic
        assert model.margin_error_correlation_ == pytest.approx(expected)
        # Measuring them is no part of the training.
        plain = MR2Classifier("mlp", **options).fit(X, y)
        np.testing.assert_array_equal(model.coef_, plain.coef_)
        model.partial_fit(X, y)
        assert model.margin_error_source_ is None

    def test_correlation_is_not_measured_unasked(self):
        model = MR2Classifier().fit(*load_iris(return_X_y=True))
        assert model.margin_error_source_ is None
        assert np.isnan(model.margin_error_correlation_)

    def test_collapsed_class_keeps_a_usable_margin(self):
        X, y, _ = problem(3)
        X[y == 1] = 0
        model = MR2Classifier().fit(X, y)
        assert (model.margins_ > 0).all()
        assert np.isfinite(model.coef_).all()


class TestPartialFit:
    def test_statistics_are_exact_over_the_parts(self):
        X, y, _ = problem(4)
        model = MR2Classifier(random_state=0)
        for part in np.array_split(np.arange(len(y)), 5):
            model.partial_fit(X[part], y[part], classes=range(4))
        whole = MR2Classifier().fit(X, y)
        np.testing.assert_allclose(model.margins_, whole.margins_)

    def test_directions_of_a_cosine_head_are_never_penalised(self):
        X, y, _ = problem(3)
        strong, weak = (
            MR2Classifier(head="cosine", C=C, random_state=0).partial_fit(X, y, classes=range(3))
            for C in (1e-6, 1e6)
        )
        strong.partial_fit(X, y)
        weak.partial_fit(X, y)
        np.testing.assert_array_equal(strong.predict_proba(X), weak.predict_proba(X))

    def test_statistics_of_single_precision_parts_stay_in_double(self):
        X, y, _ = problem(3)
        model = MR2Classifier(random_state=0)
        for part in np.array_split(np.arange(len(y)), 3):
            model.partial_fit(X[part].astype(np.float32), y[part], classes=range(3))
        assert model.net_.criterion_.running.mean.dtype == torch.float64
        assert model.coef_.dtype == np.float32

    def test_continues_a_full_fit(self):
        X, y, _ = problem(3, n=400)
        model = MR2Classifier(random_state=0).fit(X[:300], y[:300])
        coef = model.coef_
        model.partial_fit(X[300:], y[300:])
        assert 0 < np.abs(model.coef_ - coef).max() < 0.1
        np.testing.assert_allclose(model.margins_, MR2Classifier().fit(X, y).margins_)

    def test_not_available_with_the_error_statistic(self):
        model = MR2Classifier(margin_statistic="error")
        assert not hasattr(model, "partial_fit")


class TestToSklearn:
    @pytest.mark.parametrize("n_classes", [2, 4])
    def test_same_predictions(self, n_classes):
        X, y, _ = problem(n_classes)
        labels = np.array(["ant", "bee", "cat", "dog"])[y]
        model = MR2Classifier().fit(X, labels)
        plain = model.to_sklearn()
        assert type(plain) is LogisticRegression
        np.testing.assert_array_equal(plain.predict(X), model.predict(X))
        np.testing.assert_allclose(plain.predict_proba(X), model.predict_proba(X), atol=1e-12)

    def test_independent_of_the_model(self):
        X, y, _ = problem(3)
        model = MR2Classifier().fit(X, y)
        model.to_sklearn().coef_[:] = 0
        assert model.coef_.any()


@pytest.mark.gpu
def test_cuda_gives_the_same_model():
    X, y, _ = problem(4)
    cpu = MR2Classifier(device="cpu", tol=1e-12).fit(X, y)
    gpu = MR2Classifier(device="cuda", tol=1e-12).fit(torch.as_tensor(X, device="cuda"), y)
    np.testing.assert_allclose(gpu.coef_, cpu.coef_, atol=1e-6)
