"""Tune and fit a cross-entropy and an MR2 probe with the same budget, and compare them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import RepeatedStratifiedKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from ..metrics import difficulty_thirds, per_class_report
from ..mr2 import MR2Classifier
from .errors import InputError
from .paired import PairedDifference, paired_difference

Rule = Literal["paper", "error"]

#: Margins of each rule, as parameters of MR2Classifier.
RULES: dict[Rule, dict[str, Any]] = {
    "paper": {"margin_statistic": "second_moment"},
    "error": {
        "margin": "auto",
        "margin_statistic": "error",
        "margin_mode": "subtract",
        "margin_exponent": 1.0,
    },
}

DEFAULT_CS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

# Products of fewer numbers than this are done before a second thread has started; on a busy
# machine more threads make them many times slower.
_SERIAL_SIZE = 10**8

# So that .1 * 30 and the like count as whole numbers.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Settings:
    """What the user can choose.

    Attributes
    ----------
    test_size : float
        Share of the samples held out for testing.
    seed : int
        Seed of the split, the folds and the models.
    Cs : tuple of float
        Values of `C` that both models are tuned over, rising.
    cv : int
        Folds of the tuning.
    repeats : int
        Number of times the folds are drawn.
    rule : {"paper", "error"}
        Where MR2's margins come from, see `RULES`.
    """

    test_size: float = 0.25
    seed: int = 0
    Cs: tuple[float, ...] = DEFAULT_CS
    cv: int = 3
    repeats: int = 1
    rule: Rule = "paper"


class Part(NamedTuple):
    """Samples for training or testing; `codes` are the positions of `y` among the classes."""

    X: NDArray
    y: NDArray
    codes: NDArray[np.intp]


class Tuned(NamedTuple):
    """One of the two models after tuning."""

    C: float
    cv_accuracy: NDArray[np.float64]  # of each value of C
    cv_recall: NDArray[np.float64]  # of each class with the C chosen
    model: Pipeline  # fitted on the whole training part
    correct: NDArray[np.bool_]  # of each test sample
    report: pd.DataFrame  # per_class_report on the test part


class Comparison(NamedTuple):
    """A summary of both models on the test part."""

    label: str
    cross_entropy: float
    mr2: float
    difference: PairedDifference


@dataclass(frozen=True)
class Outcome:
    """All that the job finds out.

    Attributes
    ----------
    settings : Settings
        What it was run with.
    n_train, n_test : int
        Sizes of the two parts.
    classes : ndarray of shape (n_classes,)
        Labels, sorted.
    cross_entropy, mr2 : Tuned
        The two models.
    table : DataFrame
        One row a class: third and recall in cross-validation on the training part, then support,
        recalls and their difference on the test part, and margin.
    comparisons : list of Comparison
        Overall accuracy, hardest and easiest third, worst class.
    n_not_converged : int
        Number of fits that stopped before the optimum.
    """

    settings: Settings
    n_train: int
    n_test: int
    classes: NDArray
    cross_entropy: Tuned
    mr2: Tuned
    table: pd.DataFrame
    comparisons: list[Comparison]
    n_not_converged: int

    @property
    def worst_class(self) -> Any:
        """Class with the lowest recall of cross-entropy in cross-validation."""
        return self.classes[self.cross_entropy.cv_recall.argmin()]

    @property
    def margin_error_correlation(self) -> float:
        """Rank correlation of MR2's margins and out-of-fold class errors in the training part."""
        return float(self.mr2.model[-1].margin_error_correlation_)


def n_fits(settings: Settings) -> int:
    """Return how often `run_probe` reports progress."""
    return 2 * len(settings.Cs) * settings.cv * settings.repeats + 2


def run_probe(
    X: NDArray, y: NDArray, settings: Settings, advance: Callable[[], object] = lambda: None
) -> Outcome:
    """Compare cross-entropy and MR2 on a held-out part of the data.

    The test part decides nothing: features are standardised, `C` is tuned and the thirds and the
    worst class are chosen on the training part alone, the latter by the recalls of cross-entropy
    in cross-validation.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Features, finite.
    y : ndarray of shape (n_samples,)
        Class labels.
    settings : Settings
        How to go about it.
    advance : callable, optional
        Called after each of the `n_fits` fits.

    Returns
    -------
    Outcome
        Models and their comparison.

    Raises
    ------
    InputError
        If there is one class only, or if a class has too few samples for the split and the folds.
    """
    classes, codes = np.unique(y, return_inverse=True)
    train, test = (Part(X[part], y[part], codes[part]) for part in _split(classes, codes, settings))
    folds = list(
        RepeatedStratifiedKFold(
            n_splits=settings.cv, n_repeats=settings.repeats, random_state=settings.seed
        ).split(train.X, train.codes)
    )
    fit = _Fitter(settings, advance)
    with _sensible_threads(train.X.size * len(classes)):
        cross_entropy = _tune({"margin_statistic": None}, train, test, folds, fit)
        mr2 = _tune(RULES[settings.rule], train, test, folds, fit)
    table = _table(classes, train, test, cross_entropy, mr2)
    return Outcome(
        settings,
        len(train.y),
        len(test.y),
        classes,
        cross_entropy,
        mr2,
        table,
        _compare(table, test, cross_entropy, mr2),
        fit.n_not_converged,
    )


def _split(
    classes: NDArray, codes: NDArray[np.intp], settings: Settings
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Split at random by class, or say which class is too small for the split and the folds."""
    counts = np.bincount(codes)
    if len(classes) < 2:
        raise InputError(
            f"all samples are of one class, {str(classes[0])!r}; give samples of at least two"
        )
    in_training = settings.cv
    if settings.rule == "error":
        # So that what a fold leaves is enough for the folds that its margins need.
        in_training += 2
    needed = math.ceil(in_training / (1 - settings.test_size) - _ROUNDING)
    if counts.min() < needed:
        k = counts.argmin()
        has = "1 sample" if counts[k] == 1 else f"{counts[k]} samples"
        cure = "remove or merge such classes" + (", or lower --cv" if settings.cv > 2 else "")
        raise InputError(
            f"class {str(classes[k])!r} has {has}; a test part of {settings.test_size:.0%} and "
            f"{settings.cv} folds need at least {needed} of every class "
            f"({(counts < needed).sum()} of {len(classes)} classes have fewer): {cure}"
        )
    # Not train_test_split: it may leave a small class one sample short in either part.
    n_test = np.ceil(settings.test_size * counts - _ROUNDING).astype(np.intp)
    order = np.random.default_rng(settings.seed).permutation(len(codes))
    rank = pd.Series(order).groupby(codes[order]).cumcount().to_numpy()
    held_out = rank < n_test[codes[order]]
    return np.sort(order[~held_out]), np.sort(order[held_out])


@dataclass
class _Fitter:
    """Fits pipelines, says so to `advance`, and counts those that stop before the optimum."""

    settings: Settings
    advance: Callable[[], object]
    n_not_converged: int = 0
    shown: dict = field(default_factory=dict)  # other warnings, to show each of them once

    def __call__(
        self, C: float, margins: dict[str, Any], X: NDArray, y: NDArray, error_cv: int | None = None
    ) -> Pipeline:
        # Standardised before they are rounded to single precision: offsets may be large.
        model = make_pipeline(
            StandardScaler(),
            MR2Classifier(
                C=C,
                dtype="float32",
                random_state=self.settings.seed,
                error_cv=error_cv,
                **margins,
            ),
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            model.fit(X, y)
        early = [issubclass(warning.category, ConvergenceWarning) for warning in caught]
        self.n_not_converged += any(early)
        for warning, counted in zip(caught, early, strict=True):
            if not counted:
                warnings.warn_explicit(
                    warning.message,
                    warning.category,
                    warning.filename,
                    warning.lineno,
                    registry=self.shown,
                )
        self.advance()
        return model


def _tune(
    margins: dict[str, Any],
    train: Part,
    test: Part,
    folds: list[tuple[NDArray, NDArray]],
    fit: _Fitter,
) -> Tuned:
    """Choose C by accuracy over the folds, the smallest of equally good ones, and fit with it."""
    settings = fit.settings
    in_folds = settings.cv if margins["margin_statistic"] == "error" else None
    predicted = np.empty((len(settings.Cs), settings.repeats, len(train.y)), dtype=np.intp)
    for row, C in zip(predicted, settings.Cs, strict=True):
        for i, (inner, outer) in enumerate(folds):
            model = fit(C, margins, train.X[inner], train.codes[inner], in_folds)
            row[i // settings.cv, outer] = model.predict(train.X[outer])
    cv_accuracy = (predicted == train.codes).mean(axis=(1, 2))
    best = int(cv_accuracy.argmax())
    cv_correct = (predicted[best] == train.codes).mean(axis=0)
    # The folds of the final fit give margin_error_correlation_.
    final = None if margins["margin_statistic"] is None else settings.cv
    model = fit(settings.Cs[best], margins, train.X, train.y, final)
    prediction = model.predict(test.X)
    return Tuned(
        settings.Cs[best],
        cv_accuracy,
        np.bincount(train.codes, cv_correct) / np.bincount(train.codes),
        model,
        prediction == test.y,
        per_class_report(test.y, prediction, labels=model.classes_),
    )


def _table(
    classes: NDArray, train: Part, test: Part, cross_entropy: Tuned, mr2: Tuned
) -> pd.DataFrame:
    n_classes = len(classes)
    columns: dict[str, Any] = {
        "class": classes,
        "difficulty": difficulty_thirds(pd.Series(cross_entropy.cv_recall)).to_numpy(),
        "cv_recall_cross_entropy": cross_entropy.cv_recall,
        "train_samples": np.bincount(train.codes),
        "test_samples": np.bincount(test.codes),
        "margin_mr2": mr2.model[-1].margins_,
    }
    for name, tuned in (("cross_entropy", cross_entropy), ("mr2", mr2)):
        for column in ("recall", "recall_low", "recall_high", "precision", "f1"):
            columns[f"{column}_{name}"] = tuned.report[column].to_numpy()
    # Bonferroni: the classes that changed most are picked among all of them.
    level = 1 - 0.05 / n_classes
    differences = [
        paired_difference(
            cross_entropy.correct, mr2.correct, test.codes, np.arange(n_classes) == k, level=level
        )
        for k in range(n_classes)
    ]
    for column, values in zip(("", "_low", "_high"), zip(*differences, strict=True), strict=True):
        columns[f"difference{column}"] = values
    return pd.DataFrame(columns)


def _compare(table: pd.DataFrame, test: Part, cross_entropy: Tuned, mr2: Tuned) -> list[Comparison]:
    n_test = table["test_samples"].to_numpy()
    groups = {
        "hardest third": (table["difficulty"] == "hard").to_numpy(),
        "easiest third": (table["difficulty"] == "easy").to_numpy(),
        "worst class": np.arange(len(table)) == cross_entropy.cv_recall.argmin(),
    }
    weights = {"overall accuracy": n_test / n_test.sum()}
    weights |= {label: members / members.sum() for label, members in groups.items()}
    return [
        Comparison(
            label,
            float(weight @ table["recall_cross_entropy"]),
            float(weight @ table["recall_mr2"]),
            paired_difference(cross_entropy.correct, mr2.correct, test.codes, weight),
        )
        for label, weight in weights.items()
    ]


@contextmanager
def _sensible_threads(size: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if size >= _SERIAL_SIZE else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
