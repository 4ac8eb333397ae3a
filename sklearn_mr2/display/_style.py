"""What all displays share: how models are told apart, and how names are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend

#: Background of what is set apart, such as the hardest third.
SHADE = "0.93"
GRID = "0.85"

#: Text properties of names that users give: they are no formulas, whatever "$" they have.
LITERAL: dict[str, Any] = {"parse_math": False, "usetex": False}

_MAX_MODEL_NAME = 40


class Style(NamedTuple):
    """Colour, marker and dashes: each of them alone tells models apart."""

    color: str
    marker: str
    linestyle: str | tuple[int, tuple[int, ...]]


# Colours of Okabe and Ito (2008), safe for colour-blind people, ordered so that neighbours also
# differ in lightness.
_COLORS = ("#0072B2", "#E69F00", "#000000", "#CC79A7", "#009E73", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_LINESTYLES: tuple[str | tuple[int, tuple[int, ...]], ...] = (
    "-",
    "--",
    ":",
    "-.",
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (1, 1)),
)
N_STYLES = len(_COLORS)


def style(position: int) -> Style:
    """Style of the model at a position; from the seventh on colours meet other markers."""
    shifted = (position + position // N_STYLES) % N_STYLES
    return Style(_COLORS[position % N_STYLES], _MARKERS[shifted], _LINESTYLES[shifted])


def shorten(label: Any, length: int) -> str:
    """Text of a label on a single line of at most `length` characters."""
    text = " ".join(str(label).split())
    return text if len(text) <= length else text[: length - 1] + "…"


def legend_entry(name: str, summary: str = "") -> str:
    """What the legend says of a model."""
    text = shorten(name, _MAX_MODEL_NAME) + (f": {summary}" if summary else "")
    # matplotlib leaves labels with a leading underscore out of legends; a hair space saves them.
    return "\u200a" + text if text.startswith("_") else text


def legend_above(ax: Axes, **options: Any) -> Legend:
    """Put the legend above the axes, where it hides nothing."""
    from matplotlib.patches import Patch

    handles, _ = ax.get_legend_handles_labels()
    options = {"handlelength": 2.4, "fontsize": 9, **options}
    legend = ax.legend(
        handles=sorted(handles, key=lambda handle: isinstance(handle, Patch)),  # models first
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
        borderaxespad=0.2,
        **options,
    )
    for text in legend.get_texts():
        text.set(**LITERAL)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)  # many points are drawn translucent
    return legend


def trim(ax: Axes) -> None:
    """Leave out the box around the axes and keep the grid behind the data."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
