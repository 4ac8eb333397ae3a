"""Methods that wrap training rather than change the loss of a sample."""

import numpy as np
import torch
from learners import Learner, Predictor, recalls
from numpy.typing import NDArray
from torch.nn import functional as F

from sklearn_mr2.metrics.disparity import third_size

from .losses import CrossEntropy, GeneralisedCrossEntropy


def _losses(predict: Predictor, learner: Learner) -> NDArray:
    logits = torch.as_tensor(predict(learner.X))
    return F.cross_entropy(logits, torch.as_tensor(learner.y), reduction="none").numpy()


def just_train_twice(learner: Learner, times: float, factor: float = 1.0) -> Predictor:
    """JTT (Liu et al., 2021): train again with the samples that were misclassified repeated.

    The paper's first model is stopped early, so that it still makes mistakes. Here they are the
    mistakes of cross-entropy out of fold, which need no such choice.
    """
    missed = learner.reference.argmax(1) != learner.y
    weight = np.where(missed, times, 1.0)
    return learner.fit(CrossEntropy(), factor, weight / weight.mean())


def learning_from_failure(learner: Learner, q: float, factor: float = 1.0) -> Predictor:
    """LfF (Nam et al., 2020): weight samples by their relative difficulty for a biased model.

    The paper trains both models side by side. Here the biased one, under generalised
    cross-entropy, and a plain one are trained first, and give fixed weights.
    """
    biased = _losses(learner.fit(GeneralisedCrossEntropy(q)), learner)
    plain = _losses(learner.fit(CrossEntropy()), learner)
    weight = biased / np.maximum(biased + plain, 1e-12)
    return learner.fit(CrossEntropy(), factor, weight / weight.mean())


def offsets_for_hard_classes(
    logits: NDArray, reference: NDArray, y: NDArray, give_up: float, rounds: int = 3
) -> NDArray:
    """Offsets of the logits that maximise the recall of the hard classes on these samples.

    Coordinate ascent over the classes from zero offsets, on a grid in units of the logits' spread,
    among offsets with at least the accuracy of the reference logits minus `give_up`. The hard
    classes are the third that the reference recognises worst.
    """
    n_classes = logits.shape[1]
    recall = recalls(reference, y)
    hard = np.argsort(recall, kind="stable")[: third_size(n_classes)]
    least_accuracy = np.mean(reference.argmax(1) == y) - give_up
    offsets = np.zeros(n_classes)
    grid = logits.std() * np.linspace(-0.5, 0.5, 21)

    def value(candidate: NDArray) -> tuple[bool, float, float]:
        shifted = logits + candidate
        accuracy = float(np.mean(shifted.argmax(1) == y))
        enough = accuracy >= least_accuracy - 1e-12
        gain = float(recalls(shifted, y)[hard].mean())
        return enough, gain if enough else accuracy, accuracy

    best = value(offsets)
    for _ in range(rounds):
        before = best
        for k in range(n_classes):
            for step in grid:
                candidate = offsets.copy()
                candidate[k] += step
                score = value(candidate)
                if score > best:
                    best, offsets = score, candidate
        if best == before:
            break
    return offsets
