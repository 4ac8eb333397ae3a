"""Margins from feature spread (MR2) and mirror flow as scikit-learn estimators on torch."""

from ._version import __version__
from .metrics import NeuronSparsity, PerClassDisparityScorer
from .mirror import MirrorFlowClassifier
from .mr2 import MR2Classifier, MR2ClassifierCV

__all__ = [
    "MR2Classifier",
    "MR2ClassifierCV",
    "MirrorFlowClassifier",
    "NeuronSparsity",
    "PerClassDisparityScorer",
    "__version__",
]
