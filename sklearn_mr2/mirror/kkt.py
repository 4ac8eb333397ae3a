r"""How close a network's direction is to a KKT point of the margin problem."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize
from torch import Tensor, nn

from .losses import margins

__all__ = ["kkt_ratio"]

Groups = Sequence[Mapping[str, Any]]


def kkt_ratio(
    module: nn.Module,
    X: Tensor,
    y: Tensor,
    groups: Groups,
    degree: float,
    *,
    kink_tolerance: float = 1e-2,
    max_constraints: int = 500,
) -> float:
    r"""How close the direction is to a KKT point of the margin problem: 1 exactly at one.

    The problem is :math:`\min \tfrac12 \phi_\alpha(\theta)^2` such that all margins are at least 1.
    The ratio compares the two sides of its duality,

    .. math::
        \rho = \frac{L q_{\min} / \phi_\alpha(\theta)}
                    {\min_{\mu} \|\sum_n \mu_n \nabla q_n\|_{\phi^*}} \in (0, 1],

    with :math:`\mu` in the simplex and the dual norm below. For a linear model it is the horizon
    margin divided by the largest possible one.

    Parameters
    ----------
    module : nn.Module
        The network, homogeneous of degree L.
    X : Tensor of shape (n_samples, ...)
        The training inputs.
    y : Tensor of shape (n_samples,)
        Integer classes from 0 on.
    groups : sequence of mapping
        One group per layer, with all of the network's trainable parameters.
    degree : float
        The network's degree of homogeneity L.
    kink_tolerance : float, default=0.01
        A dense layer's neuron with :math:`|w_j^\top x| \le` this times :math:`\|w_j\| \|x\|` counts
        as being at its ReLU's kink, where any convex combination of the two one-sided gradients is
        allowed. Only for samples with a margin of at most 1.2 times the smallest.
    max_constraints : int, default=500
        How many of the smallest margins (of pairs of a sample and a wrong class) take part. Leaving
        others out can only lower the ratio.

    Returns
    -------
    float
        The ratio, from below to a relative accuracy of 1e-4.

    Raises
    ------
    ValueError
        If the smallest margin is not positive, or some :math:`\alpha` is below 1.

    Notes
    -----
    Layers of different :math:`\alpha` enter as :math:`\sum_i \phi_i \|\cdot\|_{\phi_i^*} / L` in
    place of :math:`\phi \|\cdot\|_{\phi^*} / L`. With only :math:`\alpha = 1` the minimum is a
    linear programme. Otherwise Frank-Wolfe steps over vertices with full correction find it, with
    :math:`L_\infty` blocks bounded above by :math:`L_{64}`; their dual bound is the accuracy.
    """
    if min(g["potential"].alpha for g in groups) < 1:
        raise ValueError("the dual norm needs alpha >= 1")
    constraints = _constraints(module, X, y, groups, kink_tolerance, max_constraints)
    blocks, smallest = _blocks(groups, degree), constraints.smallest
    if all(block.order == math.inf for block in blocks):
        return smallest / _minimise_linear(constraints, blocks)
    return smallest / _minimise_smooth(constraints, blocks)


@dataclasses.dataclass(frozen=True)
class _Block:
    """Rows of the gradients that share a dual norm: ``weight * ||.||_order`` in the objective."""

    rows: slice
    order: float
    weight: float


def _blocks(groups: Groups, degree: float) -> list[_Block]:
    alphas = [g["potential"].alpha for g in groups]
    sizes = [sum(p.numel() for p in g["params"]) for g in groups]
    horizons = [
        float(g["potential"].horizon([p.detach().double() for p in g["params"]])) for g in groups
    ]
    if len(set(alphas)) == 1:
        joint = float(np.linalg.norm(horizons, ord=alphas[0]))
        return [_Block(slice(0, sum(sizes)), _dual_order(alphas[0]), joint / degree)]
    ends = np.cumsum(sizes)
    return [
        _Block(slice(end - size, end), _dual_order(alpha), horizon / degree)
        for end, size, alpha, horizon in zip(ends, sizes, alphas, horizons, strict=True)
    ]


def _dual_order(alpha: float) -> float:
    return math.inf if alpha == 1 else alpha / (alpha - 1)


@dataclasses.dataclass(frozen=True)
class _Constraints:
    """Margin constraints: their gradients, and alternatives at kinks.

    Column c of ``gradients`` is the gradient of constraint c. The multiplier of column k of
    ``kinks`` lies between 0 and that of constraint ``owner[k]``.
    """

    gradients: NDArray[np.float64]
    kinks: NDArray[np.float64]
    owner: NDArray[np.int64]
    smallest: float

    @property
    def columns(self) -> NDArray[np.float64]:
        return np.hstack([self.gradients, self.kinks])


def _constraints(
    module: nn.Module,
    X: Tensor,
    y: Tensor,
    groups: Groups,
    kink_tolerance: float,
    max_constraints: int,
) -> _Constraints:
    probe = copy.deepcopy(module).double().eval().requires_grad_(True)
    twin = dict(zip(module.parameters(), probe.parameters(), strict=True))
    params: list[Tensor] = [twin[p] for g in groups for p in g["params"]]
    # The horizon is the norm of the parameters times this, the dual norm that of gradients over it.
    scale = torch.cat([
        torch.full((p.numel(),), g["potential"].horizon_scale, dtype=torch.float64)
        for g in groups
        for p in g["params"]
    ]).numpy()  # fmt: skip
    X = X.double() if X.is_floating_point() else X
    with torch.no_grad():
        outputs = probe(X)
    samples, classes, values = _pairs(outputs, y)
    smallest = float(values[0])
    if not smallest > 0:
        raise ValueError(f"the smallest margin must be positive, got {smallest:.3g}: train on")

    gradients, kinks, owner = [], [], []
    chosen = zip(samples[:max_constraints], classes[:max_constraints], values, strict=False)
    for index, (n, k, value) in enumerate(chosen):
        tolerance = kink_tolerance if value <= 1.2 * smallest else 0.0
        gradient, alternatives = _margin_gradients(
            probe, X[n : n + 1], int(y[n]), int(k), params, tolerance
        )
        gradients.append(gradient / scale)
        kinks += [alternative / scale for alternative in alternatives]
        owner += [index] * len(alternatives)
    return _Constraints(
        np.stack(gradients, axis=1),
        np.stack(kinks, axis=1) if kinks else np.empty((len(scale), 0)),
        np.array(owner, dtype=np.int64),
        smallest,
    )


def _pairs(outputs: Tensor, y: Tensor) -> tuple[NDArray, NDArray, NDArray]:
    """Samples, wrong classes and margins of all pairs, smallest margins first."""
    outputs = outputs.cpu()
    y = y.cpu().long()
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        values = margins(outputs, y)[:, None].numpy()
    else:
        values = (outputs.gather(1, y[:, None]) - outputs).numpy()
        values[np.arange(len(y)), y.numpy()] = np.inf
    order = np.argsort(values, axis=None, kind="stable")
    order = order[np.isfinite(values.ravel()[order])]
    samples, classes = np.unravel_index(order, values.shape)
    return samples, classes, values.ravel()[order]


def _margin_gradients(
    probe: nn.Module, x: Tensor, target: int, other: int, params: list[Tensor], tolerance: float
) -> tuple[NDArray, list[NDArray]]:
    """Gradient of one margin, and what flipping each ReLU at its kink would add to it."""
    dense: dict[int, tuple[nn.Linear, Tensor, Tensor]] = {}
    relus: list[tuple[nn.Linear, Tensor, Tensor, Tensor]] = []

    def after_linear(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        dense[id(output)] = (layer, inputs[0], output)  # type: ignore[assignment]

    def after_relu(_: nn.Module, inputs: Any, output: Tensor) -> None:
        if id(inputs[0]) in dense and output is not inputs[0]:
            relus.append((*dense[id(inputs[0])], output))

    handles = [
        layer.register_forward_hook(after_linear if isinstance(layer, nn.Linear) else after_relu)
        for layer in probe.modules()
        if isinstance(layer, nn.Linear | nn.ReLU)
    ]
    output = probe(x).reshape(-1)
    for handle in handles:
        handle.remove()
    margin = output[0] * (2 * target - 1) if len(output) == 1 else output[target] - output[other]
    activations = [relu for *_, relu in relus]
    slopes = torch.autograd.grad(margin, params + activations, retain_graph=True, allow_unused=True)
    alternatives = []
    if tolerance > 0:
        for (layer, inputs, before, _), slope in zip(relus, slopes[len(params) :], strict=True):
            if slope is None:
                continue
            for j in _kinks(layer, inputs, before, tolerance):
                flip = -slope[0, j] if before[0, j] > 0 else slope[0, j]
                branch = torch.autograd.grad(
                    before[0, j], params, retain_graph=True, allow_unused=True
                )
                alternatives.append(_flat(params, branch) * float(flip))
    return _flat(params, slopes[: len(params)]), alternatives


def _kinks(layer: nn.Linear, inputs: Tensor, before: Tensor, tolerance: float) -> list[int]:
    """Neurons whose preactivation is zero but for the tolerance."""
    has_bias = layer.bias is not None
    weight = torch.cat([layer.weight, layer.bias[:, None]], 1) if has_bias else layer.weight
    size = weight.norm(dim=1) * math.sqrt(float(inputs.square().sum()) + has_bias)
    near = before[0].abs() <= tolerance * size
    return torch.nonzero(near).flatten().tolist()


def _flat(params: list[Tensor], gradients: Sequence[Tensor | None]) -> NDArray:
    parts = [
        torch.zeros_like(p) if g is None else g for p, g in zip(params, gradients, strict=True)
    ]
    return torch.cat([part.detach().reshape(-1) for part in parts]).cpu().numpy()


def _minimise_linear(constraints: _Constraints, blocks: list[_Block]) -> float:
    """Minimise the weighted sum of L-infinity norms, as a linear programme."""
    columns = constraints.columns
    n_gradients, n_kinks = constraints.gradients.shape[1], constraints.kinks.shape[1]
    n_rows, n_blocks = len(columns), len(blocks)
    bound = np.zeros((n_rows, n_blocks))
    for b, block in enumerate(blocks):
        bound[block.rows, b] = 1
    # Variables: multipliers of gradients, of kinks, and each block's norm.
    upper = np.vstack([np.hstack([columns, -bound]), np.hstack([-columns, -bound])])
    owned = np.zeros((n_kinks, upper.shape[1]))
    owned[np.arange(n_kinks), n_gradients + np.arange(n_kinks)] = 1
    owned[np.arange(n_kinks), constraints.owner] = -1
    weights = [block.weight for block in blocks]
    result = linprog(
        np.concatenate([np.zeros(n_gradients + n_kinks), weights]),
        A_ub=np.vstack([upper, owned]),
        b_ub=np.zeros(2 * n_rows + n_kinks),
        A_eq=np.concatenate([np.ones(n_gradients), np.zeros(n_kinks + n_blocks)])[None],
        b_eq=[1.0],
        method="highs",
    )
    if result.x is None:
        raise RuntimeError(f"the linear programme failed: {result.message}")
    return float(np.dot(weights, result.x[-n_blocks:]))


# L-infinity is bounded above by this norm where it is not the only one.
_LARGE_ORDER = 64.0
_GAP = 1e-4
_MAX_VERTICES = 1000


def _minimise_smooth(constraints: _Constraints, blocks: list[_Block]) -> float:
    """Minimise the weighted sum of norms by Frank-Wolfe steps with full correction.

    A vertex is a constraint's gradient with some of its kinks flipped. The objective F is convex
    and homogeneous of degree 1, so the minimum over vertices of their product with the gradient
    of F is a lower bound of the minimum of F.
    """

    def objective(r: NDArray) -> tuple[float, NDArray]:
        value, gradient = 0.0, np.zeros_like(r)
        for block in blocks:
            v, order = r[block.rows], min(block.order, _LARGE_ORDER)
            largest = np.abs(v).max()
            if largest > 0:
                unit = np.abs(v) / largest
                norm = np.sum(unit**order) ** (1 / order)
                value += block.weight * largest * norm
                gradient[block.rows] = block.weight * np.sign(v) * (unit / norm) ** (order - 1)
        return value, gradient

    def best_vertex(direction: NDArray) -> NDArray:
        products = direction @ constraints.gradients
        gains = direction @ constraints.kinks
        np.add.at(products, constraints.owner, np.minimum(gains, 0))
        best = int(products.argmin())
        flipped = (constraints.owner == best) & (gains < 0)
        return constraints.gradients[:, best] + constraints.kinks[:, flipped].sum(axis=1)

    vertices = constraints.gradients[:, :1]
    weights = np.ones(1)
    for _ in range(_MAX_VERTICES):
        value, gradient = objective(vertices @ weights)
        vertex = best_vertex(gradient)
        if gradient @ vertex >= (1 - _GAP) * value:
            break
        vertices = np.hstack([vertices, vertex[:, None]])

        def correction(w: NDArray, V: NDArray = vertices) -> tuple[float, NDArray]:
            value, gradient = objective(V @ w)
            return value, gradient @ V

        result = minimize(  # type: ignore[call-overload]
            correction,
            np.append(0.9 * weights, 0.1),
            jac=True,
            bounds=[(0, 1)] * (len(weights) + 1),
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
            method="SLSQP",
            options={"ftol": 1e-12 * value, "maxiter": 500},
        )
        weights = np.clip(result.x, 0, None)
        kept = weights > 1e-12
        vertices, weights = vertices[:, kept], weights[kept] / weights[kept].sum()
    return float(objective(vertices @ weights)[0])
