"""MR2: margins for classes from the spread of their features."""

from .classifier import MR2Classifier
from .cv import MR2ClassifierCV

__all__ = ["MR2Classifier", "MR2ClassifierCV"]
