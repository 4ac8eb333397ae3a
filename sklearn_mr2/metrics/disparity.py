"""How unequally a classifier treats its classes: a report, a score, a scorer and a choice.

Three conventions hold throughout:

- a class is *present* if its (weighted) support in ``y_true`` is positive; only present classes
  have a recall, and only they enter a disparity;
- precision and F1 of a present class that is never predicted are 0, as in scikit-learn, so that a
  model cannot hide its worst class by never naming it;
- of every score, higher is better.
"""

import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Self, get_args

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri
from sklearn import get_config
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.utils.metadata_routing import MetadataRequest

from ._counts import Metric, check_classes, class_counts

Summary = Literal["gap", "worst", "hard", "std"]
Third = Literal["hard", "medium", "easy"]

# Means over folds of equal numbers may differ in their last bits; scores closer than this
# count as equal.
_ROUNDING = 1e-12


def _wilson_interval(
    proportion: NDArray[np.float64], n: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Wilson's 95% interval (1927, JASA 22, 209-212); NaN where the proportion is NaN."""
    z2 = ndtri(0.975) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        centre = (proportion + z2 / (2 * n)) / (1 + z2 / n)
        half = np.sqrt(z2 * (proportion * (1 - proportion) / n + z2 / (4 * n**2))) / (1 + z2 / n)
    # The ends at proportions 0 and 1 are exact; rounding must not push the proportion out.
    low = np.clip(np.minimum(centre - half, proportion), 0, 1)
    high = np.clip(np.maximum(centre + half, proportion), 0, 1)
    return low, high


def third_size(n_classes: int) -> int:
    """Number of classes in the hardest third: n_classes / 3 rounded, at least one."""
    return max(1, round(n_classes / 3))


def _as_thirds(values: Any, index: pd.Index) -> pd.Series:
    dtype = pd.CategoricalDtype(list(get_args(Third)), ordered=True)
    return pd.Series(values, index=index, name="difficulty", dtype=dtype)


def difficulty_thirds(recall: pd.Series) -> pd.Series:
    """Split classes into thirds by their recall.

    Of `K` classes with a recall, the ``max(1, round(K / 3))`` lowest are "hard", as many of the
    highest (of those that remain) are "easy", and the rest are "medium". Equal recalls keep the
    order they have in `recall`: the earlier class counts as the harder.

    Thirds should be chosen on *other* data than they judge: on reference runs with other seeds or
    splits. A class is partly among the hardest of a run by bad luck in that run, and a model
    compared on the thirds another model chose gains .3 to .8 points of recall for free.

    Parameters
    ----------
    recall : Series of shape (n_classes,)
        The recall of each class, indexed by class. NaN marks a class without samples.

    Returns
    -------
    difficulty : Series of shape (n_classes,)
        "hard", "medium" or "easy" (an ordered categorical), on the index of `recall`; missing where
        the recall is NaN.

    Raises
    ------
    TypeError
        If `recall` is not a pandas Series.
    ValueError
        If `recall` is not numeric or holds a class twice.

    Examples
    --------
    Choose the thirds on two reference runs:

    >>> import pandas as pd
    >>> from sklearn_mr2.metrics import difficulty_thirds
    >>> runs = [
    ...     pd.Series({"bag": 0.98, "coat": 0.80, "shirt": 0.61}),
    ...     pd.Series({"bag": 0.96, "coat": 0.84, "shirt": 0.65}),
    ... ]
    >>> difficulty_thirds(pd.concat(runs, axis=1).mean(axis=1)).to_dict()
    {'bag': 'easy', 'coat': 'medium', 'shirt': 'hard'}
    """
    if not isinstance(recall, pd.Series):
        raise TypeError(
            f"recall must be a pandas Series indexed by class, got {type(recall).__name__}; pass "
            'for example per_class_report(y_true, y_pred)["recall"].'
        )
    if not pd.api.types.is_numeric_dtype(recall.dtype):
        raise ValueError(
            f"recall must be numeric, got {recall.dtype}; pass the recall of each class."
        )
    if not recall.index.is_unique:
        raise ValueError(
            "recall holds a class twice; average runs first, for example with "
            "recall.groupby(level=0).mean()."
        )
    values = recall.to_numpy(dtype=np.float64, na_value=np.nan)
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    size = third_size(len(order))
    thirds = np.full(len(values), None, dtype=object)
    thirds[order] = "medium"
    thirds[order[size:][-size:]] = "easy"
    thirds[order[:size]] = "hard"
    return _as_thirds(thirds, recall.index)


def _given_thirds(difficulty: Mapping | pd.Series, recall: pd.Series) -> pd.Series:
    given = dict(difficulty)
    present = recall.index[recall.notna()]
    missing = [label for label in present if label not in given]
    if missing:
        raise ValueError(
            f"difficulty has no entry for the classes {reprlib.repr(missing)}; its keys must be "
            "class labels, of the same type as in y_true. Use None for a class outside every third."
        )
    values = {label: None if pd.isna(given[label]) else given[label] for label in present}
    unknown = set(values.values()) - {*get_args(Third), None}
    if unknown:
        raise ValueError(
            f"difficulty has the values {', '.join(sorted(map(repr, unknown)))}; use "
            '"hard", "medium" or "easy", for example from difficulty_thirds.'
        )
    return _as_thirds([values.get(label) for label in recall.index], recall.index)


def per_class_report(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    difficulty: Mapping[Any, str | None] | pd.Series | None = None,
) -> pd.DataFrame:
    """Report how a classifier does on every class.

    Parameters
    ----------
    y_true : array-like of shape (n_samples,)
        True class labels: strings, integers or booleans, in an array, list, or pandas or polars
        series.

    y_pred : array-like of shape (n_samples,)
        Predicted class labels.

    labels : array-like of shape (n_classes,), default=None
        Classes to report, in this order. Predictions of other classes still count as errors. By
        default all classes in `y_true` and `y_pred`, sorted.

    sample_weight : array-like of shape (n_samples,), default=None
        Sample weights.

    difficulty : mapping or Series from class to {"hard", "medium", "easy"}, default=None
        Thirds chosen on other data, for example by :func:`difficulty_thirds` on the recalls of
        reference runs with other seeds. By default the thirds of this very report, which is right
        for describing one run and wrong for comparing two: see Notes.

    Returns
    -------
    report : DataFrame
        One row for each class, with the columns

        - ``support``: number of samples (integer), or their total weight (float);
        - ``recall``, ``precision``, ``f1``: as scikit-learn defines them. Precision and F1 are 0
          for a class that has samples but is never predicted, and for one that is predicted but has
          none;
        - ``recall_low``, ``recall_high``: Wilson's 95% interval of the recall;
        - ``difficulty``: "hard", "medium" or "easy", an ordered categorical.

        A class without samples (or with weight 0 only) has support 0, recall NaN and no third; if
        it is not predicted either, its precision and F1 are NaN.

    Raises
    ------
    ValueError
        If labels are missing, mixed, continuous or of different lengths; if weights are negative,
        not finite or all zero; if `labels` names a class twice; if `difficulty` lacks a class that
        has samples or has other values.

    Notes
    -----
    Choosing the hardest third and judging it on the same run flatters comparisons: some classes are
    in it by bad luck in that run, and any other model regresses to their mean. This gives .3 to .8
    points of recall for free. Give `difficulty` from other runs to compare.

    With weights the interval uses the effective sample size of the class, ``sum(w)**2 / sum(w**2)``
    (Kish 1965). It is exact for equal weights within a class, whatever their scale, and approximate
    otherwise. Weights therefore count as importance, not as repetitions: weight 2 for every sample
    leaves the interval as it is, where repeating every sample would narrow it. All other columns
    are the same for a weight and as many repetitions.

    Examples
    --------
    >>> from sklearn_mr2.metrics import per_class_report
    >>> y_true = ["cat"] * 4 + ["dog"] * 4 + ["fox"] * 2
    >>> y_pred = ["cat", "cat", "cat", "dog", "dog", "dog", "cat", "fox", "fox", "fox"]
    >>> per_class_report(y_true, y_pred).round(2)  # doctest: +NORMALIZE_WHITESPACE
           support  recall  precision   f1  recall_low  recall_high difficulty
    class
    cat          4    0.75       0.75  0.75        0.30         0.95     medium
    dog          4    0.50       0.67  0.57        0.15         0.85       hard
    fox          2    1.00       0.67  0.80        0.34         1.00       easy
    """
    counts = class_counts(y_true, y_pred, labels, sample_weight)
    recall = counts.metric("recall")
    low, high = _wilson_interval(recall, counts.effective)
    report = pd.DataFrame(
        {
            "support": counts.support if sample_weight is not None else counts.support.astype(int),
            "recall": recall,
            "precision": counts.metric("precision"),
            "f1": counts.metric("f1"),
            "recall_low": low,
            "recall_high": high,
        },
        index=pd.Index(counts.classes, name="class"),
    )
    if difficulty is None:
        report["difficulty"] = difficulty_thirds(report["recall"])
    else:
        report["difficulty"] = _given_thirds(difficulty, report["recall"])
    return report


def _check_disparity_parameters(
    metric: str, summary: str, labels: ArrayLike | None, hard_classes: ArrayLike | None
) -> None:
    for name, value, kind in (("metric", metric, Metric), ("summary", summary, Summary)):
        if value not in get_args(kind):
            options = ", ".join(map(repr, get_args(kind)))
            raise ValueError(f"{name} must be one of {options}, got {value!r}.")
    if labels is not None:
        check_classes(labels, "labels")
    if hard_classes is not None:
        check_classes(hard_classes, "hard_classes")
        if summary != "hard":
            raise ValueError(
                f'hard_classes has no effect on summary={summary!r}; use summary="hard", or labels '
                "to restrict another summary to some classes."
            )
        if labels is not None:
            raise ValueError("hard_classes and labels exclude each other; give hard_classes alone.")


def disparity_score(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    metric: Metric = "recall",
    summary: Summary = "gap",
    labels: ArrayLike | None = None,
    hard_classes: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Summarise the inequality between classes in one number; higher is better.

    Parameters
    ----------
    y_true : array-like of shape (n_samples,)
        True class labels.

    y_pred : array-like of shape (n_samples,)
        Predicted class labels.

    metric : {"recall", "precision", "f1"}, default="recall"
        What is computed for each class. Precision and F1 of a class that has samples but is never
        predicted are 0.

    summary : {"gap", "worst", "hard", "std"}, default="gap"
        How the classes are summarised:

        - "gap": minus the difference of the best and the worst class;
        - "worst": the worst class;
        - "hard": the mean of `hard_classes` or, by default, of the hardest third of the classes,
          the ``max(1, round(K / 3))`` of `K` with the lowest metric (see
          :func:`difficulty_thirds`);
        - "std": minus the standard deviation over classes (divided by the number of classes).

    labels : array-like of shape (n_classes,), default=None
        Classes to summarise; by default those in `y_true`.

    hard_classes : array-like, default=None
        The classes of ``summary="hard"``, chosen on other data.

    sample_weight : array-like of shape (n_samples,), default=None
        Sample weights; they weight samples within classes. Classes count equally.

    Returns
    -------
    score : float
        At most 0 for "gap" and "std"; from 0 to 1 for "worst" and "hard". A class without samples
        in `y_true` (or with weight 0 only) is left out, also if it is in `labels` or
        `hard_classes`; NaN, with a warning, if none is left.

    Raises
    ------
    ValueError
        If a parameter or an input is invalid; the message names it.

    See Also
    --------
    PerClassDisparityScorer : The same as ``scoring=`` for model selection.

    Examples
    --------
    >>> from sklearn_mr2.metrics import disparity_score
    >>> y_true = [0, 0, 1, 1, 2, 2]
    >>> y_pred = [0, 0, 1, 0, 2, 2]
    >>> disparity_score(y_true, y_pred, summary="worst")
    0.5
    >>> disparity_score(y_true, y_pred, summary="gap")
    -0.5
    """
    _check_disparity_parameters(metric, summary, labels, hard_classes)
    chosen, argument = (
        (labels, "labels") if hard_classes is None else (hard_classes, "hard_classes")
    )
    counts = class_counts(y_true, y_pred, chosen, sample_weight)
    values = counts.metric(metric)[counts.present]
    if len(values) == 0:
        warnings.warn(
            f"No class of {argument} has samples in y_true, so the score is undefined (NaN).",
            UndefinedMetricWarning,
            stacklevel=2,
        )
        return float("nan")
    if summary == "gap":
        return float(values.min() - values.max())
    if summary == "worst":
        return float(values.min())
    if summary == "std":
        return float(-values.std())
    if hard_classes is None:
        values = np.sort(values)[: third_size(len(values))]
    return float(values.mean())


class PerClassDisparityScorer:
    """Scorer of the inequality between classes, to be passed as ``scoring=``; higher is better.

    Works alone and in multi-metric dictionaries, in ``GridSearchCV``, ``cross_validate`` and
    wherever scikit-learn takes a scorer.

    Parameters
    ----------
    metric : {"recall", "precision", "f1"}, default="recall"
        What is computed for each class.

    summary : {"gap", "worst", "hard", "std"}, default="gap"
        How the classes are summarised; see :func:`disparity_score`.

    labels : array-like of shape (n_classes,), default=None
        Classes to summarise; by default those in `y`.

    hard_classes : array-like, default=None
        The classes of ``summary="hard"``. By default every call takes the hardest third of its own
        predictions, so that each candidate and each fold is judged on its own worst classes.

    Raises
    ------
    ValueError
        If a parameter is invalid; already here, because errors inside a search become NaN scores.

    See Also
    --------
    BestWithinTolerance : Choose by disparity among the candidates that are accurate enough.

    Notes
    -----
    A class without samples in a fold's `y` is left out of that fold's score. A class of `y` that
    the estimator never saw in training is never predicted, and has recall, precision and F1 of 0.

    Sample weights: with metadata routing
    (``sklearn.set_config(enable_metadata_routing=True)``) ask for them with
    ``set_score_request(sample_weight=True)``. Without it, scikit-learn from 1.7 on passes the
    ``sample_weight`` given to the ``fit`` of a search to this scorer too; 1.6 passes it to no
    scorer.

    In a multi-metric dictionary each of these scorers predicts anew.
    ``make_scorer(disparity_score, summary="worst")`` shares the predictions of scikit-learn's
    scorers, which helps where prediction is slow, and is what ``TunedThresholdClassifierCV``, which
    takes only scorers made by ``make_scorer``, needs.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.model_selection import cross_val_score
    >>> from sklearn_mr2.metrics import PerClassDisparityScorer
    >>> X, y = load_iris(return_X_y=True)
    >>> worst = PerClassDisparityScorer(summary="worst")
    >>> cross_val_score(LogisticRegression(max_iter=1000), X, y, scoring=worst, cv=3).round(2)
    array([0.94, 0.88, 0.94])
    """

    def __init__(
        self,
        metric: Metric = "recall",
        summary: Summary = "gap",
        *,
        labels: ArrayLike | None = None,
        hard_classes: ArrayLike | None = None,
    ):
        _check_disparity_parameters(metric, summary, labels, hard_classes)
        self.metric = metric
        self.summary = summary
        self.labels = labels
        self.hard_classes = hard_classes
        self._sample_weight_request: bool | str | None = None

    def __repr__(self) -> str:
        shown = [f"metric={self.metric!r}", f"summary={self.summary!r}"]
        for name in ("labels", "hard_classes"):
            value = getattr(self, name)
            if value is not None:
                shown.append(f"{name}={reprlib.repr(np.asarray(value).tolist())}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __call__(
        self, estimator: Any, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> float:
        """Score the predictions of `estimator` for `X` against `y`.

        Parameters
        ----------
        estimator : object
            Fitted classifier with a ``predict`` method.

        X : array-like
            Samples, as `estimator` takes them.

        y : array-like of shape (n_samples,)
            True class labels.

        sample_weight : array-like of shape (n_samples,), default=None
            Sample weights.

        Returns
        -------
        score : float
            The score; higher is better.
        """
        return disparity_score(
            y,
            estimator.predict(X),
            metric=self.metric,
            summary=self.summary,
            labels=self.labels,
            hard_classes=self.hard_classes,
            sample_weight=sample_weight,
        )

    def set_score_request(self, *, sample_weight: bool | str | None) -> Self:
        """Say whether this scorer wants ``sample_weight`` from metadata routing.

        Parameters
        ----------
        sample_weight : bool, str or None
            True to receive the weights, False to ignore them, a string to receive the metadata of
            that name as weights, None to make scikit-learn raise an error if weights are given.

        Returns
        -------
        self : PerClassDisparityScorer
            This scorer, changed.

        Raises
        ------
        RuntimeError
            If metadata routing is not enabled.
        """
        if not get_config()["enable_metadata_routing"]:
            raise RuntimeError(
                "set_score_request has no effect without metadata routing; enable it with "
                "sklearn.set_config(enable_metadata_routing=True)."
            )
        self._request(sample_weight)  # scikit-learn's own check of the value
        self._sample_weight_request = sample_weight
        return self

    def get_metadata_routing(self) -> MetadataRequest:
        """Get the metadata this scorer asks for.

        Returns
        -------
        routing : MetadataRequest
            The request, as routers in scikit-learn read it.
        """
        return self._request(self._sample_weight_request)

    def _request(self, sample_weight: bool | str | None) -> MetadataRequest:
        request = MetadataRequest(owner=type(self).__name__)
        request.score.add_request(param="sample_weight", alias=sample_weight)
        return request

    def _accept_sample_weight(self) -> bool:
        # scikit-learn 1.7 and later ask this of every scorer in a multi-metric dictionary when
        # routing is off and weights are given; without an answer the search fails.
        return True


@dataclass(frozen=True)
class BestWithinTolerance:
    """Choose the least disparity that costs little accuracy, to be passed as ``refit=``.

    Of the candidates whose accuracy is within `tolerance` of the best accuracy, the one with the
    best disparity score; of several, the most accurate; of several, the first. A candidate with a
    NaN in either score is never chosen.

    Parameters
    ----------
    disparity : str, default="mean_test_worst"
        Key of ``cv_results_`` with the disparity score; higher is better.

    accuracy : str, default="mean_test_accuracy"
        Key of ``cv_results_`` with the accuracy; higher is better.

    tolerance : float, default=0.005
        Accuracy that may be given up, absolute: 0.005 is half a point. Not negative.

    Raises
    ------
    ValueError
        If `tolerance` is negative or not finite; when called, if a key is missing or no candidate
        has both scores.

    Notes
    -----
    Scores that differ by less than 1e-12 count as equal, because means over folds of equal numbers
    may differ in their last bits.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.model_selection import GridSearchCV
    >>> from sklearn_mr2.metrics import BestWithinTolerance, PerClassDisparityScorer
    >>> X, y = load_iris(return_X_y=True)
    >>> search = GridSearchCV(
    ...     LogisticRegression(max_iter=1000),
    ...     {"C": [0.01, 1.0]},
    ...     scoring={"accuracy": "accuracy", "worst": PerClassDisparityScorer(summary="worst")},
    ...     refit=BestWithinTolerance("mean_test_worst", tolerance=0.01),
    ... )
    >>> search.fit(X, y).best_params_
    {'C': 1.0}
    """

    disparity: str = "mean_test_worst"
    accuracy: str = "mean_test_accuracy"
    tolerance: float = 0.005

    def __post_init__(self) -> None:
        if not (isinstance(self.tolerance, Real) and 0 <= self.tolerance < np.inf):
            raise ValueError(
                f"tolerance must be a finite number, not negative, got {self.tolerance!r}; 0.005 "
                "gives up at most half a point of accuracy."
            )

    def __call__(self, cv_results: Mapping[str, Any]) -> int:
        """Choose a candidate.

        Parameters
        ----------
        cv_results : mapping from str to array of shape (n_candidates,)
            The ``cv_results_`` of a search.

        Returns
        -------
        index : int
            Index of the chosen candidate.
        """
        disparity = self._scores(cv_results, "disparity")
        accuracy = self._scores(cv_results, "accuracy")
        eligible = np.isfinite(disparity) & np.isfinite(accuracy)
        if not eligible.any():
            raise ValueError(
                f"No candidate has a finite {self.disparity!r} and {self.accuracy!r}; find the "
                'failing fit or scorer with error_score="raise".'
            )
        eligible &= accuracy >= accuracy[eligible].max() - self.tolerance - _ROUNDING
        eligible &= disparity >= disparity[eligible].max() - _ROUNDING
        eligible &= accuracy >= accuracy[eligible].max() - _ROUNDING
        return int(np.argmax(eligible))

    def _scores(self, cv_results: Mapping[str, Any], argument: str) -> NDArray[np.float64]:
        key = getattr(self, argument)
        if key not in cv_results:
            available = sorted(name for name in cv_results if name.startswith("mean_test_"))
            raise ValueError(
                f"{argument}={key!r} is not in cv_results_, which has {', '.join(available)}; pass "
                "one of these, or add the scorer to scoring=."
            )
        return np.asarray(cv_results[key], dtype=np.float64)
