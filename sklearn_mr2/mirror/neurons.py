r"""Hidden neurons of a network: how much each contributes, and networks without some of them.

A neuron's effective weight is :math:`c_j = \|w_j\| \|a_j\|`, the norms of its incoming weights
(with its bias, the weight of a constant feature) and of its outgoing ones. With ReLU and pooling it
does not change when a neuron is scaled up on one side and down on the other, and it bounds what the
neuron adds to the next layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .theory import effective_weights

__all__ = ["HiddenLayer", "hidden_layers", "keep_neurons", "weight_layers"]


class HiddenLayer(NamedTuple):
    """A layer of hidden neurons or channels, and the layer that reads them.

    Attributes
    ----------
    name : str
        Name of the submodule.
    layer, reader : nn.Module
        The layer and the next one, each with a ``weight`` of shape (n_outputs, n_inputs, ...).
    """

    name: str
    layer: Any
    reader: Any

    @property
    def width(self) -> int:
        """Number of neurons or channels."""
        return len(self.layer.weight)

    def _reading(self) -> Tensor:
        """The reader's weights with one axis for what it reads: (group, output, input, rest)."""
        weight, n_groups = self.reader.weight.detach(), getattr(self.reader, "groups", 1)
        return weight.view(n_groups, len(weight) // n_groups, weight.shape[1], -1)

    def effective_weights(self) -> Tensor:
        """Effective weight of each neuron.

        Returns
        -------
        Tensor of shape (width,)
            The effective weights, in float64 on the CPU.
        """
        by_input = self._reading().cpu().movedim(2, 1).flatten(0, 1)
        # A flattened channel feeds several consecutive inputs of a dense layer.
        outgoing = by_input.unflatten(0, (self.width, -1)).flatten(1)
        bias = self.layer.bias
        return effective_weights(
            self.layer.weight.cpu(), outgoing.T, None if bias is None else bias.cpu()
        )

    @torch.no_grad()
    def silence(self, neurons: Tensor) -> None:
        """Set all weights into and out of some neurons to zero, in place.

        Parameters
        ----------
        neurons : bool Tensor of shape (width,)
            Which.
        """
        neurons = neurons.to(self.layer.weight.device)
        self.layer.weight[neurons] = 0
        if self.layer.bias is not None:
            self.layer.bias[neurons] = 0
        reading = self._reading()
        inputs = neurons.repeat_interleave(len(reading) * reading.shape[2] // self.width)
        reading.masked_fill_(inputs.view(len(reading), 1, -1, 1), 0)


def weight_layers(module: nn.Module) -> list[tuple[str, Any]]:
    """Dense and convolutional layers of a network, in the order in which they are registered.

    Parameters
    ----------
    module : nn.Module
        The network.

    Returns
    -------
    list of (str, nn.Module)
        Names and layers.

    Raises
    ------
    ValueError
        If there are weights of another kind, such as those of a recurrent layer.
    """
    layers: list[tuple[str, Any]] = []
    for name, layer in module.named_modules():
        if all(p.ndim < 2 for p in layer.parameters(recurse=False)):
            continue
        weight = getattr(layer, "weight", None)
        dense = weight is not None and weight.shape[1:] == (getattr(layer, "in_features", None),)
        convolution = isinstance(layer, _ConvNd) and not isinstance(layer, _ConvTransposeNd)
        if not dense and not convolution:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) is neither dense nor convolutional: its "
                "neurons have no defined incoming and outgoing weights."
            )
        layers.append((name, layer))
    return layers


def hidden_layers(module: nn.Module) -> list[HiddenLayer]:
    """Hidden layers of a network that is a chain of layers.

    Parameters
    ----------
    module : nn.Module
        A network whose dense and convolutional layers follow each other in the order in which they
        are registered, with activations, pooling and flattening in between.

    Returns
    -------
    list of HiddenLayer
        All layers but the last; empty for a linear model.

    Raises
    ------
    ValueError
        If consecutive layers do not fit, or there are weights of another kind.

    Examples
    --------
    >>> from sklearn_mr2.mirror.networks import HomogeneousMLP
    >>> [hidden.width for hidden in hidden_layers(HomogeneousMLP(4, (8, 3)))]
    [8, 3]
    """
    hidden = []
    for (name, layer), (next_name, reader) in pairwise(weight_layers(module)):
        n_inputs = reader.weight.shape[1] * getattr(reader, "groups", 1)
        if n_inputs % len(layer.weight):
            raise ValueError(
                f"layer {next_name!r} with {n_inputs} inputs does not follow layer {name!r} with "
                f"{len(layer.weight)} outputs: the network is not a chain of layers in the order "
                "in which they are registered."
            )
        hidden.append(HiddenLayer(name, layer, reader))
    return hidden


@torch.no_grad()
def keep_neurons(network: nn.Module, kept: Sequence[Tensor]) -> nn.Module:
    """Copy a multi-layer perceptron with some of its hidden neurons only.

    Parameters
    ----------
    network : nn.Module
        A chain of dense layers with elementwise activations in between. It is not changed.
    kept : sequence of bool Tensor
        For each hidden layer a mask of shape (width,).

    Returns
    -------
    nn.Module
        The smaller network.
    """
    network = copy.deepcopy(network)
    for (_, layer, reader), mask in zip(hidden_layers(network), kept, strict=True):
        layer.weight = nn.Parameter(layer.weight[mask])
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias[mask])
        layer.out_features = reader.in_features = int(mask.sum())
        reader.weight = nn.Parameter(reader.weight[:, mask])
    return network
