"""Cross-entropy that stays precise where it is small, and distances, against plain formulas."""

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from sklearn_mr2.mr2.functional import relative_cross_entropy, squared_distances


def exact(row, label):
    with mpmath.workdps(40):
        others = [mpmath.exp(mpmath.mpf(z) - row[label]) for k, z in enumerate(row) if k != label]
        return float(mpmath.log1p(mpmath.fsum(others)))


@given(
    seed=st.integers(0, 10_000),
    n_classes=st.integers(2, 8),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_relative_error(seed, n_classes, scale, dtype):
    rng = np.random.default_rng(seed)
    logits = torch.as_tensor(scale * rng.normal(size=(5, n_classes)), dtype=dtype)
    y = torch.as_tensor(rng.integers(n_classes, size=5))
    expected = [exact(row, label) for row, label in zip(logits.tolist(), y.tolist(), strict=True)]
    loss = relative_cross_entropy(logits, y)
    tiny = torch.finfo(dtype).tiny
    # The difference of two logits is rounded, and its exponential is that much off.
    rtol = 4 * torch.finfo(dtype).eps * (n_classes + 5 * max(scale, 1))
    np.testing.assert_allclose(loss.tolist(), expected, rtol=min(rtol, 0.5), atol=tiny)


@given(seed=st.integers(0, 10_000), n_classes=st.integers(2, 8))
def test_gradient(seed, n_classes):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(6, n_classes, generator=generator, dtype=torch.float64)
    y = torch.randint(n_classes, (6,), generator=generator)
    upstream = torch.rand(6, generator=generator, dtype=torch.float64)
    gradients = []
    for loss in (relative_cross_entropy, lambda z, y: cross_entropy(z, y, reduction="none")):
        leaf = logits.clone().requires_grad_()
        (upstream * loss(leaf, y)).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spread", [0.0, 1e3, 1e30])
def test_extreme_logits_are_finite(spread):
    logits = torch.tensor([[spread, 0.0, -spread], [-spread, 0.0, spread]], requires_grad=True)
    loss = relative_cross_entropy(logits, torch.tensor([0, 0]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad.isfinite().all()


def test_precise_where_torch_is_not():
    logits = torch.tensor([[25.0, 0.0, 1.0]])
    loss = relative_cross_entropy(logits, torch.tensor([0]))
    assert loss.item() == pytest.approx(exact([25.0, 0.0, 1.0], 0), rel=1e-5)
    assert cross_entropy(logits, torch.tensor([0])).item() == 0


@given(seed=st.integers(0, 10_000), n=st.integers(1, 6), d=st.integers(1, 5))
def test_squared_distances_and_their_derivatives(seed, n, d):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, d, generator=generator, dtype=torch.float64)
    # The gradient of a sum that weighs (i, j) and (j, i) differently, as the loss does.
    weight = torch.randn(n, n, generator=generator, dtype=torch.float64).fill_diagonal_(0)

    def brute_force(x):
        return (x[:, None] - x).square().sum(2)

    derivatives = []
    for distances in (squared_distances, brute_force):
        x = rows.clone().requires_grad_()
        value = (weight * distances(x)).exp().sum()
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        derivatives.append((value, first, second))
    torch.testing.assert_close(*derivatives, rtol=1e-9, atol=1e-9)
    assert (squared_distances(rows.float()) >= 0).all()


def test_gradient_has_no_subnormal_numbers():
    # They would slow down the matrix product with the features many times.
    gaps = torch.linspace(0, 200, 401)
    logits = torch.stack([torch.zeros_like(gaps), -gaps], dim=1).requires_grad_()
    (relative_cross_entropy(logits, torch.zeros(401, dtype=torch.int64)).sum() / 1e5).backward()
    size = logits.grad.abs()
    assert (size[gaps < 70] > 0).all()
    assert ((size == 0) | (size >= torch.finfo(torch.float32).tiny)).all()
    assert (size == 0).any()
