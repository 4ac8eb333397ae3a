"""Loss, margin and sparsity along the path of mirror flow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pandas as pd

from ._estimators import by_name, part_with
from ._matplotlib import import_pyplot
from ._style import GRID, legend_above, legend_entry, style, trim

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D


class _Panel(NamedTuple):
    column: str
    label: str


_PANELS = (
    _Panel("log_loss", "ln of the\nsummed loss"),
    _Panel("q_margin", "Q-margin\n/ its last value"),
    _Panel("sparsity", "Sparsity\n(1 − PR / width)"),
)
_MAX_MARKERS = 12


def _path(history: pd.DataFrame, column: str) -> pd.Series | None:
    """A recorded quantity by log-time, or None where it was not recorded."""
    if column not in history:
        return None
    values = history.set_index("log_time")[column].dropna()
    if column == "q_margin":
        # Until all samples are classified correctly the margin is negative and means nothing.
        if values.empty or not values.iloc[-1] > 0:
            return None
        values = values[values > 0] / values.iloc[-1]
    return None if values.empty else values


class MirrorTrajectoryDisplay:
    r"""Loss, Q-margin and sparsity against the logarithm of the flow's time.

    The theory is about late times: once the data are separated, the Q-margin rises to its limit,
    the logarithm of the loss goes on falling about as fast as :math:`\ln t` rises, and the sparsity
    tends to that of the largest margin in the potential's norm. The Q-margin of a path with steps
    of finite size may fall for a while.

    Q-margins of different potentials cannot be compared, so each is drawn relative to its last
    value, which the legend has, and from where all samples are classified correctly.

    Use :meth:`from_estimator` to create one. All parameters are stored as attributes.

    Parameters
    ----------
    histories : mapping from str to DataFrame
        The ``history_`` of every model, by the name to show, with the columns ``log_time`` and
        ``log_loss``. ``q_margin`` and ``sparsity`` may be missing, or be NaN in epochs where they
        were not recorded; a panel that no model has values for is left out.

    Attributes
    ----------
    axes_ : ndarray of shape (n_panels,)
        Axes of the panels, from top to bottom.

    figure_ : matplotlib Figure
        Figure with the axes.

    lines_ : dict from str to dict from str to Line2D
        For every model its lines, by the column of the history.

    Raises
    ------
    ValueError
        If there is no history, or one has no ``log_time``.

    See Also
    --------
    NeuronSpectrumDisplay : The neurons at the end of the path.

    Notes
    -----
    Logarithms are natural ones. Loss is the sum over samples.

    References
    ----------
    P. Jacobs and G. Montufar, "Implicit bias of mirror flow in homogeneous neural networks",
    arXiv:2605.19458.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn_mr2 import MirrorFlowClassifier
    >>> from sklearn_mr2.display import MirrorTrajectoryDisplay
    >>> X, y = load_iris(return_X_y=True)
    >>> model = MirrorFlowClassifier((16,), random_state=0).fit(X[:100], y[:100])
    >>> display = MirrorTrajectoryDisplay.from_estimator(model)
    >>> list(display.lines_["MirrorFlowClassifier"])
    ['log_loss', 'q_margin', 'sparsity']
    """

    axes_: np.ndarray
    figure_: Figure | SubFigure
    lines_: dict[str, dict[str, Line2D]]

    def __init__(self, histories: Mapping[str, pd.DataFrame]):
        if len(histories) == 0:
            raise ValueError("histories is empty; pass at least one model.")
        for name, history in histories.items():
            missing = [c for c in ("log_time", "log_loss") if c not in history]
            if missing:
                raise ValueError(
                    f"the history of {name!r} has no {' and no '.join(missing)}: mini-batches have "
                    "no flow time. Fit without batch_size and partial_fit."
                )
        self.histories = histories
        paths = {
            panel: {name: _path(history, panel.column) for name, history in histories.items()}
            for panel in _PANELS
        }
        self._paths = {
            panel: {name: path for name, path in by_model.items() if path is not None}
            for panel, by_model in paths.items()
            if any(path is not None for path in by_model.values())
        }
        if not self._paths:
            raise ValueError("histories have no finite values to draw.")

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        ax: Axes | Iterable[Axes] | None = None,
    ) -> Self:
        """Plot the path of a fitted model, or of several.

        Parameters
        ----------
        estimator : estimator or mapping from str to estimator
            Fitted :class:`~sklearn_mr2.mirror.classifier.MirrorFlowClassifier`, trained with the
            full batch, or several by the name to show; each may be in a pipeline or search.

        ax : matplotlib Axes or iterable of them, default=None
            See :meth:`plot`.

        Returns
        -------
        display : MirrorTrajectoryDisplay
            The display, drawn.

        Raises
        ------
        TypeError
            If an estimator has no ``history_``.
        ValueError
            If a model was trained by mini-batches, which have no flow time.
        """
        histories = {
            name: part_with(model, "history_", "a fitted MirrorFlowClassifier").history_
            for name, model in by_name(estimator).items()
        }
        return cls(histories).plot(ax=ax)

    def plot(self, ax: Axes | Iterable[Axes] | None = None) -> Self:
        """Draw the paths.

        Parameters
        ----------
        ax : matplotlib Axes or iterable of them, default=None
            Axes of the panels, from top to bottom, or one that all panels together take the place
            of. By default those of a new figure.

        Returns
        -------
        display : MirrorTrajectoryDisplay
            This display, drawn.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If the number of axes is not that of the panels.
        """
        plt = import_pyplot(f"{type(self).__name__}.plot")
        self.axes_ = self._axes(plt, ax)
        self.figure_ = self.axes_[0].figure
        self.lines_ = {name: {} for name in self.histories}
        for axes, (panel, paths) in zip(self.axes_, self._paths.items(), strict=True):
            for position, name in enumerate(self.histories):
                if name not in paths:
                    continue
                look, path = style(position), paths[name]
                (self.lines_[name][panel.column],) = axes.plot(
                    path.index,
                    path,
                    color=look.color,
                    linestyle=look.linestyle,
                    marker=look.marker,
                    markersize=4,
                    # Evenly spaced along the line, and at other places for each model.
                    markevery=(0.02 + 0.015 * position, 1 / _MAX_MARKERS),
                    linewidth=1.6,
                    label=legend_entry(name, self._summary(name)),
                )
            axes.set_ylabel(panel.label)
            axes.grid(color=GRID, linewidth=0.6)
            trim(axes)
            if panel.column == "sparsity":
                axes.set_ylim(-0.03, 1.03)
            elif panel.column == "q_margin":
                axes.set_ylim(bottom=0)
        self.axes_[-1].set_xlabel("ln t, the logarithm of the flow's time")
        legend_above(self.axes_[0], handlelength=3)
        return self

    def _summary(self, name: str) -> str:
        history = self.histories[name]
        if "q_margin" not in history or history["q_margin"].dropna().empty:
            return ""
        return f"last Q-margin {history['q_margin'].dropna().iloc[-1]:.3g}"

    def _axes(self, plt: Any, ax: Any) -> np.ndarray:
        n_panels = len(self._paths)
        if ax is None:
            _, axes = plt.subplots(
                n_panels,
                figsize=(6.4, 0.4 + 0.2 * len(self.histories) + 1.8 * n_panels),
                sharex=True,
                squeeze=False,
                layout="constrained",
            )
            return axes[:, 0]
        if hasattr(ax, "plot"):  # a single one: make room for the panels in its place
            grid = ax.get_subplotspec()
            if grid is None:
                raise ValueError("ax must be one of a grid of subplots, or one for each panel.")
            ax.set_axis_off()
            cells = grid.subgridspec(n_panels, 1)
            first = ax.figure.add_subplot(cells[0])
            rest = [ax.figure.add_subplot(cells[k], sharex=first) for k in range(1, n_panels)]
            for upper in [first, *rest][:-1]:
                upper.tick_params(labelbottom=False)
            return np.array([first, *rest])
        given = np.array(list(ax), dtype=object).ravel()
        if len(given) != n_panels:
            raise ValueError(
                f"ax must be a single axes, or {n_panels}, one for each panel; got {len(given)}."
            )
        return given
