"""One estimator or several by name, and the part of each that has what is drawn."""

from collections.abc import Mapping
from typing import Any

from sklearn.utils.validation import check_is_fitted


def by_name(estimator: Any) -> dict[str, Any]:
    """Take one estimator under the name of its class, or several under the names given."""
    if not isinstance(estimator, Mapping):
        return {type(estimator).__name__: estimator}
    if not estimator:
        raise ValueError("estimator is an empty mapping; pass at least one fitted model.")
    return {str(name): model for name, model in estimator.items()}


def part_with(estimator: Any, attribute: str, what: str) -> Any:
    """Find the fitted part of a pipeline or search that has an attribute.

    Parameters
    ----------
    estimator : object
        Fitted estimator, possibly inside of pipelines and searches.
    attribute : str
        What the part must have.
    what : str
        What it is called in the error: "a fitted ...".

    Returns
    -------
    object
        The part itself, not a copy.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        If the estimator is not fitted.
    TypeError
        If no part has the attribute.
    """
    part = estimator
    while not hasattr(part, attribute):
        if hasattr(part, "steps"):
            part = part.steps[-1][1]
        elif hasattr(part, "best_estimator_"):
            part = part.best_estimator_
        else:
            if hasattr(part, "fit"):
                check_is_fitted(part)
            found = type(part).__name__
            inside = "" if part is estimator else f" inside of {type(estimator).__name__}"
            raise TypeError(
                f"estimator must be {what}, alone or as the last step of a pipeline or in a "
                f"search, got {found}{inside}, which has no {attribute}."
            )
    return part
