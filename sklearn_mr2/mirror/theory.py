r"""The quantities of the theory of mirror flow, measured on a network.

Notation: :math:`Q_i` is the dual potential :math:`Q_i(\nabla R_i(W_i))` of layer i, :math:`L_i`
its degree of homogeneity (1 for a dense or convolutional layer), :math:`L = \sum_i L_i` that of the
network, and :math:`\phi_i = \phi_{\alpha_i}(W_i)` the horizon function.

The functions take *groups*: one mapping per layer with its ``params`` and its ``potential``, as
made by :func:`~sklearn_mr2.mirror.networks.layer_groups` or found in an optimiser's
``param_groups``. The network's degree is shared equally between the groups unless each has a
``degree`` of its own.

With one :math:`\alpha` for all layers the size of the parameters is measured jointly,

.. math::
    (\alpha \textstyle\sum_i Q_i)^{L / \alpha}
    \quad\text{and}\quad
    (\textstyle\sum_i \phi_i^\alpha)^{L / \alpha},

and with several layer by layer, as :math:`\prod_i (\alpha_i Q_i)^{L_i / \alpha_i}` and
:math:`\prod_i \phi_i^{L_i}`. Under either, the smoothed Q-margin of the exponential loss does not
decrease along the flow, provided that :math:`\theta r''(\theta) \theta \le \alpha Q`, which holds
for all potentials of this package.

References
----------
P. Jacobs and G. Montufar, "Implicit bias of mirror flow in homogeneous neural networks",
arXiv:2605.19458.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from .kkt import kkt_ratio
from .losses import error_logits, margins
from .potentials import Potential

__all__ = [
    "Rates",
    "active_count",
    "alignment",
    "effective_exponent",
    "effective_norm",
    "effective_weights",
    "fit_rates",
    "horizon_margin",
    "kkt_ratio",
    "layer_balance",
    "layer_duals",
    "margins",
    "neuron_balance",
    "participation_ratio",
    "q_margin",
    "smoothed_q_margin",
]

Groups = Sequence[Mapping[str, Any]]


# Size and margins ----------------------------------------------------------------------------


def layer_duals(groups: Groups) -> Tensor:
    r"""The dual potential :math:`Q_i(\nabla R_i(W_i))` of each layer.

    Parameters
    ----------
    groups : sequence of mapping
        One group per layer, with ``params`` and ``potential``.

    Returns
    -------
    Tensor of shape (n_groups,)
        The dual potentials, in float64.
    """
    return torch.stack([g["potential"].total_dual(_detached(g)) for g in groups])


def q_margin(margin: float, groups: Groups, degree: float) -> float:
    r"""The Q-margin, :math:`q_{\min} / (\alpha Q)^{L / \alpha}`.

    Parameters
    ----------
    margin : float
        The smallest classification margin, ``margins(outputs, targets).min()``.
    groups : sequence of mapping
        One group per layer.
    degree : float
        The network's degree of homogeneity L.

    Returns
    -------
    float
        The Q-margin. It tends to the :func:`horizon_margin` as the parameters grow.
    """
    return float(margin) * math.exp(-_log_size(groups, degree, _dual_powers))


def smoothed_q_margin(outputs: Tensor, targets: Tensor, groups: Groups, degree: float) -> float:
    r"""The smoothed Q-margin, :math:`\log(1 / \sum_n e^{x_n}) / (\alpha Q)^{L / \alpha}`.

    :math:`x_n` is the error logit, for two classes minus the margin. Along the flow of the
    exponential loss this does not decrease once it is positive; it lies below the Q-margin and has
    the same limit.

    Parameters
    ----------
    outputs : Tensor of shape (n_samples,), (n_samples, 1) or (n_samples, n_classes)
        The network's outputs.
    targets : Tensor of shape (n_samples,)
        Integer classes from 0 on.
    groups : sequence of mapping
        One group per layer.
    degree : float
        The network's degree of homogeneity L.

    Returns
    -------
    float
        The smoothed Q-margin.
    """
    x = error_logits(outputs.detach().double(), targets)
    return q_margin(-float(torch.logsumexp(x, dim=0)), groups, degree)


def horizon_margin(margin: float, groups: Groups, degree: float) -> float:
    r"""The horizon margin, :math:`q_{\min} / \phi_\alpha(\theta)^L`, which mirror flow maximises.

    Parameters
    ----------
    margin : float
        The smallest classification margin.
    groups : sequence of mapping
        One group per layer.
    degree : float
        The network's degree of homogeneity L.

    Returns
    -------
    float
        The horizon margin; it does not change with the parameters' scale.
    """
    return float(margin) * math.exp(-_log_size(groups, degree, _horizon_powers))


def alignment(groups: Groups, degree: float = 1.0) -> float:
    r"""Alignment :math:`A = (\alpha Q)^{1/\alpha} / \phi_\alpha(\theta)`, which tends to 1.

    For the hyperbolic entropy this is :math:`Q / \|\theta\|_1`. While it is far above 1 the
    parameters are too small for the potential's asymptotic geometry to show.

    Parameters
    ----------
    groups : sequence of mapping
        One group per layer.
    degree : float, default=1
        The network's degree of homogeneity L; it matters only for layers of different
        :math:`\alpha` and unequal degree.

    Returns
    -------
    float
        The alignment.
    """
    excess = _log_size(groups, degree, _dual_powers) - _log_size(groups, degree, _horizon_powers)
    return math.exp(excess / degree)


def _log_size(groups: Groups, degree: float, powers: Callable[[Mapping[str, Any]], float]) -> float:
    """Logarithm of the size of the parameters, jointly or layer by layer (see the module)."""
    alphas = [g["potential"].alpha for g in groups]
    logs = [math.log(p) if p > 0 else -math.inf for p in map(powers, groups)]
    if len(set(alphas)) == 1:
        return degree / alphas[0] * float(np.logaddexp.reduce(logs))
    shares = _degrees(groups, degree)
    return sum(s / a * v for s, a, v in zip(shares, alphas, logs, strict=True))


def _dual_powers(group: Mapping[str, Any]) -> float:
    potential: Potential = group["potential"]
    return potential.alpha * float(potential.total_dual(_detached(group)))


def _horizon_powers(group: Mapping[str, Any]) -> float:
    potential: Potential = group["potential"]
    return float(potential.horizon(_detached(group))) ** potential.alpha


def _degrees(groups: Groups, degree: float) -> list[float]:
    if all("degree" in g for g in groups):
        return [float(g["degree"]) for g in groups]
    return [degree / len(groups)] * len(groups)


def _detached(group: Mapping[str, Any]) -> list[Tensor]:
    return [p.detach().double() for p in group["params"]]


# Balance -------------------------------------------------------------------------------------


def layer_balance(groups: Groups, degree: float | None = None) -> Tensor:
    r"""Differences :math:`Q_{i+1} / L_{i+1} - Q_i / L_i` between consecutive layers.

    They are constant along the flow, whatever the layers' potentials: their change since the start
    is what the discretisation adds, of first order in the step.

    Parameters
    ----------
    groups : sequence of mapping
        One group per layer.
    degree : float, optional
        The network's degree of homogeneity; by default each layer has degree 1.

    Returns
    -------
    Tensor of shape (n_groups - 1,)
        The differences, in float64.
    """
    degrees = _degrees(groups, len(groups) if degree is None else degree)
    duals = layer_duals(groups)
    return torch.diff(duals / torch.tensor(degrees, dtype=duals.dtype, device=duals.device))


def neuron_balance(module: nn.Module, groups: Groups) -> list[Tensor]:
    r"""Differences :math:`Q(a_j) - Q(w_j)` for each hidden neuron or channel j.

    :math:`w_j` are its incoming weights, with its bias, and :math:`a_j` its outgoing weights. They
    are constant along the flow, as the layers' differences are.

    Parameters
    ----------
    module : nn.Module
        A network whose dense and convolutional layers follow each other in the order in which they
        are registered, with ReLUs (and pooling) in between.
    groups : sequence of mapping
        Groups which contain the layers' parameters.

    Returns
    -------
    list of Tensor
        For each hidden layer a tensor of shape (n_neurons,), in float64.

    Raises
    ------
    ValueError
        If two consecutive layers do not fit each other.
    """
    potential_of = {p: g["potential"] for g in groups for p in g["params"]}
    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    differences = []
    for (name, inner), (outer_name, outer) in pairwise(layers):
        n_neurons = inner.weight.shape[0]
        if outer.weight.shape[1] % n_neurons:
            raise ValueError(
                f"layer {outer_name!r} does not follow {name!r}: {outer.weight.shape[1]} inputs "
                f"for {n_neurons} neurons"
            )
        incoming = _duals(potential_of, inner.weight).reshape(n_neurons, -1).sum(1)
        if inner.bias is not None:
            incoming = incoming + _duals(potential_of, inner.bias)
        # A flattened channel feeds several consecutive inputs of a dense layer.
        outgoing = _duals(potential_of, outer.weight).reshape(len(outer.weight), n_neurons, -1)
        differences.append(outgoing.sum((0, 2)) - incoming)
    return differences


def _duals(potential_of: dict[Tensor, Potential], p: Tensor) -> Tensor:
    return potential_of[p].dual(p.detach().double())


# Features ------------------------------------------------------------------------------------


def effective_weights(
    weight_in: Tensor, weight_out: Tensor, bias: Tensor | None = None, order: float = 2.0
) -> Tensor:
    r"""How much each hidden neuron contributes, :math:`c_j = \|a_j\| \|w_j\|`.

    Parameters
    ----------
    weight_in : Tensor of shape (n_neurons, ...)
        Weights into the neurons.
    weight_out : Tensor of shape (n_outputs, n_neurons, ...)
        Weights out of the neurons.
    bias : Tensor of shape (n_neurons,), optional
        The neurons' biases, which count as weights of a constant feature.
    order : float, default=2
        Order of the norms. With :math:`\alpha` the flow's predicted geometry is exact.

    Returns
    -------
    Tensor of shape (n_neurons,)
        The effective weights, in float64.

    Examples
    --------
    >>> import torch
    >>> effective_weights(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0]]))
    tensor([10.,  0.], dtype=torch.float64)
    """
    incoming = weight_in.detach().double().flatten(1)
    if bias is not None:
        incoming = torch.cat([incoming, bias.detach().double()[:, None]], dim=1)
    outgoing = weight_out.detach().double().transpose(0, 1).flatten(1)
    norm = torch.linalg.vector_norm
    return norm(incoming, ord=order, dim=1) * norm(outgoing, ord=order, dim=1)


def effective_exponent(alphas: Sequence[float]) -> float:
    r"""Exponent of the predicted geometry, :math:`1 / \sum_i 1/\alpha_i`.

    Minimising the layers' norms :math:`\|W_i\|_{\alpha_i}` at given products minimises this
    (quasi-)norm of the products. For two layers of one potential it is :math:`\alpha / 2`: sparse
    for the hyperbolic entropy, :math:`\ell_1` for the Euclidean potential, dense for higher powers.

    Parameters
    ----------
    alphas : sequence of float
        The layers' growth rates.

    Returns
    -------
    float
        The exponent.

    Examples
    --------
    >>> effective_exponent([3, 3])
    1.5
    """
    return 1 / sum(1 / alpha for alpha in alphas)


def effective_norm(effective: Tensor, exponent: float) -> float:
    r"""The (quasi-)norm :math:`(\sum_j c_j^s)^{1/s}` of effective weights.

    Parameters
    ----------
    effective : Tensor of shape (n_neurons,)
        The effective weights.
    exponent : float
        The exponent s, :func:`effective_exponent` of the layers.

    Returns
    -------
    float
        The norm. Minimal among equal functions where the flow has done what the theory says.

    Examples
    --------
    >>> import torch
    >>> effective_norm(torch.tensor([1.0, 1.0, 1.0, 1.0]), 0.5)
    16.0
    """
    return float(effective.double().abs().pow(exponent).sum() ** (1 / exponent))


def participation_ratio(effective: Tensor) -> float:
    r"""Participation ratio :math:`(\sum_j c_j)^2 / \sum_j c_j^2`, a smooth count of neurons.

    Parameters
    ----------
    effective : Tensor of shape (n_neurons,)
        The effective weights, not negative.

    Returns
    -------
    float
        Between 1 (one neuron does everything) and ``n_neurons`` (all do the same); 0 if all are 0.

    Examples
    --------
    >>> import torch
    >>> participation_ratio(torch.tensor([2.0, 2.0, 0.0, 0.0]))
    2.0
    """
    c = effective.double()
    largest = c.max()
    return float((c / largest).sum() ** 2 / (c / largest).square().sum()) if largest > 0 else 0.0


def active_count(effective: Tensor, threshold: float = 0.01) -> int:
    """Number of neurons whose effective weight is more than a fraction of the largest.

    Parameters
    ----------
    effective : Tensor of shape (n_neurons,)
        The effective weights, not negative.
    threshold : float, default=0.01
        The fraction.

    Returns
    -------
    int
        The number of active neurons.

    Examples
    --------
    >>> import torch
    >>> active_count(torch.tensor([1.0, 0.5, 0.001]))
    2
    """
    return int((effective > threshold * effective.max()).sum())


# Rates ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rates:
    r"""Fitted exponents in :math:`\log t`, next to those of the theory.

    Attributes
    ----------
    dual_exponent : float
        b in :math:`Q \sim (\log t)^b`.
    dual_exponent_theory : float
        :math:`\alpha / L`.
    loss_exponent : float
        e in :math:`L(\theta) \sim 1 / (t (\log t)^e)`.
    loss_exponent_theory : float
        :math:`2 - \alpha / L`.
    """

    dual_exponent: float
    dual_exponent_theory: float
    loss_exponent: float
    loss_exponent_theory: float


def fit_rates(
    log_time: ArrayLike,
    log_loss: ArrayLike,
    dual: ArrayLike,
    *,
    alpha: float,
    degree: float,
    after: float | None = None,
) -> Rates:
    r"""Fit how fast the loss falls and Q grows, by least squares in :math:`\log \log t`.

    With :math:`\log 1/L(\theta) \sim q_{\min} \sim Q^{L/\alpha}` and
    :math:`dQ/dt \sim L(\theta) \log(1/L(\theta))` follow :math:`Q \sim (\log t)^{\alpha/L}` and
    :math:`L(\theta) \sim 1 / (t (\log t)^{2 - \alpha/L})`.

    Parameters
    ----------
    log_time : array-like of shape (n_records,)
        Logarithms of the time.
    log_loss : array-like of shape (n_records,)
        Logarithms of the total loss.
    dual : array-like of shape (n_records,)
        The total dual potential Q.
    alpha : float
        The potential's growth rate.
    degree : float
        The network's degree of homogeneity L.
    after : float, optional
        Only records with a larger log time take part; by default a quarter of the last one.

    Returns
    -------
    Rates
        The exponents.

    Raises
    ------
    ValueError
        If fewer than three records are left.

    Examples
    --------
    >>> import numpy as np
    >>> log_time = np.linspace(10, 1000, 50)
    >>> rates = fit_rates(log_time, -log_time, log_time**2, alpha=2, degree=1)
    >>> round(rates.dual_exponent, 6), rates.dual_exponent_theory
    (2.0, 2.0)
    """
    log_time, log_loss, dual = (np.asarray(a, dtype=np.float64) for a in (log_time, log_loss, dual))
    after = log_time.max() / 4 if after is None else after
    kept = log_time > max(after, 0)
    if kept.sum() < 3:
        raise ValueError(f"after={after:.3g} leaves {kept.sum()} records: at least 3 are needed")
    x = np.log(log_time[kept])
    dual_exponent = np.polyfit(x, np.log(dual[kept]), 1)[0]
    loss_exponent = np.polyfit(x, -(log_loss[kept] + log_time[kept]), 1)[0]
    return Rates(float(dual_exponent), alpha / degree, float(loss_exponent), 2 - alpha / degree)
