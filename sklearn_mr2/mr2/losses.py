"""The two losses of MR2 and their sum, as plain torch modules.

Zhu et al., "Reducing class-wise performance disparity via margin regularization", arXiv
2602.00205.
"""

from collections.abc import Callable
from numbers import Real
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from .functional import relative_cross_entropy, squared_distances
from .statistics import (
    ClassMoments,
    FullPrecisionModule,
    RunningClassMoments,
    check_batch,
    class_margins,
)

__all__ = [
    "MARGIN_MODES",
    "MARGIN_STATISTICS",
    "LogitMarginLoss",
    "MR2Loss",
    "RepresentationMarginLoss",
]


def _full_precision(tensor: Tensor) -> Tensor:
    """In float32 at least: half precision cannot hold squared distances or small margins."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class MarginMode(Protocol):
    """How a margin acts on the logits of a sample."""

    floor: float
    """The `floor` of :func:`~sklearn_mr2.mr2.statistics.class_margins` this mode needs."""

    def apply(self, logits: Tensor, y: Tensor, margin: Tensor) -> Tensor:
        """Logits of shape (n_samples, n_classes), given each sample's margin (n_samples,)."""


class DivideMargin:
    """The whole row of logits divided by the margin of the sample's class, as in the paper."""

    floor = 0.1

    def apply(self, logits: Tensor, y: Tensor, margin: Tensor) -> Tensor:
        return logits / margin[:, None]


class SubtractMargin:
    """The margin taken from the logit of the sample's class, as in LDAM."""

    floor = 0.0

    def apply(self, logits: Tensor, y: Tensor, margin: Tensor) -> Tensor:
        return logits.scatter_add(1, y[:, None], -margin[:, None])


MARGIN_MODES: dict[str, MarginMode] = {"divide": DivideMargin(), "subtract": SubtractMargin()}


def _second_moment(moments: ClassMoments) -> Tensor:
    return moments.second_moment


def _dispersion(moments: ClassMoments) -> Tensor:
    # One point, up to rounding, has no dispersion that could be compared: a class of which a
    # single sample has been seen would get an extreme margin by accident.
    unknown = moments.dispersion <= 1e-10 * moments.second_moment
    return moments.dispersion.masked_fill(unknown, torch.nan)


def _error(moments: ClassMoments) -> Tensor:
    # No property of the features: not known until MR2Loss.set_class_spread.
    return torch.full_like(moments.weight, torch.nan)


MARGIN_STATISTICS: dict[str, Callable[[ClassMoments], Tensor]] = {
    "second_moment": _second_moment,
    "dispersion": _dispersion,
    "error": _error,
}
"""Class spread, shape (n_classes,), from class moments; NaN where it is not known."""


def _choose(name: str, value: str, choices):
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {sorted(choices)}.")
    return choices[value]


class LogitMarginLoss(nn.Module):
    """Cross-entropy with a margin for each class.

    With ``mode="divide"`` (the paper's) a sample's whole row of logits is divided by the margin
    of its class, :math:`-\\log\\,\\mathrm{softmax}(z / \\gamma_y)_y`. With ``mode="subtract"`` the
    margin is taken from the logit of its class. Predict with the raw logits.

    Parameters
    ----------
    mode : {"divide", "subtract"}, default="divide"
        How the margin acts.
    reduction : {"mean", "sum", "none"}, default="mean"
        "mean" is :math:`\\sum_i w_i l_i / n` with `n` the number of samples in the batch, not
        :math:`\\sum_i w_i`. For weights scaled to mean 1 over the training set, the expectation of
        a batch's loss is then the loss over the training set; divided by its own sum of weights
        it would not be.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.mr2.losses import LogitMarginLoss
    >>> logits, y = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
    >>> margins = torch.tensor([0.5, 2.0])
    >>> LogitMarginLoss(reduction="none")(logits, y, margins)
    tensor([0.0181, 0.3133])
    >>> LogitMarginLoss("subtract", reduction="none")(logits, y, margins)
    tensor([0.2014, 0.6931])
    """

    def __init__(
        self,
        mode: Literal["divide", "subtract"] = "divide",
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        super().__init__()
        self.mode = mode
        self.reduction = reduction
        self._mode = _choose("mode", mode, MARGIN_MODES)
        _choose("reduction", reduction, dict.fromkeys(["mean", "sum", "none"]))

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, reduction={self.reduction!r}"

    def forward(
        self, logits: Tensor, y: Tensor, margins: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        """The loss.

        Parameters
        ----------
        logits : Tensor of shape (n_samples, n_classes)
        y : int64 Tensor of shape (n_samples,)
        margins : Tensor of shape (n_classes,)
            Positive with "divide". No gradient flows into them.
        sample_weight : Tensor of shape (n_samples,), optional

        Returns
        -------
        Tensor
            0-d, or of shape (n_samples,) with ``reduction="none"``; float32 at least.

        Raises
        ------
        ValueError
            If shapes disagree or `y` is not int64.
        """
        check_batch(logits, y, sample_weight, name="logits")
        if margins.shape != logits.shape[1:]:
            raise ValueError(
                f"margins must have one entry for each of the {logits.shape[1]} columns of "
                f"logits, got shape {tuple(margins.shape)}."
            )
        logits = _full_precision(logits)
        margin = margins.detach().to(logits.dtype)[y]
        logits = self._mode.apply(logits, y, margin)
        loss = relative_cross_entropy(logits, y)
        if sample_weight is not None:
            loss = loss * sample_weight.to(loss.dtype)
        if self.reduction == "none":
            return loss
        return loss.sum() / max(len(y), 1) if self.reduction == "mean" else loss.sum()


class RepresentationMarginLoss(nn.Module):
    """Pull together samples of a class that are further apart than its classes' usual spread.

    .. math:: l_i = \\tau \\log\\Big(1 + \\sum_{j \\ne i,\\, y_j = y_i}
        w_j \\exp\\frac{\\|\\phi_i - \\phi_j\\|_2^2 - 2 \\bar s}{\\tau}\\Big)

    over the batch, averaged over the samples that have another of their class in it, each weighted
    by :math:`w_i`. :math:`2 \\bar s` is the squared distance two samples of a class have on
    average.

    Parameters
    ----------
    tau : float or "auto", default=1.0
        Temperature: the difference in squared distance by which one pair counts *e* times as much
        as another. 1 is the paper's. Where squared distances are large against it, the loss is a
        hinge, :math:`\\max_j(\\|\\phi_i - \\phi_j\\|^2 - 2\\bar s)_+`, that acts on a single pair
        for each sample. "auto" takes :math:`\\bar s`: squared distances scale with the square of
        the features, and only a temperature that does so too leaves the relative pull of the
        pairs alone when features are rescaled. (The number of features is such a scale only for
        features of unit variance.) It matters little: a small convolutional network on 5,000
        images of Fashion-MNIST, with representation weights from 0.01 to 0.1 and 3 seeds, came to
        the same accuracy within 0.1 points with 1, the number of features and "auto".

    Notes
    -----
    *Weights.* A weight means that many copies of the sample in the batch: `w` positives of the
    others, `w` anchors, and, as copies are positives of each other at distance 0, a further
    :math:`(w - 1)_+ e^{-2\\bar s/\\tau}` inside the logarithm of its own. Other than in a mean of
    losses, the scale of the weights matters.

    *Batches.* A sample without another of its class in the batch gives no gradient, so batches
    should hold several samples of each class they hold.

    *Cost.* One Gram matrix of the batch. Offsets are taken from one sample of each class first, so
    that rounding is relative to the spread within classes and not to the features' norm.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.mr2.losses import RepresentationMarginLoss
    >>> features = torch.tensor([[0.0, 0.0], [0.0, 2.0], [5.0, 5.0]])
    >>> loss = RepresentationMarginLoss()
    >>> loss(features, torch.tensor([0, 0, 1]), mean_spread=0.5)  # log(1 + exp(4 - 1))
    tensor(3.0486)
    >>> loss(features, torch.tensor([0, 1, 2]), mean_spread=0.5)  # no two of a class
    tensor(0.)
    """

    def __init__(self, tau: float | Literal["auto"] = 1.0) -> None:
        super().__init__()
        if tau != "auto" and not (isinstance(tau, Real) and 0 < tau < float("inf")):
            raise ValueError(f'tau={tau!r} must be a positive finite number or "auto".')
        self.tau = tau

    def extra_repr(self) -> str:
        return f"tau={self.tau!r}"

    def forward(
        self,
        features: Tensor,
        y: Tensor,
        mean_spread: Tensor | float,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """The loss.

        Parameters
        ----------
        features : Tensor of shape (n_samples, n_features)
        y : int64 Tensor of shape (n_samples,)
        mean_spread : 0-d Tensor or float
            :math:`\\bar s`, `mean_spread` of :class:`~sklearn_mr2.mr2.statistics.ClassMoments`. No
            gradient flows into it.
        sample_weight : Tensor of shape (n_samples,), optional

        Returns
        -------
        Tensor
            0-d, float32 at least. 0 if no two samples are of the same class.

        Raises
        ------
        ValueError
            If shapes disagree or `y` is not int64.
        """
        check_batch(features, y, sample_weight)
        features = _full_precision(features)
        spread = torch.as_tensor(mean_spread, dtype=features.dtype, device=features.device)
        spread = spread.detach()
        tau = spread.clamp(min=1e-12) if self.tau == "auto" else torch.full_like(spread, self.tau)
        weight = None if sample_weight is None else sample_weight.to(features.dtype)

        if features.device.type == "cpu" and not torch.compiler.is_compiling():
            # Samples without another of their class have no part in the loss. With many classes
            # that is most of them, and the Gram matrix is most of the cost. Elsewhere looking up
            # which they are would cost more than it saves.
            paired = y.bincount()[y] > 1
            if weight is not None:
                paired |= weight > 1
            rows = paired.nonzero()[:, 0]
            features, y = features.index_select(0, rows), y[rows]
            weight = None if weight is None else weight[rows]
        if not len(y):
            return features.sum()  # 0, and part of the graph

        same = y[:, None] == y
        itself = torch.eye(len(y), dtype=torch.bool, device=y.device)
        positive = same & ~itself
        offset = features - features.detach().index_select(0, same.byte().argmax(dim=1))
        with torch.autocast(features.device.type, enabled=False):
            distance = squared_distances(offset)
        exponent = (distance - 2 * spread).div_(tau)
        # The pair of a sample with itself is free to hold the 1 of the logarithm, exp(0).
        own = offset.new_zeros(len(y))
        has_positive = positive.any(dim=1)
        if weight is None:
            weight = torch.ones_like(own)
        else:
            positive = positive & (weight > 0)
            exponent = exponent + weight.log()
            copies = (weight - 1).clamp(min=0)
            own = torch.log1p(copies * torch.exp(-2 * spread / tau))
            has_positive = positive.any(dim=1) | (copies > 0)
        exponent = torch.where(itself, own.diag(), exponent.masked_fill_(~positive, -torch.inf))
        anchor = weight * has_positive
        total = anchor.sum()
        loss = (anchor * exponent.logsumexp(dim=1)).sum()
        return tau * loss / torch.where(total > 0, total, 1)


class MR2Loss(FullPrecisionModule):
    """The loss of MR2 for learned features: both margins, and the statistics they come from.

    The mean over the batch of :class:`LogitMarginLoss` plus `representation_weight` times
    :class:`RepresentationMarginLoss`, with margins and mean spread from running statistics of the
    features. In training mode a call first lets the batch enter the statistics. In evaluation
    mode they are used as they are. They are constants for the gradient, and part of the
    ``state_dict``.

    Parameters
    ----------
    n_classes, n_features : int
        Columns of the logits and of the features under the head.
    margin : float, default=1.0
        Mean of the margins over the classes.
    margin_statistic : {"second_moment", "dispersion", "error"}, default="second_moment"
        What the margin of a class grows with: the second moment of its features as in the paper,
        their dispersion about the class mean alone, or the class's error, which has to be given
        by :meth:`set_class_spread`.
    margin_exponent : float, default=1/3
        Power of that statistic a margin is proportional to. 0 gives every class the same margin.
    margin_mode : {"divide", "subtract"}, default="divide"
        How the margin acts on the logits.
    margin_norm : float, default=2
        Norm of the statistics. L2-normalised features need another than 2, for which they all
        have second moment 1; the paper uses 3.
    representation_weight : float, default=0.0
        Weight of the representation loss. Only learned features are changed by it.
    tau : float or "auto", default=1.0
        Temperature of the representation loss.
    momentum : float or None, default=0.95
        See :class:`~sklearn_mr2.mr2.statistics.RunningClassMoments`.

    Attributes
    ----------
    logit_loss : LogitMarginLoss
    representation_loss : RepresentationMarginLoss
    running : RunningClassMoments
    weight_scale : float
        Copies of a sample that a weight of 1 stands for; 1 unless set. Weights of mean 1 are what
        a mean of losses wants, the representation loss wants to know how many copies they are.
    given_spread : Tensor of shape (n_classes,)
        Buffer with what :meth:`set_class_spread` was given, NaN where nothing was.

    Notes
    -----
    With a cosine head pass the normalised features, ``head.normalise(features)``.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.mr2.heads import LinearHead
    >>> from sklearn_mr2.mr2.losses import MR2Loss
    >>> generator = torch.Generator().manual_seed(0)
    >>> X, y = torch.randn(60, 2, generator=generator), torch.arange(60) % 3
    >>> X = X + 3 * torch.nn.functional.one_hot(y, 3)[:, :2]
    >>> backbone, head = torch.nn.Linear(2, 4), LinearHead(4, 3)
    >>> criterion = MR2Loss(3, 4, margin=0.5, representation_weight=0.01)
    >>> parameters = [*backbone.parameters(), *head.parameters()]
    >>> optimizer = torch.optim.SGD(parameters, lr=0.1)
    >>> for _ in range(100):
    ...     features = backbone(X)
    ...     loss = criterion(head(features), features, y)
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> bool((head(backbone(X)).argmax(1) == y).float().mean() > 0.8)
    True
    >>> round(float(criterion.margins.mean()), 6)
    0.5
    """

    given_spread: Tensor

    def __init__(
        self,
        n_classes: int,
        n_features: int,
        *,
        margin: float = 1.0,
        margin_statistic: Literal["second_moment", "dispersion", "error"] = "second_moment",
        margin_exponent: float = 1 / 3,
        margin_mode: Literal["divide", "subtract"] = "divide",
        margin_norm: float = 2,
        representation_weight: float = 0.0,
        tau: float | Literal["auto"] = 1.0,
        momentum: float | None = 0.95,
    ) -> None:
        super().__init__()
        if not 0 <= representation_weight < float("inf"):
            raise ValueError(
                f"representation_weight={representation_weight!r} must be a finite number of at "
                "least 0."
            )
        self.margin = margin
        self.margin_statistic = margin_statistic
        self.margin_exponent = margin_exponent
        self.representation_weight = representation_weight
        self.weight_scale = 1.0
        self._statistic = _choose("margin_statistic", margin_statistic, MARGIN_STATISTICS)
        self._floor = _choose("margin_mode", margin_mode, MARGIN_MODES).floor
        self.logit_loss = LogitMarginLoss(margin_mode)
        self.representation_loss = RepresentationMarginLoss(tau)
        self.running = RunningClassMoments(n_classes, n_features, momentum, margin_norm)
        self.register_buffer("given_spread", torch.full((n_classes,), torch.nan))
        # Rejects a bad margin or exponent now, and not in the first batch.
        self._margins(self.running.view())

    def extra_repr(self) -> str:
        return (
            f"margin={self.margin}, margin_statistic={self.margin_statistic!r}, "
            f"margin_exponent={self.margin_exponent:g}, "
            f"representation_weight={self.representation_weight}"
        )

    @property
    def moments(self) -> ClassMoments:
        """The running statistics as they stand, a copy."""
        return self.running.moments()

    @property
    def spread(self) -> Tensor:
        """The statistic the margins come from, shape (n_classes,); NaN where it is not known."""
        return self._spread(self.moments)

    @property
    def margins(self) -> Tensor:
        """The margins as they stand, shape (n_classes,).

        `margin` for classes not seen so far.
        """
        return self._margins(self.running.view())

    @torch.no_grad()
    def set_class_spread(self, spread: Tensor | None) -> None:
        """Fix the statistic the margins come from, instead of following the features.

        For class errors measured on validation data (``margin_statistic="error"``; until then
        all margins are equal), or statistics of frozen features. It can be called again, for
        instance after each epoch.

        Parameters
        ----------
        spread : Tensor of shape (n_classes,) or None
            Non-negative. NaN leaves a class to `margin_statistic`, None all of them.

        Raises
        ------
        ValueError
            If `spread` has another shape or a negative entry.
        """
        if spread is None:
            self.given_spread.fill_(torch.nan)
            return
        spread = torch.as_tensor(spread)
        if spread.shape != self.given_spread.shape:
            raise ValueError(
                f"spread must have one entry for each of the {len(self.given_spread)} classes, "
                f"got shape {tuple(spread.shape)}."
            )
        if (spread < 0).any():
            raise ValueError("spread must not be negative.")
        self.given_spread.copy_(spread)

    @torch.no_grad()
    def _spread(self, moments: ClassMoments) -> Tensor:
        measured = torch.where(moments.present, self._statistic(moments), torch.nan)
        return torch.where(self.given_spread.isnan(), measured, self.given_spread)

    @torch.no_grad()
    def _margins(self, moments: ClassMoments) -> Tensor:
        return class_margins(
            self._spread(moments),
            self.margin,
            exponent=self.margin_exponent,
            floor=self._floor,
        )

    def forward(
        self, logits: Tensor, features: Tensor, y: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        """The loss.

        Parameters
        ----------
        logits : Tensor of shape (n_samples, n_classes)
        features : Tensor of shape (n_samples, n_features)
            What the head made the logits of.
        y : int64 Tensor of shape (n_samples,)
        sample_weight : Tensor of shape (n_samples,), optional
            Scaled to mean 1 over the training set.

        Returns
        -------
        Tensor
            0-d, float32 at least.

        Raises
        ------
        ValueError
            If shapes disagree or `y` is not int64.
        """
        self.running.update(features, y, sample_weight)
        moments = self.running.view()
        loss = self.logit_loss(logits, y, self._margins(moments), sample_weight)
        if self.representation_weight == 0:
            return loss
        copies = sample_weight
        if self.weight_scale != 1:
            ones = features.new_ones(len(y)) if copies is None else copies
            copies = self.weight_scale * ones
        representation = self.representation_loss(features, y, moments.mean_spread, copies)
        return loss + self.representation_weight * representation
