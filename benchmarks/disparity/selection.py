"""Which candidate of a method counts: one rule for all methods, on validation results alone.

A cell holds what each candidate did on the inner folds and on the test set. The rule looks at the
inner folds only; that the test results of the other candidates are kept allows to see afterwards
how much depends on the rule.
"""

from typing import Any

import numpy as np

from sklearn_mr2.metrics.disparity import third_size

BASELINE = "cross-entropy"
# What a point of overall accuracy is worth in points of the hardest third. A limit on the accuracy
# instead would turn on differences that are smaller than the noise of the inner folds.
RATE = 4.0

Candidate = dict[str, Any]


def most_accurate(row: dict[str, Any]) -> Candidate:
    """The choice for cross-entropy itself."""
    return max(row["candidates"], key=lambda c: c["validation"]["accuracy"])


def choose(row: dict[str, Any], baseline: dict[str, Any], stay: bool = True) -> Candidate:
    """The candidate with the best sum of the hardest third and `RATE` times the accuracy.

    Parameters
    ----------
    row, baseline : dict
        The cells of a method and of cross-entropy on the same split.
    stay : bool, default=True
        Whether cross-entropy is a candidate too, so that a method is only used where it seems to
        help.

    Returns
    -------
    dict
        One of the candidates of `row`, or the one of `baseline`.
    """
    reference = most_accurate(baseline)
    if row["method"].startswith(BASELINE):
        return most_accurate(row)
    recalls = np.array(reference["validation"]["recalls"])
    hard = np.argsort(recalls, kind="stable")[: third_size(len(recalls))]

    def worth(candidate: Candidate) -> float:
        recalls = np.array(candidate["validation"]["recalls"])
        return float(recalls[hard].mean() + RATE * candidate["validation"]["accuracy"])

    return max([*([reference] if stay else []), *row["candidates"]], key=worth)
