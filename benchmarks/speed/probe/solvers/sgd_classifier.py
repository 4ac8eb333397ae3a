"""scikit-learn's SGDClassifier."""

import numpy as np
from benchmark_utils import ProbeSolver
from sklearn.linear_model import SGDClassifier

#: Products in an epoch of all binary problems, which takes about a nanosecond for each.
LARGEST_EPOCH = 2e10


class Solver(ProbeSolver):
    """Stochastic gradients of the logistic loss with the defaults otherwise.

    One-versus-rest: a binary problem for each class, which is another objective than the
    multinomial one. Its optimum is not the multinomial one.
    """

    name = "SGDClassifier"
    label = "SGDClassifier, one-vs-rest"
    requirements = ["pip::scikit-learn"]

    def skip(self, X, y, C, n_classes):
        if X.size * n_classes > LARGEST_EPOCH:
            return True, "an epoch of so many binary problems takes too long"
        return False, None

    def solve(self):
        model = SGDClassifier(loss="log_loss", alpha=1 / (self.C * len(self.X)), random_state=0)
        classes = np.arange(self.n_classes)
        while True:
            model.partial_fit(self.X, self.y, classes=classes)
            self.passes += 1
            self.report(model.coef_, model.intercept_)
