"""How widely the features of each class spread, and the margins that follow from it.

Everything here is plain torch and constant for the gradient. The mathematics is that of Zhu et
al., "Reducing class-wise performance disparity via margin regularization", arXiv 2602.00205.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["ClassMoments", "RunningClassMoments", "class_margins", "class_moments"]


class ClassMoments(NamedTuple):
    """First and second moments of the features, class by class.

    With :math:`\\phi` the features, :math:`\\mu_k` their mean and :math:`s_k` their per-dimension
    standard deviation in class `k` (weighted, divided by the total weight, not by ``n - 1``).

    Attributes
    ----------
    weight : Tensor of shape (n_classes,)
        Total sample weight of each class; 0 for a class without samples, which has zeros in every
        other field too.
    mean : Tensor of shape (n_classes, n_features)
        :math:`\\mu_k`.
    second_moment : Tensor of shape (n_classes,)
        :math:`\\|\\mu_k\\|_p^2` plus `dispersion`. With ``norm=2`` this is
        :math:`E_k\\|\\phi\\|_2^2`, the spread the paper's margins are made of.
    dispersion : Tensor of shape (n_classes,)
        :math:`E_k\\|\\phi - \\mu_k\\|_p^2`, which is :math:`\\|s_k\\|_2^2` with ``norm=2``.
    variance : Tensor of shape (n_classes,)
        :math:`\\|s_k\\|_2^2`, whatever the norm.
    """

    weight: Tensor
    mean: Tensor
    second_moment: Tensor
    dispersion: Tensor
    variance: Tensor

    @property
    def present(self) -> Tensor:
        """Which classes have samples: bool Tensor of shape (n_classes,)."""
        return self.weight > 0

    @property
    def mean_spread(self) -> Tensor:
        """Mean of :math:`\\|s_k\\|_2^2` over the classes present, a 0-d Tensor.

        Always the 2-norm: the representation loss compares it with Euclidean distances. 0 where
        no class is present.
        """
        # Absent classes hold zeros, so only the divisor has to leave them out.
        return self.variance.sum() / self.present.sum().clamp(min=1)


def _check_norm(norm: float) -> float:
    if not norm >= 1:
        raise ValueError(f"norm={norm!r} is no norm: give a number of at least 1, or math.inf.")
    return float(norm)


def check_batch(
    features: Any, y: Tensor, sample_weight: Tensor | None, name: str = "features"
) -> None:
    """Raise if shapes or dtypes of a batch disagree.

    The values are left alone: a look at them would make the host wait for an accelerator in every
    step.
    """
    if features.ndim != 2:
        raise ValueError(
            f"{name} must have one row for each sample, got shape {tuple(features.shape)}: "
            "flatten or pool everything but the first dimension."
        )
    if y.dtype != torch.int64:
        raise ValueError(f"y must hold class codes as int64, got {y.dtype}: use y.long().")
    for other, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None and value.shape != features.shape[:1]:
            raise ValueError(
                f"{other} must have one entry for each of the {features.shape[0]} rows of "
                f"{name}, got shape {tuple(value.shape)}."
            )


def _squared_norm(rows: Tensor, norm: float) -> Tensor:
    """:math:`\\|x\\|_p^2` of each row."""
    if norm == 2:
        return torch.linalg.vector_norm(rows, dim=1).square()
    rows = rows.abs()
    largest = rows.amax(dim=1, keepdim=True)
    if norm == math.inf:
        return largest[:, 0].square()
    # The p-th power of a large entry leaves float32's range, that of a ratio does not. And pow is
    # an order of magnitude faster than vector_norm for the powers in use.
    powers = rows.div_(torch.where(largest > 0, largest, 1)).pow_(norm)
    return largest[:, 0].square() * powers.sum(dim=1).pow(2 / norm)


def _ratio(numerator: Tensor, weight: Tensor) -> Tensor:
    """``numerator / weight``, with 0 (not NaN) for rows of no weight, whose numerator is 0."""
    return numerator / torch.where(weight > 0, weight, 1)


@torch.no_grad()
def class_moments(
    features: Any,
    y: Any,
    n_classes: int,
    sample_weight: Any = None,
    *,
    norm: float = 2,
    chunk_size: int | None = None,
    reduce: Callable[[list[Tensor]], None] | None = None,
) -> ClassMoments:
    """Exact moments of the features of each class.

    Two passes over the data, the second about the means found in the first, in float64 whatever
    the input's dtype: a spread of 1e-3 around a mean of 1e4 comes out to full precision as far as
    the input holds it.

    Parameters
    ----------
    features : Tensor or array of shape (n_samples, n_features)
        Read slice by slice, so a memory-mapped array is never held in memory as a whole.
    y : integer Tensor or array of shape (n_samples,)
        Class codes in ``[0, n_classes)``.
    n_classes : int
        Number of classes. Classes without samples get zeros.
    sample_weight : Tensor or array of shape (n_samples,), optional
        Non-negative weights; a weight of 2 is the same as having the sample twice.
    norm : float, default=2
        The `p` of the norm, at least 1, or ``math.inf``.
    chunk_size : int, optional
        Rows per slice. By default as many as make a slice of about 2 MB in float64, on
        an accelerator 32 MB.
    reduce : callable, optional
        Called with lists of tensors of sums over the rows; replaces them by the sums over the rows
        of all processes, where each holds a part of the data.

    Returns
    -------
    ClassMoments
        float64 Tensors on the features' device.

    Raises
    ------
    ValueError
        If shapes disagree, `y` is not of an integer type or outside of ``[0, n_classes)``, a
        weight is negative, or `norm` is below 1.

    Notes
    -----
    With a norm other than 2 the spread depends on the basis: rotating the features changes it.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.mr2.statistics import class_moments
    >>> features = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    >>> moments = class_moments(features, torch.tensor([0, 0, 1]), n_classes=2)
    >>> moments.mean.tolist()
    [[2.0, 0.0], [0.0, 5.0]]
    >>> moments.second_moment.tolist(), moments.dispersion.tolist()
    ([5.0, 25.0], [1.0, 0.0])
    """
    norm = _check_norm(norm)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r} must be at least 1.")
    device = features.device if isinstance(features, Tensor) else torch.device("cpu")
    accumulator: dict[str, Any] = {"dtype": torch.float64, "device": device}
    y = torch.as_tensor(y, device=device)
    if not y.is_floating_point():
        y = y.long()
    if sample_weight is not None:
        sample_weight = torch.as_tensor(sample_weight, **accumulator)
    check_batch(features, y, sample_weight)
    n_samples, n_features = features.shape
    if n_samples and (y.min() < 0 or y.max() >= n_classes):
        raise ValueError(
            f"y must hold class codes from 0 to n_classes - 1 = {n_classes - 1}, "
            f"got {int(y.min())} to {int(y.max())}."
        )
    if sample_weight is None:
        sample_weight = torch.ones(n_samples, **accumulator)
    elif (sample_weight < 0).any():
        raise ValueError("sample_weight must not be negative.")

    # On a CPU a chunk and what is computed from it stay in the cache.
    at_once = 2**18 if device.type == "cpu" else 2**22
    step = chunk_size or max(1, at_once // max(1, n_features))
    chunks = [slice(start, start + step) for start in range(0, n_samples, step)]

    def read(rows: slice) -> Tensor:
        if isinstance(features, Tensor):
            return features[rows].to(torch.float64)
        return torch.from_numpy(np.array(features[rows], dtype=np.float64))

    weight = torch.zeros(n_classes, **accumulator).index_add_(0, y, sample_weight)
    mean = torch.zeros(n_classes, n_features, **accumulator)
    for rows in chunks:
        mean.index_add_(0, y[rows], read(rows) * sample_weight[rows, None])
    if reduce is not None:
        reduce([weight, mean])
    mean = _ratio(mean, weight[:, None])

    variance = torch.zeros(n_classes, **accumulator)
    dispersion = variance if norm == 2 else torch.zeros(n_classes, **accumulator)
    for rows in chunks:
        deviation = read(rows) - mean[y[rows]]
        variance.index_add_(0, y[rows], sample_weight[rows] * _squared_norm(deviation, 2))
        if norm != 2:
            dispersion.index_add_(0, y[rows], sample_weight[rows] * _squared_norm(deviation, norm))
    if reduce is not None:
        reduce([variance] if dispersion is variance else [variance, dispersion])
    variance, dispersion = _ratio(variance, weight), _ratio(dispersion, weight)
    return ClassMoments(weight, mean, _squared_norm(mean, norm) + dispersion, dispersion, variance)


@torch.no_grad()
def class_margins(
    spread: Tensor,
    mean_margin: float = 1.0,
    *,
    exponent: float = 1 / 3,
    present: Tensor | None = None,
    floor: float = 0.1,
) -> Tensor:
    """Margins proportional to a power of the class spread.

    .. math:: \\gamma_k = \\bar c \\, K \\, r_k^e \\Big/ \\sum_j r_j^e

    with the sum, and `K`, over the classes whose spread is known. For the paper's rule (Corollary
    1) :math:`r_k` is `second_moment` of :class:`ClassMoments` and :math:`e = 1/3`.

    Parameters
    ----------
    spread : Tensor of shape (n_classes,)
        Non-negative spread :math:`r_k` of each class. NaN or infinity stands for a spread that is
        not known.
    mean_margin : float, default=1.0
        :math:`\\bar c`, the mean of the margins over the classes whose spread is known. It may be
        0 only where margins are subtracted, with ``floor=0``.
    exponent : float, default=1/3
        :math:`e`. With 0 every class gets `mean_margin`.
    present : bool Tensor of shape (n_classes,), optional
        Classes whose spread counts. The others do not enter the normalisation.
    floor : float, default=0.1
        A class whose :math:`r_k^e` is below `floor` times the mean is raised to it. It keeps a
        collapsed class (spread 0) usable where the margin divides the logits: its margin is at
        least ``mean_margin * floor / (1 + floor)``. With the default it takes a spread a thousand
        times below the others' to be affected at exponent 1/3. Use 0 where the margin is
        subtracted and a margin of 0 is harmless.

    Returns
    -------
    Tensor of shape (n_classes,)
        The margins, always finite, in the dtype of `spread` (float32 at least). `mean_margin` for
        classes that are absent or whose spread is not known, and for all classes if every spread
        is 0.

    Raises
    ------
    ValueError
        If `mean_margin` is negative, or 0 with a positive `floor`, if `exponent` is negative, or
        if `floor` is outside [0, 1).

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.mr2.statistics import class_margins
    >>> class_margins(torch.tensor([1.0, 8.0])).tolist()  # a ratio of 8 gives a ratio of 2
    [0.6666..., 1.3333...]
    """
    if not 0 <= mean_margin < math.inf or mean_margin == 0 < floor:
        raise ValueError(
            f"mean_margin={mean_margin!r} must be a positive finite number; 0 needs floor=0, since "
            "margins of 0 cannot divide."
        )
    if not 0 <= exponent < math.inf:
        raise ValueError(f"exponent={exponent!r} must be a finite number of at least 0.")
    if not 0 <= floor < 1:
        raise ValueError(f"floor={floor!r} must lie in [0, 1).")
    spread = spread.to(torch.promote_types(spread.dtype, torch.float32))
    known = torch.isfinite(spread) if present is None else torch.isfinite(spread) & present
    spread = torch.where(known, spread, 0).clamp(min=0)
    # Relative to the largest no power can overflow, and with all spreads 0 all scores are 1.
    largest = spread.amax()
    score = torch.where(largest > 0, spread / torch.where(largest > 0, largest, 1), 1)
    score = torch.where(known, score.pow(exponent), 0)
    n_known = known.sum().clamp(min=1).to(score.dtype)
    score = torch.where(known, torch.maximum(score, floor * score.sum() / n_known), 0)
    total = score.sum()
    margins = mean_margin * n_known * (score / torch.where(total > 0, total, 1))
    return torch.where(known, margins, mean_margin)


class FullPrecisionModule(nn.Module):
    """A module whose buffers move and are cast as usual, but never below float32.

    ``half()`` and ``to(torch.bfloat16)`` are meant for a network's parameters; statistics would be
    ruined by them.
    """

    def _apply(self, fn, recurse=True):
        def keep_precision(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            return tensor.to(applied.device) if applied.dtype.itemsize < 4 else applied

        return super()._apply(keep_precision, recurse)


class RunningClassMoments(FullPrecisionModule):
    """Moments of the features of each class, kept up to date batch by batch.

    For features that change while a network learns. A batch holds few samples of a class, often
    one, and the variance within one batch is then far too small (``(n - 1) / n`` of the truth),
    so averaging batch variances does not help. Here the mean is kept as a vector and a batch
    enters by its distances from that mean. With ``norm=2`` the result is exactly the moments of
    all samples seen, each class's earlier samples discounted by `momentum` each time the class
    appears.

    Parameters
    ----------
    n_classes, n_features : int
        Sizes.
    momentum : float or None, default=0.95
        What remains of the weight of a class's earlier samples when it appears in a new batch, in
        [0, 1). (The `momentum` of :class:`torch.nn.BatchNorm1d` is the share of the new batch.)
        None discounts nothing: the moments of everything ever seen. At the default the margins
        of small networks trained on 10 to 1000 classes were closest to those from exact
        statistics: less memory adds noise, more lags behind the features.
    norm : float, default=2
        The `p` of the norm, at least 1, or ``math.inf``.
    device, dtype : optional
        Where and how the statistics are kept. They are never kept, nor computed, in less than
        float32, whatever the module is cast to. By default float64 with ``momentum=None``, else
        float32.

    Attributes
    ----------
    weight, mean, dispersion, variance : Tensor
        Buffers, as in :class:`ClassMoments`; with a `momentum`, `weight` is the discounted one.

    Notes
    -----
    A class with old mean :math:`\\mu` and dispersion `d`, of which a batch holds samples with mean
    :math:`\\mu + \\delta` and a share `f` of the new total weight, gets

    .. math:: \\mu + f \\delta, \\qquad
        (1 - f) \\, d + f \\, E_b\\|\\phi - \\mu\\|_p^2 - f^2 \\|\\delta\\|_p^2 .

    For ``p = 2`` this is the exact rule for merging two groups. No other norm has one; there the
    dispersion is approximate (within 0.3% on Gaussian, rectified and normalised features, for
    1 to 500 samples of a class per batch).

    Rows that are not finite are left out, so that one overflow in mixed-precision training, which
    a gradient scaler skips, does not destroy the statistics.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.mr2.statistics import RunningClassMoments
    >>> running = RunningClassMoments(n_classes=2, n_features=1, momentum=None)
    >>> running.update(torch.tensor([[1.0]]), torch.tensor([0]))
    >>> running.update(torch.tensor([[3.0]]), torch.tensor([0]))
    >>> moments = running.moments()
    >>> moments.weight.tolist(), moments.dispersion.tolist(), moments.second_moment.tolist()
    ([2.0, 0.0], [1.0, 0.0], [5.0, 0.0])
    """

    weight: Tensor
    mean: Tensor
    dispersion: Tensor
    variance: Tensor

    def __init__(
        self,
        n_classes: int,
        n_features: int,
        momentum: float | None = 0.95,
        norm: float = 2,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if momentum is not None and not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum!r} must lie in [0, 1), or be None.")
        self.n_classes = n_classes
        self.n_features = n_features
        self.momentum = momentum
        self.norm = _check_norm(norm)
        if dtype is None:
            dtype = torch.float64 if momentum is None else torch.float32
        dtype = torch.promote_types(dtype, torch.float32)
        for name, shape in {
            "weight": (n_classes,),
            "mean": (n_classes, n_features),
            "dispersion": (n_classes,),
            "variance": (n_classes,),
        }.items():
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype))

    def extra_repr(self) -> str:
        return f"{self.n_classes}, {self.n_features}, momentum={self.momentum}, norm={self.norm:g}"

    @torch.no_grad()
    def update(self, features: Tensor, y: Tensor, sample_weight: Tensor | None = None) -> None:
        """Let a batch enter the statistics; do nothing in evaluation mode.

        Only classes in the batch change. A class seen for the first time starts from the batch.

        Parameters
        ----------
        features : Tensor of shape (n_samples, n_features)
        y : int64 Tensor of shape (n_samples,)
            Class codes in ``[0, n_classes)``.
        sample_weight : Tensor of shape (n_samples,), optional

        Raises
        ------
        ValueError
            If shapes disagree or `y` is not int64.
        """
        if not self.training:
            return
        check_batch(features, y, sample_weight)
        if features.shape[1] != self.n_features:
            raise ValueError(
                f"features has {features.shape[1]} columns, but n_features={self.n_features}."
            )
        # Sums over a class are gathered in the row of its first sample in the batch; the class's
        # other rows stay 0 and add nothing below. So shapes do not depend on the data, the cost
        # does not depend on the number of classes, and the host never waits for an accelerator.
        n_samples, dtype = len(features), self.mean.dtype
        rows = torch.arange(n_samples, device=y.device)
        first = y.new_full((self.n_classes,), n_samples).scatter_reduce_(0, y, rows, "amin")[y]

        def total_by_class(values: Tensor) -> Tensor:
            return torch.zeros_like(values).index_add_(0, first, values)

        # Everything is measured from the mean so far, which keeps float32 sound for a large mean.
        # In place where it can be: fresh memory costs more than the arithmetic.
        offset = self.mean.index_select(0, y).sub_(features).neg_()
        usable = _squared_norm(offset, 2).isfinite()
        offset.nan_to_num_(0, 0, 0)
        weight = usable.to(dtype)
        if sample_weight is not None:
            weight = torch.where(usable, sample_weight.to(dtype), 0)

        batch_weight = total_by_class(weight)
        old_weight = self.weight[y]
        kept_weight = old_weight if self.momentum is None else self.momentum * old_weight
        new_weight = torch.where(batch_weight > 0, kept_weight + batch_weight, old_weight)
        share = _ratio(batch_weight, new_weight)
        shift = _ratio(total_by_class(weight[:, None] * offset), batch_weight[:, None])

        # A class without a mean so far is measured from the batch's.
        fresh = kept_weight == 0
        offset.addcmul_(shift.index_select(0, first), fresh[:, None].to(dtype), value=-1)

        def spread_increment(old: Tensor, norm: float) -> Tensor:
            square = torch.where(usable, _squared_norm(offset, norm), 0)
            batch = _ratio(total_by_class(weight * square), batch_weight)
            moved = torch.where(fresh, 0, share * _squared_norm(shift, norm))
            return share * (batch - moved - old[y])

        variance = spread_increment(self.variance, 2)
        dispersion = variance if self.norm == 2 else spread_increment(self.dispersion, self.norm)
        self.variance.index_add_(0, y, variance)
        self.dispersion.index_add_(0, y, dispersion)
        self.mean.index_add_(0, y, shift.mul_(share[:, None]))
        self.weight.index_add_(0, y, torch.where(batch_weight > 0, new_weight - old_weight, 0))

    @torch.no_grad()
    def load(self, moments: ClassMoments) -> None:
        """Take over moments measured elsewhere, for instance exactly on earlier data.

        Parameters
        ----------
        moments : ClassMoments
            With this module's sizes and norm.
        """
        for name in ("weight", "mean", "dispersion", "variance"):
            getattr(self, name).copy_(getattr(moments, name))

    @torch.no_grad()
    def view(self) -> ClassMoments:
        """The statistics as they stand, sharing memory with the buffers: for use at once."""
        second_moment = _squared_norm(self.mean, self.norm) + self.dispersion
        return ClassMoments(self.weight, self.mean, second_moment, self.dispersion, self.variance)

    def moments(self) -> ClassMoments:
        """The statistics as they stand, in a copy that later updates do not change."""
        return ClassMoments(*(field.clone() for field in self.view()))
