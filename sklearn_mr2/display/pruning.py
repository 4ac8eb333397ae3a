"""What fitted networks still know when they are pruned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ..metrics import pruning_curve
from ._estimators import by_name
from ._matplotlib import import_pyplot
from ._style import GRID, legend_above, legend_entry, style, trim

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D

Unit = Literal["magnitude", "neuron"]

_UNITS: dict[Unit, str] = {"magnitude": "weights", "neuron": "hidden neurons"}
#: More markers than this run into each other.
_MAX_MARKERS = 25


class PruningCurveDisplay:
    """Score of fitted networks against the share of neurons, or weights, that is kept.

    A network whose features are sparse keeps its score down to a small share.

    Use :meth:`from_estimator` to create one. All parameters are stored as attributes.

    Parameters
    ----------
    curves : mapping from str to DataFrame
        The :func:`~sklearn_mr2.metrics.pruning_curve` of every model, by the name to show.

    by : {"neuron", "magnitude"}, default="neuron"
        What was removed.

    score_name : str, default="Accuracy"
        Name of the score.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the plot.

    figure_ : matplotlib Figure
        Figure with the axes.

    lines_ : dict from str to Line2D
        The curve of every model.

    Raises
    ------
    ValueError
        If there is no curve, a curve has no rows, or `by` is unknown.

    See Also
    --------
    NeuronSpectrumDisplay : How the neurons' weights fall off.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn_mr2 import MirrorFlowClassifier
    >>> from sklearn_mr2.display import PruningCurveDisplay
    >>> X, y = load_iris(return_X_y=True)
    >>> X, y = X[:100], y[:100]
    >>> models = {
    ...     potential: MirrorFlowClassifier((16,), potential=potential, random_state=0).fit(X, y)
    ...     for potential in ["hyperbolic_entropy", "euclidean"]
    ... }
    >>> display = PruningCurveDisplay.from_estimator(models, X, y, amounts=[0, 0.5, 1])
    >>> display.curves["hyperbolic_entropy"]["score"].tolist()
    [1.0, 1.0, 0.5]
    """

    ax_: Axes
    figure_: Figure | SubFigure
    lines_: dict[str, Line2D]

    def __init__(
        self,
        curves: Mapping[str, pd.DataFrame],
        *,
        by: Unit = "neuron",
        score_name: str = "Accuracy",
    ):
        if len(curves) == 0:
            raise ValueError("curves is empty; pass at least one model.")
        for name, curve in curves.items():
            if len(curve) == 0:
                raise ValueError(f"curves has no amounts for {name!r}; pass at least one.")
        if by not in get_args(Unit):
            options = ", ".join(map(repr, get_args(Unit)))
            raise ValueError(f"by must be one of {options}, got {by!r}.")
        self.curves = curves
        self.by = by
        self.score_name = score_name

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: ArrayLike,
        *,
        amounts: Iterable[float] | None = None,
        by: Unit = "neuron",
        scoring: Any = None,
        ax: Axes | None = None,
    ) -> Self:
        """Prune a fitted network, or several, and plot their scores.

        Parameters
        ----------
        estimator : estimator or mapping from str to estimator
            Fitted classifier with a torch network, or several by the name to show. They are not
            changed.

        X : array-like of shape (n_samples, n_features)
            Test samples.

        y : array-like of shape (n_samples,)
            True class labels.

        amounts : iterable of float, default=None
            Fractions to remove, each from 0 to 1; by default in steps of 5 %.

        by : {"neuron", "magnitude"}, default="neuron"
            What to remove, as in :func:`~sklearn_mr2.metrics.pruning_curve`.

        scoring : str, callable or None, default=None
            How to score, as in scikit-learn; None is the estimator's own ``score``.

        ax : matplotlib Axes, default=None
            Axes to draw on; by default those of a new figure.

        Returns
        -------
        display : PruningCurveDisplay
            The display, drawn.
        """
        import_pyplot(f"{cls.__name__}.from_estimator")
        models = by_name(estimator)
        shares = np.linspace(0, 1, 21).tolist() if amounts is None else list(amounts)
        curves = {
            name: pruning_curve(model, X, y, shares, by=by, scoring=scoring)
            for name, model in models.items()
        }
        score_name = "Accuracy" if scoring in (None, "accuracy") else "Score"
        if isinstance(scoring, str) and scoring != "accuracy":
            score_name = scoring
        return cls(curves, by=by, score_name=score_name).plot(ax=ax)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw the curves.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to draw on; by default those of a new figure.

        Returns
        -------
        display : PruningCurveDisplay
            This display, drawn.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        plt = import_pyplot(f"{type(self).__name__}.plot")
        from matplotlib.ticker import PercentFormatter

        if ax is None:
            height = 3.4 + 0.2 * len(self.curves)  # the legend has a line for each model
            _, ax = plt.subplots(figsize=(6.4, height), layout="constrained")
        self.ax_ = ax
        self.figure_ = ax.figure
        self.lines_ = {}
        for position, (name, curve) in enumerate(self.curves.items()):
            look = style(position)
            curve = curve.sort_values("amount", ascending=False)
            (self.lines_[name],) = ax.plot(
                1 - curve["amount"],
                curve["score"],
                color=look.color,
                linestyle=look.linestyle,
                marker=look.marker,
                # Later models are drawn over earlier ones; smaller markers let those show.
                markersize=max(7 - position, 3),
                markevery=-(-len(curve) // _MAX_MARKERS),
                linewidth=1.6,
                label=legend_entry(name),
            )
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.set_xlabel(f"Share of {_UNITS[self.by]} kept")
        ax.set_ylabel(self.score_name)
        ax.grid(color=GRID, linewidth=0.6)
        trim(ax)
        legend_above(ax, handlelength=3)
        return self
