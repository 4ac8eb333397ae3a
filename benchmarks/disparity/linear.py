"""Linear probes under any smooth loss, many of them on the same training set.

The comparison fits thousands of probes that differ in their loss only. Here they share what depends
on the data alone: for each class the Gram matrix of the features weighted by the curvature at the
cross-entropy solution, whose inverse square root makes all these problems well conditioned, and
that solution as a start.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional as F

# Mean loss over all samples, from logits (n_samples, n_classes) and class codes (n_samples,).
Loss = Callable[[Tensor, Tensor], Tensor]

# Relative decrease of the objective at which a fit ends.
_TOLERANCE = 3e-6


class LinearProbes:
    """All linear probes on one training set with one strength `C` of the penalty.

    The objective is ``loss + ||W||^2 / (2 C n)``, intercepts are free: with the mean cross-entropy
    that is scikit-learn's LogisticRegression.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
    y : ndarray of shape (n_samples,)
        Class codes from 0.
    n_classes : int
    C : float

    Attributes
    ----------
    cross_entropy : Tensor of shape (n_features + 1, n_classes)
        Weights of the probe under cross-entropy, its intercepts in the last row.
    """

    def __init__(self, X: NDArray, y: NDArray, n_classes: int, C: float) -> None:
        self._X = torch.from_numpy(np.ascontiguousarray(X, dtype=np.float32))
        self._y = torch.from_numpy(y.astype(np.int64))
        self._l2 = 1 / (C * len(y))
        self._start = torch.zeros(X.shape[1] + 1, n_classes)
        # Rough solution in coordinates of constant curvature, then the curvature there.
        self._whiten(torch.full((len(y), 1), 0.1).expand(-1, n_classes), shared=True)
        self._start = self.fit(F.cross_entropy, tolerance=1e-3)
        p = self.logits(self._X, self._start).softmax(1)
        self._whiten(p * (1 - p), shared=False)
        self._start = self.cross_entropy = self.fit(F.cross_entropy)

    def _whiten(self, curvature: Tensor, shared: bool) -> None:
        maps, inverses = [], []
        for h in curvature.T[:1] if shared else curvature.T:
            gram = (self._X * (h / len(h))[:, None]).T @ self._X
            values, vectors = torch.linalg.eigh(gram)
            root = (values.clamp_min(0) + self._l2).sqrt()
            maps.append(vectors / root)  # from whitened coordinates to weights
            inverses.append((vectors * root).T)
        self._map, self._inverse = torch.stack(maps), torch.stack(inverses)

    def fit(self, loss: Loss, tolerance: float = _TOLERANCE) -> Tensor:
        """Minimise the objective from the cross-entropy solution.

        Returns
        -------
        Tensor of shape (n_features + 1, n_classes)
            Weights, and intercepts in the last row.
        """
        X, y, l2 = self._X, self._y, self._l2
        shape = self._start.shape

        def objective(flat: NDArray) -> tuple[float, NDArray]:
            v = torch.from_numpy(flat.astype(np.float32)).view(shape)
            weight = _by_class(self._map, v[:-1])
            logits = torch.addmm(v[-1], X, weight).requires_grad_()
            value = loss(logits, y)
            (slope,) = torch.autograd.grad(value, logits)
            gradient = _by_class(self._map.mT, X.T @ slope + l2 * weight)
            total = value.item() + 0.5 * l2 * weight.square().sum().item()
            return total, torch.cat([gradient, slope.sum(0, keepdim=True)]).double().numpy().ravel()

        start = torch.cat([_by_class(self._inverse, self._start[:-1]), self._start[-1:]])
        result = minimize(
            objective,
            start.double().numpy().ravel(),
            jac=True,
            method="L-BFGS-B",
            options={"maxcor": 10, "ftol": tolerance, "gtol": 0.0, "maxiter": 300},
        )
        v = torch.from_numpy(result.x.astype(np.float32)).view(shape)
        return torch.cat([_by_class(self._map, v[:-1]), v[-1:]])

    @staticmethod
    def logits(X: NDArray | Tensor, weights: Tensor) -> Tensor:
        """Logits of shape (n_samples, n_classes) of a fitted probe."""
        X = torch.as_tensor(X, dtype=torch.float32)
        return torch.addmm(weights[-1], X, weights[:-1])


def _by_class(maps: Tensor, columns: Tensor) -> Tensor:
    """Multiply each column by its class's matrix, or all by a single one."""
    if len(maps) == 1:
        return maps[0] @ columns
    return torch.einsum("kij,jk->ik", maps, columns)
