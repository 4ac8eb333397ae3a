"""MR2: margins for classes from the spread of their features."""

from .classifier import MR2Classifier

__all__ = ["MR2Classifier"]
