"""scikit-learn's LogisticRegression, watched from inside.

scikit-learn tells nobody about the iterates of these solvers, so that the functions it calls are
replaced, for the time of a fit, by ones that report and otherwise do the same.
"""

import contextlib
import warnings
from unittest import mock

import numpy as np
import scipy.optimize
from benchmark_utils import ProbeSolver
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, _logistic
from sklearn.preprocessing import StandardScaler

#: Largest number of coefficients for newton-cholesky, whose Hessian has its square of entries.
LARGEST_HESSIAN = 4000


class Solver(ProbeSolver):
    """The solvers of scikit-learn for the multinomial loss, on raw or on transformed features.

    On standardised or whitened features the penalty is another one. Users do that for speed, and
    it is measured here by the objective of the raw features, whose optimum it may never reach.
    """

    name = "LogisticRegression"
    requirements = ["pip::scikit-learn"]
    parameters = {
        "solver, features": [
            ("lbfgs", "raw"),
            ("newton-cg", "raw"),
            ("newton-cholesky", "raw"),
            ("lbfgs", "standardised"),
            ("lbfgs", "whitened"),
        ]
    }

    @property
    def label(self):
        kind = "" if self.features == "raw" else f", {self.features}"
        return f"LogisticRegression {self.solver}{kind}"

    def skip(self, X, y, C, n_classes):
        if self.solver == "newton-cholesky" and X.shape[1] * n_classes > LARGEST_HESSIAN:
            return True, f"the Hessian of more than {LARGEST_HESSIAN} coefficients is too large"
        if self.features == "whitened" and len(X) <= X.shape[1]:
            return True, "fewer samples than features cannot be whitened"
        return False, None

    def solve(self):
        X = self.X
        self.transformer = None
        if self.features == "standardised":
            self.transformer = StandardScaler().fit(X)
        elif self.features == "whitened":
            # The fastest of PCA's solvers here.
            self.transformer = PCA(whiten=True, svd_solver="covariance_eigh").fit(X)
        if self.transformer is not None:
            X = self.transformer.transform(X)
        # It is the driver that ends a run, except where the arithmetic allows no progress.
        model = LogisticRegression(C=self.C, solver=self.solver, tol=1e-12, max_iter=10**6)
        with self.watched(), warnings.catch_warnings():
            # About line searches at the limit of float32, a singular Hessian after which
            # newton-cholesky goes on with lbfgs, and the number of iterations.
            warnings.simplefilter("ignore")
            model.fit(X, self.y)
        return model.coef_, model.intercept_

    def to_original(self, coef, intercept):
        if self.transformer is None:
            return coef, intercept
        coef = coef.astype(np.float64)
        if isinstance(self.transformer, StandardScaler):
            coef = coef / self.transformer.scale_
        else:
            deviations = np.sqrt(self.transformer.explained_variance_)
            # As PCA does where nothing varies.
            deviations = np.maximum(deviations, np.finfo(deviations.dtype).eps)
            coef = coef @ (self.transformer.components_ / deviations[:, None])
        return coef, intercept - coef @ self.transformer.mean_

    def run(self, callback):
        self.transformer = None
        super().run(callback)

    @contextlib.contextmanager
    def watched(self):
        """Replace what LogisticRegression calls by functions that report each iterate."""
        minimize, newton_cg = scipy.optimize.minimize, _logistic._newton_cg

        def report(flat):
            table = np.asarray(flat).reshape(self.n_classes, -1, order="F")
            self.report(table[:, :-1], table[:, -1])

        def counted(function):
            def call(*args):
                self.count_pass()
                return function(*args)

            return call

        def watched_minimize(fun, x0, **kwargs):
            return minimize(counted(fun), x0, **{**kwargs, "callback": lambda xk: report(xk)})

        def watched_newton_cg(*, grad_hess, func, grad, **kwargs):
            def watched_grad_hess(x, *args):
                report(x)
                self.count_pass()
                gradient, product = grad_hess(x, *args)
                return gradient, counted(product)

            return newton_cg(
                grad_hess=watched_grad_hess, func=counted(func), grad=counted(grad), **kwargs
            )

        class WatchedCholesky(_logistic.NewtonCholeskySolver):
            def update_gradient_hessian(solver, *args, **kwargs):
                report(solver.coef)
                self.count_pass()
                return super().update_gradient_hessian(*args, **kwargs)

        with (
            mock.patch.object(scipy.optimize, "minimize", watched_minimize),
            mock.patch.object(_logistic, "_newton_cg", watched_newton_cg),
            mock.patch.object(_logistic, "NewtonCholeskySolver", WatchedCholesky),
        ):
            yield
