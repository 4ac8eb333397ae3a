"""Heads: the last layer, from features to one logit for each class."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CosineHead", "LinearHead"]


def _check_sizes(in_features: int, n_classes: int) -> None:
    if in_features < 1:
        raise ValueError(f"in_features={in_features!r} must be at least 1.")
    if n_classes < 2:
        raise ValueError(f"n_classes={n_classes!r} must be at least 2.")


class LinearHead(nn.Module):
    """Logits linear in the features.

    For two classes the logits are :math:`(0, \\langle w, \\phi\\rangle + b)` with a single `w`, so
    that a penalty on the weight is that of binary logistic regression. (Two rows of weights
    would share the work, and halve the penalty.) Otherwise there is a row for each class.

    Weight and bias start at 0 unless a generator is given: the problem is convex in them, and
    gives the same result every time. Over a backbone that learns, zeros are a poor start, since the
    backbone gets no gradient through them.

    Parameters
    ----------
    in_features : int
        Number of features.
    n_classes : int
        Number of classes, at least 2.
    bias : bool, default=True
        Whether to add an intercept to each logit.
    generator : torch.Generator, optional
        Draw the weights from the uniform distribution between plus and minus
        ``1 / sqrt(in_features)``, as in :class:`torch.nn.Linear`, in place of zeros.
    device, dtype : optional
        As in :class:`torch.nn.Linear`.

    Attributes
    ----------
    weight : Parameter of shape (n_classes, in_features), or (1, in_features) for two classes
    bias : Parameter of shape (n_classes,), or (1,) for two classes; or None

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.mr2.heads import LinearHead
    >>> head = LinearHead(3, n_classes=2)
    >>> head.weight.shape, head(torch.ones(5, 3)).shape
    (torch.Size([1, 3]), torch.Size([5, 2]))
    """

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(in_features, n_classes)
        self.in_features = in_features
        self.n_classes = n_classes
        rows = 1 if n_classes == 2 else n_classes
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set weight and bias to 0, or the weight to random numbers if a generator is given."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if generator is not None:
            # Drawn where the generator is, so that a seed means the same on every device.
            uniform = torch.rand(self.weight.shape, generator=generator, device=generator.device)
            self.weight.copy_((2 * uniform - 1) / math.sqrt(self.in_features))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.n_classes}, bias={self.bias is not None}"

    def forward(self, features: Tensor) -> Tensor:
        """Logits of shape (..., n_classes) of features of shape (..., in_features)."""
        logits = F.linear(features, self.weight, self.bias)
        if self.n_classes == 2:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
        return logits


class CosineHead(nn.Module):
    """Logits that are scaled cosines between the features and a direction for each class.

    .. math:: z_k = \\mathrm{scale} \\,
        \\big\\langle \\phi / \\|\\phi\\|, w_k / \\|w_k\\| \\big\\rangle

    Parameters
    ----------
    in_features : int
        Number of features.
    n_classes : int
        Number of classes, at least 2.
    scale : float, default=20.0
        Logits lie between minus and plus this, so the scale is a bound on the weights: with a
        small one no class can become probable, with a large one the head fits noise. With the
        class directions as far apart as they can be, a class reaches probability `p` from
        ``scale = (K - 1) / K * log((K - 1) * p / (1 - p))``: for ``p = 0.99`` that is 6 with 10
        classes and 11 with 1000. Features do not use the whole range of cosines, so the default
        is about twice that. On the bundled embeddings it was better than 3, 6, 10, 30, 50 and
        100 (10 to 30 within a point of accuracy).
    learn_scale : bool, default=False
        Whether the scale is a parameter, learned as its logarithm so that it stays positive.
    bias : bool, default=False
        Whether to add an intercept to each logit. The paper's head has none.
    generator : torch.Generator, optional
        Source of the random initial directions. By default one of its own with a fixed seed, so
        that the head is the same every time and the global random state is not touched.
    device, dtype : optional
        As in :class:`torch.nn.Linear`.

    Attributes
    ----------
    weight : Parameter of shape (n_classes, in_features)
    bias : Parameter of shape (n_classes,), or None
    log_scale : Parameter, or buffer if it is not learned; 0-d

    Notes
    -----
    Class statistics are those of ``normalise(features)``.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.mr2.heads import CosineHead
    >>> head = CosineHead(3, n_classes=4, scale=10)
    >>> logits = head(torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]))
    >>> torch.allclose(logits[0], logits[1]), bool((logits.abs() <= 10).all())
    (True, True)
    """

    log_scale: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        scale: float = 20.0,
        learn_scale: bool = False,
        *,
        bias: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(in_features, n_classes)
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale!r} must be a positive finite number.")
        self.in_features = in_features
        self.n_classes = n_classes
        self.weight = nn.Parameter(torch.empty(n_classes, in_features, device=device, dtype=dtype))
        log_scale = torch.tensor(math.log(scale), device=device, dtype=dtype)
        if learn_scale:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)
        if bias:
            self.bias = nn.Parameter(torch.empty(n_classes, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the directions anew, uniformly from the sphere; keep the scale, zero the bias."""
        if generator is None:
            generator = torch.Generator().manual_seed(0)
        # Drawn where the generator is, so that a seed means the same on every device.
        weight = torch.randn(self.weight.shape, generator=generator, device=generator.device)
        self.weight.copy_(F.normalize(weight))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def scale(self) -> Tensor:
        """The scale, a 0-d Tensor."""
        return self.log_scale.exp()

    def extra_repr(self) -> str:
        learned = isinstance(self.log_scale, nn.Parameter)
        return f"{self.in_features}, {self.n_classes}, learn_scale={learned}"

    def normalise(self, features: Tensor) -> Tensor:
        """Features divided by their Euclidean norm, in the last dimension.

        A row of zeros stays zero, with the gradient of the identity rather than an infinite one.
        Half-precision features come back in the precision of the head's weight.
        """
        features = features.to(torch.promote_types(features.dtype, self.weight.dtype))
        # float32 at least, where the square of 300 is still finite.
        full = features.to(torch.promote_types(features.dtype, torch.float32))
        square = full.square().sum(dim=-1, keepdim=True)
        norm = torch.where(square > 0, square, 1).sqrt()
        return (full / norm).to(features.dtype)

    def forward(self, features: Tensor) -> Tensor:
        """Logits of shape (..., n_classes) of features of shape (..., in_features)."""
        cosine = F.linear(self.normalise(features), self.normalise(self.weight))
        return self.scale * cosine if self.bias is None else self.scale * cosine + self.bias
