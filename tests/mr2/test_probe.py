"""The full-batch optimiser of linear probes against closed forms and dense linear algebra."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp
from sklearn.base import clone
from sklearn.datasets import load_iris

from sklearn_mr2 import MR2Classifier
from sklearn_mr2.mr2.probe import (
    GramPreconditioner,
    HessianPreconditioner,
    PreconditionedLBFGS,
)


def dense_inverse(X, curvature, l2):
    """Inverse of the matrix in the coordinates (W, b), written down in full."""
    Z = np.column_stack([X, np.ones(len(X))])
    return np.linalg.inv(Z.T @ (curvature[:, None] * Z) + l2 * np.diag([1.0] * X.shape[1] + [0.0]))


@given(
    n=st.integers(2, 12),
    d=st.integers(1, 8),
    shift=st.sampled_from([0.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_preconditioner_is_the_inverse(n, d, shift, seed):
    rng = np.random.default_rng(seed)
    X, curvature = rng.normal(size=(n, d)) + shift, rng.uniform(0.1, 1, size=n)
    gradient = rng.normal(size=(3, d + 1))
    matrix = GramPreconditioner(
        torch.as_tensor(X), torch.as_tensor(curvature), 0.5, fit_intercept=True, chunk_size=5
    )
    weight, bias = matrix.solve(torch.as_tensor(gradient[:, :d]), torch.as_tensor(gradient[:, d]))
    expected = gradient @ dense_inverse(X, curvature, 0.5)
    np.testing.assert_allclose(weight, expected[:, :d], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(bias, expected[:, d], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(20, 5), (5, 20)])
def test_preconditioner_without_intercept(shape):
    rng = np.random.default_rng(0)
    X, curvature = rng.normal(size=shape) + 3, rng.uniform(0.1, 1, size=shape[0])
    matrix = GramPreconditioner(
        torch.as_tensor(X), torch.as_tensor(curvature), 0.2, fit_intercept=False
    )
    gradient = rng.normal(size=(2, shape[1]))
    (solved,) = matrix.solve(torch.as_tensor(gradient))
    full = X.T @ (curvature[:, None] * X) + 0.2 * np.eye(shape[1])
    np.testing.assert_allclose(solved, np.linalg.solve(full, gradient.T).T, rtol=1e-8)


def test_preconditioner_of_flat_data_is_finite():
    X = torch.ones(10, 3, dtype=torch.float64)
    matrix = GramPreconditioner(X, torch.zeros(10), 1e-30, fit_intercept=True)
    weight, bias = matrix.solve(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2).double())
    assert weight.isfinite().all()
    assert bias.isfinite().all()


@pytest.mark.parametrize("shape", [(20, 5), (5, 20)])
def test_preconditioner_without_a_ridge_is_finite(shape):
    X = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = GramPreconditioner(X, torch.ones(shape[0]), 0.0, fit_intercept=False)
    (solved,) = matrix.solve(torch.ones(2, shape[1], dtype=torch.float64))
    assert solved.isfinite().all()


def quadratic(n, condition, seed=0):
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(n, n)))
    matrix = torch.as_tensor(basis * np.geomspace(1, condition, n) @ basis.T)
    return matrix, torch.as_tensor(rng.normal(size=n))


def minimise(matrix, target, preconditioner=None, tol=1e-10, **options):
    x = torch.zeros_like(target, requires_grad=True)
    make = None if preconditioner is None else lambda: preconditioner
    optimizer = PreconditionedLBFGS([x], make, tol=tol, **options)
    evaluations = []

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * (x - target) @ matrix @ (x - target) + 1
        loss.backward()
        evaluations.append(loss.item())
        return loss

    for _ in range(2000):
        optimizer.step(closure)
        if optimizer.converged:
            break
    return x.detach(), optimizer, evaluations


@pytest.mark.parametrize("seed", range(10))
def test_reaches_the_minimum_of_a_quadratic(seed):
    matrix, target = quadratic(30, 1e4, seed)
    x, optimizer, _ = minimise(matrix, target)
    assert optimizer.converged
    distance = 0.5 * (x - target) @ matrix @ (x - target)
    assert distance < 1e-10


def test_a_good_preconditioner_saves_evaluations():
    matrix, target = quadratic(60, 1e6)
    inverse = torch.linalg.inv(matrix)
    _, _, plain = minimise(matrix, target)
    _, _, fewer = minimise(matrix, target, lambda g: [inverse @ g])
    assert len(fewer) * 5 < len(plain)


def test_objective_never_rises():
    matrix, target = quadratic(40, 1e5)
    x = torch.zeros_like(target, requires_grad=True)
    optimizer = PreconditionedLBFGS([x])

    def closure():
        optimizer.zero_grad()
        loss = torch.log1p((x - target) @ matrix @ (x - target)) + (x - target).abs().pow(3).sum()
        loss.backward()
        return loss

    values = [optimizer.step(closure).item() for _ in range(100)]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(values))


def test_stops_at_a_stationary_start():
    target = torch.zeros(3, dtype=torch.float64)
    x, optimizer, evaluations = minimise(torch.eye(3, dtype=torch.float64), target)
    assert optimizer.converged
    assert len(evaluations) == 1
    assert torch.equal(x, target)


def test_single_precision_stops_at_rounding_level():
    matrix, target = (t.float() for t in quadratic(20, 1e3))
    x, optimizer, evaluations = minimise(matrix, target, tol=0)
    assert optimizer.converged
    assert len(evaluations) < 500
    assert 0.5 * (x - target) @ matrix @ (x - target) < 1e-5


def test_single_precision_does_not_stop_at_short_steps():
    # Steps that each decrease the objective by less than rounding add up.
    scale = torch.logspace(-4, 0, 300)
    x = torch.ones(300, requires_grad=True)
    optimizer = PreconditionedLBFGS([x], history_size=2)

    def closure():
        optimizer.zero_grad()
        (scale * x.square()).mean().backward()
        return 1 + (scale.double() * x.detach().double().square()).mean()

    for _ in range(1000):
        if optimizer.converged:
            break
        value = optimizer.step(closure)
    assert optimizer.converged
    assert value - 1 < 5e-6


def test_rejects_bad_arguments():
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match="tol must be >= 0"):
        PreconditionedLBFGS([x], tol=-1)
    with pytest.raises(ValueError, match="history_size must be >= 1"):
        PreconditionedLBFGS([x], history_size=0)
    with pytest.raises(ValueError, match="single parameter group"):
        PreconditionedLBFGS([{"params": [x]}, {"params": [torch.ones(1, requires_grad=True)]}])


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_hessian_preconditioner_is_the_inverse_hessian(fit_intercept):
    """Against automatic differentiation, on gradients as they occur: summing to 0 over classes."""
    torch.manual_seed(0)
    X, W = torch.randn(40, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    b, y = torch.randn(4, dtype=torch.float64), torch.arange(40) % 4
    weight = torch.rand(40, dtype=torch.float64)
    l2 = 0.1

    def objective(flat):
        W, b = flat[:12].view(4, 3), flat[12:] if fit_intercept else 0
        loss = torch.nn.functional.cross_entropy(X @ W.T + b, y, reduction="none")
        return weight @ loss + 0.5 * l2 * W.square().sum()

    flat = torch.cat((W.reshape(-1), b)) if fit_intercept else W.reshape(-1)
    hessian = torch.autograd.functional.hessian(objective, flat)
    p = (X @ W.T + (b if fit_intercept else 0)).softmax(1)
    made = HessianPreconditioner(X, p, weight, l2, fit_intercept=fit_intercept)
    gradient = torch.randn(4, 4 if fit_intercept else 3, dtype=torch.float64)
    gradient -= gradient.mean(0)
    parts = (gradient[:, :3], gradient[:, 3]) if fit_intercept else (gradient,)
    step = torch.cat([part.reshape(-1) for part in made.solve(*parts)])
    expected = torch.cat([part.reshape(-1) for part in parts])
    torch.testing.assert_close(hessian @ step, expected, rtol=1e-4, atol=1e-4)


def test_hessian_preconditioner_with_another_ridge():
    torch.manual_seed(0)
    X, p, weight = torch.randn(30, 3), torch.randn(30, 4).softmax(1), torch.rand(30)
    first = HessianPreconditioner(X, p, weight, 0.1, fit_intercept=True)
    gradient = torch.randn(4, 3), torch.randn(4)
    before = first.solve(*gradient)
    expected = HessianPreconditioner(X, p, weight, 2.0, fit_intercept=True).solve(*gradient)
    for made, wanted in zip(first.with_ridge(2.0).solve(*gradient), expected, strict=True):
        torch.testing.assert_close(made, wanted)
    torch.testing.assert_close(first.solve(*gradient), before)


def test_hessian_preconditioner_of_nearly_perfect_predictions():
    """Where 1 - p rounds to 0 the matrix must stay positive definite."""
    torch.manual_seed(0)
    X, y = torch.randn(30, 3), torch.arange(30) % 4
    p = (torch.nn.functional.one_hot(y, 4) * 25.0 + torch.randn(30, 4)).softmax(1)
    assert (p.amax(1) == 1).any()
    made = HessianPreconditioner(X, p, torch.full((30,), 1 / 30), 1e-12, fit_intercept=False)
    gradient = torch.randn(4, 3)
    gradient -= gradient.mean(0)
    (step,) = made.solve(gradient)
    assert torch.isfinite(step).all()
    assert (step * gradient).sum() > 0


@pytest.mark.parametrize("shift", [0.0, 1e5])
def test_hessian_preconditioner_survives_a_shift(shift):
    """In float32 and with columns of very different scale, as raw data have."""
    rng = np.random.default_rng(0)
    X = torch.as_tensor(rng.normal(size=(200, 3)) * [1e-3, 1, 1e3] + [0, shift, 0]).float()
    Z = X.double() - X.double().mean(0)
    p = torch.as_tensor(rng.normal(size=(200, 4))).softmax(1)
    weight = torch.full((200,), 1 / 200, dtype=torch.float64)
    gradient = torch.as_tensor(rng.normal(size=(4, 4)))
    gradient -= gradient.mean(0)
    exact = HessianPreconditioner(Z, p, weight, 1e-6, fit_intercept=True)
    expected, _ = exact.solve(gradient[:, :3], gradient[:, 3])
    made = HessianPreconditioner(X, p.float(), weight, 1e-6, fit_intercept=True)
    mean = X.double().mean(0)
    shifted = (gradient[:, :3] + torch.outer(gradient[:, 3], mean)).float()
    step, _ = made.solve(shifted, gradient[:, 3].float())
    torch.testing.assert_close(step.double(), expected, rtol=0.05, atol=1e-3 * expected.abs().max())


def test_hessian_preconditioner_of_many_classes_with_few_features():
    """Its blocks of columns span several classes, and its rows several blocks."""
    rng = np.random.default_rng(0)
    X = torch.as_tensor(rng.normal(size=(1500, 2)))
    p = torch.as_tensor(rng.normal(size=(1500, 200))).softmax(1)
    weight = torch.as_tensor(rng.uniform(size=1500))
    made = HessianPreconditioner(X, p, weight, 0.1, fit_intercept=False)
    step = torch.as_tensor(rng.normal(size=(200, 2)))
    step -= step.mean(0)
    # The Hessian times a step, without making the Hessian.
    logits = X @ step.T
    curved = p * (logits - (p * logits).sum(1, keepdim=True))
    product = (weight[:, None] * curved).T @ X + 0.1 * step
    torch.testing.assert_close(made.solve(product)[0], step, rtol=1e-6, atol=1e-9)


def objective(model, X, y):
    """LogisticRegression's, of a fitted probe without margins."""
    z = model.decision_function(X).reshape(len(y), -1)
    z = np.hstack([0 * z, z]) if z.shape[1] == 1 else z
    weight = model.net_.module_.head.weight.double().square().sum().item()
    return (logsumexp(z, axis=1) - z[np.arange(len(y)), y]).sum() + weight / (2 * model.C)


# The first two are the hardest of several hundred for the rule that stops.
@pytest.mark.parametrize(("seed", "C"), [(11, 0.1), (14, 10.0), (0, 1e-2), (1, 1.0), (2, 1e2)])
def test_probe_meets_its_tolerance_on_separable_data(seed, C):
    rng = np.random.default_rng(seed)
    n_classes = int(rng.integers(3, 8))
    X = rng.normal(size=(300, int(rng.integers(n_classes, 20))))
    y = rng.integers(0, n_classes, 300)
    X[np.arange(300), y] += rng.uniform(1, 4)
    found, best = (
        objective(MR2Classifier(margin_statistic=None, C=C, tol=tol).fit(X, y), X, y)
        for tol in (1e-6, 1e-12)
    )
    assert found <= best * (1 + 1e-6)


@given(
    offset=st.sampled_from([0.0, 10.0, 1e3, 1e6]),
    C=st.sampled_from([0.01, 1.0, 1e3]),
    seed=st.integers(0, 1000),
)
def test_probe_does_not_depend_on_an_offset_of_the_features(offset, C, seed):
    rng = np.random.default_rng(seed)
    n_features, n_classes = int(rng.integers(1, 6)), int(rng.integers(2, 5))
    X, y = rng.normal(size=(60, n_features)), np.arange(60) % n_classes
    X[:, 0] += y
    there = X + offset * rng.normal(size=n_features)
    model = MR2Classifier(margin_statistic=None, C=C)
    centred = there - there.mean(0)  # rounded as `there` is
    found, expected = (objective(clone(model).fit(Z, y), Z, y) for Z in (there, centred))
    assert found == pytest.approx(expected, rel=2e-6)


def test_probe_of_raw_columns_of_very_different_scale():
    X, y = load_iris(return_X_y=True)
    seconds = np.linspace(1.5e9, 1.6e9, len(y))  # as of a clock
    X = np.column_stack([X, seconds])
    model = MR2Classifier(margin_statistic=None, C=1000, tol=1e-8)
    raw, centred = (clone(model).fit(Z, y) for Z in (X, X - X.mean(0)))
    np.testing.assert_allclose(raw.coef_, centred.coef_, rtol=1e-3, atol=1e-9)


def test_features_whose_squares_overflow_are_refused():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(2**16, 8)).astype(np.float32), np.arange(2**16) % 3
    with pytest.raises(ValueError, match=r"values in X overflow.*StandardScaler"):
        MR2Classifier().fit(X * np.float32(1e25), y)


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_features_of_any_scale_in_double_precision(scale):
    X, y = load_iris(return_X_y=True)
    model = MR2Classifier(C=scale**-2)  # the same problem
    assert model.fit(X * scale, y).score(X * scale, y) >= 0.97


@pytest.mark.parametrize("constant", [0.1, 1000.0])
@pytest.mark.parametrize("n_features", [6, 300])  # by the Hessian, and by the Gram matrix
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_constant_column_is_no_feature(constant, n_features, dtype):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, n_features))
    y = (X[:, :3] + rng.normal(size=(3000, 3))).argmax(1)
    plain = MR2Classifier(margin_statistic=None, C=np.inf, dtype=dtype).fit(X, y)
    model = clone(plain).fit(np.column_stack([X, np.full(3000, constant)]), y)
    assert np.abs(model.coef_).max() < 1e3
    predicted = model.predict_proba(np.column_stack([X, np.full(3000, constant)]))
    np.testing.assert_allclose(predicted, plain.predict_proba(X), atol=2e-3)


@pytest.mark.parametrize("C", [1e8, 1e12, np.inf])
def test_fewer_samples_than_features_of_low_rank(C):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 20))
    y = (X[:, :3] + 3 * rng.normal(size=(200, 3))).argmax(1)
    wide = X @ np.linalg.qr(rng.normal(size=(300, 20)))[0].T  # rotated: the same problem
    model = MR2Classifier(margin_statistic=None, C=C, tol=1e-8)
    narrow, found = clone(model).fit(X, y), clone(model).fit(wide, y)
    np.testing.assert_allclose(found.predict_proba(wide), narrow.predict_proba(X), atol=1e-3)


def test_separable_data_without_a_penalty():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 4)), np.arange(200) % 4
    X[np.arange(200), y] += 8
    model = MR2Classifier(C=np.inf)
    assert model.fit(X, y).score(X, y) == 1


@pytest.mark.parametrize(
    ("suggested", "taken"), [([0.9, 2.1], True), ([-5.0, 9.0], False), ([np.nan, 0.0], False)]
)
def test_a_suggested_start_is_taken_where_it_is_better(suggested, taken):
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer, values, points = PreconditionedLBFGS([x], history_size=1), [], []

    def closure():
        optimizer.zero_grad()
        loss = (x - torch.tensor([1.0, 2.0])).pow(4).sum() + 1.0
        loss.backward()
        points.append(x.detach().clone())
        values.append(loss.item())
        return loss

    optimizer.suggest([torch.tensor(suggested, dtype=torch.float64)])
    optimizer.step(closure)
    np.testing.assert_array_equal(points[0], [0, 0])
    np.testing.assert_array_equal(points[1], suggested)
    start = points[1] if taken else points[0]
    gradient = 4 * (start - torch.tensor([1.0, 2.0])).pow(3)
    # The first step is one against the gradient at the start that was taken.
    step = points[2] - start
    assert torch.allclose(step / step.norm(), -gradient / gradient.norm())
