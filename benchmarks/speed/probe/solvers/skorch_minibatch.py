"""skorch as it comes, with mini-batches."""

import torch
from benchmark_utils import ProbeSolver
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback

OPTIMIZERS = {
    "Adam": {"optimizer": torch.optim.Adam, "lr": 1e-3},
    "SGD": {"optimizer": torch.optim.SGD, "lr": 1e-2, "optimizer__momentum": 0.9},
}


class Reporter(Callback):
    """Call a function with the net after each epoch."""

    def __init__(self, function):
        self.function = function

    def on_epoch_end(self, net, **kwargs):
        self.function(net)


class Solver(ProbeSolver):
    """A linear module in ``NeuralNetClassifier``, with the penalty as weight decay of its weight.

    A constant learning rate: it ends in a neighbourhood of the optimum.
    """

    name = "skorch"
    requirements = ["pip::skorch", "pip::torch"]
    parameters = {"optimizer": ["Adam", "SGD"]}

    @property
    def label(self):
        return f"skorch {self.optimizer}"

    def solve(self):
        def report(net):
            self.passes += 1
            self.report(net.module_.weight.detach(), net.module_.bias.detach())

        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            net = NeuralNetClassifier(
                torch.nn.Linear,
                module__in_features=self.X.shape[1],
                module__out_features=self.n_classes,
                criterion=torch.nn.CrossEntropyLoss,
                optimizer__param_groups=[
                    ("weight", {"weight_decay": 1 / (self.C * len(self.X))}),
                ],
                max_epochs=10**6,
                iterator_train__shuffle=True,
                train_split=None,
                verbose=0,
                callbacks=[("report", Reporter(report))],
                **OPTIMIZERS[self.optimizer],
            ).fit(self.X, self.y)
        return net.module_.weight.detach(), net.module_.bias.detach()
