"""Measures of what this package changes: disparity between classes."""

from .disparity import (
    BestWithinTolerance,
    PerClassDisparityScorer,
    difficulty_thirds,
    disparity_score,
    per_class_report,
)

__all__ = [
    "BestWithinTolerance",
    "PerClassDisparityScorer",
    "difficulty_thirds",
    "disparity_score",
    "per_class_report",
]
