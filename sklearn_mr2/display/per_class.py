"""Recall of every class, hardest first, for one model or several side by side."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ..metrics import per_class_report
from ..metrics.disparity import _given_thirds, third_size
from ._estimators import by_name
from ._matplotlib import import_pyplot
from ._style import (
    GRID,
    LITERAL,
    SHADE,
    Style,
    legend_above,
    legend_entry,
    shorten,
    style,
    trim,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

Kind = Literal["auto", "dots", "curve"]

# More rows than this do not fit a page with names that can be read.
_MAX_ROWS = 50
_MAX_NAME = 28
_MAX_COLUMN = 14


class PerClassAccuracyDisplay:
    """Recall of every class with its interval, hardest class first.

    The recall of a class is the accuracy among its samples. Up to 50 classes are drawn as rows of
    dots with Wilson's 95% intervals and named; more are drawn as one sorted curve for each model,
    and the hardest are named in a table.

    Use :meth:`from_estimator` or :meth:`from_predictions` to create one. All parameters are stored
    as attributes.

    Parameters
    ----------
    reports : mapping from str to DataFrame
        The :func:`~sklearn_mr2.metrics.per_class_report` of every model, by the name to show. All
        must be of the same test data. Classes without samples are not drawn.

    difficulty : mapping or Series from class to {"hard", "medium", "easy"}, default=None
        Thirds chosen on other data, as for :func:`~sklearn_mr2.metrics.per_class_report`. The
        legend then has the means over the hard classes, whose rows are shaded among dots. By
        default it has the means over the third that is hardest in the plot.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the plot.

    figure_ : matplotlib Figure
        Figure with the axes.

    artists_ : dict from str to ErrorbarContainer or Line2D
        What is drawn for each model: dots with intervals, or a curve.

    order_ : Index
        Classes in the order drawn, hardest first.

    text_ : matplotlib Text or None
        The table of the hardest classes beside a curve.

    Raises
    ------
    ValueError
        If there is no report, or the reports differ in their classes; if `difficulty` lacks a
        class, has other values or no hard class.

    See Also
    --------
    sklearn_mr2.metrics.per_class_report : The numbers behind the plot.

    Notes
    -----
    Dots are sorted by the mean recall over the models, and their hardest third is that of this
    mean, so that no model is favoured: sorted by one model's recall, any other model looks better
    on the hardest classes and worse on the easiest. Each curve is sorted by its own recalls and has
    its own hardest third. To claim that a model does better on the hard classes, choose these on
    other data and give them as `difficulty`.

    The legend lies above the axes; ``display.figure_.suptitle`` sets a title above it.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.model_selection import train_test_split
    >>> from sklearn_mr2.display import PerClassAccuracyDisplay
    >>> X, y = load_digits(return_X_y=True)
    >>> X, X_test, y, y_test = train_test_split(X / 16, y, stratify=y, random_state=0)
    >>> models = {
    ...     "C = 0.001": LogisticRegression(C=0.001).fit(X, y),
    ...     "C = 1": LogisticRegression(C=1).fit(X, y),
    ... }
    >>> display = PerClassAccuracyDisplay.from_estimator(models, X_test, y_test)
    >>> int(display.order_[0])  # the hardest digit, drawn on top
    8
    """

    ax_: "Axes"
    figure_: "Figure | SubFigure"
    artists_: "dict[str, ErrorbarContainer | Line2D]"
    order_: pd.Index
    text_: "Text | None"

    def __init__(
        self,
        reports: Mapping[str, pd.DataFrame],
        *,
        difficulty: Mapping[Any, str | None] | pd.Series | None = None,
    ):
        if len(reports) == 0:
            raise ValueError("reports is empty; pass at least one model.")
        present = [report.index[report["support"] > 0] for report in reports.values()]
        if not all(index.equals(present[0]) for index in present):
            raise ValueError(
                "reports differ in their classes; make them all from the same test data and labels."
            )
        if len(present[0]) == 0:
            raise ValueError("reports has no class with samples; check labels and sample_weight.")
        self.reports = reports
        self.difficulty = difficulty
        self._hard: pd.Index | None = None
        if difficulty is not None:
            thirds = _given_thirds(difficulty, pd.Series(0.0, index=present[0]))
            self._hard = thirds.index[thirds == "hard"]
            if len(self._hard) == 0:
                raise ValueError('difficulty has no "hard" class among those with samples.')

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: ArrayLike,
        *,
        labels: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        difficulty: Mapping[Any, str | None] | pd.Series | None = None,
        ax: "Axes | None" = None,
        kind: Kind = "auto",
        sort_by: str | None = None,
        n_named: int = 8,
    ) -> Self:
        """Plot the recalls of a fitted classifier, or of several.

        Parameters
        ----------
        estimator : estimator or mapping from str to estimator
            Fitted classifier, or several by the name to show.

        X : array-like of shape (n_samples, n_features)
            Test samples.

        y : array-like of shape (n_samples,)
            True class labels.

        labels : array-like of shape (n_classes,), default=None
            Classes to show; by default all in `y`.

        sample_weight : array-like of shape (n_samples,), default=None
            Sample weights.

        difficulty : mapping or Series from class to {"hard", "medium", "easy"}, default=None
            Thirds chosen on other data; see the class.

        ax : matplotlib Axes, default=None
            See :meth:`plot`, also for the other parameters.

        kind : {"auto", "dots", "curve"}, default="auto"
            See :meth:`plot`.

        sort_by : str, default=None
            See :meth:`plot`.

        n_named : int, default=8
            See :meth:`plot`.

        Returns
        -------
        display : PerClassAccuracyDisplay
            The display, drawn.
        """
        import_pyplot(f"{cls.__name__}.from_estimator")  # before predictions that may take long
        predictions = {}
        for name, model in by_name(estimator).items():
            if not hasattr(model, "predict"):
                raise TypeError(
                    f"estimator must be a fitted classifier or a mapping from names to them, got "
                    f"{type(model).__name__} for {name!r}, which has no predict."
                )
            predictions[name] = model.predict(X)
        return cls.from_predictions(
            y,
            predictions,
            labels=labels,
            sample_weight=sample_weight,
            difficulty=difficulty,
            ax=ax,
            kind=kind,
            sort_by=sort_by,
            n_named=n_named,
        )

    @classmethod
    def from_predictions(
        cls,
        y_true: ArrayLike,
        y_pred: ArrayLike | Mapping[str, ArrayLike],
        *,
        labels: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        difficulty: Mapping[Any, str | None] | pd.Series | None = None,
        ax: "Axes | None" = None,
        kind: Kind = "auto",
        sort_by: str | None = None,
        n_named: int = 8,
    ) -> Self:
        """Plot the recalls of one model's predictions, or of several models'.

        Parameters
        ----------
        y_true : array-like of shape (n_samples,)
            True class labels.

        y_pred : array-like of shape (n_samples,) or mapping from str to array-like
            Predicted class labels, or several models' by the name to show.

        labels : array-like of shape (n_classes,), default=None
            Classes to show; by default all in `y_true`.

        sample_weight : array-like of shape (n_samples,), default=None
            Sample weights.

        difficulty : mapping or Series from class to {"hard", "medium", "easy"}, default=None
            Thirds chosen on other data; see the class.

        ax : matplotlib Axes, default=None
            See :meth:`plot`, also for the other parameters.

        kind : {"auto", "dots", "curve"}, default="auto"
            See :meth:`plot`.

        sort_by : str, default=None
            See :meth:`plot`.

        n_named : int, default=8
            See :meth:`plot`.

        Returns
        -------
        display : PerClassAccuracyDisplay
            The display, drawn.
        """
        predictions = y_pred if isinstance(y_pred, Mapping) else {"Classifier": y_pred}
        reports = {
            name: per_class_report(y_true, prediction, labels=labels, sample_weight=sample_weight)
            for name, prediction in predictions.items()
        }
        return cls(reports, difficulty=difficulty).plot(
            ax=ax, kind=kind, sort_by=sort_by, n_named=n_named
        )

    def plot(
        self,
        ax: "Axes | None" = None,
        *,
        kind: Kind = "auto",
        sort_by: str | None = None,
        n_named: int = 8,
    ) -> Self:
        """Draw the recalls.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to draw on; by default those of a new figure that fits the number of classes.

        kind : {"auto", "dots", "curve"}, default="auto"
            "dots" draws a row for each class, "curve" each model's sorted recalls; "auto" takes
            dots for up to 50 classes.

        sort_by : str, default=None
            Name of the model whose recall orders the classes; by default the mean over models.

        n_named : int, default=8
            Number of the hardest classes that are named beside a curve; 0 for no table. Dots name
            all classes.

        Returns
        -------
        display : PerClassAccuracyDisplay
            This display, drawn.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If a parameter is invalid; the message names it.
        """
        plt = import_pyplot(f"{type(self).__name__}.plot")
        if kind not in get_args(Kind):
            options = ", ".join(map(repr, get_args(Kind)))
            raise ValueError(f"kind must be one of {options}, got {kind!r}.")
        if sort_by is not None and sort_by not in self.reports:
            models = ", ".join(map(repr, self.reports))
            raise ValueError(f"sort_by must be None or one of {models}, got {sort_by!r}.")
        if n_named < 0:
            raise ValueError(f"n_named must not be negative, got {n_named}; use 0 to name none.")

        recalls = pd.DataFrame({name: r["recall"] for name, r in self.reports.items()}).dropna()
        key = recalls.mean(axis=1) if sort_by is None else recalls[sort_by]
        self.order_ = key.sort_values(kind="stable").index
        dots = kind == "dots" or (kind == "auto" and len(recalls) <= _MAX_ROWS)
        if ax is None:
            rows = len(recalls) * (0.16 + 0.04 * len(self.reports))
            size = (6.4, max(2.4, 1.2 + rows)) if dots else (7.2, 4.2)
            _, ax = plt.subplots(figsize=size, layout="constrained")
        self.ax_ = ax
        self.figure_ = ax.figure
        self.text_ = None
        self.artists_ = {}
        if dots:
            self._plot_dots()
        else:
            self._plot_curves()
            if n_named:
                self._plot_table(recalls, n_named)
        trim(ax)
        legend_above(ax)
        return self

    def _styled_reports(self) -> Iterator[tuple[str, pd.DataFrame, Style]]:
        for position, (name, report) in enumerate(self.reports.items()):
            # Not .loc, which takes boolean labels for a mask.
            yield name, report.reindex(self.order_), style(position)

    def _is_hard(self, classes: pd.Index) -> NDArray[np.bool_]:
        """Which classes, given hardest first, the legend has the mean of."""
        if self._hard is None:
            return np.arange(len(classes)) < third_size(len(classes))
        return classes.isin(self._hard)

    def _summary(self, name: str, recall: pd.Series) -> str:
        """Entry of the legend; `recall` is in the order drawn."""
        which = "hardest third" if self._hard is None else "hard classes"
        hard = recall[self._is_hard(recall.index)].mean()
        return legend_entry(name, f"mean {recall.mean():.3f}, {which} {hard:.3f}")

    def _plot_dots(self) -> None:
        ax, n_classes, n_models = self.ax_, len(self.order_), len(self.reports)
        # Sizes in points follow the height that a row has on these axes.
        row = ax.get_window_extent().height / self.figure_.dpi * 72 / n_classes
        rows = np.arange(n_classes)
        # Models of one class are closer to each other than to the next class.
        spacing = 0.7 / n_models
        offsets = spacing * (np.arange(n_models) - (n_models - 1) / 2)
        marker_size = float(np.clip(spacing * row, 2.5, 6))
        for offset, (name, report, model) in zip(offsets, self._styled_reports(), strict=True):
            recall = report["recall"]
            self.artists_[name] = ax.errorbar(
                recall,
                rows + offset,
                xerr=[recall - report["recall_low"], report["recall_high"] - recall],
                fmt=model.marker,
                color=model.color,
                markersize=marker_size,
                elinewidth=1,
                label=self._summary(name, recall),
            )
        ax.set_yticks(
            rows,
            [shorten(label, _MAX_NAME) for label in self.order_],
            fontsize=float(np.clip(0.75 * row, 4, 10)),
            **LITERAL,
        )
        ax.set_ylim(n_classes - 0.5, -0.5)  # hardest on top
        ax.set_xlim(right=1.01)
        ax.set_xlabel("Recall of the class, with 95% interval")
        ax.grid(axis="x", color=GRID, linewidth=0.6)
        ax.grid(axis="y", color="0.8", linewidth=0.6, linestyle=":")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        hard = self._is_hard(self.order_)
        edges = np.flatnonzero(np.diff(hard, prepend=False, append=False))
        for start, stop in edges.reshape(-1, 2):
            shade = ax.axhspan(start - 0.5, stop - 0.5, color=SHADE, linewidth=0, zorder=0)
        if self._hard is not None:
            shade.set_label("hard classes, as given")
        else:
            ax.annotate(
                "hardest third",
                xy=(1, (hard.sum() - 1) / 2),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                textcoords="offset points",
                rotation=-90,
                va="center",
                fontsize=8,
                color="0.35",
            )

    def _plot_curves(self) -> None:
        ax, n_classes = self.ax_, len(self.order_)
        ranks = np.arange(1, n_classes + 1)
        for name, report, model in self._styled_reports():
            # Each curve in its own order: curves compare distributions, not classes.
            report = report.sort_values("recall", kind="stable")
            (self.artists_[name],) = ax.plot(
                ranks,
                report["recall"],
                color=model.color,
                linestyle=model.linestyle,
                linewidth=1.8,
                label=self._summary(name, report["recall"]),
            )
            ax.fill_between(
                ranks,
                report["recall_low"],
                report["recall_high"],
                color=model.color,
                alpha=0.3 / (1 + len(self.reports)),
                linewidth=0,
            )
        if self._hard is None:
            ax.axvspan(
                0.5,
                third_size(n_classes) + 0.5,
                color=SHADE,
                zorder=0,
                label="hardest third of each model",
            )
        ax.set_xlim(0.5, n_classes + 0.5)
        ax.set_ylim(0, 1.01)
        ax.set_xlabel("Classes, each model's hardest first")
        ax.set_ylabel("Recall of the class, with 95% interval")
        ax.grid(axis="y", color=GRID, linewidth=0.6)

    def _plot_table(self, recalls: pd.DataFrame, n_named: int) -> None:
        hardest = recalls.reindex(self.order_[:n_named])
        columns = [["Hardest classes", *(shorten(label, _MAX_NAME) for label in hardest.index)]]
        for name, values in hardest.items():
            columns.append([shorten(name, _MAX_COLUMN), *(f"{value:.2f}" for value in values)])
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in zip(*columns, strict=True)
        ]
        # A rising curve leaves the corner below its high end free, or the one above its low end.
        below = np.median(recalls.to_numpy()) > 0.5
        self.text_ = self.ax_.text(
            0.985 if below else 0.015,
            0.03 if below else 0.97,
            "\n".join(lines),
            transform=self.ax_.transAxes,
            horizontalalignment="right" if below else "left",
            verticalalignment="bottom" if below else "top",
            multialignment="left",
            family="monospace",
            fontsize=7.5,
            bbox={"facecolor": "white", "edgecolor": "0.8", "alpha": 0.9},
            **LITERAL,
        )
