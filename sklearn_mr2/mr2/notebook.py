"""What notebooks show of fitted margins, below scikit-learn's diagram of the estimator."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .classifier import MR2Classifier

#: How many classes are listed; with many classes the largest margins say most.
_LISTED = 5
_LABEL_LENGTH = 40

# The look of scikit-learn's diagram, whose style sheet does not reach below it.
_TEMPLATE = """
<details class="sklearn-mr2-margins" style="font-family: monospace; margin: 0.5em;">
<summary style="cursor: pointer;">{title}</summary>
<table style="font-family: monospace; margin: 0.3em 0 0 1em;">
<tbody>
{rows}
<tr><th colspan="2" style="text-align: left; padding-top: 0.5em;">{heading}</th></tr>
{classes}
</tbody>
</table>
</details>
"""


class MarginsInNotebooks:
    """Mixin that appends :func:`margins_html` to the HTML of a fitted estimator.

    Inside of another estimator's diagram, such as a pipeline's, scikit-learn draws the parts, and
    shows what it shows of every estimator.
    """

    def _repr_html_inner(self) -> str:
        return super()._repr_html_inner() + self._margins_html()  # type: ignore[misc]

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        bundle = super()._repr_mimebundle_(**kwargs)  # type: ignore[misc]
        if "text/html" in bundle:  # not with set_config(display="text")
            bundle["text/html"] += self._margins_html()
        return bundle

    def _margins_html(self) -> str:
        # MR2ClassifierCV holds the model that it chose.
        return margins_html(getattr(self, "best_estimator_", self))  # type: ignore[arg-type]


def margins_html(model: MR2Classifier) -> str:
    """Summary of the margins, folded up until it is clicked on.

    Parameters
    ----------
    model : MR2Classifier
        Fitted or not.

    Returns
    -------
    str
        HTML: range and median of the margins, their correlation with the class errors if that was
        measured, and the classes with the largest margins. Empty if the model is not fitted, or is
        fitted without margins.
    """
    margins = getattr(model, "margins_", None)
    if margins is None or np.isnan(model.class_spread_).all():
        return ""
    known = margins[np.isfinite(margins)]
    rows = [
        ("mode", model.net_.criterion_.logit_loss.mode),  # of the fit, not what was set since
        ("smallest", _number(known.min())),
        ("median", _number(np.median(known))),
        ("largest", _number(known.max())),
    ]
    if np.isfinite(model.margin_error_correlation_):
        source = {"validation": "on validation data", "out_of_fold": "out of fold"}
        correlation = f"{model.margin_error_correlation_:.2f}"
        errors = source[str(model.margin_error_source_)]
        rows.append(("rank correlation with class errors", f"{correlation} ({errors})"))
    # A stable sort of the negated margins: NaN last, classes in their order among equals.
    order = np.argsort(-margins, kind="stable")[: len(known)]
    classes = [(_short(model.classes_[k]), _number(margins[k])) for k in order[:_LISTED]]
    return _TEMPLATE.format(
        title=f"Margins of {len(margins)} classes",
        rows=_rows(rows),
        heading="largest margins" if len(order) > _LISTED else "all margins",
        classes=_rows(classes),
    )


def _rows(pairs: list[tuple[str, str]]) -> str:
    cell = '<td style="text-align: left; padding: 0.1em 1em 0.1em 0;">{}</td>'
    return "\n".join(
        "<tr>" + "".join(cell.format(html.escape(text)) for text in pair) + "</tr>"
        for pair in pairs
    )


def _number(value: float) -> str:
    return f"{value:.4g}"


def _short(label: Any) -> str:
    text = str(label)
    return text if len(text) <= _LABEL_LENGTH else text[: _LABEL_LENGTH - 1] + "…"
