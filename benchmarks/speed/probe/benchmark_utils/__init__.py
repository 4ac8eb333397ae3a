"""What the solvers share."""

import numpy as np
from benchopt import BaseSolver


class Stop(Exception):
    """Ends a solver from inside its callback."""


class ProbeSolver(BaseSolver):
    """A solver that reports its iterates to a callback during one run.

    A subclass calls :meth:`report` with each iterate. That calls benchopt's callback, which stops
    the clock, evaluates and says whether to go on; if not, :class:`Stop` is raised, which
    :meth:`run` of the subclass lets through to :meth:`run_reporting`.

    Attributes
    ----------
    label : str
        Name in tables.
    passes : float
        Passes over the data so far: evaluations of the objective or its derivatives, or epochs.
    """

    label: str

    def set_objective(self, X, y, C, n_classes):
        self.X, self.y, self.C, self.n_classes = X, y, C, n_classes

    def run(self, callback):
        self._callback = callback
        # Asked where a single iteration may take longer than the driver allows a run to take.
        self._expired = getattr(callback, "expired", lambda: False)
        self.passes = 0
        self._iterate = np.zeros((self.n_classes, self.X.shape[1])), np.zeros(self.n_classes)
        try:
            self.report(*self._iterate)
            self.report(*self.solve())
        except Stop:
            pass

    def solve(self):
        """Solve the problem, calling :meth:`report`; return coefficients and intercepts."""
        raise NotImplementedError

    def report(self, coef, intercept):
        """Hand an iterate to the driver."""
        self._iterate = coef, intercept
        if not self._callback():
            raise Stop

    def count_pass(self):
        """Count a pass over the data, and end the run if its time is over."""
        self.passes += 1
        if self._expired():
            raise Stop

    def to_original(self, coef, intercept):
        """Coefficients of the features as they were given, from those that are solved for."""
        return coef, intercept

    def get_result(self):
        coef, intercept = self.to_original(*(np.asarray(part) for part in self._iterate))
        return {
            "coef": np.array(coef, dtype=self.X.dtype),
            "intercept": np.array(intercept, dtype=self.X.dtype),
        }
