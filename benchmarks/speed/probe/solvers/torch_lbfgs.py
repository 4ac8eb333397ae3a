"""torch.optim.LBFGS on all the data, as one would write it in plain torch."""

import torch
from benchmark_utils import ProbeSolver
from torch.nn import functional as F


class Solver(ProbeSolver):
    """L-BFGS with the strong Wolfe line search and torch's defaults otherwise.

    The points that the line search tries are reported, since torch has no callback; the best so
    far is what counts.
    """

    name = "torch LBFGS"
    requirements = ["pip::torch"]
    parameters = {"device": ["cpu"]}

    @property
    def label(self):
        return self.name if self.device == "cpu" else f"{self.name} on {self.device}"

    def solve(self):
        X = torch.from_numpy(self.X).to(self.device)
        y = torch.from_numpy(self.y).to(self.device)
        weight = torch.zeros(self.n_classes, X.shape[1], device=self.device, requires_grad=True)
        bias = torch.zeros(self.n_classes, device=self.device, requires_grad=True)
        penalty = 1 / (2 * self.C * len(X))
        optimizer = torch.optim.LBFGS(
            [weight, bias],
            max_iter=10**6,
            max_eval=10**7,
            tolerance_grad=0,
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )

        def closure():
            if self.device != "cpu":
                torch.cuda.synchronize()
            self.report(weight.detach().cpu(), bias.detach().cpu())
            self.count_pass()
            optimizer.zero_grad()
            loss = F.cross_entropy(F.linear(X, weight, bias), y) + penalty * weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return weight.detach().cpu(), bias.detach().cpu()
