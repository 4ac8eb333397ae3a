"""Mirror flow as a scikit-learn classifier."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from ..base import TorchClassifier, TrainingData
from ..net import IsolatedRNG, TensorDataset, TensorNet, evaluation_mode
from .flow import FlowNet, MeanLoss, MirrorModule, MirrorNet, Potentials
from .kkt import kkt_ratio
from .losses import LOSSES, margins
from .networks import HomogeneousMLP, homogeneity_degree, layer_groups
from .neurons import hidden_layers, keep_neurons
from .potentials import Potential, get_potential
from .theory import horizon_margin, q_margin

#: Rows of a chunk of full-batch training, and of prediction.
_CHUNK = 4096
#: Rows that a user's network is examined with.
_PROBE_ROWS = 8


class MirrorFlowClassifier(TorchClassifier):
    r"""Homogeneous network trained by mirror flow, whose potential decides what it learns.

    Mirror flow follows :math:`\dot z = -\nabla L(\theta)` with :math:`z = \nabla R(\theta)`. On
    separable data the parameters of a homogeneous network grow without end while their direction
    converges to a point that satisfies the optimality conditions of the largest margin in the norm
    of the potential :math:`R` [1]_: :math:`L_1` for the hyperbolic entropy, which makes few neurons
    active, :math:`L_2` for the Euclidean potential (gradient descent) and :math:`L_p` for powers,
    which use all neurons.

    By default the flow itself is followed, with all data in each step, in the log domain and in a
    normalised time in which the margin grows at a steady pace. With `batch_size` networks too large
    for that are trained by mini-batch mirror descent.

    Parameters
    ----------
    hidden_layer_sizes : sequence of int or int, default=(64,)
        Widths of the hidden layers of a ReLU network; ``()`` is the linear model.
    module : torch.nn.Module, class or callable, optional
        Another network: an instance, which is copied and never changed, or what makes one, called
        with the parameters ``module__*``. It maps `X` to a logit for each class, or to a single
        one for two classes. `hidden_layer_sizes`, `fit_intercept` and `init_scale` have no effect
        then. It should be homogeneous in its parameters: that is checked, and a warning names the
        layer that breaks it.
    potential : str, Potential, list or dict, default="hyperbolic_entropy"
        The mirror potential: "hyperbolic_entropy", "euclidean", "power", "smoothed_power" or a
        :class:`~sklearn_mr2.mirror.potentials.Potential`; a list has one for each layer, a
        dictionary names the layers. Parameters of a single potential can be given as
        ``potential__lam`` and ``potential__p``.
    loss : {"logistic", "exponential"}, default="logistic"
        The loss; "logistic" is cross-entropy.
    step_size : float, default=0.1
        Full batch: the first-order decrease of the log-loss in each step. The path tends to the
        flow as it gets smaller.
    batch_size : int, optional
        Samples in a mini-batch. None uses all samples in each step, summed over in chunks of
        ``iterator_train__batch_size`` rows.
    lr : float, default=0.3
        Mini-batches: step of the dual variable along the gradient of the mean loss. Parameters move
        by this divided by :math:`r''(\theta)`, so the hyperbolic entropy wants values several
        times larger than the Euclidean potential.
    max_epochs : int or "auto", default="auto"
        Largest number of passes over the data. "auto" is 1000 steps of the full batch and 50
        epochs of mini-batches.
    target_margin : float, default=30
        Training ends once the smallest margin reaches this. The margin is that of the logits, so
        the loss is then about ``exp(-target_margin)``.
    tol : float, default=1e-2
        Full batch: training ends when the direction of each layer has moved by less than this,
        in the layer's own norm, while the margin doubled (from 10 on). That is an estimate of its
        distance from the limit. 0 goes on to `target_margin`.
    fit_intercept : bool, default=True
        Whether the first layer has a bias. In later layers it would break homogeneity.
    init_scale : "auto", "he", "zeros" or float, default="auto"
        Initial weights: "he" draws them so that activations keep their size, a number is their
        standard deviation, "zeros" is for the linear model. "auto" is "zeros" for that and "he"
        for others.
    class_weight : dict or "balanced", optional
        Weights of the classes, multiplied with `sample_weight`. Weights change the path, but not
        the direction of the largest margin.
    validation_fraction : float, optional
        Share of the training data held out for validation scores and `callbacks` such as early
        stopping. A class with a single sample stays in the training part.
    device : str or torch.device, default="auto"
        Where to train and predict. "auto" takes a GPU when there is one.
    dtype : {"auto", "float32", "float64"}, default="auto"
        Floating point type of data and model. "auto" keeps that of `X`.
    warm_start : bool, default=False
        Start from the parameters (and the time) of the last fit.
    callbacks : list of skorch callbacks, optional
        Used as copies; parameters are passed as ``callbacks__*``.
    verbose : int, default=0
        0 prints nothing, 1 shows a progress bar, 2 prints a line for each epoch.
    random_state : int, RandomState instance or None, default=None
        Source of randomness: initialisation and the order of mini-batches. Neither numpy's nor
        torch's global state is used.
    **kwargs
        ``module__*``, ``potential__*``, ``callbacks__*`` and ``iterator_train__*``.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    degree_ : float
        Degree L of the network, :math:`f(x; a\theta) = a^L f(x; \theta)`; NaN if there is none.
    margin_ : float
        The smallest margin of the training data; not positive if they are not separated.
    q_margin_ : float
        :math:`q_{\min} / (\alpha Q)^{L/\alpha}`, the margin relative to the dual potential Q.
    horizon_margin_ : float
        :math:`q_{\min} / \phi_\alpha(\theta)^L`, the margin relative to the norm of the parameters:
        what the flow maximises.
    balance_ : ndarray of shape (n_layers - 1,)
        How far consecutive layers have come off their balance: the change, since the
        initialisation, of the difference of :math:`Q_i / L_i`, relative to :math:`Q / L`. The flow
        conserves it; the change is what steps of finite size add.
    log_time_ : float
        Logarithm of the flow's time; NaN for mini-batches.
    coefs_ : list of ndarray
        Weights of the layers, each of shape (n_inputs, n_outputs). Not with `module`.
    intercepts_ : list of ndarray
        Biases of the layers, zero but for the first. Not with `module`.
    n_iter_ : int
        Number of epochs, which are steps in full-batch training.
    history_ : DataFrame
        One row an epoch. ``train_loss`` is the mean loss, ``margin`` the smallest margin (over
        the batches of the epoch where they are small); full batch also ``log_loss``, the logarithm
        of the summed loss, and ``log_time``. ``Q``, ``q_margin``, ``horizon_margin`` and
        ``sparsity`` (1 - participation ratio / width of the hidden layers) are recorded in epochs
        that are about 10 % apart, and NaN in others.
    net_ : skorch net
        The trained net.
    n_features_in_ : int
        Number of features seen in :meth:`fit`.
    feature_names_in_ : ndarray of shape (n_features,)
        Names of the features, if `X` had string names.

    Notes
    -----
    Logits grow with the margin, so probabilities are close to 0 and 1. For probabilities that
    mean something use :class:`~sklearn.calibration.CalibratedClassifierCV`.

    Data that cannot be separated by the network have no margin to maximise. The full batch then
    ends at the minimum of the loss, or after `max_epochs`, with a warning.

    References
    ----------
    .. [1] P. Jacobs and G. Montufar, "Implicit bias of mirror flow in homogeneous neural networks",
       arXiv:2605.19458.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn_mr2 import MirrorFlowClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> X, y = X[:100], y[:100]
    >>> model = MirrorFlowClassifier((16,), target_margin=15, random_state=0).fit(X, y)
    >>> model.score(X, y)
    1.0
    >>> dense = MirrorFlowClassifier(
    ...     (16,), potential="smoothed_power", target_margin=15, random_state=0
    ... ).fit(X, y)
    >>> sparsity = [m.history_["sparsity"].iloc[-1] for m in (model, dense)]
    >>> bool(sparsity[0] > sparsity[1])
    True
    """

    _passthrough_prefixes = ("module__", "potential__", "callbacks__", "iterator_train__")

    _parameter_constraints: dict = {
        **TorchClassifier._parameter_constraints,
        "hidden_layer_sizes": ["array-like", Interval(Integral, 1, None, closed="left")],
        "module": [nn.Module, callable, None],
        "potential": [str, Potential, list, tuple, dict],
        "loss": [StrOptions(set(LOSSES))],
        "step_size": [Interval(Real, 0, None, closed="neither")],
        "batch_size": [Interval(Integral, 1, None, closed="left"), None],
        "lr": [Interval(Real, 0, None, closed="neither")],
        "target_margin": [Interval(Real, 0, None, closed="right")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "fit_intercept": ["boolean"],
        "init_scale": [
            StrOptions({"auto", "he", "zeros"}),
            Interval(Real, 0, None, closed="neither"),
        ],
    }

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] | int = (64,),
        *,
        module: nn.Module | Callable[..., nn.Module] | None = None,
        potential: Potentials = "hyperbolic_entropy",
        loss: Literal["logistic", "exponential"] = "logistic",
        step_size: float = 0.1,
        batch_size: int | None = None,
        lr: float = 0.3,
        max_epochs: int | Literal["auto"] = "auto",
        target_margin: float = 30.0,
        tol: float = 1e-2,
        fit_intercept: bool = True,
        init_scale: float | Literal["auto", "he", "zeros"] = "auto",
        class_weight: dict | Literal["balanced"] | None = None,
        validation_fraction: float | None = None,
        device: str | torch.device = "auto",
        dtype: Literal["auto", "float32", "float64"] = "auto",
        warm_start: bool = False,
        callbacks: list | None = None,
        verbose: int = 0,
        random_state: Any = None,
        **kwargs: Any,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.module = module
        self.potential = potential
        self.loss = loss
        self.step_size = step_size
        self.batch_size = batch_size
        self.lr = lr
        self.max_epochs = max_epochs
        self.target_margin = target_margin
        self.tol = tol
        self.fit_intercept = fit_intercept
        self.init_scale = init_scale
        self.class_weight = class_weight
        self.validation_fraction = validation_fraction
        self.device = device
        self.dtype = dtype
        self.warm_start = warm_start
        self.callbacks = callbacks
        self.verbose = verbose
        self.random_state = random_state
        self._set_passthrough(kwargs)

    # ------------------------------------------------------------------ building the net

    def _wants_2d(self) -> bool:
        return self.module is None

    def _build_net(
        self, data: TrainingData, rng: IsolatedRNG, seed: int, *, by_parts: bool
    ) -> TensorNet:
        with rng.scope():
            network = self._build_network(data).to(self.device_, data.X.dtype)
            self._check_outputs(network, data)  # where lazy layers draw their weights
        degree = self._degree(network, data.X)
        full_batch = self.batch_size is None and not by_parts
        options: dict[str, Any] = {
            "criterion": MeanLoss(self.loss),
            "potential": self._potentials(),
            "degree": degree,
            "target_margin": self.target_margin,
            "rng": rng,
            "stochastic": self.module is not None,
            "max_epochs": self.max_epochs,
            "iterator_valid__batch_size": _CHUNK,
            "callbacks": self._fresh_callbacks(),
            "device": self.device_,
            "verbose": self.verbose,
            **self._passthrough("callbacks__", "iterator_train__"),
        }
        if self.max_epochs == "auto":
            options["max_epochs"] = 1000 if full_batch else 50
        module = MirrorModule(network, data.X[:_PROBE_ROWS])
        net: TensorNet
        if full_batch:
            net = FlowNet(
                module,
                loss=self.loss,
                total_weight=data.total_weight,
                tol=self.tol,
                lr=self.step_size,
                batch_size=_CHUNK,
                **options,
            )
        else:
            options.setdefault("iterator_train__shuffle", True)
            net = MirrorNet(
                module,
                lr=self.lr,
                batch_size=128 if self.batch_size is None else self.batch_size,
                iterator_train__generator=torch.Generator().manual_seed(seed),
                **options,
            )
        return net.initialize()

    def _build_network(self, data: TrainingData) -> nn.Module:
        parameters = self._passthrough("module__")
        if self.module is None:
            if parameters:
                raise ValueError(f"{', '.join(parameters)} need a class as module.")
            return self._build_mlp(data)
        if isinstance(self.module, nn.Module):
            if parameters:
                raise ValueError(
                    f"{', '.join(parameters)} need a class as module, but it is an instance of "
                    f"{type(self.module).__name__}. Give the class, or build the instance so."
                )
            return copy.deepcopy(self.module)
        start = len("module__")
        network = self.module(**{name[start:]: value for name, value in parameters.items()})
        if not isinstance(network, nn.Module):
            raise TypeError(
                f"module must be or make a torch.nn.Module, but it makes a {type(network).__name__}"
            )
        return network

    def _build_mlp(self, data: TrainingData) -> HomogeneousMLP:
        sizes = self._hidden_layer_sizes()
        scale = self.init_scale
        if scale == "auto":
            scale = "he" if sizes else "zeros"
        if scale == "zeros" and sizes:
            raise ValueError(
                "init_scale='zeros' is for the linear model, hidden_layer_sizes=(): the gradients "
                "of a network with hidden layers vanish there. Use 'he' or a number."
            )
        return HomogeneousMLP(
            data.X.shape[1],
            sizes,
            1 if data.n_classes == 2 else data.n_classes,
            fit_intercept=self.fit_intercept,
            weight_init=scale,
        )

    def _hidden_layer_sizes(self) -> list[int]:
        sizes = np.atleast_1d(np.asarray(self.hidden_layer_sizes, dtype=object)).tolist()
        for size in sizes:
            if not isinstance(size, Integral) or size < 1:
                raise ValueError(
                    "hidden_layer_sizes must be integers from 1 up, one for each hidden layer, got "
                    f"{self.hidden_layer_sizes!r}."
                )
        return [int(size) for size in sizes]

    def _potentials(self) -> Potentials:
        start = len("potential__")
        parameters = {k[start:]: v for k, v in self._passthrough("potential__").items()}
        if isinstance(self.potential, str | Potential):
            return get_potential(self.potential, **parameters)
        if parameters:
            raise ValueError(
                f"{', '.join('potential__' + name for name in parameters)} need a single potential "
                "for all layers. Give each layer's parameters in potential, as in "
                "[HyperbolicEntropy(lam=0.1), Euclidean()]."
            )
        return self.potential

    def _check_outputs(self, network: nn.Module, data: TrainingData) -> None:
        X = data.X[:_PROBE_ROWS]
        with torch.no_grad(), evaluation_mode(network):
            outputs = network(X)
        if not any(p.requires_grad for p in network.parameters()):
            raise ValueError("module has no trainable parameters.")
        allowed: list[tuple[int, ...]] = [(len(X), data.n_classes)]
        if data.n_classes == 2:
            allowed += [(len(X),), (len(X), 1)]
        if not isinstance(outputs, Tensor) or tuple(outputs.shape) not in allowed:
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ValueError(
                f"module must map {len(X)} samples of {data.n_classes} classes to logits of shape "
                f"{' or '.join(map(str, allowed))}, got {got}."
            )

    def _degree(self, network: nn.Module, X: Tensor) -> float:
        if self.module is None:
            return float(len(list(network.parameters())) - self.fit_intercept)
        try:
            return homogeneity_degree(network, X[:_PROBE_ROWS])
        except ValueError as error:  # not homogeneous, or zero for these samples
            warnings.warn(
                f"module: {error} Training goes on without what the theory needs the degree of "
                "homogeneity for: q_margin_, horizon_margin_ and balance_ are NaN.",
                UserWarning,
                stacklevel=6,
            )
            return math.nan

    # ------------------------------------------------------------------ after training

    def _start_from(self, net: TensorNet, previous: TensorNet) -> None:
        super()._start_from(net, previous)
        assert isinstance(net, MirrorNet)
        assert isinstance(previous, MirrorNet)
        net.continue_from(previous)

    def _prepare_partial(self, net: TensorNet, data: TrainingData) -> TensorNet:
        if not isinstance(net, FlowNet):
            return net
        # Continue a fit to all the data by mini-batches.
        partial = self._new_net(data, by_parts=True)
        self._start_from(partial, net)
        return partial

    def _after_training(self, data: TrainingData, valid: TensorDataset | None) -> None:
        net = self.net_
        assert isinstance(net, MirrorNet)
        logits = torch.cat([logits for logits, _ in net.outputs(data.X)])
        self.margin_ = margins(logits, data.y).min().item()
        self.degree_ = net.degree
        groups = net.groups()
        known = not math.isnan(net.degree)
        self.q_margin_ = q_margin(self.margin_, groups, net.degree) if known else math.nan
        self.horizon_margin_ = (
            horizon_margin(self.margin_, groups, net.degree) if known else math.nan
        )
        self.balance_ = net.balance().numpy()
        self.log_time_ = net.optimizer_.log_time if isinstance(net, FlowNet) else math.nan
        self._read_weights()

    def _read_weights(self) -> None:
        if self.module is not None:
            return
        layers = [m for m in self.net_.module_.network if isinstance(m, nn.Linear)]
        self.coefs_ = [layer.weight.detach().cpu().numpy().T.copy() for layer in layers]
        self.intercepts_ = [
            np.zeros(layer.out_features, self.dtype_)
            if layer.bias is None
            else layer.bias.detach().cpu().numpy().copy()
            for layer in layers
        ]

    @property
    def _n_features_out(self) -> int:
        return self.net_.module_.n_features_out

    # ------------------------------------------------------------------ on request

    def kkt_ratio(self, X: Any, y: Any, **options: Any) -> float:
        r"""Measure how close the direction is to a solution of the margin problem.

        The ratio is 1 exactly where the parameters satisfy the conditions of optimality (KKT) of
        :math:`\min \tfrac12 \phi_\alpha(\theta)^2` with all margins at least 1. For a linear model
        it is the margin divided by the largest possible one.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            The training data.
        y : array-like of shape (n_samples,)
            Their labels.
        **options
            Those of :func:`~sklearn_mr2.mirror.kkt.kkt_ratio`.

        Returns
        -------
        float
            The ratio, in (0, 1].

        Raises
        ------
        ValueError
            If the data are not separated, the network is not homogeneous, or `y` has a label that
            was not seen in training.
        """
        check_is_fitted(self)
        if math.isnan(self.degree_):
            raise ValueError("kkt_ratio needs a homogeneous network, and this one is not.")
        X, y = self._check_X(X, y=y, reset=False)
        unseen = np.setdiff1d(y, self.classes_)
        if len(unseen):
            raise ValueError(f"y contains labels that were not seen in fit: {unseen.tolist()}.")
        network = copy.deepcopy(self.net_.module_.network).cpu()
        groups = layer_groups(network, self.net_.potential)
        X, y = torch.tensor(X), torch.as_tensor(np.searchsorted(self.classes_, y))
        return kkt_ratio(network, X, y, groups, self.degree_, **options)

    def compact(self, threshold: float = 1e-3) -> Self:
        r"""Return a fitted copy without the hidden neurons that contribute next to nothing.

        A neuron is removed if its effective weight :math:`c_j = \|w_j\| \|a_j\|` is at most
        `threshold` times the largest of its layer. With one hidden layer no logit of a sample
        :math:`x` changes by more than the sum of the removed :math:`c_j` times
        :math:`\|(x, 1)\|_2`.

        Parameters
        ----------
        threshold : float, default=1e-3
            From 0, which removes only neurons without any effect, to less than 1.

        Returns
        -------
        MirrorFlowClassifier
            The smaller model, whose `hidden_layer_sizes` are the widths that are left. Its
            `coefs_` and `intercepts_` are its own; other attributes are those of the training.

        Raises
        ------
        ValueError
            If `threshold` is not in [0, 1), or if the network is a `module`.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn_mr2 import MirrorFlowClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = MirrorFlowClassifier((64,), random_state=0).fit(X[:100], y[:100])
        >>> small = model.compact()
        >>> small.hidden_layer_sizes[0] < 64
        True
        >>> bool((small.predict(X) == model.predict(X)).all())
        True
        """
        check_is_fitted(self)
        if not isinstance(threshold, Real) or not 0 <= threshold < 1:
            raise ValueError(f"threshold must be a number from 0 to less than 1, got {threshold!r}")
        if self.module is not None:
            raise ValueError(
                "compact is for networks made from hidden_layer_sizes: how the layers of a module "
                "hang together is not known."
            )
        network = self.net_.module_.network
        kept = []
        for hidden in hidden_layers(network):
            c = hidden.effective_weights()
            kept.append(c > threshold * c.max())
            kept[-1][c.argmax()] = True  # even where all are zero
        small = copy.deepcopy(self)
        small.hidden_layer_sizes = tuple(int(mask.sum()) for mask in kept)
        small.net_.replace_network(keep_neurons(network, kept))
        small._read_weights()
        return small
