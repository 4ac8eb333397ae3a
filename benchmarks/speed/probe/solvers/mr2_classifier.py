"""The linear probe of this package."""

import warnings

import torch
from benchmark_utils import ProbeSolver
from sklearn.exceptions import ConvergenceWarning
from skorch.callbacks import Callback

from sklearn_mr2 import MR2Classifier


class Reporter(Callback):
    """Call a function with the net after each iteration."""

    def __init__(self, function):
        self.function = function

    def on_epoch_end(self, net, **kwargs):
        self.function(net)


class Solver(ProbeSolver):
    """``MR2Classifier(margin_statistic=None)``, everything that ``fit`` does included."""

    name = "MR2Classifier"
    requirements = ["pip::sklearn-mr2"]
    # With tol=0 the driver decides when it is enough.
    parameters = {"device": ["cpu"], "tol": [0.0]}

    @property
    def label(self):
        return self.name if self.device == "cpu" else f"{self.name} on {self.device}"

    def solve(self):
        def report(net):
            self.passes = len(net.history)
            if self.device != "cpu":
                torch.cuda.synchronize()
            head = net.module_.head
            self.report(head.weight.detach().cpu(), head.bias.detach().cpu())

        model = MR2Classifier(
            margin_statistic=None,
            C=self.C,
            tol=self.tol,
            max_epochs=10**6,
            device=self.device,
            callbacks=[("report", Reporter(report))],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(self.X, self.y)
        return model.coef_, model.intercept_
