r"""Mirror descent as a torch optimiser.

The optimiser steps the dual variable, :math:`z \leftarrow z - h\,\nabla L(\theta)`, and maps it
back, :math:`\theta = (\nabla R)^{-1}(z)`. With ``step_size="normalised"`` and a closure returning
the *logarithm* of the loss it integrates the mirror flow itself, in a time in which the margin
grows at a steady pace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .potentials import Euclidean, Potential, get_potential

__all__ = ["MirrorDescent"]

STEP_SIZES = ("constant", "normalised")

# Tensors of at most this many elements are mapped back together, in one concatenated tensor: below
# it the cost of a call outweighs that of copying.
_SMALL = {"cpu": 2**13, "cuda": 2**20}
# On a CPU larger ones are mapped in pieces of this many elements, whose intermediate results stay
# in the cache and in memory that the allocator already holds.
_PIECE = 2**16


class MirrorDescent(Optimizer):
    r"""Mirror descent: gradient steps on the dual variable of a mirror potential.

    Parameters
    ----------
    params : iterable of Tensor or dict
        Parameters, or parameter groups. Each group may have its own ``potential``, such as one
        potential per layer; see :func:`~sklearn_mr2.mirror.networks.layer_groups`.
    lr : float, default=0.1
        With ``step_size="constant"`` the learning rate h. With ``step_size="normalised"`` the
        constant c: the first-order decrease of the closure's value in each step. Keep c below 1:
        on misclassified samples the logarithm of the loss is too curved for more.
    potential : str or Potential, default="hyperbolic_entropy"
        The mirror potential of groups which do not name their own.
    step_size : {"constant", "normalised"}, default="constant"
        "constant" steps by ``lr``, as in mini-batch training.

        "normalised" steps by :math:`h = c / \langle g, g / r''(\theta) \rangle`, the same for all
        groups, with g the gradient of the closure's value. That value must be the logarithm of
        the full-batch loss, :func:`~sklearn_mr2.mirror.losses.log_total_loss`; its logarithmic
        time is kept in :attr:`log_time`.
    weight_decay : float, default=0
        Must be 0. Weight decay bounds the parameters, so the loss cannot go to zero and the flow
        never reaches the large-parameter regime in which it maximises a margin.

    Attributes
    ----------
    log_time : float
        Logarithm of the flow's time, :math:`\log \sum h / L`, in normalised mode.

    Raises
    ------
    FloatingPointError
        By :meth:`step`, where a gradient is not finite or a parameter would leave the range in
        which products of two can be computed. Parameters and state are then untouched.

    Notes
    -----
    *Overflow.* For potentials with exponential inverse (``max_dual_step`` is finite) a step is
    shortened, in either mode, so that no dual coordinate of a group moves by more than
    ``max_dual_step``. For the hyperbolic entropy :math:`\sqrt{\theta^2 + \lambda^2}` then grows at
    most by the factor 1.35 in a step.

    *Zero curvature.* Where :math:`\langle g, g / r'' \rangle` is infinite or zero because
    :math:`r''(0)` is (the unsmoothed power), the normalised h solves
    :math:`\langle g, \theta - (\nabla R)^{-1}(\nabla R(\theta) - h g) \rangle = c`, of which the
    rule above is the linearisation.

    *Stiffness.* Under a power potential a parameter near zero, where :math:`r''` is small, reacts
    much faster than the others. The normalised step becomes short enough to follow it, so that
    :math:`p = 3` needs several times the steps of the Euclidean potential to the same margin, and
    :math:`p \ge 4` many times. A larger ``lam`` of the smoothed power helps.

    *Altered parameters.* The dual variable of a parameter is made at its first step. If the
    parameter has been changed since the last step (an initialisation, ``load_state_dict``,
    pruning), the dual is derived again for those entries which no longer equal the dual's image;
    entries which do keep theirs bit for bit. Changes are noticed through autograd's version
    counter, which an in-place write through ``parameter.data`` evades: call :meth:`refresh` after
    one.

    *Resuming.* The dual variable and the potentials are in ``state_dict``. A run resumed from the
    model's and the optimiser's state continues bit for bit, in whichever order they are loaded.

    The Euclidean potential's dual is the parameter itself: the step is that of plain SGD and there
    is no state.

    References
    ----------
    P. Jacobs and G. Montufar, "Implicit bias of mirror flow in homogeneous neural networks",
    arXiv:2605.19458.

    Examples
    --------
    Two informative features of which the first suffices: the hyperbolic entropy finds it.

    >>> import torch
    >>> from sklearn_mr2.mirror.losses import log_total_loss
    >>> X = torch.tensor([[2.0, 1.0], [-2.0, -1.0]], dtype=torch.float64)
    >>> y = torch.tensor([1, 0])
    >>> w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    >>> optimizer = MirrorDescent([w], potential="hyperbolic_entropy", step_size="normalised")
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     log_loss = log_total_loss(X @ w, y)
    ...     log_loss.backward()
    ...     return log_loss
    >>> for _ in range(1000):
    ...     _ = optimizer.step(closure)
    >>> bool(w[0] > 25 * w[1])
    True
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.1,
        potential: str | Potential = "hyperbolic_entropy",
        *,
        step_size: str = "constant",
        weight_decay: float = 0.0,
    ) -> None:
        if step_size not in STEP_SIZES:
            raise ValueError(f"step_size must be one of {STEP_SIZES}, got {step_size!r}")
        _refuse_weight_decay(weight_decay)
        defaults = {
            "lr": lr,
            "potential": get_potential(potential),
            "step_size": step_size,
            "log_time": -math.inf,
        }
        super().__init__(params, defaults)
        self.refresh()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Loaded parameters and duals are compared before the next step.
        self.refresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, such as a layer with its own potential.

        Parameters
        ----------
        param_group : dict
            ``params`` and, optionally, ``potential`` (a name or a Potential) and ``lr``.
        """
        _refuse_weight_decay(param_group.get("weight_decay", 0))
        param_group = dict(param_group)
        potential = param_group.get("potential", self.defaults["potential"])
        param_group["potential"] = get_potential(potential)
        lr = param_group.get("lr", self.defaults["lr"])
        if not 0 <= float(lr) < math.inf:
            raise ValueError(f"lr must be finite and not negative, got {lr!r}")
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"parameters must be float32 or float64, got {p.dtype}: the dual variable "
                    "needs the precision. For mixed precision keep the parameters in float32 and "
                    "run the forward pass under torch.autocast"
                )

    @property
    def log_time(self) -> float:
        """Logarithm of the flow's time so far; minus infinity before the first step."""
        return self.param_groups[0]["log_time"]

    def refresh(self) -> None:
        """Compare parameters and dual variables anew before the next step.

        Only needed after an in-place write through ``parameter.data``, which torch does not record.
        """
        # What each parameter looked like when its dual was last known to match.
        self._seen: dict[Tensor, tuple[int, int, Potential]] = {}
        # An upper bound on the size of each parameter's dual, where the inverse may overflow.
        self._bounds: dict[Tensor, float] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Take one step.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss and its gradients, and returns the loss. Needed in normalised mode,
            where it must return the logarithm of the full-batch loss.

        Returns
        -------
        Tensor or None
            What the closure returned.

        Raises
        ------
        FloatingPointError
            If the loss or a gradient is not finite, or a parameter would overflow.
        """
        normalised = self.defaults["step_size"] == "normalised"
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        elif normalised:
            raise ValueError(
                "step_size='normalised' needs a closure that returns the logarithm of the loss"
            )
        groups = [group for group in map(_Group, self.param_groups) if group.params]
        for group in groups:
            group.measure_gradient()
        if not groups:
            return loss
        if normalised:
            assert loss is not None
            self._set_normalised_step(groups, float(loss))
        for group in groups:
            self._match_duals(group)
            self._check_range(group)
        for group in groups:
            group.update()
            if not group.is_euclidean:
                self._seen.update((p, _look(p, group.potential)) for p in group.params)
        return loss

    def _set_normalised_step(self, groups: list[_Group], log_loss: float) -> None:
        if not math.isfinite(log_loss):
            raise FloatingPointError(
                f"the closure returned {log_loss}; parameters are unchanged. Lower lr"
            )
        if len({float(group["lr"]) for group in self.param_groups}) > 1:
            raise ValueError(
                "step_size='normalised' needs the same lr in all parameter groups: the flow has "
                "one time"
            )
        decrease = float(self.param_groups[0]["lr"])
        if decrease == 0 or all(group.largest == 0 for group in groups):
            h = 0.0
        else:
            slope = sum(group.slope() for group in groups)
            h = decrease / slope if 0 < slope < math.inf else _solve_step(groups, decrease)
            h = min([h] + [group.longest_step() for group in groups])
        for group in groups:
            group.h = h
        if h > 0:
            log_time = _logaddexp(self.log_time, math.log(h) - log_loss)
            for param_group in self.param_groups:
                param_group["log_time"] = log_time

    def _match_duals(self, group: _Group) -> None:
        """Fill ``group.duals``, deriving again what no longer matches its parameter."""
        if group.is_euclidean:
            return
        for p in group.params:
            state = self.state[p]
            if self._seen.get(p) != _look(p, group.potential):
                state["dual"] = _match(p, state.get("dual"), group.potential)
                self._bounds.pop(p, None)
            group.duals.append(state["dual"])

    def _check_range(self, group: _Group) -> None:
        """Raise before a step that could overflow an exponential inverse.

        Bounds on the duals grow by the step's length and are measured only where they reach the
        limit, so the check costs no pass over the parameters.
        """
        if not math.isfinite(group.potential.max_dual_step):
            return
        length = group.h * group.largest
        for p, z in zip(group.params, group.duals, strict=True):
            limit = _dual_limit(group.potential, p.dtype)
            bound = self._bounds.get(p, math.inf) + length
            if bound > limit:
                bound = _largest([z]) + length
            if bound > limit:
                raise FloatingPointError(
                    f"a parameter under {group.potential!r} would exceed the square root of "
                    f"{p.dtype}'s largest number; parameters are unchanged. Lower lr, or stop here"
                )
            self._bounds[p] = bound


class _Group:
    """One parameter group during one step: the parameters that have gradients."""

    def __init__(self, param_group: dict[str, Any]) -> None:
        self.potential: Potential = param_group["potential"]
        self.is_euclidean = isinstance(self.potential, Euclidean)
        self.params = [p for p in param_group["params"] if p.grad is not None]
        self.grads = [p.grad for p in self.params]
        self.duals: list[Tensor] = []
        self.h = float(param_group["lr"])
        self.largest = math.nan
        self._normalised = param_group["step_size"] == "normalised"

    def measure_gradient(self) -> None:
        """Refuse a gradient that is not finite; find its largest entry if the step needs it."""
        if any(g.layout is not torch.strided for g in self.grads):
            raise TypeError("MirrorDescent does not support sparse gradients")
        if self._normalised or math.isfinite(self.potential.max_dual_step):
            self.largest = _largest(self.grads)
            finite = math.isfinite(self.largest)
            self.h = min(self.h, self.longest_step())
        else:
            # The cheapest pass that meets every NaN and infinity.
            finite = math.isfinite(sum(_numbers([g.sum() for g in self.grads])))
        if not finite:
            raise FloatingPointError(
                "a gradient is not finite; parameters are unchanged. Lower lr, or check the data"
            )

    def longest_step(self) -> float:
        return self.potential.max_dual_step / self.largest if self.largest > 0 else math.inf

    def slope(self) -> float:
        """Rate of decrease of the loss along the flow, <g, g / r''>."""
        terms = []
        for p, g in zip(self.params, self.grads, strict=True):
            ratio = g * g / self.potential.hessian_diagonal(p)
            # 0 / 0: a coordinate without curvature that has no reason to move
            terms.append(torch.where(g == 0, 0, ratio).sum())
        return sum(_numbers(terms))

    def decrease(self, h: float) -> float:
        """The linear model's decrease of the loss over a step of length h."""
        terms = []
        for p, g in zip(self.params, self.grads, strict=True):
            moved = self.potential.inverse(self.potential.gradient(p) - h * g)
            terms.append(torch.sum(g * (p - moved)))
        return sum(_numbers(terms))

    def update(self) -> None:
        if self.is_euclidean:
            torch._foreach_add_(self.params, self.grads, alpha=-self.h)
            return
        torch._foreach_add_(self.duals, self.grads, alpha=-self.h)
        small: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for p, z in zip(self.params, self.duals, strict=True):
            if p.numel() <= _SMALL.get(p.device.type, 0):
                small.setdefault((p.device, p.dtype), []).append((p, z))
            elif p.device.type == "cpu" and p.is_contiguous() and z.is_contiguous():
                pieces = zip(p.view(-1).split(_PIECE), z.view(-1).split(_PIECE), strict=True)
                for p_piece, z_piece in pieces:
                    self.potential.image_(p_piece, z_piece)
            else:
                self.potential.image_(p, z)
        for pairs in small.values():
            flat = self.potential.inverse(torch.cat([z.reshape(-1) for _, z in pairs]))
            parts = flat.split([p.numel() for p, _ in pairs])
            images = [part.view(p.shape) for part, (p, _) in zip(parts, pairs, strict=True)]
            torch._foreach_copy_([p for p, _ in pairs], images)


def _refuse_weight_decay(weight_decay: float) -> None:
    if weight_decay:
        raise ValueError(
            "weight_decay must be 0: it bounds the parameters, while mirror flow maximises a "
            "margin only as they grow. Stop early instead, or choose another potential"
        )


def _look(p: Tensor, potential: Potential) -> tuple[int, int, Potential]:
    return p._version, p.data_ptr(), potential


def _match(p: Tensor, dual: Tensor | None, potential: Potential) -> Tensor:
    """The dual of p: the given one where p is still its image, a fresh one elsewhere."""
    fresh = potential.gradient(p).clone(memory_format=torch.preserve_format)
    if dual is None or (dual.shape, dual.dtype, dual.device) != (p.shape, p.dtype, p.device):
        return fresh
    # The same number may come out a few units in the last place off on another device, or at
    # another place in a vector register.
    same = torch.isclose(potential.inverse(dual), p, rtol=8 * torch.finfo(p.dtype).eps, atol=0)
    return torch.where(same, dual, fresh)


@lru_cache
def _dual_limit(potential: Potential, dtype: torch.dtype) -> float:
    largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64).sqrt()
    return potential.gradient(largest).item()


def _solve_step(groups: list[_Group], target: float) -> float:
    """The h at which the linear model's decrease is ``target``; it increases with h."""

    def decrease(exponent: float) -> float:
        return sum(group.decrease(2.0**exponent) for group in groups)

    low = high = 0.0
    while decrease(high) < target and high < 96:
        low, high = high, high + 8
    while decrease(low) >= target and low > -96:
        low, high = low - 8, low
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if decrease(middle) < target else (low, middle)
    return 2.0**low


def _largest(tensors: list[Tensor]) -> float:
    """The largest absolute entry, NaN if there is one."""
    extremes = [extreme for t in tensors for extreme in torch.aminmax(t)]
    sizes = [abs(number) for number in _numbers(extremes)]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)


def _numbers(values: list[Tensor]) -> list[float]:
    """Read scalars off their device: all at once where each reading is a synchronisation."""
    if values[0].device.type == "cpu" or len({v.device for v in values}) > 1:
        return [v.item() for v in values]
    return torch.stack(values).tolist()


def _logaddexp(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high + math.log1p(math.exp(low - high)) if low > -math.inf else high
