"""Measures of what this package changes: disparity between classes, sparsity of networks."""

from .disparity import (
    BestWithinTolerance,
    PerClassDisparityScorer,
    difficulty_thirds,
    disparity_score,
    per_class_report,
)
from .sparsity import NeuronSparsity, find_module, pruning_curve

__all__ = [
    "BestWithinTolerance",
    "NeuronSparsity",
    "PerClassDisparityScorer",
    "difficulty_thirds",
    "disparity_score",
    "find_module",
    "per_class_report",
    "pruning_curve",
]
