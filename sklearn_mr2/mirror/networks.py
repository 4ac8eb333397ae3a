r"""Homogeneous networks, and a numerical check of homogeneity.

The theory of mirror flow is about networks with :math:`f(x; a\theta) = a^L f(x; \theta)` for all
:math:`a > 0`. ReLU and pooling keep that property; a bias does so only in the first layer, where it
is the weight of a constant feature; batch normalisation breaks it.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .potentials import Potential, get_potential

__all__ = [
    "HomogeneityError",
    "HomogeneousCNN",
    "HomogeneousMLP",
    "homogeneity_degree",
    "layer_groups",
]

_SCALES = (0.5, 2.0, 3.0)


class HomogeneousMLP(nn.Sequential):
    r"""A ReLU multi-layer perceptron with biases in its first layer only.

    Its degree is the number of layers, ``len(hidden_layer_sizes) + 1``.

    Parameters
    ----------
    n_features : int
        Number of inputs.
    hidden_layer_sizes : sequence of int, default=(64,)
        Widths of the hidden layers; empty for the linear model.
    n_outputs : int, default=1
        Number of outputs; 1 for binary classification.
    fit_intercept : bool, default=True
        Whether the first layer has a bias.
    weight_init : "he", "zeros" or float, default="he"
        "he" draws normal weights whose variance keeps the size of the activations whatever the
        width; a number is the standard deviation of all weights. "zeros" is for the linear model:
        all gradients of a deeper network vanish there. Biases start at zero.
    generator : torch.Generator, optional
        Source of randomness; torch's global one by default.

    Examples
    --------
    >>> import torch
    >>> network = HomogeneousMLP(4, (8,), generator=torch.Generator().manual_seed(0))
    >>> network(torch.ones(3, 4)).shape
    torch.Size([3, 1])
    >>> [name for name, _ in network.named_parameters()]
    ['hidden1.weight', 'hidden1.bias', 'output.weight']
    """

    def __init__(
        self,
        n_features: int,
        hidden_layer_sizes: Sequence[int] = (64,),
        n_outputs: int = 1,
        *,
        fit_intercept: bool = True,
        weight_init: str | float = "he",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(_dense_layers(n_features, hidden_layer_sizes, n_outputs, fit_intercept))
        _initialise(self, weight_init, generator)


class HomogeneousCNN(nn.Sequential):
    r"""A VGG-style convolutional network without batch norm, biases in its first layer only.

    Blocks of 3x3 convolutions and ReLUs, each block ending in a 2x2 pooling; then the average over
    the remaining positions and dense layers. Its degree is the number of convolutions and dense
    layers.

    Parameters
    ----------
    n_channels : int
        Number of channels of the images, which have shape (n_samples, n_channels, height, width).
        Height and width must be at least ``2 ** len(block_channels)``.
    n_outputs : int
        Number of outputs; 1 for binary classification.
    block_channels : sequence of int, default=(32, 64, 128)
        Number of channels in each block.
    convolutions_per_block : int, default=2
        Number of convolutions in each block.
    hidden_layer_sizes : sequence of int, default=()
        Widths of dense layers before the output.
    pooling : {"max", "average"}, default="max"
        How a block is pooled.
    fit_intercept : bool, default=True
        Whether the first convolution has a bias.
    weight_init : "he" or float, default="he"
        As in :class:`HomogeneousMLP`.
    generator : torch.Generator, optional
        Source of randomness; torch's global one by default.

    Examples
    --------
    >>> import torch
    >>> network = HomogeneousCNN(1, 10, block_channels=(8, 16), convolutions_per_block=1)
    >>> network(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        n_channels: int,
        n_outputs: int,
        *,
        block_channels: Sequence[int] = (32, 64, 128),
        convolutions_per_block: int = 2,
        hidden_layer_sizes: Sequence[int] = (),
        pooling: str = "max",
        fit_intercept: bool = True,
        weight_init: str | float = "he",
        generator: torch.Generator | None = None,
    ) -> None:
        pools = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}
        if pooling not in pools:
            raise ValueError(f"pooling must be one of {sorted(pools)}, got {pooling!r}")
        if not block_channels:
            raise ValueError("block_channels must name at least one block; see HomogeneousMLP")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        width = n_channels
        for block, channels in enumerate(block_channels, start=1):
            for index in range(1, convolutions_per_block + 1):
                layers[f"conv{block}_{index}"] = nn.utils.skip_init(
                    nn.Conv2d, width, channels, 3, padding=1, bias=fit_intercept and not layers
                )
                layers[f"conv{block}_{index}_relu"] = nn.ReLU()
                width = channels
            layers[f"pool{block}"] = pools[pooling](2)
        layers["average"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers.update(_dense_layers(width, hidden_layer_sizes, n_outputs, bias=False))
        super().__init__(layers)
        _initialise(self, weight_init, generator)


def layer_groups(
    module: nn.Module,
    potential: str | Potential | Sequence[str | Potential] | Mapping[str, str | Potential],
) -> list[dict[str, Any]]:
    """Parameter groups with one group per layer, each with its potential.

    They serve :class:`~sklearn_mr2.mirror.optimizer.MirrorDescent` as well as the functions of
    :mod:`~sklearn_mr2.mirror.theory`.

    Parameters
    ----------
    module : nn.Module
        The network. A layer is a submodule that itself holds trainable parameters.
    potential : str, Potential, sequence or mapping
        One potential for all layers, one for each layer in order, or a mapping from layers' names.

    Returns
    -------
    list of dict
        With the keys ``name``, ``params`` and ``potential``.

    Raises
    ------
    ValueError
        If the number or the names of the potentials do not match the layers.

    Examples
    --------
    >>> network = HomogeneousMLP(4, (8,))
    >>> groups = layer_groups(network, ["euclidean", "hyperbolic_entropy"])
    >>> [(group["name"], group["potential"]) for group in groups]
    [('hidden1', Euclidean()), ('output', HyperbolicEntropy(lam=0.1))]
    """
    layers: dict[str, list[Tensor]] = {}
    seen: set[Tensor] = set()
    for name, layer in module.named_modules():
        # A tied parameter belongs to the first layer that holds it.
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad and p not in seen]
        seen.update(own)
        if own:
            layers[name] = own
    if isinstance(potential, Mapping):
        chosen = dict(potential)
        if set(chosen) != set(layers):
            raise ValueError(
                f"potential must name the layers {list(layers)}, got {list(potential)}"
            )
    elif isinstance(potential, str | Potential):
        chosen = dict.fromkeys(layers, potential)
    else:
        if len(potential) != len(layers):
            raise ValueError(
                f"potential has {len(potential)} entries for {len(layers)} layers {list(layers)}"
            )
        chosen = dict(zip(layers, potential, strict=True))
    return [
        {"name": name, "params": params, "potential": get_potential(chosen[name])}
        for name, params in layers.items()
    ]


class HomogeneityError(ValueError):
    """A network is not homogeneous in its parameters.

    Attributes
    ----------
    layer : str
        Name of the layer that breaks homogeneity, or of the one next to the operation that does.
    """

    def __init__(self, message: str, layer: str) -> None:
        super().__init__(message)
        self.layer = layer


def homogeneity_degree(module: nn.Module, X: Tensor, *, rtol: float = 1e-6) -> float:
    r"""Degree L of a network with :math:`f(x; a\theta) = a^L f(x; \theta)`, checked numerically.

    The check runs on a copy of the network in double precision and evaluation mode, at parameters
    moved slightly at random: a bias of zero or fresh batch norm statistics would pass otherwise.

    Parameters
    ----------
    module : nn.Module
        The network. Only its trainable parameters are scaled; frozen layers count as fixed
        features.
    X : Tensor of shape (n_samples, ...)
        A few inputs.
    rtol : float, default=1e-6
        Largest deviation from homogeneity, relative to the largest output.

    Returns
    -------
    float
        The degree L.

    Raises
    ------
    HomogeneityError
        If the network is not homogeneous, naming the layer that breaks it. The inputs of that
        layer are homogeneous and its outputs are not.
    ValueError
        If nothing is trainable or all outputs are zero.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    >>> homogeneity_degree(HomogeneousMLP(4, (8, 8)), X)
    3.0
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> try:
    ...     homogeneity_degree(network, X)
    ... except HomogeneityError as error:
    ...     print(error.layer)
    2
    """
    probe = copy.deepcopy(module).cpu().double().eval()
    X = X.detach().cpu()
    X = X.double() if X.is_floating_point() else X
    trainable = [p for p in probe.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("module has no trainable parameters")
    _perturb(probe, trainable)
    reference = _trace(probe, X)
    scaled = []
    for scale in _SCALES:
        other = copy.deepcopy(probe)
        for p in other.parameters():
            if p.requires_grad:
                p.detach().mul_(scale)
        scaled.append(_trace(other, X))

    degree = _degree(reference.output, [trace.output for trace in scaled], rtol)
    if degree is None:
        raise _blame(probe, reference, scaled, rtol)
    if not reference.output.any():
        raise ValueError("all outputs of the module are zero: its degree cannot be measured")
    if degree <= rtol:
        raise HomogeneityError(
            "the outputs do not grow with the parameters, so no margin can",
            reference.calls[-1].name,
        )
    return float(round(degree)) if abs(degree - round(degree)) < 1e-6 else degree


class _Call(NamedTuple):
    """A call of a leaf module."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class _Trace(NamedTuple):
    """A network's output and the calls of its leaf modules in order."""

    output: Tensor
    calls: list[_Call]


def _trace(module: nn.Module, X: Tensor) -> _Trace:
    calls: list[_Call] = []

    def recorder(name: str) -> Any:
        def record(_: nn.Module, inputs: Any, output: Any) -> None:
            calls.append(_Call(name, _tensors(inputs), _tensors(output)))

        return record

    handles = [
        layer.register_forward_hook(recorder(name))
        for name, layer in module.named_modules()
        if not any(layer.children())
    ]
    with torch.no_grad():
        output = module(X)
    for handle in handles:
        handle.remove()
    return _Trace(output, calls)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        # A module working in place would overwrite what was recorded.
        return [value.clone()] if value.is_floating_point() else []
    if isinstance(value, list | tuple):
        return [t for part in value for t in _tensors(part)]
    return []


def _degree(u: Tensor, scaled: list[Tensor], rtol: float) -> float | None:
    """The d with v = a^d u for every scale a and its v: None if there is none, 0 for zeros."""
    found = []
    for scale, v in zip(_SCALES, scaled, strict=True):
        if not u.any() and not v.any():
            continue
        ratio = float(v.norm() / u.norm())
        if not 0 < ratio < math.inf or (v - ratio * u).abs().max() > rtol * v.abs().max():
            return None
        found.append(math.log(ratio) / math.log(scale))
    if not found:
        return 0.0
    return found[0] if max(found) - min(found) <= 10 * rtol else None


def _blame(
    module: nn.Module, reference: _Trace, scaled: list[_Trace], rtol: float
) -> HomogeneityError:
    """The error that names the first layer at which homogeneity is lost."""

    def is_lost(tensors: list[Tensor], scaled_tensors: list[list[Tensor]]) -> bool:
        return any(
            _degree(u, vs, rtol) is None for u, *vs in zip(tensors, *scaled_tensors, strict=True)
        )

    message = "the network is not homogeneous in its parameters: "
    operation = "adds terms of different degrees or is not positively homogeneous"
    previous = ""
    for call, *others in zip(reference.calls, *[trace.calls for trace in scaled], strict=True):
        name = call.name
        if is_lost(call.inputs, [other.inputs for other in others]):
            place = f"between layers {previous!r} and {name!r}" if previous else f"before {name!r}"
            return HomogeneityError(f"{message}an operation of forward {place} {operation}", name)
        if is_lost(call.outputs, [other.outputs for other in others]):
            layer = module.get_submodule(name)
            kind = type(layer).__name__
            return HomogeneityError(
                f"{message}layer {name!r} ({kind}) breaks it. {_reason(layer)}", name
            )
        previous = name
    place = f"after layer {previous!r}"
    return HomogeneityError(f"{message}an operation of forward {place} {operation}", previous)


def _reason(layer: nn.Module) -> str:
    if isinstance(layer, _NormBase | nn.LayerNorm | nn.GroupNorm):
        return "Normalisation does: remove it."
    if getattr(layer, "bias", None) is not None:
        return (
            "A bias is homogeneous in the first layer only, as the weight of a constant feature: "
            "set bias=False."
        )
    return "Use positively homogeneous operations, such as ReLU and pooling."


def _perturb(module: nn.Module, trainable: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in trainable:
            size = p.square().mean().sqrt() if p.any() else torch.ones((), dtype=p.dtype)
            p.add_(0.1 * size * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        for buffer in module.buffers():
            if buffer.is_floating_point():
                # Positive, since some buffers are variances.
                noise = torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype)
                buffer.add_(0.1 * noise)


def _dense_layers(
    n_inputs: int, hidden_layer_sizes: Sequence[int], n_outputs: int, bias: bool
) -> OrderedDict[str, nn.Module]:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index, width in enumerate(hidden_layer_sizes, start=1):
        layers[f"hidden{index}"] = nn.utils.skip_init(
            nn.Linear, n_inputs, width, bias=bias and not layers
        )
        layers[f"hidden{index}_relu"] = nn.ReLU()
        n_inputs = width
    layers["output"] = nn.utils.skip_init(nn.Linear, n_inputs, n_outputs, bias=bias and not layers)
    return layers


def _initialise(
    module: nn.Module, weight_init: str | float, generator: torch.Generator | None
) -> None:
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if weight_init == "zeros" and len(layers) > 1:
        raise ValueError(
            "weight_init='zeros' is for the linear model: the gradients of a network with hidden "
            "layers vanish there"
        )
    if isinstance(weight_init, str) and weight_init not in ("he", "zeros"):
        raise ValueError(f"weight_init must be 'he', 'zeros' or a number, got {weight_init!r}")
    for layer in layers:
        # A ReLU halves the second moment of what it passes on.
        gain = 1.0 if layer is layers[-1] else 2.0
        if weight_init == "he":
            std = math.sqrt(gain / layer.weight[0].numel())
        else:
            std = 0.0 if weight_init == "zeros" else float(weight_init)
        nn.init.normal_(layer.weight, std=std, generator=generator)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
