"""Margins of classes against their errors: whether the difficult classes have the larger ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from ..metrics import per_class_report
from ._estimators import part_with
from ._matplotlib import import_pyplot
from ._names import name_points
from ._style import GRID, legend_above, legend_entry, style, trim

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D
    from matplotlib.text import Annotation

# Intervals of more classes than this hide each other.
_MAX_INTERVALS = 50


class MarginDisplay:
    """Margin of every class against its error.

    Margins help the difficult classes only if these are the ones that get the larger margins. The
    legend has Spearman's rank correlation of both, and the names of the classes with the largest
    errors, the largest margins and the smallest margins are written beside their points. Up to 50
    classes have Wilson's 95% interval of their error.

    Use :meth:`from_estimator` or :meth:`from_predictions` to create one. All parameters are stored
    as attributes.

    Parameters
    ----------
    margins : mapping or Series from class to float
        Margin of every class.

    report : DataFrame
        The :func:`~sklearn_mr2.metrics.per_class_report`. Classes without samples are not drawn.

    name : str, default=None
        Name of the model in the legend.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the plot.

    figure_ : matplotlib Figure
        Figure with the axes.

    points_ : Line2D
        One point for each class.

    intervals_ : LineCollection or None
        Intervals of the errors.

    names_ : list of Annotation
        Names of classes. One that has no place left without hiding another is left out.

    correlation_ : float
        Spearman's rank correlation of margins and errors; NaN if all margins or all errors are
        equal.

    Raises
    ------
    ValueError
        If a class with samples has no margin, or no class has samples.

    See Also
    --------
    PerClassAccuracyDisplay : Recalls of several models side by side.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.model_selection import train_test_split
    >>> from sklearn_mr2 import MR2Classifier
    >>> from sklearn_mr2.display import MarginDisplay
    >>> X, y = load_digits(return_X_y=True)
    >>> X, X_test, y, y_test = train_test_split(
    ...     X / 16, y, stratify=y, test_size=0.5, random_state=0
    ... )
    >>> model = MR2Classifier(C=0.1, margin_statistic="error", random_state=0).fit(X, y)
    >>> display = MarginDisplay.from_estimator(model, X_test, y_test)
    >>> bool(display.correlation_ > 0)
    True
    """

    ax_: Axes
    figure_: Figure | SubFigure
    points_: Line2D
    intervals_: LineCollection | None
    names_: list[Annotation]

    def __init__(
        self,
        margins: Mapping[Any, float] | pd.Series,
        report: pd.DataFrame,
        *,
        name: str | None = None,
    ):
        self.margins = margins
        self.report = report
        self.name = name
        self._table = report.loc[report["support"].to_numpy() > 0].copy()
        if self._table.empty:
            raise ValueError("report has no class with samples; check labels and sample_weight.")
        by_class = dict(margins)
        missing = [label for label in self._table.index if label not in by_class]
        if missing:
            shown = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise ValueError(
                f"margins has no entry for the classes {shown}; restrict the classes with labels, "
                "or use the labels that the model was trained with."
            )
        self._table["margin"] = [float(by_class[label]) for label in self._table.index]
        self._table["error"] = 1 - self._table["recall"]
        varies = self._table[["margin", "error"]].nunique() > 1
        self.correlation_ = (
            float(spearmanr(self._table["margin"], self._table["error"]).statistic)
            if varies.all()
            else np.nan
        )

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: ArrayLike,
        *,
        labels: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        n_named: int = 3,
        ax: Axes | None = None,
    ) -> Self:
        """Plot the margins of a fitted classifier against its class errors.

        Parameters
        ----------
        estimator : MR2Classifier, or pipeline or search with one
            Fitted classifier.

        X : array-like of shape (n_samples, n_features)
            Test samples.

        y : array-like of shape (n_samples,)
            True class labels.

        labels : array-like of shape (n_classes,), default=None
            Classes to show; by default all in `y`.

        sample_weight : array-like of shape (n_samples,), default=None
            Sample weights.

        n_named : int, default=3
            See :meth:`plot`.

        ax : matplotlib Axes, default=None
            See :meth:`plot`.

        Returns
        -------
        display : MarginDisplay
            The display, drawn.

        Raises
        ------
        TypeError
            If the estimator has no margins.
        ValueError
            If there are classes in `y` that it was not trained with.
        """
        import_pyplot(f"{cls.__name__}.from_estimator")
        holder = part_with(estimator, "margins_", "a fitted MR2Classifier")
        margins = dict(zip(holder.classes_.tolist(), holder.margins_.tolist(), strict=True))
        return cls.from_predictions(
            y,
            estimator.predict(X),
            margins=margins,
            labels=labels,
            sample_weight=sample_weight,
            name=type(holder).__name__,
            n_named=n_named,
            ax=ax,
        )

    @classmethod
    def from_predictions(
        cls,
        y_true: ArrayLike,
        y_pred: ArrayLike,
        *,
        margins: Mapping[Any, float] | pd.Series,
        labels: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        name: str | None = None,
        n_named: int = 3,
        ax: Axes | None = None,
    ) -> Self:
        """Plot margins against the class errors of predictions.

        Parameters
        ----------
        y_true : array-like of shape (n_samples,)
            True class labels.

        y_pred : array-like of shape (n_samples,)
            Predicted class labels.

        margins : mapping or Series from class to float
            Margin of every class.

        labels : array-like of shape (n_classes,), default=None
            Classes to show; by default all in `y_true`.

        sample_weight : array-like of shape (n_samples,), default=None
            Sample weights.

        name : str, default=None
            Name of the model in the legend.

        n_named : int, default=3
            See :meth:`plot`.

        ax : matplotlib Axes, default=None
            See :meth:`plot`.

        Returns
        -------
        display : MarginDisplay
            The display, drawn.
        """
        report = per_class_report(y_true, y_pred, labels=labels, sample_weight=sample_weight)
        return cls(margins, report, name=name).plot(ax=ax, n_named=n_named)

    def plot(self, ax: Axes | None = None, *, n_named: int = 3) -> Self:
        """Draw margins and errors.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to draw on; by default those of a new figure.

        n_named : int, default=3
            Number of classes that are named for the largest error, for the largest margin and for
            the smallest margin; 0 for no names.

        Returns
        -------
        display : MarginDisplay
            This display, drawn.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If `n_named` is negative.
        """
        plt = import_pyplot(f"{type(self).__name__}.plot")
        if n_named < 0:
            raise ValueError(f"n_named must not be negative, got {n_named}; use 0 to name none.")
        if ax is None:
            _, ax = plt.subplots(figsize=(6.4, 4.8), layout="constrained")
        self.ax_ = ax
        self.figure_ = ax.figure
        table, look = self._table, style(0)
        margin, error = table["margin"].to_numpy(), table["error"].to_numpy()
        few = len(table) <= _MAX_INTERVALS
        self.intervals_ = (
            ax.vlines(
                margin,
                1 - table["recall_high"].to_numpy(),
                1 - table["recall_low"].to_numpy(),
                color="0.7",
                linewidth=1,
                zorder=1.5,
            )
            if few
            else None
        )
        correlation = (
            "rank correlation not defined"
            if np.isnan(self.correlation_)
            else f"rank correlation {self.correlation_:.2f}"
        )
        (self.points_,) = ax.plot(
            margin,
            error,
            linestyle="none",
            marker=look.marker,
            markersize=6 if few else 4,
            color=look.color,
            alpha=1 if few else 0.45,
            markeredgewidth=0,
            label=legend_entry(self.name or "Classifier", f"{len(table)} classes, {correlation}"),
        )
        ax.margins(0.08)
        ax.set_xlabel("Margin of the class")
        ax.set_ylabel("Error of the class (1 − recall)" + (", with 95% interval" if few else ""))
        ax.grid(color=GRID, linewidth=0.6)
        trim(ax)
        legend_above(ax)
        by_margin = np.argsort(margin, kind="stable")
        by_error = np.lexsort((margin, -error))  # of equal errors the smaller margin is the odder
        extremes = [by_error[:n_named], by_margin[::-1][:n_named], by_margin[:n_named]]
        named = list(dict.fromkeys(np.concatenate(extremes).tolist()))
        ax.plot(
            margin[named],
            error[named],
            linestyle="none",
            marker=look.marker,
            markersize=6,
            color=look.color,
            markeredgecolor="black",
            markeredgewidth=1.2,
        )
        self.names_ = name_points(ax, np.column_stack([margin, error]), named, list(table.index))
        return self
