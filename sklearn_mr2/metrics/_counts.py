"""Class labels as they come, checked and counted."""

from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

Metric = Literal["recall", "precision", "f1"]


class ClassCounts(NamedTuple):
    """Weighted counts of each class; all arrays have shape (n_classes,)."""

    classes: NDArray
    support: NDArray[np.float64]  # weight of the samples of the class
    effective: NDArray[np.float64]  # effective number of the samples of the class
    predicted: NDArray[np.float64]  # weight of the samples predicted as the class
    correct: NDArray[np.float64]  # weight of the samples of the class predicted as the class

    @property
    def present(self) -> NDArray[np.bool_]:
        return self.support > 0

    def metric(self, name: Metric) -> NDArray[np.float64]:
        """Recall, precision or F1 of every class; NaN where numerator and denominator are empty."""
        numerator = self.correct
        if name == "recall":
            denominator = self.support
        elif name == "precision":
            # A present class that is never predicted: 0 / support = 0.
            denominator = np.where(self.predicted > 0, self.predicted, self.support)
        else:
            numerator = 2 * self.correct
            denominator = self.support + self.predicted
        out = np.full(len(self.classes), np.nan)
        return np.divide(numerator, denominator, out=out, where=denominator > 0)


def _check_labels(y: ArrayLike, name: str) -> NDArray:
    """Class labels as a one-dimensional array of booleans, integers, whole floats or strings."""
    array = np.asarray(y)
    if array.ndim != 1:
        raise ValueError(
            f"{name} must be one-dimensional, got shape {array.shape}; pass one class label for "
            "each sample, such as estimator.predict(X), not probabilities or indicators."
        )
    if len(array) == 0:
        raise ValueError(f"{name} is empty; pass at least one class label.")
    if np.any(pd.isna(array)):
        raise ValueError(f"{name} has missing values; drop those samples or name them as a class.")
    if array.dtype.kind in "OT":
        # Columns of data frames arrive as objects: find out what they hold.
        values = array.tolist()
        if 0 < sum(isinstance(value, str) for value in values) < len(values):
            raise ValueError(f"{name} mixes strings with other types; convert it with astype(str).")
        array = np.array(values)
    kind = array.dtype.kind
    whole = kind == "f" and bool(np.all(np.isfinite(array) & (array == np.round(array))))
    if array.ndim != 1 or not (whole or kind in "biuU"):
        raise ValueError(
            f"{name} must hold class labels (strings, integers or booleans), got {array.dtype} "
            "values; pass labels, such as estimator.predict(X), and convert other types with "
            "astype(str)."
        )
    return array


def _check_same_kind(**labels: NDArray) -> None:
    if len({array.dtype.kind == "U" for array in labels.values()}) > 1:
        kinds = ", ".join(
            f"{name} holds {'strings' if array.dtype.kind == 'U' else 'numbers'}"
            for name, array in labels.items()
        )
        raise ValueError(f"The class labels do not match: {kinds}; convert them to one type.")


def _check_weights(sample_weight: ArrayLike | None, n_samples: int) -> NDArray[np.float64]:
    if sample_weight is None:
        return np.ones(n_samples)
    weights = np.asarray(sample_weight, dtype=np.float64)
    if weights.shape != (n_samples,):
        raise ValueError(
            f"sample_weight has shape {weights.shape}, expected ({n_samples},); pass one weight "
            "for each sample."
        )
    if not np.all(np.isfinite(weights)) or np.any(weights < 0) or not np.any(weights > 0):
        raise ValueError(
            "sample_weight must be finite, not negative, and not zero for all samples; remove "
            "samples that should not count, or give them weight 0."
        )
    return weights


def check_classes(classes: ArrayLike, name: str) -> NDArray:
    """Labels given by the caller to choose classes; kept in the caller's order."""
    array = _check_labels(classes, name)
    if len(np.unique(array)) < len(array):
        raise ValueError(f"{name} names a class twice; name each class once.")
    return array


def class_counts(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    labels: ArrayLike | None,
    sample_weight: ArrayLike | None,
) -> ClassCounts:
    """Count the samples, predictions and hits of `labels`, or of every class in either array."""
    true = _check_labels(y_true, "y_true")
    pred = _check_labels(y_pred, "y_pred")
    if len(true) != len(pred):
        raise ValueError(
            f"y_true has {len(true)} samples but y_pred has {len(pred)}; pass one prediction for "
            "each sample."
        )
    weights = _check_weights(sample_weight, len(true))
    _check_same_kind(y_true=true, y_pred=pred)
    values = [true, pred]
    if labels is not None:
        chosen = check_classes(labels, "labels")
        _check_same_kind(y_true=true, labels=chosen)
        values.append(chosen)
    classes, codes = np.unique(np.concatenate(values), return_inverse=True)
    true_codes, pred_codes = codes[: len(true)], codes[len(true) : 2 * len(true)]

    def total(code: NDArray, weight: NDArray) -> NDArray[np.float64]:
        return np.bincount(code, weight, len(classes)).astype(np.float64, copy=False)

    support = total(true_codes, weights)
    # Kish's effective sample size sum(w)^2 / sum(w^2), from shares so that no square underflows.
    samples = support[true_codes]
    shares = np.divide(weights, samples, out=np.zeros(len(true)), where=samples > 0)
    concentration = total(true_codes, shares**2)
    counts = ClassCounts(
        classes,
        support=support,
        effective=np.divide(1, concentration, out=np.zeros(len(classes)), where=support > 0),
        predicted=total(pred_codes, weights),
        correct=total(true_codes, weights * (true_codes == pred_codes)),
    )
    if labels is None:
        return counts
    order = codes[2 * len(true) :]
    return ClassCounts(*(column[order] for column in counts))
