"""Training one task's model under any loss, on one training set.

A learner holds a training set and what its fits share: the strength of the fit, the folds, and
the class errors of cross-entropy out of fold. Methods see nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from baselines.losses import CrossEntropy
from linear import LinearProbes
from networks import ConvNet
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold
from tasks import Task
from torch import nn

from sklearn_mr2 import MR2Classifier

Predictor = Callable[[NDArray], NDArray]
Weights = NDArray | None


class Learner(ABC):
    """Fits models to one training set.

    Parameters
    ----------
    task : Task
    X, y : ndarray
        Training set; `y` codes from 0.
    n_classes : int
    seed : int
        Of folds, and of initial weights and mini-batches.
    strength : float
        What cross-entropy was tuned over: inverse penalty or learning rate.
    """

    def __init__(
        self, task: Task, X: NDArray, y: NDArray, n_classes: int, seed: int, strength: float = 1.0
    ) -> None:
        self.task, self.X, self.y = task, X, y
        self.n_classes, self.seed, self.strength = n_classes, seed, strength
        self._out_of_fold: dict[Any, NDArray] = {}

    @property
    @abstractmethod
    def n_features(self) -> int:
        """Number of features under the head."""

    @abstractmethod
    def fit(self, loss: nn.Module, factor: float = 1.0, weight: Weights = None) -> Predictor:
        """Fit with `factor` times the strength; returns what maps X to logits."""

    def set_strength(self, strength: float) -> None:
        """Change the strength here and in the folds."""
        if strength != self.strength:
            self.strength = strength
            self._out_of_fold.clear()
            for learner, _ in self.__dict__.get("inner", ()):
                learner.set_strength(strength)

    def restricted(self, rows: NDArray) -> Learner:
        """A learner on some of the rows, with the same penalty for each sample."""
        return type(self)(
            self.task, self.X[rows], self.y[rows], self.n_classes, self.seed, self.strength
        )

    def folds(self, n_folds: int) -> list[tuple[NDArray, NDArray]]:
        """Stratified folds, the same for every method."""
        splitter = StratifiedKFold(n_folds, shuffle=True, random_state=self.seed)
        return list(splitter.split(self.X, self.y))

    @cached_property
    def inner(self) -> list[tuple[Learner, NDArray]]:
        """Learners on all folds but one, and the rows of that one."""
        return [(self.restricted(train), test) for train, test in self.folds(self.task.n_folds)]

    def out_of_fold(self, key: Any, fit: Callable[[Learner], Predictor]) -> NDArray:
        """Logits of each training sample by a model that has not seen it; kept under `key`."""
        if key not in self._out_of_fold:
            logits = np.empty((len(self.y), self.n_classes), np.float32)
            for learner, rows in self.inner:
                logits[rows] = fit(learner)(self.X[rows])
            self._out_of_fold[key] = logits
        return self._out_of_fold[key]

    @property
    def reference(self) -> NDArray:
        """Out-of-fold logits of cross-entropy."""
        return self.out_of_fold("cross-entropy", lambda learner: learner.fit(CrossEntropy()))

    @property
    def class_error(self) -> NDArray:
        """Error of each class of cross-entropy, out of fold."""
        return class_error(self.reference, self.y)


class ProbeLearner(Learner):
    """Linear probes; weights of samples are repetitions."""

    @property
    def n_features(self) -> int:
        return self.X.shape[1]

    @cached_property
    def _probes(self) -> dict[float, LinearProbes]:
        return {}

    def fit(self, loss: nn.Module, factor: float = 1.0, weight: Weights = None) -> Predictor:
        C = float(np.float32(self.strength * factor))
        if C not in self._probes:
            # The penalty of a sample stays the same in the smaller sets of the folds.
            C_here = C * self.task.n_train / len(self.y)
            self._probes[C] = LinearProbes(self.X, self.y, self.n_classes, C_here)
        probes = self._probes[C]
        if type(loss) is CrossEntropy and loss.smoothing == 0 and weight is None:
            weights = probes.cross_entropy
        else:
            w = None if weight is None else torch.from_numpy(weight.astype(np.float32))
            features = torch.empty(0)  # frozen: no loss has a gradient through them
            weights = probes.fit(lambda logits, y: loss(logits, features, y, w))
        return lambda X: LinearProbes.logits(X, weights).numpy()


class _AnyLossClassifier(MR2Classifier):
    """The package's network, training and all, under another loss."""

    _other_loss: nn.Module

    def _loss(self, module: Any, data: Any, error: Any) -> Any:
        return self._other_loss

    def _after_training(self, data: Any, valid: Any) -> None:
        pass  # what is reported of margins is not there under other losses


class NetworkLearner(Learner):
    """Networks, trained by the package's classifier; the strength is their lr."""

    @property
    @abstractmethod
    def network(self) -> dict[str, Any]:
        """The classifier's parameters that say which network."""

    def fit(self, loss: nn.Module, factor: float = 1.0, weight: Weights = None) -> Predictor:
        classifier = _AnyLossClassifier(
            **self.network,
            C=1e12,
            optimizer=torch.optim.Adam,
            lr=self.strength * factor,
            batch_size=self.task.batch_size,
            max_epochs=self.task.max_epochs,
            dtype="float32",
            random_state=self.seed,
        )
        classifier._other_loss = loss
        classifier.fit(self.X, self.y, sample_weight=weight)
        return classifier.decision_function


class PerceptronLearner(NetworkLearner):
    """Multilayer perceptrons."""

    @property
    def n_features(self) -> int:
        return self.task.hidden

    @property
    def network(self) -> dict[str, Any]:
        return {"module": "mlp", "module__hidden_layer_sizes": (self.task.hidden,)}


class ConvLearner(NetworkLearner):
    """Small convolutional networks."""

    @property
    def n_features(self) -> int:
        return ConvNet.n_features

    @property
    def network(self) -> dict[str, Any]:
        return {"module": ConvNet}


LEARNERS: dict[str, type[Learner]] = {
    "probe": ProbeLearner,
    "mlp": PerceptronLearner,
    "cnn": ConvLearner,
}


def recalls(logits: NDArray, y: NDArray) -> NDArray:
    """Share of each class that is recognised."""
    right = logits.argmax(1) == y
    size = np.bincount(y, minlength=logits.shape[1])
    return np.bincount(y, right, minlength=logits.shape[1]) / np.maximum(size, 1)


def class_error(logits: NDArray, y: NDArray) -> NDArray:
    """Error of each class, shrunk by one imagined sample of the mean error.

    So that no class of a small set has an error of exactly 0.
    """
    size = np.bincount(y, minlength=logits.shape[1])
    error = 1 - recalls(logits, y)
    return (size * error + error.mean()) / (size + 1)
