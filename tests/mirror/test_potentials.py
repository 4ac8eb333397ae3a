"""The potentials' identities, against autograd, root finding and limits."""

import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from sklearn_mr2.mirror.potentials import (
    Euclidean,
    HyperbolicEntropy,
    Potential,
    Power,
    SmoothedPower,
    get_potential,
)

exponents = st.floats(2, 6)
lams = st.floats(-3, 2).map(lambda e: 10**e)
potentials = st.one_of(
    st.just(Euclidean()),
    st.builds(Power, p=st.floats(1.25, 6)),
    st.builds(SmoothedPower, p=exponents, lam=lams),
    st.builds(HyperbolicEntropy, lam=lams),
)
dtypes = st.sampled_from([torch.float32, torch.float64])
# Powers up to the seventh of these stay far inside float32's range.
points = st.lists(
    st.tuples(st.floats(-3, 3), st.sampled_from([-1.0, 1.0])).map(lambda s: s[1] * 10 ** s[0]),
    min_size=1,
    max_size=12,
)


def tensor(values, dtype):
    return torch.tensor(values, dtype=dtype)


def eps(dtype):
    return torch.finfo(dtype).eps


@given(potentials, points, dtypes)
def test_inverse_undoes_the_gradient(potential, values, dtype):
    t = tensor(values, dtype)
    z = potential.gradient(t)
    # A relative error e of z is one of e r'(t) / (t r''(t)) in t: no formula does better.
    condition = z / (t * potential.hessian_diagonal(t))
    error = (potential.inverse(z) - t).abs() / t.abs()
    assert (error <= 8 * eps(dtype) * (1 + condition)).all()


@given(potentials, points, dtypes)
def test_image_is_the_inverse_in_place(potential, values, dtype):
    z = tensor([*values, 0.0, -0.0, 1e-30, -1e-30], dtype).clamp(-50, 50)
    before, t = z.clone(), torch.full_like(z, torch.nan)
    potential.image_(t, z)
    assert torch.equal(z, before)
    assert (t[z == 0] == 0).all()
    torch.testing.assert_close(t, potential.inverse(z), rtol=8 * eps(dtype), atol=0)


@given(potentials, points)
def test_inverse_to_1e14_in_float64(potential, values):
    t = tensor(values, torch.float64).clamp(-50, 50)
    error = (potential.inverse(potential.gradient(t)) - t).abs() / t.abs()
    assert error.max() <= 1e-14


@given(potentials, points, dtypes)
def test_fenchel_young_equality(potential, values, dtype):
    t = tensor(values, dtype)
    z = potential.gradient(t)
    r, q, product = potential.value(t), potential.conjugate(z), t * z
    scale = r.abs() + q.abs() + product.abs()
    condition = z / (t * potential.hessian_diagonal(t))
    assert ((r + q - product).abs() <= 8 * eps(dtype) * (1 + condition) * scale).all()
    assert ((potential.dual(t) - q).abs() <= 16 * eps(dtype) * (1 + condition) * q).all()


@given(potentials, points, points)
def test_fenchel_young_inequality(potential, values, others):
    s, t = tensor(values, torch.float64)[:, None], tensor(others, torch.float64)
    z = potential.gradient(t)
    left, right = potential.value(s) + potential.conjugate(z), s * z
    assert (left >= right - 1e-12 * (left.abs() + right.abs() + 1)).all()


@given(potentials, points, dtypes)
def test_derivatives_against_autograd(potential, values, dtype):
    t = tensor(values, dtype).requires_grad_()
    (first,) = torch.autograd.grad(potential.value(t).sum(), t)
    (second,) = torch.autograd.grad(potential.gradient(t).sum(), t)
    z = potential.gradient(t).detach().requires_grad_()
    (back,) = torch.autograd.grad(potential.conjugate(z).sum(), z)
    rtol = 1e3 * eps(dtype)
    torch.testing.assert_close(first, potential.gradient(t), rtol=rtol, atol=1e2 * eps(dtype))
    torch.testing.assert_close(second, potential.hessian_diagonal(t), rtol=rtol, atol=0)
    torch.testing.assert_close(back, potential.inverse(z), rtol=rtol, atol=1e2 * eps(dtype))


# Squares of smaller numbers underflow.
@given(
    potentials,
    st.lists(st.floats(-5, 5).filter(lambda v: v == 0 or abs(v) > 1e-100), min_size=1, max_size=8),
)
def test_horizon_is_the_limit_of_the_dual(potential, values):
    theta = tensor(values, torch.float64)
    phi = potential.horizon(theta)
    distances = [
        float(eta * (potential.alpha * potential.total_dual(theta / eta)) ** (1 / potential.alpha))
        - float(phi)
        for eta in (1e-5, 1e-8)
    ]
    # What smoothing adds to Q vanishes relative to the growth: eta lam for the hyperbolic entropy,
    # a power of eta lam between 1 - 2/p and 1 for the smoothed power.
    lam = getattr(potential, "lam", 0.0)
    slowest = min(1.0, 1 - 2 / potential.alpha) if isinstance(potential, SmoothedPower) else 1.0
    for eta, distance in zip((1e-5, 1e-8), distances, strict=True):
        bound = 10 * len(values) * max(lam, 1) * eta**slowest if potential.alpha != 2 else 0.0
        assert abs(distance) <= bound + 1e-12 * float(phi)


@pytest.mark.parametrize(
    ("potential", "norm"),
    [
        (Euclidean(), lambda t: np.linalg.norm(t)),
        (Power(3), lambda t: 2 ** (1 / 3) * np.sum(np.abs(t) ** 3) ** (1 / 3)),
        (SmoothedPower(4, 0.2), lambda t: 3 ** (1 / 4) * np.sum(np.abs(t) ** 4) ** (1 / 4)),
        (SmoothedPower(2, 0.5), lambda t: 1.5**0.5 * np.linalg.norm(t)),
        (HyperbolicEntropy(0.3), lambda t: np.abs(t).sum()),
    ],
)
def test_horizon_closed_form_over_several_tensors(potential, norm):
    parts = [torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.tensor([0.5])]
    expected = norm(np.array([1.0, -2.0, 0.0, 3.0, 0.5]))
    assert float(potential.horizon(iter(parts))) == pytest.approx(expected, rel=1e-6)
    limit = 1e-5 * (potential.alpha * potential.total_dual(p.double() * 1e5 for p in parts)) ** (
        1 / potential.alpha
    )
    assert float(limit) == pytest.approx(expected, rel=1e-5)


def test_horizon_of_zero_and_of_huge_parameters():
    assert float(Power(4).horizon(torch.zeros(3))) == 0.0
    assert float(Power(4).horizon(torch.full((2,), 1e20))) == pytest.approx(6**0.25 * 1e20)


@pytest.mark.parametrize("p", [2.0, 2.0001, 2.3, 3.0, 3.5, 4.0, 7.0, 20.0])
@pytest.mark.parametrize("lam", [1e-8, 0.01, 1.0, 1e3])
def test_smoothed_power_inverse_over_sixty_decades(p, lam):
    z = torch.logspace(-30, 30, 2001, dtype=torch.float64)
    t = SmoothedPower(p, lam).inverse(z)
    residual = SmoothedPower(p, lam).gradient(t) / z - 1
    assert residual.abs().max() <= 1e-15 * (4 + p)


@pytest.mark.parametrize(
    "potential", [Power(1.5), Power(3), SmoothedPower(3, 0.3), SmoothedPower(4.2, 0.01),
                  HyperbolicEntropy(0.1)]
)  # fmt: skip
@pytest.mark.parametrize("z", [-7.0, -0.01, 0.4, 12.0])
def test_inverse_against_root_finding(potential, z):
    root = brentq(
        lambda t: float(potential.gradient(tensor([t], torch.float64))) - z, -1e5, 1e5, xtol=1e-14
    )
    inverse = float(potential.inverse(tensor([z], torch.float64)))
    assert inverse == pytest.approx(root, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "potential",
    [Euclidean(), Power(3), Power(4.5), SmoothedPower(), SmoothedPower(5), HyperbolicEntropy()],
)
def test_zero_is_a_fixed_point_and_signs_survive(potential, dtype):
    zero = torch.zeros(3, dtype=dtype)
    assert (potential.gradient(zero) == 0).all()
    assert (potential.inverse(zero) == 0).all()
    t = torch.tensor([[0.3, 1.7]], dtype=dtype)
    for method in (potential.gradient, potential.inverse):
        out = method(-t)
        assert torch.equal(out, -method(t))
        assert out.dtype == dtype
        assert out.shape == t.shape


def test_hyperbolic_entropy_where_cosh_overflows():
    potential = HyperbolicEntropy(1e-3)
    t = torch.tensor([1e30, -1e33])
    z = potential.gradient(t)
    torch.testing.assert_close(potential.inverse(z), t, rtol=1e-4, atol=0)
    torch.testing.assert_close(potential.conjugate(z), t.abs(), rtol=1e-4, atol=0)
    # sqrt(t^2 + lam^2) without squaring
    torch.testing.assert_close(potential.dual(t), t.abs())
    assert float(potential.dual(torch.zeros(5)).sum()) == pytest.approx(5e-3)


def test_unsmoothed_power_has_no_curvature_at_zero():
    zero = torch.zeros(1)
    assert float(Power(3).hessian_diagonal(zero)) == 0.0
    assert float(SmoothedPower(3, 0.5).hessian_diagonal(zero)) == 0.5


@pytest.mark.parametrize(
    "potential", [Euclidean(), Power(4), SmoothedPower(3, 0.2), HyperbolicEntropy(0.3)]
)
def test_potentials_are_values(potential):
    for other in (pickle.loads(pickle.dumps(potential)), copy.deepcopy(potential)):
        assert other == potential
        assert hash(other) == hash(potential)
        assert repr(other) == repr(potential)
    assert eval(repr(potential)) == potential
    assert type(potential)(**potential.get_params()) == potential
    buffer = io.BytesIO()
    torch.save(potential, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == potential


def test_potentials_are_immutable():
    potential = HyperbolicEntropy(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        potential.lam = 1.0
    assert dataclasses.replace(potential, lam=1.0) == HyperbolicEntropy(1.0)
    assert HyperbolicEntropy(1.0) != potential
    assert SmoothedPower(3, 0.1) != SmoothedPower(4, 0.1)


def test_numpy_scalars_as_parameters():
    lam = np.logspace(-1, 0, 2)[0]
    t = torch.randn(4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for potential in (HyperbolicEntropy(lam), SmoothedPower(np.int64(3), lam)):
        assert isinstance(potential.inverse(potential.gradient(t)), torch.Tensor)
        assert isinstance(potential.alpha, float)


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("euclidean", {}, Euclidean()),
        ("power", {"p": 4}, Power(4)),
        ("smoothed_power", {"p": 4, "lam": 0.5}, SmoothedPower(4, 0.5)),
        ("hyperbolic_entropy", {"lam": 1.0}, HyperbolicEntropy(1.0)),
        (Power(3), {"p": 5}, Power(5)),
        (Power(3), {}, Power(3)),
    ],
)
def test_get_potential(name, params, expected):
    assert get_potential(name, **params) == expected


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: get_potential("entropy"), ValueError, "hyperbolic_entropy"),
        (lambda: get_potential("power", lam=1.0), TypeError, "no parameter lam"),
        (lambda: get_potential(3), TypeError, "must be a string or a Potential"),
        (lambda: Power(1), ValueError, "p must be a finite number > 1"),
        (lambda: SmoothedPower(1.5), ValueError, "p must be a finite number >= 2"),
        (lambda: SmoothedPower(3, 0), ValueError, "lam must be a finite number > 0"),
        (lambda: HyperbolicEntropy(float("nan")), ValueError, "lam must be a finite number"),
        (lambda: HyperbolicEntropy("0.1"), TypeError, "lam must be a finite number"),
    ],
)
def test_bad_parameters(call, error, words):
    with pytest.raises(error, match=words):
        call()


@dataclasses.dataclass(frozen=True)
class Scaled(Potential):
    weight: float = 2.0
    alpha = 2.0

    @property
    def horizon_scale(self):
        return self.weight**0.5

    def value(self, t):
        return self.weight * t**2 / 2

    def gradient(self, t):
        return self.weight * t

    def inverse(self, z):
        return z / self.weight

    def hessian_diagonal(self, t):
        return torch.full_like(t, self.weight)


def test_a_users_potential_gets_dual_conjugate_and_horizon():
    potential, t = Scaled(4.0), torch.tensor([1.0, -3.0])
    assert torch.equal(potential.dual(t), 2 * t**2)
    assert torch.equal(potential.conjugate(4 * t), 2 * t**2)
    assert float(potential.horizon(t)) == pytest.approx((4 * 10) ** 0.5)
    assert get_potential(potential, weight=1.0) == Scaled(1.0)


def test_an_undecorated_potential_is_named_in_the_error():
    class Bare(Scaled.__base__):
        alpha = 2.0
        value = gradient = inverse = hessian_diagonal = lambda self, t: t

    with pytest.raises(TypeError, match="Bare is not a dataclass"):
        Bare().get_params()
