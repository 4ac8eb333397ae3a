"""How few neurons a fitted network uses, and what is left of it when it is pruned."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.metrics import check_scoring
from sklearn.utils.metadata_routing import MetadataRequest
from sklearn.utils.validation import check_is_fitted
from torch import nn
from torch.nn.utils import prune

from ..mirror.neurons import HiddenLayer, hidden_layers, weight_layers
from ..mirror.theory import active_count, participation_ratio

Criterion = Literal["participation_ratio", "active_fraction"]
Unit = Literal["magnitude", "neuron"]

# Where estimators keep what they hold: this package's and skorch's nets, searches and other
# meta-estimators, and FrozenEstimator.
_HOLDERS = ("net_", "module_", "best_estimator_", "estimator_", "estimator")


def find_module(estimator: Any) -> nn.Module:
    """Find the torch network inside a fitted estimator.

    Parameters
    ----------
    estimator : object
        A classifier of this package, a skorch net, a network, or any of these as the last step of
        a pipeline or inside of a search, a frozen estimator or another meta-estimator with a single
        fitted estimator.

    Returns
    -------
    nn.Module
        The network itself, not a copy.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        If the estimator is not fitted.
    TypeError
        If there is no torch network in it.
    """
    inner = estimator
    while not isinstance(inner, nn.Module):
        if hasattr(inner, "fit") and not hasattr(inner, "module_"):
            check_is_fitted(inner)
        if hasattr(inner, "steps"):
            inner = inner.steps[-1][1]
            continue
        held = next((name for name in _HOLDERS if hasattr(inner, name)), None)
        if held is None:
            raise TypeError(
                f"estimator holds no torch network: found {type(inner).__name__} at the end of "
                f"{type(estimator).__name__}. Pass a fitted classifier of this package, a skorch "
                "net, or a pipeline or search with one."
            )
        inner = getattr(inner, held)
    return inner


def _hidden(estimator: Any) -> list[HiddenLayer]:
    hidden = hidden_layers(find_module(estimator))
    if not hidden:
        raise ValueError(
            f"{type(estimator).__name__} has no hidden neurons; a linear model has weights only."
        )
    return hidden


@dataclass(frozen=True)
class NeuronSparsity:
    r"""Scorer of how few hidden neurons do the work, to be passed as ``scoring=``.

    A neuron counts by its effective weight :math:`c_j = \|w_j\| \|a_j\|`, the norms of its incoming
    weights (with the bias) and of its outgoing ones; in a convolution a channel is a neuron. It
    depends on the network only, not on the data it is scored on.

    Parameters
    ----------
    criterion : {"participation_ratio", "active_fraction"}, default="participation_ratio"
        The number of neurons that work in a layer is their participation ratio
        :math:`(\sum_j c_j)^2 / \sum_j c_j^2`, or the number of those whose :math:`c_j` is more than
        `threshold` times the largest. The score is 1 minus the sum of these numbers over the hidden
        layers divided by the sum of the widths: from 0 to 1, higher is sparser.
    threshold : float, default=0.01
        What counts as active, from 0 to less than 1.

    Raises
    ------
    ValueError
        If a parameter is invalid; already here, because errors inside a search become NaN scores.

    See Also
    --------
    pruning_curve : What a network still knows without its weakest weights or neurons.

    Notes
    -----
    The network must be a chain of dense and convolutional layers in the order in which they are
    registered, with activations and pooling in between. Scales of normalisation layers do not
    enter.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn_mr2 import MirrorFlowClassifier, NeuronSparsity
    >>> X, y = load_iris(return_X_y=True)
    >>> model = MirrorFlowClassifier((16,), random_state=0).fit(X[:100], y[:100])
    >>> sparsity = NeuronSparsity("active_fraction", threshold=0.1)
    >>> bool(0 < sparsity(model, X, y) < 1)
    True
    >>> sparsity.per_layer(model).columns.tolist()
    ['width', 'active', 'PR']
    """

    criterion: Criterion = "participation_ratio"
    threshold: float = 0.01

    def __post_init__(self) -> None:
        if self.criterion not in get_args(Criterion):
            options = ", ".join(map(repr, get_args(Criterion)))
            raise ValueError(f"criterion must be one of {options}, got {self.criterion!r}.")
        if not (isinstance(self.threshold, Real) and 0 <= self.threshold < 1):
            raise ValueError(
                f"threshold must be a number from 0 to less than 1, got {self.threshold!r}."
            )

    def __call__(self, estimator: Any, X: Any = None, y: Any = None, **ignored: Any) -> float:
        """Score the network of a fitted estimator.

        Parameters
        ----------
        estimator : object
            What :func:`find_module` finds a network in.
        X, y, **ignored
            Not used; there for scikit-learn.

        Returns
        -------
        float
            The score, from 0 to 1; higher is sparser.

        Raises
        ------
        ValueError
            If the network has no hidden layer or is not a chain of layers.
        """
        layers = self.per_layer(estimator)
        used = layers["PR" if self.criterion == "participation_ratio" else "active"]
        return float(1 - used.sum() / layers["width"].sum())

    def per_layer(self, estimator: Any, X: Any = None) -> pd.DataFrame:
        """Count the neurons of each hidden layer.

        Parameters
        ----------
        estimator : object
            What :func:`find_module` finds a network in.
        X : ignored
            Not used; there for a uniform signature.

        Returns
        -------
        DataFrame
            One row for each hidden layer, with the columns ``width``, ``active`` (number of active
            neurons) and ``PR`` (participation ratio).
        """
        hidden = _hidden(estimator)
        weights = [layer.effective_weights() for layer in hidden]
        return pd.DataFrame(
            {
                "width": [layer.width for layer in hidden],
                "active": [active_count(c, self.threshold) for c in weights],
                "PR": [participation_ratio(c) for c in weights],
            },
            index=pd.Index([layer.name for layer in hidden], name="layer"),
        )

    def get_metadata_routing(self) -> MetadataRequest:
        """Get the metadata this scorer asks for: none.

        Returns
        -------
        routing : MetadataRequest
            An empty request.
        """
        return MetadataRequest(owner=type(self).__name__)

    def _accept_sample_weight(self) -> bool:
        # A search with weights asks for this, and warns of scorers that would be wrong without
        # them. This one is right with and without.
        return True


def pruning_curve(
    estimator: Any,
    X: Any,
    y: ArrayLike,
    amounts: Iterable[float],
    by: Unit = "magnitude",
    scoring: Any = None,
) -> pd.DataFrame:
    """Score a fitted network without its weakest weights or neurons.

    Parameters
    ----------
    estimator : object
        Fitted classifier, see :func:`find_module`. It is not changed.
    X : array-like
        Samples, as `estimator` takes them.
    y : array-like of shape (n_samples,)
        True class labels.
    amounts : iterable of float
        Fractions to remove, each from 0 to 1.
    by : {"magnitude", "neuron"}, default="magnitude"
        "magnitude" removes the weights that are smallest in the whole network (biases stay),
        "neuron" the hidden neurons or channels whose effective weight is smallest relative to the
        largest of their layer.
    scoring : str, callable or None, default=None
        How to score, as in scikit-learn; None is the estimator's own ``score``.

    Returns
    -------
    DataFrame
        One row for each amount, with the columns ``amount`` and ``score``.

    Raises
    ------
    ValueError
        If an amount is not from 0 to 1, `by` is unknown, or there are no neurons to remove.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn_mr2 import MirrorFlowClassifier
    >>> from sklearn_mr2.metrics import pruning_curve
    >>> X, y = load_iris(return_X_y=True)
    >>> X, y = X[:100], y[:100]
    >>> model = MirrorFlowClassifier((16,), random_state=0).fit(X, y)
    >>> pruning_curve(model, X, y, [0, 0.5, 1], by="neuron")
       amount  score
    0     0.0    1.0
    1     0.5    1.0
    2     1.0    0.5
    """
    if by not in get_args(Unit):
        options = ", ".join(map(repr, get_args(Unit)))
        raise ValueError(f"by must be one of {options}, got {by!r}.")
    amounts = list(amounts)
    for amount in amounts:
        if not isinstance(amount, Real) or not 0 <= float(amount) <= 1:
            raise ValueError(f"amounts must be numbers from 0 to 1, got {amount!r} among them.")
    score = check_scoring(estimator, scoring)
    find_module(estimator)  # before copying what has no network
    remove = _remove_weights if by == "magnitude" else _remove_neurons
    rows = []
    for amount in map(float, amounts):
        pruned = copy.deepcopy(estimator)
        remove(pruned, amount)
        rows.append((amount, float(score(pruned, X, y))))
    return pd.DataFrame(rows, columns=["amount", "score"])


def _remove_weights(estimator: Any, amount: float) -> None:
    weights = [(layer, "weight") for _, layer in weight_layers(find_module(estimator))]
    prune.global_unstructured(weights, prune.L1Unstructured, amount=amount)
    for layer, name in weights:
        prune.remove(layer, name)


def _remove_neurons(estimator: Any, amount: float) -> None:
    hidden = _hidden(estimator)
    relative = []
    for layer in hidden:
        c = layer.effective_weights()
        relative.append(c / c.max() if c.any() else c)
    importance = torch.cat(relative)
    order = importance.argsort(stable=True)
    removed = torch.zeros(len(importance), dtype=torch.bool)
    removed[order[: round(amount * len(order))]] = True
    for layer, mask in zip(hidden, removed.split([layer.width for layer in hidden]), strict=True):
        layer.silence(mask)
