"""Mirror flow in homogeneous networks: potentials, their optimiser, a classifier, the theory."""

from .classifier import MirrorFlowClassifier
from .optimizer import MirrorDescent
from .potentials import Euclidean, HyperbolicEntropy, Potential, Power, SmoothedPower

__all__ = [
    "Euclidean",
    "HyperbolicEntropy",
    "MirrorDescent",
    "MirrorFlowClassifier",
    "Potential",
    "Power",
    "SmoothedPower",
]
