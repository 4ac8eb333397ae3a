"""Plots in scikit-learn's manner: ``from_estimator``, ``from_predictions``, ``plot``."""

from .margin import MarginDisplay
from .per_class import PerClassAccuracyDisplay
from .pruning import PruningCurveDisplay
from .spectrum import NeuronSpectrumDisplay
from .tradeoff import DisparityTradeoffDisplay
from .trajectory import MirrorTrajectoryDisplay

__all__ = [
    "DisparityTradeoffDisplay",
    "MarginDisplay",
    "MirrorTrajectoryDisplay",
    "NeuronSpectrumDisplay",
    "PerClassAccuracyDisplay",
    "PruningCurveDisplay",
]
