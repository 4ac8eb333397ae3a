"""How much each hidden neuron of fitted networks contributes, largest first."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._estimators import by_name, part_with
from ._matplotlib import import_pyplot
from ._style import GRID, legend_above, legend_entry, style, trim

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D

_MAX_MARKERS = 25
#: Relative weights below this are as good as none.
_FLOOR = 1e-8


def _effective_weights(model: Any, layer: int) -> NDArray[np.float64]:
    """Norms of the incoming weights (with the bias) times those of the outgoing ones."""
    part = part_with(
        model, "coefs_", "a fitted multi-layer perceptron with coefs_, as MirrorFlowClassifier"
    )
    n_hidden = len(part.coefs_) - 1
    if not -n_hidden <= layer < n_hidden:
        raise ValueError(
            f"layer must be the index of a hidden layer, got {layer}, and "
            f"{type(part).__name__} has {n_hidden}."
        )
    layer %= n_hidden
    incoming = np.vstack([part.coefs_[layer], part.intercepts_[layer]]).astype(np.float64)
    outgoing = np.asarray(part.coefs_[layer + 1], dtype=np.float64)
    return np.linalg.norm(incoming, axis=0) * np.linalg.norm(outgoing, axis=1)


class NeuronSpectrumDisplay:
    r"""Effective weights of a hidden layer's neurons, each model's largest first.

    The effective weight of neuron `j` is :math:`c_j = \|w_j\| \|a_j\|`, the norms of its incoming
    weights (with the bias) and of its outgoing ones; it bounds what the neuron adds to the next
    layer. Weights are drawn relative to the largest of the model. The legend says how many are
    active, above `threshold`.

    Use :meth:`from_estimator` to create one. All parameters are stored as attributes.

    Parameters
    ----------
    weights : mapping from str to array-like of shape (n_neurons,)
        Effective weights of a layer of every model, by the name to show; not negative.

    threshold : float, default=0.01
        What counts as active, relative to the largest weight; from 0 to less than 1.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the plot.

    figure_ : matplotlib Figure
        Figure with the axes.

    lines_ : dict from str to Line2D
        The sorted relative weights of every model.

    threshold_line_ : Line2D or None
        The threshold, if it is positive.

    Raises
    ------
    ValueError
        If there is no model, weights are negative, not finite, all zero or not one-dimensional, or
        `threshold` is not from 0 to less than 1.

    See Also
    --------
    PruningCurveDisplay : What is left without the small ones.
    sklearn_mr2.metrics.NeuronSparsity : The number of active neurons as a scorer.

    Notes
    -----
    The axis ends at 1e-8. Lines that leave it below go on with weights that are smaller, or zero.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn_mr2 import MirrorFlowClassifier
    >>> from sklearn_mr2.display import NeuronSpectrumDisplay
    >>> X, y = load_iris(return_X_y=True)
    >>> models = {
    ...     potential: MirrorFlowClassifier(
    ...         (16,), potential=potential, target_margin=15, random_state=0
    ...     ).fit(X[:100], y[:100])
    ...     for potential in ["hyperbolic_entropy", "smoothed_power"]
    ... }
    >>> display = NeuronSpectrumDisplay.from_estimator(models)
    >>> sparse, dense = display.weights.values()
    >>> bool((sparse > 0.01 * sparse.max()).sum() < (dense > 0.01 * dense.max()).sum())
    True
    """

    ax_: Axes
    figure_: Figure | SubFigure
    lines_: dict[str, Line2D]
    threshold_line_: Line2D | None

    def __init__(self, weights: Mapping[str, ArrayLike], *, threshold: float = 0.01):
        if len(weights) == 0:
            raise ValueError("weights is empty; pass at least one model.")
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold must be from 0 to less than 1, got {threshold}.")
        self.weights = {
            name: np.asarray(values, dtype=np.float64) for name, values in weights.items()
        }
        for name, values in self.weights.items():
            if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
                raise ValueError(
                    f"weights of {name!r} must be one finite number for each neuron, not negative."
                )
            if not values.any():
                raise ValueError(f"weights of {name!r} are all zero; there is no largest.")
        self.threshold = threshold

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        layer: int = 0,
        threshold: float = 0.01,
        ax: Axes | None = None,
    ) -> Self:
        """Plot the effective weights of a fitted network's neurons, or of several networks'.

        Parameters
        ----------
        estimator : estimator or mapping from str to estimator
            Fitted multi-layer perceptron, or several by the name to show: a
            :class:`~sklearn_mr2.mirror.classifier.MirrorFlowClassifier` made from
            `hidden_layer_sizes`, scikit-learn's ``MLPClassifier``, or a pipeline or search with
            one. For other networks pass the weights to the class itself.

        layer : int, default=0
            Index of the hidden layer; negative numbers count from the last.

        threshold : float, default=0.01
            What counts as active, relative to the largest weight.

        ax : matplotlib Axes, default=None
            Axes to draw on; by default those of a new figure.

        Returns
        -------
        display : NeuronSpectrumDisplay
            The display, drawn.

        Raises
        ------
        TypeError
            If an estimator has no ``coefs_``, or `layer` is no integer.
        ValueError
            If a network has no such layer.
        """
        if not isinstance(layer, Integral):
            raise TypeError(f"layer must be an integer, got {type(layer).__name__}.")
        weights = {
            name: _effective_weights(model, int(layer))
            for name, model in by_name(estimator).items()
        }
        return cls(weights, threshold=threshold).plot(ax=ax)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw the effective weights.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to draw on; by default those of a new figure.

        Returns
        -------
        display : NeuronSpectrumDisplay
            This display, drawn.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        plt = import_pyplot(f"{type(self).__name__}.plot")
        from matplotlib.ticker import MaxNLocator

        if ax is None:
            height = 3.4 + 0.2 * len(self.weights)  # the legend has a line for each model
            _, ax = plt.subplots(figsize=(6.4, height), layout="constrained")
        self.ax_ = ax
        self.figure_ = ax.figure
        self.lines_ = {}
        lowest = 1.0
        for position, (name, values) in enumerate(self.weights.items()):
            look = style(position)
            relative = np.sort(values)[::-1] / values.max()
            lowest = min(lowest, float(relative[relative > 0].min()))
            active = int((relative > self.threshold).sum())
            (self.lines_[name],) = ax.plot(
                np.arange(1, len(relative) + 1),
                relative,
                color=look.color,
                linestyle=look.linestyle,
                marker=look.marker,
                markersize=4,
                markevery=-(-len(relative) // _MAX_MARKERS),
                linewidth=1.6,
                label=legend_entry(name, f"{active} of {len(relative)} active"),
            )
        self.threshold_line_ = None
        if self.threshold > 0:
            self.threshold_line_ = ax.axhline(
                self.threshold,
                color="0.5",
                linewidth=1,
                linestyle=(0, (6, 3)),
                zorder=1.5,
                label=f"active: more than {self.threshold:g} × the largest",
            )
            lowest = min(lowest, self.threshold)
        ax.set_yscale("log")  # zeros leave the axes below
        ax.set_ylim(max(0.5 * lowest, _FLOOR), 1.6)
        widest = max(len(values) for values in self.weights.values())
        ax.set_xlim(1 - 0.015 * widest, 1.015 * widest)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("Neurons, each model's largest first")
        ax.set_ylabel("Effective weight / largest")
        ax.grid(color=GRID, linewidth=0.6)
        trim(ax)
        legend_above(ax, handlelength=3)
        return self
