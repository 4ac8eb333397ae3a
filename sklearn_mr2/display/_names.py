"""Names beside points of a scatter plot, placed where they hide little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ._style import LITERAL, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

_MAX_NAME = 24
_DISTANCES = (7, 16, 28, 42, 60)  # points
_PADDING = 4  # pixels
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
_ALIGN = {1: ("left", "bottom"), -1: ("right", "top"), 0: ("center", "center")}


def name_points(
    ax: Axes, xy: NDArray[np.float64], named: Sequence[int], labels: Sequence[object]
) -> list[Annotation]:
    """Write names beside some points.

    Each name goes where it overlaps no other name, stays inside of the axes, hides few points and
    is near to its own; one that is not beside its point gets a line to it. The limits of the axes
    must be final.

    Parameters
    ----------
    ax : Axes
        Axes of the points.
    xy : ndarray of shape (n_points, 2)
        All points, in data coordinates.
    named : sequence of int
        Indices of the points to name, the most important first.
    labels : sequence of shape (n_points,)
        Names of all points.

    Returns
    -------
    list of Annotation
        The names, in the order of `named`.
    """
    ax.figure.figure.draw_without_rendering()  # where the layout is settled
    points = ax.transData.transform(xy)
    inside = ax.get_window_extent()
    taken: list[Bbox] = []
    names = []
    for index in named:
        text = ax.annotate(
            shorten(labels[index], _MAX_NAME),
            xy=xy[index],
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=8,
            zorder=4,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.7, "linewidth": 0},
            **LITERAL,
        )
        best: tuple[float, int, tuple[int, int]] | None = None
        for distance in _DISTANCES:
            for direction in _DIRECTIONS:
                _put(text, distance, direction)
                box = text.get_window_extent().padded(_PADDING)
                if any(box.overlaps(other) for other in taken):
                    continue
                outside = not (inside.contains(*box.min) and inside.contains(*box.max))
                cost = 2.5 * box.count_contains(points) + 1000 * outside + 0.05 * distance
                if best is None or cost < best[0]:
                    best = (cost, distance, direction)
        if best is None:  # crowded out: better no name than one that cannot be read
            text.remove()
            continue
        _, distance, direction = best
        _put(text, distance, direction)
        taken.append(text.get_window_extent())
        if distance > _DISTANCES[0] or 0 not in direction:
            ax.annotate(
                "",
                xy=xy[index],
                xytext=text.xyann,
                textcoords="offset points",
                zorder=3.5,
                arrowprops={"arrowstyle": "-", "color": "0.2", "linewidth": 0.7, "shrinkB": 3},
            )
        names.append(text)
    return names


def _put(text: Annotation, distance: int, direction: tuple[int, int]) -> None:
    x, y = direction
    text.xyann = (x * distance, y * distance)
    text.set(horizontalalignment=_ALIGN[x][0], verticalalignment=_ALIGN[y][1])
