"""Multinomial logistic regression with an L2 penalty, as a benchopt benchmark.

    pip install benchopt
    OMP_NUM_THREADS=1 benchopt run benchmarks/speed/probe -l -d "Bundled"

runs it with benchopt's own driver; ``table.py`` beside this file makes the project's tables.
"""

import numpy as np
from benchopt import BaseObjective
from scipy.special import logsumexp

CHUNK = 4096


class Objective(BaseObjective):
    """``sum_i loss_i + ||W||^2 / (2 C)`` divided by the number of samples.

    That is scikit-learn's objective divided by ``C * n``; the intercept is not penalised. Features
    are float32, and the objective is evaluated in float64 whatever the solvers compute in.
    """

    name = "Multinomial logistic regression"
    min_benchopt_version = "1.8"
    requirements = ["pip::scipy"]
    sampling_strategy = "callback"
    test_dataset_name = "Bundled"

    parameters = {"C": [0.01, 1.0, 100.0]}

    def set_data(self, X, y):
        self.X, self.y = X, y
        self.n_classes = int(y.max()) + 1
        present = np.bincount(y, minlength=self.n_classes) > 0
        if self.n_classes < 3 or not present.all():
            raise ValueError(
                "The solvers are compared on problems of at least three classes, with labels from "
                f"0 up of which none is missing; got {present.sum()} of {self.n_classes} classes."
            )

    def get_objective(self):
        return {"X": self.X, "y": self.y, "C": self.C, "n_classes": self.n_classes}

    def get_one_result(self):
        return {
            "coef": np.zeros((self.n_classes, self.X.shape[1]), self.X.dtype),
            "intercept": np.zeros(self.n_classes, self.X.dtype),
        }

    def evaluate_result(self, coef, intercept):
        coef, intercept = coef.astype(np.float64), intercept.astype(np.float64)
        n = len(self.X)
        loss = right = 0.0
        for start in range(0, n, CHUNK):
            rows = slice(start, start + CHUNK)
            logits = self.X[rows].astype(np.float64) @ coef.T + intercept
            y = self.y[rows]
            loss += (logsumexp(logits, axis=1) - logits[np.arange(len(y)), y]).sum()
            right += (logits.argmax(1) == y).sum()
        penalty = (coef**2).sum() / (2 * self.C)
        return {"value": (loss + penalty) / n, "training_accuracy": right / n}
