"""What maps `X` to the features under the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..net import evaluation_mode
from .heads import CosineHead, LinearHead


class MLP(nn.Sequential):
    """Multilayer perceptron whose last hidden activations are the features.

    Parameters
    ----------
    in_features : int
        Number of inputs.
    hidden_layer_sizes : sequence of int, default=(128,)
        Width of each hidden layer.
    dropout : float, default=0.0
        Probability of dropping an activation, after each hidden layer.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.mr2.modules import MLP
    >>> MLP(4, hidden_layer_sizes=(16, 8))(torch.zeros(5, 4)).shape
    torch.Size([5, 8])
    """

    def __init__(
        self, in_features: int, hidden_layer_sizes: Sequence[int] = (128,), dropout: float = 0.0
    ) -> None:
        if (
            not isinstance(hidden_layer_sizes, Sequence)
            or not hidden_layer_sizes
            or min(hidden_layer_sizes) < 1
        ):
            raise ValueError(
                f"module__hidden_layer_sizes={hidden_layer_sizes!r} must name at least one hidden "
                "layer, of at least one unit each, as in (128,). Use module='linear' for none."
            )
        layers: list[nn.Module] = []
        for width in hidden_layer_sizes:
            layers += [nn.Linear(in_features, width), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            in_features = width
        super().__init__(*layers)


class HeadedModule(nn.Module):
    """A backbone and a head: maps a batch to ``(logits, features)``.

    With a cosine head the features are the normalised ones, which its statistics are made of.

    Parameters
    ----------
    backbone : nn.Module
        Maps a batch to features of shape (n_samples, n_features).
    head : LinearHead or CosineHead
        Maps features to logits.
    """

    head: LinearHead | CosineHead

    def __init__(self, backbone: nn.Module, head: LinearHead | CosineHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, X: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(X)
        if isinstance(self.head, CosineHead):
            features = self.head.normalise(features)
        return self.head(features), features


@torch.no_grad()
def n_features_of(backbone: nn.Module, X: Tensor) -> int:
    """Number of features that a backbone makes of a batch; initialises its lazy layers.

    Raises
    ------
    ValueError
        If what it makes of the batch is not one row of features a sample.
    """
    with evaluation_mode(backbone):
        features = backbone(X)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(X):
        got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(
            f"module must map a batch of shape {tuple(X.shape)} to features of shape "
            f"({len(X)}, n_features), got {got}. Flatten or pool its output."
        )
    return features.shape[1]
