"""Candidates for a better rule than the paper's margins.

All of them are made of two things: a margin subtracted in training, and an offset added to the
logits in prediction. A margin is ``base + strength * e_k / mean(e)`` with `e_k` the out-of-fold
error of class `k`. An offset is a multiple of a class score, and the multiple is the one that lifts
the hardest third most, out of fold, at no less accuracy than cross-entropy.
"""

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from baselines.losses import CrossEntropy
from learners import Learner, Predictor, class_error, recalls
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn import functional as F

from sklearn_mr2.metrics.disparity import third_size
from sklearn_mr2.mr2.losses import LogitMarginLoss

# Accuracy that margins may cost while they are searched.
TOLERANCE = 0.002
MULTIPLES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0)


class FixedMargins(nn.Module):
    """The package's margin loss with given margins."""

    margins: Tensor

    def __init__(self, margins: NDArray, mode: str = "subtract") -> None:
        super().__init__()
        self._loss = LogitMarginLoss(mode)  # type: ignore[arg-type]
        self.register_buffer("margins", torch.as_tensor(np.asarray(margins), dtype=torch.float32))

    def forward(
        self, logits: Tensor, features: Tensor, y: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        return self._loss(logits, y, self.margins, sample_weight)


def relative(error: NDArray) -> NDArray:
    """Errors relative to their mean; all 1 if no class has any."""
    return error / error.mean() if error.mean() > 0 else np.ones_like(error)


def shrunk(error: NDArray, size: NDArray) -> NDArray:
    """Errors pulled towards their mean by what their binomial noise explains of their variance."""
    mean = error.mean()
    noise = (error * (1 - error) / size).mean()
    spread = error.var()
    keep = max(0.0, 1 - noise / spread) if spread > 0 else 0.0
    return mean + keep * (error - mean)


def error_margins(learner: Learner, base: float, strength: float, shrink: bool = False) -> NDArray:
    """``base + strength * e_k / mean(e)``."""
    error = learner.class_error
    if shrink:
        error = shrunk(error, np.bincount(learner.y, minlength=learner.n_classes))
    return base + strength * relative(error)


def with_error_margins(
    learner: Learner, base: float, strength: float, factor: float, shrink: bool = False
) -> Predictor:
    """Margins proportional to the class error, plus a base."""
    return learner.fit(FixedMargins(error_margins(learner, base, strength, shrink)), factor)


def two_rounds(learner: Learner, base: float, strength: float, factor: float) -> Predictor:
    """Margins from the mean of the errors of cross-entropy and of the first round's model."""
    first = learner.out_of_fold(
        ("margins", base, strength, factor),
        lambda part: with_error_margins(part, base, strength, factor),
    )
    error = (learner.class_error + class_error(first, learner.y)) / 2
    return learner.fit(FixedMargins(base + strength * relative(error)), factor)


def searched_margins(learner: Learner, base: float, step: float, factor: float) -> Predictor:
    """Margins moved by up to three steps towards the hard classes, the best of them out of fold.

    A step adds to the margins of the hardest third and takes the same in sum from all others.
    """
    y = learner.y
    floor = np.mean(learner.reference.argmax(1) == y) - TOLERANCE
    hard = hardest(learner.class_error)
    best: tuple[float, NDArray] | None = None
    for n_steps in range(4):
        margins = base + n_steps * step * (hard - hard.mean())
        logits = learner.out_of_fold(
            ("searched", base, step, n_steps, factor),
            methodcaller("fit", FixedMargins(margins), factor),
        )
        gain = float(recalls(logits, y)[hard > 0].mean())
        if np.mean(logits.argmax(1) == y) < floor and best is not None:
            break
        if best is None or gain > best[0]:
            best = gain, margins
    assert best is not None
    return learner.fit(FixedMargins(best[1]), factor)


def hardest(error: NDArray) -> NDArray:
    """1 for the hardest third of the classes, else 0."""
    score = np.zeros(len(error))
    score[np.argsort(-error, kind="stable")[: third_size(len(error))]] = 1
    return score


def membership(error: NDArray, size: NDArray, n_draws: int = 2000) -> NDArray:
    """Probability that a class is among the hardest third, given the noise of its error.

    From beta posteriors of the errors with a prior of one imagined sample.
    """
    rng = np.random.default_rng(0)
    a = size * error + error.mean() + 1e-3
    b = size * (1 - error) + 1 - error.mean() + 1e-3
    draws = rng.beta(a, b, (n_draws, len(error)))
    rank = np.argsort(np.argsort(-draws, axis=1), axis=1)
    return (rank < third_size(len(error))).mean(axis=0)


def temperature(logits: NDArray, y: NDArray) -> float:
    """What to divide logits by to make them calibrated; margins inflate them."""
    z, labels = torch.from_numpy(logits), torch.from_numpy(y)
    loss = lambda log_t: F.cross_entropy(z / np.exp(log_t), labels).item()  # noqa: E731
    return float(np.exp(minimize_scalar(loss, bounds=(-3, 4), method="bounded").x))


def class_offsets(kind: str, multiple: float, error: NDArray, size: NDArray) -> NDArray:
    """Offsets of calibrated log odds.

    "hard" and "membership" are those of the classifier that maximises the sum of accuracy and
    `multiple` times the accuracy on the hard classes, which a class is in for sure or probably.
    "error" is proportional to the class error.
    """
    if kind == "error":
        return multiple * (relative(error) - 1)
    score = hardest(error) if kind == "hard" else membership(error, size)
    return np.log1p(multiple * score)


def choose_offsets(
    logits: NDArray, reference: NDArray, y: NDArray, kind: str, give_up: float
) -> NDArray:
    """Offsets of the size that lifts the hardest third most on these samples.

    The hardest third, and the accuracy that may not be missed by more than `give_up`, are those of
    the reference logits.
    """
    error = class_error(reference, y)
    size = np.bincount(y, minlength=logits.shape[1])
    hard = hardest(error) > 0
    floor = np.mean(reference.argmax(1) == y) - give_up
    scale = temperature(logits, y)
    best, chosen = -np.inf, np.zeros(logits.shape[1])
    for multiple in MULTIPLES:
        offsets = scale * class_offsets(kind, multiple, error, size)
        shifted = logits + offsets
        gain = float(recalls(shifted, y)[hard].mean())
        if gain > best and (multiple == 0 or np.mean(shifted.argmax(1) == y) >= floor - 1e-12):
            best, chosen = gain, offsets
    return chosen


class WithOffsets:
    """Offsets on top of training with margins.

    Called with a learner it fits. `out_of_fold` gives the logits of each training sample with
    offsets chosen on the other folds, from the same out-of-fold logits that the fit uses.

    Parameters
    ----------
    choose : callable
        Maps out-of-fold logits, those of cross-entropy, and labels to offsets.
    """

    def __init__(self, choose: Callable[..., NDArray]) -> None:
        self.choose = choose

    def __call__(
        self,
        learner: Learner,
        factor: float,
        base: float = 0.0,
        strength: float = 0.0,
        **options: Any,
    ) -> Predictor:
        logits = self._logits(learner, factor, base, strength)
        offsets = self.choose(logits, learner.reference, learner.y, **options)
        predict = self._fit(learner, factor, base, strength)
        return lambda X: predict(X) + offsets

    def out_of_fold(
        self,
        learner: Learner,
        factor: float,
        base: float = 0.0,
        strength: float = 0.0,
        **options: Any,
    ) -> NDArray:
        logits, y = self._logits(learner, factor, base, strength), learner.y
        shifted = np.empty_like(logits)
        for others, rows in learner.folds(learner.task.n_folds):
            offsets = self.choose(logits[others], learner.reference[others], y[others], **options)
            shifted[rows] = logits[rows] + offsets
        return shifted

    @staticmethod
    def _fit(learner: Learner, factor: float, base: float, strength: float) -> Predictor:
        if base == strength == 0:
            return learner.fit(CrossEntropy(), factor)
        return with_error_margins(learner, base, strength, factor)

    def _logits(self, learner: Learner, factor: float, base: float, strength: float) -> NDArray:
        return learner.out_of_fold(
            ("margins", base, strength, factor),
            lambda part: self._fit(part, factor, base, strength),
        )
