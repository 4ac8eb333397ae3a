"""Plots in scikit-learn's manner: ``from_estimator``, ``from_predictions``, ``plot``."""

from .per_class import PerClassAccuracyDisplay

__all__ = ["PerClassAccuracyDisplay"]
