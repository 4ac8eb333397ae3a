"""The full-batch optimiser of a linear probe: L-BFGS preconditioned by the curvature of the data.

The spectra of embeddings span many orders of magnitude, which makes plain L-BFGS need hundreds of
passes over the data. A Cholesky factor of the features' Gram matrix, each sample weighted by the
curvature of its loss, removes most of that. The Hessian of the multinomial logistic loss in one
sample's logits is ``diag(p) - p p^T``; its diagonal, averaged over the classes, makes one matrix
serve for all of them (compare the fixed bound of Böhning, "Multinomial logistic regression
algorithm", Annals of the Institute of Statistical Mathematics 44, 1992: a bound is several times
too large against the penalty when there are many classes, which costs iterations).
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Solve = Callable[..., list[Tensor]]


class GramPreconditioner:
    """Inverse of a weighted Gram matrix plus a ridge, for the weights and intercepts of a head.

    For each row of the weight matrix the matrix is
    ``sum_i h_i (x_i - m)(x_i - m)^T + l2 * I``, for its intercept ``sum_i h_i``. Centring by the
    weighted mean ``m`` is what decouples the two; it is folded into the weights, so that the
    caller's data are never copied as a whole.

    Parameters
    ----------
    X : Tensor of shape (n_samples, n_features)
        Features.
    curvature : Tensor of shape (n_samples,)
        Curvature ``h_i`` that each sample contributes to the objective, non-negative.
    l2 : float
        Second derivative of the penalty on the weights, positive.
    fit_intercept : bool
        Whether :meth:`solve` also gets the gradient of an intercept.
    chunk_size : int, default=4096
        Rows handled at a time.
    """

    def __init__(
        self,
        X: Tensor,
        curvature: Tensor,
        l2: float,
        *,
        fit_intercept: bool,
        chunk_size: int = 4096,
    ) -> None:
        n, d = X.shape
        # Scaled to sum to 1: a curvature that has all but vanished would not survive in float32.
        total = curvature.double().sum().clamp_min(torch.finfo(torch.float64).tiny)
        h = (curvature.double() / total).to(X.dtype)
        chunks = [slice(start, start + chunk_size) for start in range(0, n, chunk_size)]
        mean = torch.zeros(d, dtype=X.dtype, device=X.device)
        if fit_intercept:
            for rows in chunks:
                mean += h[rows] @ X[rows]

        def scaled(rows: slice) -> Tensor:
            return (X[rows] - mean) * h[rows, None].sqrt()

        self._ridge = l2 / total.item()
        if n >= d:
            gram = torch.zeros(d, d, dtype=X.dtype, device=X.device)
            for rows in chunks:
                block = scaled(rows)
                gram.addmm_(block.T, block)
            gram.diagonal().add_(_rounding_of(mean))
            self._rows = None
        else:
            # Fewer samples than features: by Woodbury's identity a factor of size n is enough.
            # What it subtracts is nearly all of the gradient, hence in double precision.
            self._rows = scaled(slice(None)).double()
            gram = self._rows @ self._rows.T
            # Above what lifting the factor may add, which the ridge would have to agree with.
            rounding = 100 * torch.finfo(gram.dtype).eps * gram.diagonal().mean().item()
            self._ridge = max(self._ridge, rounding, torch.finfo(gram.dtype).tiny)
        gram.diagonal().add_(self._ridge)
        self._factor = _Factor(gram)
        self._mean = mean
        self._curvature = total.item()

    def solve(self, weight_grad: Tensor, bias_grad: Tensor | None = None) -> list[Tensor]:
        """Multiply gradients by the inverse.

        Parameters
        ----------
        weight_grad : Tensor of shape (n_rows, n_features)
            Gradient of the weights.
        bias_grad : Tensor of shape (n_rows,), optional
            Gradient of the intercepts.

        Returns
        -------
        list of Tensor
            The preconditioned gradients, in the same order and shapes.
        """
        if bias_grad is None:
            return [self._solve_rows(weight_grad)]
        # In the coordinates (W, b + W m) of centred features the matrix is block diagonal.
        weight = self._solve_rows(weight_grad - torch.outer(bias_grad, self._mean))
        return [weight, bias_grad / self._curvature - weight @ self._mean]

    def _solve_rows(self, grad: Tensor) -> Tensor:
        if self._rows is None:
            return self._factor.solve(grad.T / self._curvature).T
        g = grad.double() / self._curvature
        dual = self._factor.solve(self._rows @ g.T)
        return ((g - dual.T @ self._rows) / self._ridge).to(grad.dtype)


def _rounding_of(mean: Tensor) -> Tensor:
    """Variance of each centred feature below which it may be rounding, as in a constant one."""
    return torch.finfo(mean.dtype).eps * mean.square()


#: Probability of a class below which a sample says nothing about its curvature.
_NEGLIGIBLE = 1e-12

#: Samples, and columns of the Hessian, whose products are taken at a time: large enough to be fast,
#: small enough for the memory and for making little more than half of a symmetric matrix.
_ROWS_AT_ONCE, _COLUMNS_AT_ONCE = 1024, 256


class HessianPreconditioner:
    """Inverse of the Hessian of the multinomial logistic loss plus a ridge, for a linear head.

    The one to use where it is small: its side is ``n_classes * n_features``. Where the classes
    differ in which directions matter, no single matrix for all of them does nearly as well.

    Parameters
    ----------
    X : Tensor of shape (n_samples, n_features)
        Features.
    p : Tensor of shape (n_samples, n_classes)
        Class probabilities.
    weight : Tensor of shape (n_samples,)
        Factor of each sample's Hessian with respect to its logits, non-negative.
    l2 : float
        Second derivative of the penalty on the weights, positive.
    fit_intercept : bool
        Whether :meth:`solve` also gets the gradient of an intercept.
    """

    def __init__(
        self, X: Tensor, p: Tensor, weight: Tensor, l2: float, *, fit_intercept: bool
    ) -> None:
        n, d = X.shape
        n_classes = p.shape[1]
        # Products of smaller probabilities would be subnormal numbers, with which a processor is
        # many times slower.
        p = torch.where(p < _NEGLIGIBLE, 0, p)
        self._total = weight.double().sum().item()
        w = weight.double() / self._total
        self._mean = None
        if fit_intercept:
            self._mean = (w @ X.double()).to(X.dtype)
            X = torch.cat((X - self._mean, X.new_ones(n, 1)), 1)
            d += 1
        self._n_inputs = d
        w, side = w.to(X.dtype)[:, None], n_classes * d
        # Sums over samples of p_k x p_j x^T, those above the diagonal by symmetry.
        pairs = X.new_zeros(side, side)
        for start in range(0, n, _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            px = (p[rows, :, None] * X[rows, None]).view(-1, side)
            wpx = w[rows] * px
            for first in range(0, side, _COLUMNS_AT_ONCE):
                end = first + _COLUMNS_AT_ONCE
                pairs[first:end, :end].addmm_(wpx[:, first:end].T, px[:, :end])
        pairs = pairs.tril() + pairs.tril(-1).T
        hessian = -pairs.view(n_classes, d, n_classes, d)
        # Of a class with itself minus the sum of its pairs with others, which 1 - p would only be
        # up to rounding where p is close to 1.
        own = hessian.diagonal(dim1=0, dim2=2)
        own.zero_()
        own.copy_(-hessian.sum(2).permute(1, 2, 0))
        # The same shift for all classes changes no loss, and gradients have no part along it: any
        # curvature will do there, if only it is far from zero.
        hessian += own.mean(-1)[None, :, None] / n_classes
        self._hessian = hessian.view(side, side)
        self._factorise(l2)

    def with_ridge(self, l2: float) -> HessianPreconditioner:
        """The same curvature beside another penalty."""
        other = copy.copy(self)
        other._factorise(l2)
        return other

    def _factorise(self, l2: float) -> None:
        shifted = self._hessian.clone()
        # The intercepts, which come last in each class, are not penalised.
        diagonal = shifted.diagonal().unflatten(0, (-1, self._n_inputs))
        if self._mean is None:
            diagonal += l2 / self._total
        else:
            diagonal[:, :-1] += l2 / self._total + diagonal[:, -1:] * _rounding_of(self._mean)
        self._factor = _Factor(shifted)

    def solve(self, weight_grad: Tensor, bias_grad: Tensor | None = None) -> list[Tensor]:
        """Multiply gradients by the inverse, as :meth:`GramPreconditioner.solve` does."""
        if bias_grad is None or self._mean is None:
            return [self._solve_flat(weight_grad)]
        # In the coordinates (W, b + W m) of centred features.
        centred = weight_grad - torch.outer(bias_grad, self._mean)
        step = self._solve_flat(torch.cat((centred, bias_grad[:, None]), 1))
        weight, shift = step[:, :-1], step[:, -1]
        return [weight, shift - weight @ self._mean]

    def _solve_flat(self, gradient: Tensor) -> Tensor:
        flat = gradient.reshape(-1, 1) / self._total
        return self._factor.solve(flat).view_as(gradient)


class _Factor:
    """Cholesky factor of a matrix scaled to a unit diagonal, lifted to rounding level.

    Without the scaling, rounding of the features with the largest values would hide the curvature
    of the others.
    """

    def __init__(self, matrix: Tensor) -> None:
        info = torch.finfo(matrix.dtype)
        self._scale = matrix.diagonal().clamp_min(info.tiny).rsqrt()[:, None]
        scaled = matrix * self._scale * self._scale.T
        lift = info.eps
        for _ in range(16):
            lifted = scaled.clone()
            lifted.diagonal().add_(lift)
            self._factor, failed = torch.linalg.cholesky_ex(lifted)
            if not failed:
                return
            lift *= 10
        raise ValueError(
            "The squares of the values in X overflow. Scale X, for example with StandardScaler."
        )

    def solve(self, columns: Tensor) -> Tensor:
        """Multiply columns by the inverse of the matrix."""
        return self._scale * torch.cholesky_solve(self._scale * columns, self._factor)


class PreconditionedLBFGS(torch.optim.Optimizer):
    """L-BFGS whose initial inverse Hessian is a given preconditioner; one iteration a step.

    Meant for smooth convex objectives evaluated on all the data.

    Parameters
    ----------
    params : iterable of Tensor
        Parameters, one group.
    make_preconditioner : callable, optional
        Called without arguments before steps 0, 10, 40, 160, ...; returns a function that takes
        gradients (one argument a parameter) and returns a list of the same shapes: their product
        with a symmetric positive definite approximation of the inverse Hessian at the current
        parameters. The identity by default.
    tol : float, default=1e-6
        The search has converged when the objective's estimated distance from its minimum,
        relative to the objective, is below `tol`.
    history_size : int, default=20
        Number of past steps kept.

    Attributes
    ----------
    converged : bool
        Whether the search has met `tol`, or the point at which the objective no longer changes in
        the parameters' floating point type.

    Notes
    -----
    A step costs one evaluation of the closure, rarely more: a unit step is accepted under Armijo's
    condition, or under its form by gradients where rounding hides the decrease (Hager and Zhang,
    "A new conjugate gradient method with guaranteed descent and an efficient line search", 2005).

    The distance from the minimum is extrapolated from the decreases over the last two windows of
    iterations, taken for terms of a geometric series. The decrease that the quadratic model
    promises is no use for this: the directions that converge last are those it does not know.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.mr2.probe import PreconditionedLBFGS
    >>> x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    >>> optimizer = PreconditionedLBFGS([x])
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (x - torch.tensor([1.0, 2.0])).square().sum() + 1.0
    ...     loss.backward()
    ...     return loss
    >>> while not optimizer.converged:
    ...     loss = optimizer.step(closure)
    >>> x.detach().numpy().round(4)
    array([1., 2.])
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        make_preconditioner: Callable[[], Solve] | None = None,
        *,
        tol: float = 1e-6,
        history_size: int = 20,
    ) -> None:
        if tol < 0:
            raise ValueError(f"tol must be >= 0, got {tol!r}.")
        if history_size < 1:
            raise ValueError(f"history_size must be >= 1, got {history_size!r}.")
        super().__init__(params, {})
        if len(self.param_groups) != 1:
            raise ValueError("PreconditionedLBFGS takes a single parameter group.")
        self.make_preconditioner = make_preconditioner
        self.tol = tol
        self.history_size = history_size
        self.release()

    @property
    def _params(self) -> list[Tensor]:
        return self.param_groups[0]["params"]

    def release(self) -> None:
        """Forget the preconditioner and the points known, which are as large as the model."""
        self.converged = False
        self._point: tuple[float, Tensor] | None = None
        self._suggested: list[Tensor] | None = None
        self._pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=self.history_size)
        self._solve: Solve | None = None
        self._scale = 1.0
        self._n_steps = self._next_refresh = 0
        self._values: list[float] = []

    def suggest(self, point: Iterable[Tensor]) -> None:
        """Name a point to start from in place of the parameters, if the objective is lower there.

        Parameters
        ----------
        point : iterable of Tensor
            Values of all parameters. They are evaluated in the first step.
        """
        self._suggested = list(point)

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """Perform one iteration.

        Parameters
        ----------
        closure : callable
            Clears the gradients, evaluates the objective, calls ``backward`` and returns it.

        Returns
        -------
        Tensor
            The objective at the new parameters.
        """
        evaluate = torch.enable_grad()(closure)
        if self._point is None:
            self._point = evaluate().item(), self._flat_gradient()
            if self._suggested is not None:
                self._compare(self._suggested, evaluate)
        if self._n_steps == self._next_refresh:
            self._refresh()
        self._n_steps += 1
        value, gradient = self._point
        direction = -self._inverse_hessian(gradient)
        slope = (gradient @ direction).item()
        if slope >= 0:  # rounding spoilt the model: fall back on the preconditioner alone
            self._pairs.clear()
            direction = -self._inverse_hessian(gradient)
            slope = (gradient @ direction).item()
        if slope == 0:
            self.converged = True
            return torch.tensor(value, dtype=torch.float64)

        start = [p.detach().clone() for p in self._params]
        length = 1.0
        noise = 4 * torch.finfo(gradient.dtype).eps * abs(value)
        for _ in range(20):
            self._move(start, direction, length)
            new_value, new_gradient = evaluate().item(), self._flat_gradient()
            new_slope = (new_gradient @ direction).item()
            decreased = new_value <= value + 1e-4 * length * slope
            level = new_value <= value + noise and abs(new_slope) <= -0.9 * slope
            if decreased or level:
                break
            # Minimum of the parabola through both values and the first slope.
            curvature = new_value - value - length * slope
            shrink = -slope * length / (2 * curvature) if curvature > 0 else 0.5
            length *= min(max(shrink, 0.1), 0.5) if shrink == shrink else 0.1
        else:
            # No representable step improves: this point is as good as the arithmetic allows.
            self._move(start, direction, 0.0)
            self.converged = True
            return torch.tensor(value, dtype=torch.float64)

        change, bend = length * direction, new_gradient - gradient
        product = change @ bend
        if product > 0:
            self._pairs.append((change, bend, 1 / product))
            self._rescale()
        self._point = new_value, new_gradient
        self._values.append(new_value)
        # The factor allows for the error of the extrapolation.
        close = self._remaining() <= 0.05 * self.tol * abs(new_value)
        self.converged = close or self._stalled(noise)
        return torch.tensor(new_value, dtype=torch.float64)

    @torch.no_grad()
    def _compare(self, suggested: list[Tensor], evaluate: Callable[[], Tensor]) -> None:
        """Go where the suggestion is better than the current point."""
        current = [p.detach().clone() for p in self._params]
        torch._foreach_copy_(self._params, suggested)
        value, gradient = evaluate().item(), self._flat_gradient()
        assert self._point is not None
        if value < self._point[0]:
            self._point = value, gradient
        else:
            torch._foreach_copy_(self._params, current)

    def _refresh(self) -> None:
        self._next_refresh = max(10, 4 * self._n_steps)
        if self.make_preconditioner is not None:
            self._solve = self.make_preconditioner()
            self._rescale()

    def _rescale(self) -> None:
        """Fit the preconditioner's scale to the curvature along the last step."""
        if self._pairs:
            _, bend, inverse = self._pairs[-1]
            self._scale = (1 / (inverse * (bend @ self._precondition(bend)))).item()

    def _remaining(self) -> float:
        """Estimate how far the objective still is from its minimum."""
        window = max(5, len(self._values) // 10)
        if len(self._values) <= 2 * window:
            return math.inf
        older, middle, newest = (self._values[-1 - k * window] for k in (2, 1, 0))
        before, after = older - middle, middle - newest
        return after * after / (before - after) if before > after else math.inf

    def _stalled(self, noise: float) -> bool:
        """Whether rounding hides the decrease over a window that is long where steps are short."""
        window = max(10, len(self._values) // 10)
        return len(self._values) > window and (
            self._values[-1 - window] - self._values[-1] <= noise
        )

    def _inverse_hessian(self, gradient: Tensor) -> Tensor:
        """Two-loop recursion around the preconditioner (Nocedal and Wright, algorithm 7.4)."""
        q = gradient.clone()
        alphas = []
        for change, bend, inverse in reversed(self._pairs):
            alpha = inverse * (change @ q)
            q.sub_(alpha * bend)
            alphas.append(alpha)
        q = self._scale * self._precondition(q)
        for (change, bend, inverse), alpha in zip(self._pairs, reversed(alphas), strict=True):
            q.add_((alpha - inverse * (bend @ q)) * change)
        return q

    def _precondition(self, flat: Tensor) -> Tensor:
        if self._solve is None:
            return flat
        pieces = self._solve(*self._unflatten(flat))
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def _flat_gradient(self) -> Tensor:
        return torch.cat([p.grad.reshape(-1) for p in self._params if p.grad is not None])

    def _unflatten(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([p.numel() for p in self._params])
        return [piece.view_as(p) for piece, p in zip(pieces, self._params, strict=True)]

    @torch.no_grad()
    def _move(self, start: list[Tensor], direction: Tensor, length: float) -> None:
        for p, origin, step in zip(self._params, start, self._unflatten(direction), strict=True):
            torch.add(origin, step, alpha=length, out=p)
