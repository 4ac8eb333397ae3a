"""The full-batch optimiser of linear probes against closed forms and dense linear algebra."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


@pytest.mark.parametrize(("dtype", "scale"), [(np.float64, 1e20), (np.float32, 1e25)])
def test_features_whose_squares_overflow_are_refused(dtype, scale):
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match=r"values in X overflow.*StandardScaler"):
        MR2Classifier().fit((X * scale).astype(dtype), y)
