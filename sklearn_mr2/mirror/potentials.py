r"""Mirror potentials: the geometry in which mirror flow moves.

A potential is a separable, strictly convex function :math:`R(\theta) = \sum_i r(\theta_i)`.
Mirror flow follows the loss in the dual variable :math:`z = r'(\theta)`; the choice of the
potential decides which norm the classifier's margin becomes maximal in.

Every method is elementwise and returns a tensor of its argument's shape, dtype and device; only
:meth:`Potential.horizon` and :meth:`Potential.total_dual` reduce to a scalar.

A new potential is a frozen dataclass with four formulas and the growth rate ``alpha``:

>>> import dataclasses
>>> import torch
>>> from sklearn_mr2.mirror.potentials import Potential
>>> @dataclasses.dataclass(frozen=True)
... class Logarithmic(Potential):
...     lam: float = 0.1
...     alpha = 1.0  # Q(r'(t)) = |t| - lam log(1 + |t|/lam) grows like |t|: an L1 margin
...     max_dual_step = 0.3  # the inverse grows exponentially
...     def value(self, t):
...         return (self.lam + t.abs()) * torch.log1p(t.abs() / self.lam) - t.abs()
...     def gradient(self, t):
...         return torch.log1p(t.abs() / self.lam).copysign(t)
...     def inverse(self, z):
...         return torch.expm1(z.abs()).mul(self.lam).copysign(z)
...     def hessian_diagonal(self, t):
...         return 1 / (self.lam + t.abs())
>>> potential = Logarithmic(0.5)
>>> potential
Logarithmic(lam=0.5)
>>> potential.inverse(potential.gradient(torch.tensor([-1.0, 2.0])))
tensor([-1.,  2.])

References
----------
P. Jacobs and G. Montufar, "Implicit bias of mirror flow in homogeneous neural networks",
arXiv:2605.19458.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = [
    "Euclidean",
    "HyperbolicEntropy",
    "Potential",
    "Power",
    "SmoothedPower",
    "get_potential",
]


class Potential(ABC):
    r"""A separable, strictly convex mirror potential :math:`R(\theta) = \sum_i r(\theta_i)`.

    Subclasses are frozen dataclasses whose fields are the potential's parameters: that gives
    them equality, a hash, a readable ``repr`` and pickling. They are immutable, so a potential
    may be shared between parameter groups and estimators; ``dataclasses.replace(potential,
    lam=0.3)`` makes a changed copy.

    A subclass defines :meth:`value`, :meth:`gradient`, :meth:`inverse`,
    :meth:`hessian_diagonal` and :attr:`alpha`. It should override :meth:`dual` where
    :math:`t r'(t) - r(t)` cancels, and :attr:`horizon_scale` where :math:`Q` does not grow
    exactly like :math:`|t|^\alpha / \alpha`.

    Attributes
    ----------
    name : str
        The name :func:`get_potential` knows the potential by.
    max_dual_step : float
        The largest change of one dual coordinate in one step of
        :class:`~sklearn_mr2.mirror.optimizer.MirrorDescent`. Infinite unless the inverse grows
        exponentially, where an unbounded dual step means an overflow.
    """

    name: ClassVar[str] = ""
    max_dual_step: ClassVar[float] = math.inf

    @property
    @abstractmethod
    def alpha(self) -> float:
        r"""Growth rate of the dual potential: :math:`Q(r'(t)) \sim |t|^\alpha` for large t."""

    @property
    def horizon_scale(self) -> float:
        r"""The constant :math:`s` in :math:`\alpha Q(r'(t)) \to (s |t|)^\alpha` for large t."""
        return 1.0

    @abstractmethod
    def value(self, t: Tensor) -> Tensor:
        """The potential :math:`r(t)`."""

    @abstractmethod
    def gradient(self, t: Tensor) -> Tensor:
        """The mirror map :math:`z = r'(t)`."""

    @abstractmethod
    def inverse(self, z: Tensor) -> Tensor:
        """The inverse mirror map :math:`t = (r')^{-1}(z)`."""

    def image_(self, t: Tensor, z: Tensor) -> None:
        r"""Overwrite `t` with :math:`(r')^{-1}(z)`, within a few units in the last place.

        What an optimiser does in each step. A subclass may override it to save passes over memory
        and fresh memory, which cost more than the arithmetic where the inverse is simple.

        Parameters
        ----------
        t : Tensor
            What is overwritten; of the shape and dtype of `z`, sharing no memory with it.
        z : Tensor
            The dual variable.
        """
        t.copy_(self.inverse(z))

    @abstractmethod
    def hessian_diagonal(self, t: Tensor) -> Tensor:
        """The second derivative :math:`r''(t)`."""

    def dual(self, t: Tensor) -> Tensor:
        r"""The dual potential at the primal point, :math:`Q(r'(t)) = t r'(t) - r(t)`."""
        return t * self.gradient(t) - self.value(t)

    def conjugate(self, z: Tensor) -> Tensor:
        r"""The convex conjugate :math:`q(z) = \sup_t (z t - r(t))`."""
        return self.dual(self.inverse(z))

    def total_dual(self, params: Tensor | Iterable[Tensor]) -> Tensor:
        r"""The paper's :math:`Q(\nabla R(\theta))`: :meth:`dual` summed over all parameters.

        Parameters
        ----------
        params : Tensor or iterable of Tensor
            The parameters, of any shapes.

        Returns
        -------
        Tensor
            A scalar.
        """
        return torch.stack([self.dual(t).sum() for t in _tensors(params)]).sum()

    def horizon(self, params: Tensor | Iterable[Tensor]) -> Tensor:
        r"""The horizon function, a multiple of the :math:`L_\alpha` (quasi-)norm.

        .. math::
            \phi_\alpha(\theta)
            = \lim_{\eta \to 0} \eta\,(\alpha Q(\nabla R(\theta / \eta)))^{1/\alpha}
            = s \,\|\theta\|_\alpha

        Parameters
        ----------
        params : Tensor or iterable of Tensor
            The parameters, of any shapes.

        Returns
        -------
        Tensor
            A scalar.
        """
        tensors = _tensors(params)
        largest = torch.stack([t.abs().max() for t in tensors]).max()
        # Dividing by the largest entry first keeps its alpha-th power in the dtype's range.
        unit = torch.where(largest > 0, largest, torch.ones_like(largest))
        norms = [torch.linalg.vector_norm(t / unit, ord=self.alpha) for t in tensors]
        return self.horizon_scale * unit * torch.linalg.vector_norm(torch.stack(norms), self.alpha)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The potential's parameters by name.

        There is no ``set_params``, since potentials are immutable: use
        ``dataclasses.replace(potential, **params)``.

        Parameters
        ----------
        deep : bool, default=True
            Ignored: parameters are numbers. Present for scikit-learn's convention.

        Returns
        -------
        dict
            Names and values of the dataclass fields.
        """
        if not dataclasses.is_dataclass(self):
            raise TypeError(
                f"{type(self).__name__} is not a dataclass: decorate it with "
                "@dataclasses.dataclass(frozen=True)"
            )
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class Euclidean(Potential):
    r"""The Euclidean potential :math:`r(t) = t^2 / 2`: gradient flow, an :math:`L_2` margin.

    Examples
    --------
    >>> import torch
    >>> Euclidean().horizon(torch.tensor([3.0, -4.0]))
    tensor(5.)
    """

    name: ClassVar[str] = "euclidean"

    @property
    def alpha(self) -> float:
        return 2.0

    def value(self, t: Tensor) -> Tensor:
        return t.square() / 2

    def gradient(self, t: Tensor) -> Tensor:
        return t

    def inverse(self, z: Tensor) -> Tensor:
        return z

    def hessian_diagonal(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def dual(self, t: Tensor) -> Tensor:
        return t.square() / 2


@dataclasses.dataclass(frozen=True)
class Power(Potential):
    r"""The homogeneous potential :math:`r(t) = |t|^p / p`: an :math:`L_p` margin.

    Parameters
    ----------
    p : float, default=3
        The exponent, greater than 1. The paper's convergence theorems need :math:`p \ge 2`.

    Notes
    -----
    :math:`r''(0)` is 0 for :math:`p > 2` and infinite for :math:`p < 2`.

    Examples
    --------
    >>> import torch
    >>> Power(3).gradient(torch.tensor([-2.0, 0.0, 3.0]))
    tensor([-4.,  0.,  9.])
    """

    name: ClassVar[str] = "power"
    p: float = 3.0

    def __post_init__(self) -> None:
        _check_number("p", self.p, 1, inclusive=False)

    @property
    def alpha(self) -> float:
        return float(self.p)

    @property
    def horizon_scale(self) -> float:
        return (self.alpha - 1) ** (1 / self.alpha)

    def value(self, t: Tensor) -> Tensor:
        return t.abs().pow(self.alpha) / self.alpha

    def gradient(self, t: Tensor) -> Tensor:
        return t.abs().pow(self.alpha - 1).copysign(t)

    def inverse(self, z: Tensor) -> Tensor:
        return z.abs().pow(1 / (self.alpha - 1)).copysign(z)

    def image_(self, t: Tensor, z: Tensor) -> None:
        if self.p != 3:
            super().image_(t, z)
            return
        # z / sqrt|z| has the sign of z by itself. The clamp makes it 0 at 0.
        torch.abs(z, out=t).clamp_(min=torch.finfo(t.dtype).tiny).rsqrt_().mul_(z)

    def hessian_diagonal(self, t: Tensor) -> Tensor:
        return (self.alpha - 1) * t.abs().pow(self.alpha - 2)

    def dual(self, t: Tensor) -> Tensor:
        return (self.alpha - 1) / self.alpha * t.abs().pow(self.alpha)


@dataclasses.dataclass(frozen=True)
class SmoothedPower(Potential):
    r"""The smoothed power :math:`r(t) = |t|^p / p + \lambda t^2 / 2`: an :math:`L_p` margin.

    The quadratic term keeps :math:`r''(0) = \lambda` positive.

    Parameters
    ----------
    p : float, default=3
        The exponent, at least 2.
    lam : float, default=0.01
        The weight of the quadratic term, positive.

    Examples
    --------
    >>> import torch
    >>> potential = SmoothedPower(3, lam=0.5)
    >>> potential.inverse(potential.gradient(torch.tensor([-2.0, 0.0, 3.0])))
    tensor([-2.,  0.,  3.])
    """

    name: ClassVar[str] = "smoothed_power"
    p: float = 3.0
    lam: float = 0.01

    # Newton's method from above needs at most this many steps to reach float64's precision,
    # for any p, lam and z.
    _NEWTON_STEPS: ClassVar[int] = 7

    def __post_init__(self) -> None:
        _check_number("p", self.p, 2)
        _check_number("lam", self.lam, 0, inclusive=False)

    @property
    def alpha(self) -> float:
        return float(self.p)

    @property
    def horizon_scale(self) -> float:
        # At p = 2 the quadratic term grows as fast as the power.
        return (self.alpha - 1 + (float(self.lam) if self.p == 2 else 0)) ** (1 / self.alpha)

    def value(self, t: Tensor) -> Tensor:
        return t.abs().pow(self.alpha) / self.alpha + float(self.lam) / 2 * t.square()

    def gradient(self, t: Tensor) -> Tensor:
        return t.abs().pow(self.alpha - 1).copysign(t) + float(self.lam) * t

    def inverse(self, z: Tensor) -> Tensor:
        lam, degree = float(self.lam), self.alpha - 1
        if self.p == 2:
            return z / (1 + lam)
        if self.p == 3:
            # The root of u^2 + lam u = |z| without a difference of nearly equal numbers.
            return z / ((z.abs() + lam * lam / 4).sqrt() + lam / 2)
        size = z.abs()
        # Both terms of u^degree + lam u are positive, so the root lies below either bound, and
        # the convex function's Newton iterates fall to it monotonically.
        u = torch.minimum(size / lam, size.pow(1 / degree))
        for _ in range(self._NEWTON_STEPS):
            slope = u.pow(degree - 1)
            u = (size + (degree - 1) * slope * u) / (degree * slope + lam)
        return u.copysign(z)

    def image_(self, t: Tensor, z: Tensor) -> None:
        if self.p != 3:
            super().image_(t, z)
            return
        half = float(self.lam) / 2
        torch.abs(z, out=t).add_(half * half).sqrt_().add_(half)
        torch.div(z, t, out=t)

    def hessian_diagonal(self, t: Tensor) -> Tensor:
        return (self.alpha - 1) * t.abs().pow(self.alpha - 2) + float(self.lam)

    def dual(self, t: Tensor) -> Tensor:
        power = (self.alpha - 1) / self.alpha * t.abs().pow(self.alpha)
        return power + float(self.lam) / 2 * t.square()


@dataclasses.dataclass(frozen=True)
class HyperbolicEntropy(Potential):
    r"""The hyperbolic entropy: an :math:`L_1` margin, sparse features.

    :math:`r(t) = t \operatorname{asinh}(t / \lambda) - \sqrt{t^2 + \lambda^2}`.

    Parameters
    ----------
    lam : float, default=0.1
        The scale below which the potential is quadratic, positive. Both a tiny and a large value
        make the approach to the :math:`L_1` margin slow; 0.01 to 1 is a sensible range.

    Notes
    -----
    The dual potential is not shifted: :math:`Q(\nabla R(0)) = \lambda` for each parameter. A
    one-homogeneous :math:`R` would have :math:`Q = 0` everywhere.

    :meth:`inverse` is finite wherever :math:`|t| < \lambda M`, M being the dtype's largest number.

    Examples
    --------
    >>> import torch
    >>> potential = HyperbolicEntropy(lam=0.1)
    >>> potential.horizon(torch.tensor([3.0, -4.0]))
    tensor(7.)
    >>> potential.dual(torch.zeros(2))
    tensor([0.1000, 0.1000])
    """

    name: ClassVar[str] = "hyperbolic_entropy"
    # sqrt(t^2 + lam^2) grows at most by the factor exp(0.3) = 1.35 in one step.
    max_dual_step: ClassVar[float] = 0.3
    lam: float = 0.1

    def __post_init__(self) -> None:
        _check_number("lam", self.lam, 0, inclusive=False)

    @property
    def alpha(self) -> float:
        return 1.0

    def value(self, t: Tensor) -> Tensor:
        return t * self.gradient(t) - self.dual(t)

    def gradient(self, t: Tensor) -> Tensor:
        return torch.asinh(t / float(self.lam))

    def inverse(self, z: Tensor) -> Tensor:
        return torch.sinh(z).mul_(float(self.lam))

    def image_(self, t: Tensor, z: Tensor) -> None:
        torch.sinh(z, out=t).mul_(float(self.lam))

    def hessian_diagonal(self, t: Tensor) -> Tensor:
        return self.dual(t).reciprocal()

    def dual(self, t: Tensor) -> Tensor:
        return torch.hypot(t, torch.full((), float(self.lam), dtype=t.dtype, device=t.device))


POTENTIALS: dict[str, type[Potential]] = {
    cls.name: cls for cls in (Euclidean, Power, SmoothedPower, HyperbolicEntropy)
}
# torch.load(weights_only=True) then reads an optimiser's state, which names its potentials.
torch.serialization.add_safe_globals(list(POTENTIALS.values()))


def get_potential(potential: str | Potential, **params: float) -> Potential:
    """Return a potential by its name, or a changed copy of a given one.

    Parameters
    ----------
    potential : str or Potential
        "euclidean", "power", "smoothed_power", "hyperbolic_entropy", or an instance.
    **params : float
        Parameters of the potential, such as ``lam`` and ``p``.

    Returns
    -------
    Potential
        The potential with the given parameters.

    Raises
    ------
    ValueError
        If the name is unknown or a parameter's value is out of range.
    TypeError
        If the potential has no such parameter, or is neither a string nor a Potential.

    Examples
    --------
    >>> get_potential("smoothed_power", lam=0.5)
    SmoothedPower(p=3.0, lam=0.5)
    >>> get_potential(HyperbolicEntropy(), lam=1.0)
    HyperbolicEntropy(lam=1.0)
    """
    if isinstance(potential, str):
        if potential not in POTENTIALS:
            raise ValueError(
                f"unknown potential {potential!r}: choose one of {sorted(POTENTIALS)} or pass a "
                "Potential"
            )
        potential = POTENTIALS[potential]()
    elif not isinstance(potential, Potential):
        raise TypeError(
            f"potential must be a string or a Potential, not {type(potential).__name__}"
        )
    unknown = sorted(set(params) - set(potential.get_params())) if params else []
    if unknown:
        raise TypeError(
            f"{type(potential).__name__} has no parameter {', '.join(unknown)}; it has "
            f"{sorted(potential.get_params()) or 'none'}"
        )
    return dataclasses.replace(potential, **params) if params else potential  # type: ignore[type-var]


def _check_number(name: str, value: float, low: float, inclusive: bool = True) -> None:
    sign = ">=" if inclusive else ">"
    message = f"{name} must be a finite number {sign} {low}, got {value!r}"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(message)
    if not math.isfinite(value) or value < low or (value == low and not inclusive):
        raise ValueError(message)


def _tensors(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)
