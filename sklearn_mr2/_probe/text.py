"""What the main job says in the terminal, in 80 columns and ASCII but for the classes' names."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from .job import Outcome, Settings, n_fits
from .paired import PairedDifference

_WIDTH = 80
_LABEL = 22
_N_CHANGED = 5
_N_LISTED = 6
# With fewer, not even the second most extreme order is significant at 5%.
_FEWEST_RANKED = 6


def printable(label: Any, width: int | None = None) -> str:
    """Return a label on one line without control characters, cut to `width`."""
    text = "".join(c if c.isprintable() else "?" for c in str(label))
    return text if width is None or len(text) <= width else text[: width - 3] + "..."


def paragraph(text: str, indent: str = "", first: str | None = None) -> str:
    """Wrap to the terminal's width without breaking words such as paths."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def header(source: str, shape: tuple[int, ...], n_classes: int, s: Settings) -> str:
    """Say what will be done, before the wait."""
    repeats = f", drawn {s.repeats} times" if s.repeats > 1 else ""
    one = len(s.Cs) == 1
    data = f"{printable(source)}: {shape[0]} samples, {shape[1]} features, {n_classes} classes"
    split = (
        f"{1 - s.test_size:.0%} for training, {s.test_size:.0%} for testing, stratified "
        f"(seed {s.seed})"
    )
    tuning = (
        f"C by accuracy over {s.cv} folds of the training part{repeats}; the same folds and the "
        f"same {'value' if one else f'{len(s.Cs)} values'} for cross-entropy (CE) and MR2"
    )
    rows = {"Data": data, "Split": split, "Tuning": tuning}
    return "\n".join(paragraph(text, " " * 8, f"{name:<8}") for name, text in rows.items())


def results(outcome: Outcome) -> str:
    """Both models side by side, class by class where it matters."""
    parts = [
        _chosen(outcome),
        _comparison_table(outcome),
        _changed(outcome.table),
        paragraph(_fit_sentence(outcome)),
    ]
    return "\n\n".join(parts)


def _chosen(outcome: Outcome) -> str:
    ce, mr2, Cs = outcome.cross_entropy, outcome.mr2, outcome.settings.Cs
    scores = " and ".join(f"{100 * tuned.cv_accuracy.max():.1f}%" for tuned in (ce, mr2))
    lines = [f"C = {ce.C:g} for CE and {mr2.C:g} for MR2 ({scores} in cross-validation)"]
    edge = [name for name, tuned in (("CE", ce), ("MR2", mr2)) if tuned.C in (Cs[0], Cs[-1])]
    if edge and len(Cs) > 1:
        lines.append(
            f"Note: for {' and '.join(edge)} that is the end of the values tried, {Cs[0]:g} to "
            f"{Cs[-1]:g}; try further ones with --Cs"
        )
    if outcome.n_not_converged:
        lines.append(
            f"Note: {outcome.n_not_converged} of {n_fits(outcome.settings)} fits stopped before "
            "the optimum; leave out the largest values of --Cs"
        )
    indents = ["Chosen  ", *[" " * 8] * (len(lines) - 1)]
    return "\n".join(
        paragraph(line, " " * 8, first) for line, first in zip(lines, indents, strict=True)
    )


def _comparison_table(outcome: Outcome) -> str:
    table, worst = outcome.table, printable(outcome.worst_class)
    rows = []
    for row in outcome.comparisons:
        label = f"worst: {worst}" if row.label == "worst class" else row.label
        rows.append(_row(label, row.cross_entropy, row.mr2, row.difference))
    ranked = table.sort_values("cv_recall_cross_entropy", kind="stable")
    hardest = ranked["class"][ranked["difficulty"] == "hard"]
    easiest = ranked["class"][ranked["difficulty"] == "easy"][::-1]
    note = (
        "Thirds and worst class were chosen by the recall of CE in cross-validation on the "
        f"training part, never on the test part. Hardest: {_listing(hardest)}. Easiest: "
        f"{_listing(easiest)}. Intervals are paired (a closed form, after Agresti and Min) and "
        "cover the draw of the test samples alone."
    )
    return "\n".join(
        [
            f"Test part, {outcome.n_test} samples: accuracy, and mean recall of classes, in %",
            _heading(),
            *rows,
            paragraph(note),
        ]
    )


def _changed(table: pd.DataFrame) -> str:
    changed = table[table["difference"] != 0]
    if changed.empty:
        return "No class has another recall under MR2 than under CE."
    order = changed["difference"].abs().sort_values(ascending=False, kind="stable").index
    rows = [
        _row(
            row["class"],
            row["recall_cross_entropy"],
            row["recall_mr2"],
            PairedDifference(row["difference"], row["difference_low"], row["difference_high"]),
        )
        for _, row in changed.loc[order[:_N_CHANGED]].iterrows()
    ]
    lowest = [
        f"{name} {printable(table['class'].iloc[table[column].argmin()], _LABEL)} "
        f"({table[column].min():.1%})"
        for name, column in (("CE", "recall_cross_entropy"), ("MR2", "recall_mr2"))
    ]
    note = (
        f"These are picked among {len(table)} classes, so their intervals are wider, to cover all "
        f"{len(table)} at once. Lowest recall in the test part: {', '.join(lowest)}."
    )
    return "\n".join(["Classes that changed most", _heading(), *rows, paragraph(note)])


def _heading() -> str:
    return f"{'':<{_LABEL}}{'CE':>6}{'MR2':>7}{'change':>8}  95% interval"


def _row(label: Any, cross_entropy: float, mr2: float, difference: PairedDifference) -> str:
    digits = 1 if difference.high - difference.low < 0.2 else 0
    interval = f"[{100 * difference.low:+.{digits}f}, {100 * difference.high:+.{digits}f}]"
    return (
        f"{printable(label, _LABEL - 1):<{_LABEL}}{100 * cross_entropy:6.1f}{100 * mr2:7.1f}"
        f"{100 * difference.value:+8.1f}  {interval:<14}  {difference.verdict}"
    )


def _listing(names: pd.Series) -> str:
    shown = ", ".join(printable(name, _LABEL) for name in names[:_N_LISTED])
    more = len(names) - _N_LISTED
    return shown if more <= 0 else f"{shown} and {more} more"


def _fit_sentence(outcome: Outcome) -> str:
    rho, n = outcome.margin_error_correlation, len(outcome.classes)
    if outcome.settings.rule == "error":
        return (
            "The margins were made from the classes' errors in cross-validation on the training "
            "part, so the hard classes have the large ones by construction."
        )
    hint = "To set margins by the classes' own errors instead, add --rule error."
    if n < _FEWEST_RANKED:
        return f"{n} classes are too few to tell whether the paper's rule fits them. {hint}"
    if np.isnan(rho):
        return f"Margins or class errors are all equal, so no rule can tell classes apart. {hint}"
    measured = f"rank correlation of margin and class error {rho:+.2f}, {n} classes"
    # Two-sided test at 5%; variance of Fisher's z of Spearman's correlation by Fieller, Hartley
    # and Pearson, "Tests for rank correlation coefficients. I", Biometrika 44 (1957), 470-481.
    chance = float(np.tanh(ndtri(0.975) * (1.06 / (n - 3)) ** 0.5))
    if rho > chance:
        return f"The paper's rule fits these data: hard classes get large margins ({measured})."
    if rho < -chance:
        return (
            "The paper's rule does not fit these data: easy classes get large margins "
            f"({measured}). {hint}"
        )
    return (
        f"Nothing shows that the paper's rule fits these data ({measured}; chance alone reaches "
        f"{chance:.2f}). {hint}"
    )
