"""What a search could choose from: overall score against a score of disparity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..metrics import BestWithinTolerance, PerClassDisparityScorer
from ._estimators import part_with
from ._matplotlib import import_pyplot
from ._style import GRID, N_STYLES, SHADE, legend_above, legend_entry, shorten, style, trim

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

_MAX_VALUE = 24
_MAX_CANDIDATE = 72
_MAX_COLUMN = 42
_ALL = "candidates"


def _pareto_front(accuracy: NDArray[np.float64], disparity: NDArray[np.float64]) -> NDArray:
    """Indices of candidates that no other beats, by increasing accuracy; NaN is no candidate."""
    known = np.flatnonzero(np.isfinite(accuracy) & np.isfinite(disparity))
    by_accuracy = known[np.lexsort((-disparity[known], -accuracy[known]))]
    front = []
    best, at = -np.inf, np.nan
    for index in by_accuracy:
        tie = disparity[index] == best and accuracy[index] == at  # equals of a candidate on it
        if disparity[index] > best or tie:
            front.append(index)
            best, at = disparity[index], accuracy[index]
    return np.array(front[::-1], dtype=np.intp)


def _short_names(parameters: Sequence[str]) -> dict[str, str]:
    """Parameters without the names of pipeline steps, where that leaves them distinct."""
    last = [name.rpartition("__")[2] for name in parameters]
    return {
        name: short if last.count(short) == 1 else name
        for name, short in zip(parameters, last, strict=True)
    }


def _describe(params: Mapping[str, Any], names: Mapping[str, str]) -> str:
    values = {short: params[name] for name, short in names.items() if name in params}
    return ", ".join(f"{short}={shorten(value, _MAX_VALUE)}" for short, value in values.items())


def _varying(candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Parameters that not all candidates have the same value of."""
    seen: dict[str, set[str]] = {}
    for params in candidates:
        for name, value in params.items():
            seen.setdefault(name, set()).add(repr(value))
    return [
        name
        for name, values in seen.items()
        if len(values) > 1 or not all(name in params for params in candidates)
    ]


def _score_name(key: str, scorers: Any) -> str:
    """Words for a key of ``cv_results_``."""
    if not key.startswith("mean_test_"):
        return key
    score = key.removeprefix("mean_test_")
    scorer = scorers.get(score) if isinstance(scorers, Mapping) else None
    name = "Accuracy" if score == "accuracy" else score
    if isinstance(scorer, PerClassDisparityScorer):
        metric = scorer.metric if scorer.metric == "f1" else scorer.metric.capitalize()
        name = {
            "gap": f"{metric}: worst class minus best",
            "worst": f"{metric} of the worst class",
            "hard": f"{metric} of the hardest third",
            "std": f"{metric}: minus its spread over classes",
        }[scorer.summary]
        if scorer.hard_classes is not None:
            name = f"{metric} of the hard classes"
    return f"{name}, mean over folds"


class DisparityTradeoffDisplay:
    """Overall score against disparity score of every candidate of a search.

    A candidate on the Pareto front is one that no other candidate beats in one of the scores
    without losing in the other. What lies below the front costs something for nothing.

    Use :meth:`from_estimator` to create one. All parameters are stored as attributes.

    Parameters
    ----------
    accuracy : array-like of shape (n_candidates,)
        Overall score of every candidate; higher is better. Candidates with a NaN in a score are
        not drawn.

    disparity : array-like of shape (n_candidates,)
        Disparity score of every candidate; higher is better.

    chosen : int, default=None
        Index of the candidate that was chosen.

    chosen_name : str, default=None
        What the legend says of it.

    tolerance : float, default=None
        Accuracy that the choice could give up. The range from the best accuracy down by that much
        is shaded.

    groups : array-like of shape (n_candidates,), default=None
        Group of every candidate, drawn in its own colour and marker; at most six.

    accuracy_name, disparity_name : str
        Names of the axes.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the plot.

    figure_ : matplotlib Figure
        Figure with the axes.

    front_ : ndarray of shape (n_on_front,)
        Indices of the candidates on the Pareto front, by increasing accuracy.

    points_ : dict from str to Line2D
        The candidates, by group.

    front_line_ : Line2D
        The Pareto front, a staircase: what lies below or left of it is beaten.

    chosen_point_ : Line2D or None
        Ring around the chosen candidate.

    band_ : matplotlib Patch or None
        The range of accuracies within the tolerance.

    Raises
    ------
    ValueError
        If the scores differ in length or no candidate has both, if `chosen` is none of the
        candidates, or if there are more than six groups.

    See Also
    --------
    sklearn_mr2.metrics.BestWithinTolerance : The choice, as ``refit=`` of a search.
    sklearn_mr2.metrics.PerClassDisparityScorer : The disparity score, as ``scoring=`` of a search.

    Notes
    -----
    The scores of the best of many candidates flatter these: they were chosen for being high. Judge
    the chosen one on data that took no part in the search.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.model_selection import GridSearchCV
    >>> from sklearn_mr2.display import DisparityTradeoffDisplay
    >>> from sklearn_mr2.metrics import BestWithinTolerance, PerClassDisparityScorer
    >>> X, y = load_digits(return_X_y=True)
    >>> search = GridSearchCV(
    ...     LogisticRegression(),
    ...     {"C": [0.0001, 0.01, 1.0]},
    ...     scoring={"accuracy": "accuracy", "hard": PerClassDisparityScorer(summary="hard")},
    ...     refit=BestWithinTolerance("mean_test_hard", tolerance=0.01),
    ... ).fit(X[:500] / 16, y[:500])
    >>> display = DisparityTradeoffDisplay.from_estimator(search)
    >>> display.chosen_name
    'C=1.0'
    """

    ax_: Axes
    figure_: Figure | SubFigure
    points_: dict[str, Line2D]
    front_line_: Line2D
    chosen_point_: Line2D | None
    band_: Patch | None

    def __init__(
        self,
        accuracy: ArrayLike,
        disparity: ArrayLike,
        *,
        chosen: int | None = None,
        chosen_name: str | None = None,
        tolerance: float | None = None,
        groups: ArrayLike | None = None,
        accuracy_name: str = "Accuracy",
        disparity_name: str = "Disparity score",
    ):
        self.accuracy = np.asarray(accuracy, dtype=np.float64)
        self.disparity = np.asarray(disparity, dtype=np.float64)
        if self.accuracy.ndim != 1 or self.accuracy.shape != self.disparity.shape:
            raise ValueError(
                "accuracy and disparity must have one score for each candidate, got shapes "
                f"{self.accuracy.shape} and {self.disparity.shape}."
            )
        self.front_ = _pareto_front(self.accuracy, self.disparity)
        if len(self.front_) == 0:
            raise ValueError(
                "no candidate has a finite accuracy and disparity; find the failing fit or scorer "
                'with error_score="raise".'
            )
        if chosen is not None and not 0 <= chosen < len(self.accuracy):
            raise ValueError(
                f"chosen must be from 0 to {len(self.accuracy) - 1}, the index of a candidate, got "
                f"{chosen}."
            )
        self.chosen = chosen
        self.chosen_name = chosen_name
        self.tolerance = tolerance
        self.groups = groups
        self.accuracy_name = accuracy_name
        self.disparity_name = disparity_name
        if groups is None:
            self._groups = [_ALL] * len(self.accuracy)
        else:
            self._groups = [shorten(group, _MAX_VALUE) for group in np.asarray(groups).tolist()]
            if len(self._groups) != len(self.accuracy):
                raise ValueError(
                    f"groups must have an entry for each of the {len(self.accuracy)} candidates, "
                    f"got {len(self._groups)}."
                )
        if len(set(self._groups)) > N_STYLES:
            raise ValueError(
                f"groups has {len(set(self._groups))} different values, and no more than "
                f"{N_STYLES} can be told apart; group by something coarser."
            )

    @classmethod
    def from_estimator(
        cls,
        search: Any,
        *,
        accuracy: str | None = None,
        disparity: str | None = None,
        group_by: str | None = None,
        ax: Axes | None = None,
    ) -> Self:
        """Plot the candidates of a fitted search with several scores.

        Parameters
        ----------
        search : GridSearchCV, RandomizedSearchCV or the like
            Fitted search whose ``scoring`` has an overall score and one of disparity.

        accuracy : str, default=None
            Key of ``cv_results_`` with the overall score. By default that of
            :class:`~sklearn_mr2.metrics.BestWithinTolerance`, if the search was made with
            it, else "mean_test_accuracy".

        disparity : str, default=None
            Key of ``cv_results_`` with the disparity score. By default that of
            ``BestWithinTolerance``, else the only other ``mean_test_*`` there is.

        group_by : str, default=None
            Parameter whose values get colours and markers of their own, as it is called in the
            search's grid; at most six values.

        ax : matplotlib Axes, default=None
            Axes to draw on; by default those of a new figure.

        Returns
        -------
        display : DisparityTradeoffDisplay
            The display, drawn.

        Raises
        ------
        TypeError
            If `search` is no search.
        ValueError
            If a key or `group_by` is not among the results; the message lists what is.
        """
        import_pyplot(f"{cls.__name__}.from_estimator")
        search = part_with(search, "cv_results_", "a fitted search such as GridSearchCV")
        results = search.cv_results_
        rule = getattr(search, "refit", None)
        tolerance = None
        if isinstance(rule, BestWithinTolerance):
            if accuracy in (None, rule.accuracy):
                tolerance = rule.tolerance
            accuracy, disparity = accuracy or rule.accuracy, disparity or rule.disparity
        accuracy = accuracy or "mean_test_accuracy"
        scores = sorted(key for key in results if key.startswith("mean_test_"))
        others = [key for key in scores if key != accuracy]
        if disparity is None and len(others) == 1:
            disparity = others[0]
        for argument, key in (("accuracy", accuracy), ("disparity", disparity)):
            if key not in results:
                raise ValueError(
                    f"{argument}={key!r} is not in cv_results_, which has {', '.join(scores)}; "
                    "pass one of these, or add the scorer to scoring=."
                )
        assert disparity is not None  # for mypy: it is in the results
        candidates = results["params"]
        varying = _varying(candidates)
        names = _short_names(varying)
        groups = None
        if group_by is not None:
            if not any(group_by in params for params in candidates):
                raise ValueError(
                    f"group_by={group_by!r} is no parameter of the search, which has "
                    f"{', '.join(sorted(varying))}."
                )
            short = {group_by: names.get(group_by, group_by)}
            groups = [_describe(p, short) or f"no {short[group_by]}" for p in candidates]
        chosen = getattr(search, "best_index_", None)
        scorers = getattr(search, "scorer_", None)
        return cls(
            results[accuracy],
            results[disparity],
            chosen=None if chosen is None else int(chosen),
            chosen_name=None if chosen is None else _describe(candidates[chosen], names),
            tolerance=tolerance,
            groups=groups,
            accuracy_name=_score_name(accuracy, scorers),
            disparity_name=_score_name(disparity, scorers),
        ).plot(ax=ax)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw the candidates.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to draw on; by default those of a new figure.

        Returns
        -------
        display : DisparityTradeoffDisplay
            This display, drawn.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        plt = import_pyplot(f"{type(self).__name__}.plot")
        if ax is None:
            _, ax = plt.subplots(figsize=(6.4, 4.8), layout="constrained")
        self.ax_ = ax
        self.figure_ = ax.figure
        drawn = np.isfinite(self.accuracy) & np.isfinite(self.disparity)
        groups = np.array(self._groups)
        on_front = np.zeros(len(drawn), dtype=bool)
        on_front[self.front_] = True
        # Many candidates are a cloud, in which single ones matter less.
        size = float(np.clip(60 / np.sqrt(drawn.sum()), 3.5, 7))
        self.points_ = {}
        for position, group in enumerate(dict.fromkeys(self._groups)):
            look, members = style(position), drawn & (groups == group)
            (self.points_[group],) = ax.plot(
                self.accuracy[members],
                self.disparity[members],
                linestyle="none",
                marker=look.marker,
                markersize=size,
                color=look.color,
                alpha=0.9 if drawn.sum() <= 100 else 0.5,
                markeredgecolor="white",
                markeredgewidth=0.4,
                label=legend_entry(f"{drawn.sum()} {_ALL}" if self.groups is None else group),
            )
        (self.front_line_,) = ax.plot(
            self.accuracy[self.front_],
            self.disparity[self.front_],
            drawstyle="steps-pre",
            color="0.35",
            linewidth=1.2,
            zorder=1.5,
            label="Pareto front",
        )
        self.chosen_point_ = self.band_ = None
        if self.chosen is not None:
            name = shorten(self.chosen_name or "", _MAX_CANDIDATE)
            (self.chosen_point_,) = ax.plot(
                self.accuracy[self.chosen],
                self.disparity[self.chosen],
                linestyle="none",
                marker="o",
                markersize=size + 8,
                markerfacecolor="none",
                markeredgecolor="#D55E00",
                markeredgewidth=2,
                label="chosen" + (f": {name}" if name else ""),
            )
        if self.tolerance is not None:
            best = float(self.accuracy[drawn].max())
            self.band_ = ax.axvspan(
                best - self.tolerance,
                best,
                color=SHADE,
                linewidth=0,
                zorder=0,
                label=f"within {self.tolerance:g} of the best",
            )
        ax.margins(0.06)
        ax.set(xlabel=self.accuracy_name, ylabel=self.disparity_name)
        ax.grid(color=GRID, linewidth=0.6)
        trim(ax)
        long = len(self.chosen_name or "") > _MAX_COLUMN
        legend = legend_above(ax, ncols=1 if len(self.points_) == 1 or long else 2)
        for handle in legend.legend_handles[: len(self.points_)]:
            if handle is not None:
                handle.set(markersize=6)
        return self
