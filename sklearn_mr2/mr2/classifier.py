"""MR2 as a scikit-learn classifier."""

from __future__ import annotations

import copy
import math
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import check_cv
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from ..base import TorchClassifier, TrainingData
from ..checkpoint import fingerprint
from ..net import IsolatedRNG, TensorDataset, TensorNet
from .heads import CosineHead, LinearHead
from .losses import MARGIN_MODES, MARGIN_STATISTICS, LogitMarginLoss, MR2Loss
from .modules import MLP, HeadedModule, n_features_of
from .notebook import MarginsInNotebooks
from .probe import GramPreconditioner, HessianPreconditioner, PreconditionedLBFGS, Solve
from .statistics import ClassMoments, class_margins, class_moments

#: Samples that the probe's preconditioner is made of, for each feature and at least. At weights of
#: zero all have the same curvature and few will do; easy problems are solved before the next one.
_FIRST_ROWS, _LATER_ROWS = (2, 1024), (8, 4096)

#: Largest number of weights for which the preconditioner is the whole Hessian, the first, second
#: and later times that one is made in a fit. With 2048 weights it costs as much as some 50 passes
#: over the data, which is worth while where that many have not been enough.
_HESSIAN_SIDES = (640, 640, 2048)

#: Samples the Hessian is made of: the more the better, since it learns about each pair of classes
#: from few.
_HESSIAN_ROWS = 8192

#: How many times a fit on a path takes the Hessian of the last fit before it makes its own.
_INHERITED_TIMES = 2

#: Mean margin in units of the mean class error with ``margin="auto"``; 6 to 12 do much the same.
_MARGIN_PER_ERROR = 8.0

#: Ratio of the largest to the smallest margin above which margins should not divide.
_WIDE = 4.0


class FixedMarginLoss(nn.Module):
    """The logit margin loss of frozen features, whose margins do not change during training.

    Parameters
    ----------
    margins, spread : Tensor of shape (n_classes,)
        The margins, and the statistic they come from.
    moments : ClassMoments or None
        The moments of the features, if that statistic is made of them.
    mode : {"divide", "subtract"}
        How margins act.
    """

    margins: Tensor
    spread: Tensor

    def __init__(
        self,
        margins: Tensor,
        spread: Tensor,
        moments: ClassMoments | None,
        mode: Literal["divide", "subtract"],
    ) -> None:
        super().__init__()
        self.logit_loss = LogitMarginLoss(mode)
        self.register_buffer("margins", margins)
        self.register_buffer("spread", spread)
        self.moments = moments

    def forward(
        self, logits: Tensor, features: Tensor, y: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        return self.logit_loss(logits, y, self.margins, sample_weight)


#: Largest number of entries of a float32 `X` that a probe is nevertheless fitted to in float64: so
#: little data that speed is no concern, while rounding can be, if the features are badly scaled.
_SMALL = 2**18


class ProbeNet(TensorNet):
    """A net whose optimiser is :class:`~sklearn_mr2.mr2.probe.PreconditionedLBFGS`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        make_preconditioner: Callable[[TensorNet], Solve] | None = None,
        tol: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, accumulate=True, stochastic=False, **kwargs)
        self.make_preconditioner = make_preconditioner
        self.tol = tol

    def infer(self, x: Tensor, **fit_params: Any) -> Any:
        # Small data are fitted in float64; validation data and large data come as they are.
        return super().infer(x.to(self.module_.head.weight.dtype), **fit_params)

    def initialize_optimizer(self, *args: Any, **kwargs: Any) -> ProbeNet:
        make = self.make_preconditioner
        self.optimizer_: PreconditionedLBFGS | None = PreconditionedLBFGS(
            self.module_.parameters(), None if make is None else lambda: make(self), tol=self.tol
        )
        return self

    def train_on(
        self, train: TensorDataset, valid: TensorDataset | None = None, *, epochs: int
    ) -> ProbeNet:
        super().train_on(train, valid, epochs=epochs)
        # An end that a callback asked for, or an overflow, is not a lack of iterations.
        if len(self.history) == epochs and not getattr(self.optimizer_, "converged", False):
            warnings.warn(
                f"The probe has not converged in max_epochs={epochs} iterations. Raise max_epochs "
                "or tol, or standardise the features.",
                ConvergenceWarning,
                stacklevel=4,
            )
        # The optimiser refers to the data, the net is kept and pickled.
        self.make_preconditioner = None
        self.optimizer_ = None
        return self

    def _warn_of_divergence(self) -> None:
        warnings.warn(
            f"The probe's weights or loss overflow in iteration {len(self.history)}; the last "
            "finite ones are kept. Lower C, scale the features, or set dtype='float64'.",
            ConvergenceWarning,
            stacklevel=7,
        )


class MR2Classifier(MarginsInNotebooks, TorchClassifier):
    """Classifier with a margin for each class, computed from the spread of its features.

    Classes differ in how far their features spread, and those that spread more tend to be learned
    worse even when all classes have the same number of samples. MR2 gives a class the margin

    .. math:: \\gamma_k = \\bar c \\, K \\, r_k^{1/3} \\Big/ \\sum_j r_j^{1/3}, \\qquad
        r_k = \\|\\mu_k\\|_2^2 + \\|s_k\\|_2^2

    (Corollary 1 of [1]_; :math:`\\mu_k` and :math:`s_k` are mean and standard deviation of the
    class's features) and minimises :math:`-\\log \\mathrm{softmax}(z / \\gamma_y)_y`. Predictions
    use the raw logits `z`.

    With ``module="linear"`` it is a linear probe: a convex problem, solved to its optimum by a
    preconditioned full-batch optimiser. Without margins (``margin_statistic=None``) it is
    :class:`~sklearn.linear_model.LogisticRegression`.

    Parameters
    ----------
    module : "linear", "mlp", or torch.nn.Module class or instance, default="linear"
        What maps `X` to the features under the head: "linear" uses `X` itself, which makes a linear
        probe; "mlp" is a multilayer perceptron with ``module__hidden_layer_sizes`` (default
        ``(128,)``) and ``module__dropout``. A module of one's own maps a batch of `X`, of any
        rank, to features of shape (n_samples, n_features). An instance may be pretrained; it is
        copied, never changed. Parts of it that are frozen, by ``part.requires_grad_(False)`` or a
        callback, and in evaluation mode, by ``part.eval()``, stay in that mode in training: batch
        normalisation keeps its statistics, and nothing is dropped out.
    head : {"linear", "cosine"}, default="linear"
        What maps features to logits: weights and intercepts, or scaled cosines as for CLIP, with
        ``head__scale`` and ``head__learn_scale``; see :class:`~sklearn_mr2.mr2.heads.CosineHead`.
        The statistics are those of the normalised features then; use ``margin_norm=3``.
    margin : float or "auto", default=1.0
        Mean of the class margins, :math:`\\bar c`. Where margins divide, it acts as a temperature
        that trades against `C`, and must be positive. Where they subtract, 0 is cross-entropy.
        "auto", for margins that subtract and follow the "error", is eight times the mean of the
        class errors: no margins where there are no errors to shift. The penalty is weakened to go
        with them, see `C_`, so that `C` is that of the best model without margins.
    margin_statistic : {"second_moment", "dispersion", "error"} or None, default="second_moment"
        What the margin of a class grows with: the second moment of its features (the paper's
        rule), their dispersion around the class mean, or the class's out-of-fold error, to go with
        ``margin_mode="subtract"``. With None every class gets `margin`.
    margin_exponent : float, default=1/3
        Power of the statistic; 0 gives every class `margin`. With "error", 0.5 to 1 are good.
    margin_mode : {"divide", "subtract"}, default="divide"
        Whether a margin divides the logits of a sample (the paper's rule) or is subtracted from
        the logit of its class.
    margin_norm : float, default=2
        Norm of the statistics, see :func:`~sklearn_mr2.mr2.statistics.class_moments`.
    representation_weight : float or "auto", default="auto"
        Weight of the loss that pulls together samples of a class that are far apart; "auto" is
        0.003. It changes features only, so it does not apply to ``module="linear"``. Its pull grows
        with the square of the features' scale: end a module in a normalisation, or choose the
        weight with care.
    representation_tau : float or "auto", default="auto"
        Its temperature, see :class:`~sklearn_mr2.mr2.losses.RepresentationMarginLoss`.
    momentum : float or None, default=0.95
        How much of a class's running statistics remains at each new batch, for features that are
        learned; see :class:`~sklearn_mr2.mr2.statistics.RunningClassMoments`.
    C : float, default=1.0
        Inverse strength of the L2 penalty on the head's weights, with the meaning it has in
        :class:`~sklearn.linear_model.LogisticRegression`: the objective is
        ``sum_i w_i l_i + ||W||^2 / (2 C)``, the intercept is not penalised. With
        ``margin="auto"`` the `C` of a model without margins. It does not apply to a cosine head,
        whose weights are directions.
    fit_intercept : bool or "auto", default="auto"
        Whether the head has an intercept. "auto" gives one to a linear head, none to a cosine one.
    class_weight : dict or "balanced", optional
        Weights of the classes, multiplied with `sample_weight`.
    error_cv : int or cross-validation splitter, optional
        Folds that the class errors behind ``margin_statistic="error"`` and
        `margin_error_correlation_` are measured on; each fold is one more fit. None means 5 folds
        with ``margin_statistic="error"`` and none otherwise. A sample whose class is not in the
        training part of its fold does not count. :meth:`partial_fit` measures nothing.
    optimizer : "auto" or subclass of torch.optim.Optimizer, default="auto"
        "auto" is the full-batch optimiser for a linear probe and Adam otherwise. Parameters are
        passed as ``optimizer__*``.
    max_epochs : int or "auto", default="auto"
        Largest number of passes over the data; for the full-batch optimiser of iterations. "auto"
        is 2000 for it and 50 otherwise.
    batch_size : int or "auto", default="auto"
        Samples in a mini-batch, 128 by default. The full-batch optimiser always sums over all
        samples and takes this as the number of rows that it handles at a time.
    lr : float or "auto", default="auto"
        Learning rate of mini-batch optimisers, 1e-3 by default. The full-batch optimiser has none
        and warns if one is given.
    tol : float, default=1e-6
        The full-batch optimiser stops at this relative distance from the optimal objective.
    validation_fraction : float, optional
        Share of the training data held out for validation scores and `callbacks` such as early
        stopping. A class with a single sample stays in the training part.
    device : str or torch.device, default="auto"
        Where to train and predict. "auto" takes a GPU when there is one.
    dtype : {"auto", "float32", "float64"}, default="auto"
        Floating point type of data and model. "auto" keeps that of `X`.
    mixed_precision : "bfloat16" or None, default=None
        Type of matrix products while training by mini-batches. Parameters and losses keep `dtype`.
    compile : bool, default=False
        Whether to pass the network through :func:`torch.compile`, with ``compile__*``.
    checkpoint : path, optional
        File that mini-batch training writes its state to after each epoch. If training is cut off,
        the same fit continues from it and ends with the same model; `random_state` must be an
        integer for that. The file is removed when training is over.
    data_parallel : bool, default=False
        Whether the processes started by ``torchrun`` or ``accelerate launch`` train one model
        together. Each calls :meth:`fit` with the same data and does its share of the rows of each
        batch; all end with the model that a single process would, up to rounding. The script has
        to set up the process group, by ``torch.distributed.init_process_group()`` or
        ``accelerate.Accelerator()``.
    warm_start : bool, default=False
        Start from the parameters of the last fit.
    callbacks : list of skorch callbacks, optional
        Used as copies; parameters are passed as ``callbacks__*``.
    verbose : int, default=0
        0 prints nothing, 1 shows a progress bar, 2 prints a line for each epoch.
    random_state : int, RandomState instance or None, default=None
        Source of randomness: initialisation, order of mini-batches, folds. Neither numpy's nor
        torch's global state is used.
    **kwargs
        Parameters of the parts: ``module__*``, ``head__*``, ``optimizer__*``, ``callbacks__*``,
        ``iterator_train__*`` and ``compile__*``. ``optimizer__param_groups`` sets parts of the
        network apart, as in ``[("backbone.*", {"lr": 1e-5})]``.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    coef_ : ndarray of shape (n_classes, n_features_out) or (1, n_features_out)
        Weights of a linear head; one row for two classes.
    intercept_ : ndarray of shape (n_classes,) or (1,)
        Intercepts of a linear head.
    C_ : float
        Inverse strength of the penalty in the fit: `C`, or ``C * (1 + mean(margins_) / 2)`` with
        ``margin="auto"``. For a margin between them the logits of two classes have to grow by half
        of it each, which the penalty holds down.
    margins_ : ndarray of shape (n_classes,)
        Margin of each class.
    class_spread_ : ndarray of shape (n_classes,)
        The statistic that the margins come from; NaN with ``margin_statistic=None``.
    margin_error_correlation_ : float
        Spearman's rank correlation of margins and class errors: whether the classes with the
        larger margins are the difficult ones. NaN where it is not defined or was not asked for.
    margin_error_source_ : {"validation", "out_of_fold", None}
        What the class errors were measured on: the validation data where there are some, else
        out of fold with `error_cv`.
    n_iter_ : int
        Number of epochs trained.
    history_ : DataFrame
        One row an epoch: losses, durations and whatever callbacks recorded.
    net_ : skorch net
        The trained net.
    n_features_in_ : int
        Number of features seen in :meth:`fit`.
    feature_names_in_ : ndarray of shape (n_features,)
        Names of the features, if `X` had string names.

    References
    ----------
    .. [1] Zhu et al., "Reducing class-wise performance disparity via margin regularization",
       arXiv 2602.00205.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn_mr2 import MR2Classifier
    >>> X, y = load_digits(return_X_y=True)
    >>> probe = MR2Classifier(C=0.1).fit(X[:1000], y[:1000])
    >>> probe.margins_.shape
    (10,)
    >>> probe.score(X[1000:], y[1000:]) > 0.9
    True
    """

    _passthrough_prefixes = (*TorchClassifier._passthrough_prefixes, "head__", "compile__")

    # Set by MR2ClassifierCV, which fits the same data again and again.
    _path: Path | None = None

    _parameter_constraints: dict = {
        **TorchClassifier._parameter_constraints,
        "module": [StrOptions({"linear", "mlp"}), nn.Module, type],
        "head": [StrOptions({"linear", "cosine"})],
        "margin": [Interval(Real, 0, None, closed="left"), StrOptions({"auto"})],
        "margin_statistic": [StrOptions(set(MARGIN_STATISTICS)), None],
        "margin_exponent": [Interval(Real, 0, None, closed="left")],
        "margin_mode": [StrOptions(set(MARGIN_MODES))],
        "margin_norm": [Interval(Real, 1, None, closed="both")],
        "representation_weight": [Interval(Real, 0, None, closed="left"), StrOptions({"auto"})],
        "representation_tau": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto"})],
        "momentum": [Interval(Real, 0, 1, closed="left"), None],
        "C": [Interval(Real, 0, None, closed="right")],
        "fit_intercept": ["boolean", StrOptions({"auto"})],
        "error_cv": [Interval(Integral, 2, None, closed="left"), HasMethods(["split"]), None],
        "optimizer": "no_validation",  # see _check_optimizer
        "batch_size": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "lr": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto"})],
        "tol": [Interval(Real, 0, None, closed="left")],
        "compile": ["boolean"],
        "checkpoint": [str, os.PathLike, None],
        "data_parallel": ["boolean"],
        "mixed_precision": [StrOptions({"bfloat16"}), None],
    }

    def __init__(
        self,
        module: Any = "linear",
        *,
        head: Literal["linear", "cosine"] = "linear",
        margin: float | Literal["auto"] = 1.0,
        margin_statistic: Literal["second_moment", "dispersion", "error"] | None = "second_moment",
        margin_exponent: float = 1 / 3,
        margin_mode: Literal["divide", "subtract"] = "divide",
        margin_norm: float = 2,
        representation_weight: float | Literal["auto"] = "auto",
        representation_tau: float | Literal["auto"] = "auto",
        momentum: float | None = 0.95,
        C: float = 1.0,
        fit_intercept: bool | Literal["auto"] = "auto",
        class_weight: dict | Literal["balanced"] | None = None,
        error_cv: Any = None,
        optimizer: Any = "auto",
        max_epochs: int | Literal["auto"] = "auto",
        batch_size: int | Literal["auto"] = "auto",
        lr: float | Literal["auto"] = "auto",
        tol: float = 1e-6,
        validation_fraction: float | None = None,
        device: str | torch.device = "auto",
        dtype: Literal["auto", "float32", "float64"] = "auto",
        mixed_precision: Literal["bfloat16"] | None = None,
        compile: bool = False,
        checkpoint: str | os.PathLike | None = None,
        data_parallel: bool = False,
        warm_start: bool = False,
        callbacks: list | None = None,
        verbose: int = 0,
        random_state: Any = None,
        **kwargs: Any,
    ) -> None:
        self.module = module
        self.head = head
        self.margin = margin
        self.margin_statistic = margin_statistic
        self.margin_exponent = margin_exponent
        self.margin_mode = margin_mode
        self.margin_norm = margin_norm
        self.representation_weight = representation_weight
        self.representation_tau = representation_tau
        self.momentum = momentum
        self.C = C
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.error_cv = error_cv
        self.optimizer = optimizer
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.lr = lr
        self.tol = tol
        self.validation_fraction = validation_fraction
        self.device = device
        self.dtype = dtype
        self.mixed_precision = mixed_precision
        self.compile = compile
        self.checkpoint = checkpoint
        self.data_parallel = data_parallel
        self.warm_start = warm_start
        self.callbacks = callbacks
        self.verbose = verbose
        self.random_state = random_state
        self._set_passthrough(kwargs)

    # ------------------------------------------------------------------ building the net

    @property
    def _frozen(self) -> bool:
        """Whether the features under the head are `X` itself."""
        return isinstance(self.module, str) and self.module == "linear"

    def _full_batch(self, by_parts: bool) -> bool:
        """Whether the full-batch optimiser of the probe is to be used."""
        return self._frozen and not by_parts and self.optimizer == "auto"

    def _wants_2d(self) -> bool:
        return isinstance(self.module, str)

    def _keeps_half(self) -> bool:
        return self.head == "linear" and self._full_batch(by_parts=False)

    def _clean(
        self, X: NDArray, y: NDArray, weight: NDArray | None, *, by_parts: bool
    ) -> TrainingData:
        if by_parts and X.dtype == np.float16:
            X = X.astype(np.float32)
        if self._full_batch(by_parts) and X.size <= _SMALL and not self.device_.startswith("mps"):
            X = X.astype(np.float64)  # _after_training goes back
        return super()._clean(X, y, weight, by_parts=by_parts)

    def _build_net(
        self, data: TrainingData, rng: IsolatedRNG, seed: int, *, by_parts: bool
    ) -> TensorNet:
        self._check_optimizer(by_parts)
        with rng.scope():
            module = self._build_module(data, seed)
        self._check_margin()
        full_batch = self._full_batch(by_parts)
        fixed = self._frozen and not by_parts
        if full_batch and self.checkpoint is not None:
            raise ValueError(
                "checkpoint is for training by mini-batches. A linear probe with optimizer='auto' "
                "is fitted in one go: set checkpoint=None."
            )
        if full_batch and self.mixed_precision is not None:
            raise ValueError(
                "mixed_precision is for training by mini-batches: the full-batch optimiser of a "
                "linear probe would not reach the optimum. Set mixed_precision=None."
            )
        error = None
        if not by_parts and (self.error_cv is not None or self.margin_statistic == "error"):
            error = self._out_of_fold_error(data)
        make_loss = self._fixed_loss if fixed else self._loss
        loss = make_loss(module, data, error)
        options: dict[str, Any] = {
            "criterion": loss,
            "rng": rng,
            "head_l2": self._head_l2(data.total_weight, loss),
            "max_epochs": _resolve(self.max_epochs, 2000 if full_batch else 50),
            "batch_size": _resolve(self.batch_size, 4096 if full_batch else 128),
            "iterator_valid__batch_size": 4096 if self._frozen else 512,
            "callbacks": self._fresh_callbacks(),
            "device": self.device_,
            "compile": self.compile,
            "mixed_precision": self.mixed_precision,
            "verbose": self.verbose,
            "processes": self._processes(),
            **self._passthrough("callbacks__", "compile__"),
        }
        ignored = self._passthrough("optimizer__", "iterator_train__")
        if full_batch and ignored:
            raise ValueError(
                f"{next(iter(ignored))} is given, but the full-batch optimiser of a linear probe "
                "has no such parameters. Set optimizer, for example to torch.optim.Adam."
            )
        net: TensorNet
        if full_batch:
            make = None
            if self.head == "linear":
                intercept = _resolve(self.fit_intercept, True)
                last = None if self._path is None else self._path.last_made
                known = None if last is None else last.known
                make = _ProbePreconditioner(data, self.margin_mode, intercept, known)
                if self._path is not None:
                    self._path.last_made = make
            net = ProbeNet(module, tol=self.tol, make_preconditioner=make, **options)
        else:
            net = TensorNet(
                module,
                stochastic=not self._frozen,
                checkpoint=None if by_parts else self.checkpoint,
                fingerprint=(
                    fingerprint(self, data.X, data.y, data.sample_weight, seed)
                    if self.checkpoint
                    else ""
                ),
                optimizer=torch.optim.Adam if self.optimizer == "auto" else self.optimizer,
                lr=_resolve(self.lr, 1e-3),
                **options,
                **{
                    "iterator_train__shuffle": True,
                    "iterator_train__generator": torch.Generator().manual_seed(seed),
                    **self._passthrough("optimizer__", "iterator_train__"),
                },
            )
        net.class_error = error
        return net.initialize()

    def _check_margin(self) -> None:
        if self.margin == "auto" and (self.margin_statistic, self.margin_mode) != (
            "error",
            "subtract",
        ):
            raise ValueError(
                "margin='auto' is for margin_statistic='error' with margin_mode='subtract'; got "
                f"margin_statistic={self.margin_statistic!r} and "
                f"margin_mode={self.margin_mode!r}. Set these, or a number as margin."
            )
        if self.margin == 0 and self.margin_mode == "divide":
            raise ValueError(
                "margin=0 would divide the logits by 0. For a model without margins set "
                "margin_statistic=None, or margin_mode='subtract'."
            )

    def _check_optimizer(self, by_parts: bool) -> None:
        chosen = self.optimizer
        known = isinstance(chosen, type) and issubclass(chosen, torch.optim.Optimizer)
        if not known and not (isinstance(chosen, str) and chosen == "auto"):
            raise ValueError(
                f"optimizer must be 'auto' or a subclass of torch.optim.Optimizer, got {chosen!r}. "
                "Pass the class itself, such as torch.optim.Adam, and its parameters as lr and "
                "optimizer__*."
            )
        if self._full_batch(by_parts) and not isinstance(self.lr, str):
            warnings.warn(
                f"lr={self.lr!r} has no effect in fit: with module='linear' and optimizer='auto' "
                "the full-batch optimiser finds its own steps. Leave lr='auto', or set optimizer, "
                "for example to torch.optim.Adam.",
                stacklevel=6,
            )

    def _head_l2(self, total_weight: float, loss: nn.Module) -> float:
        # Directions have no length to penalise.
        return 0.0 if self.head == "cosine" else 1 / (self._C_under(loss) * total_weight)

    def _C_under(self, loss: nn.Module) -> float:
        if self.margin != "auto":
            return float(self.C)
        return float(self.C * (1 + cast(Tensor, loss.margins).mean() / 2))

    def _build_module(self, data: TrainingData, seed: int) -> HeadedModule:
        kwargs = {k.removeprefix("module__"): v for k, v in self._passthrough("module__").items()}
        if kwargs and (self._frozen or isinstance(self.module, nn.Module)):
            raise ValueError(
                f"module__{next(iter(kwargs))} is given, but module is "
                f"{'linear' if self._frozen else 'an instance'}, which takes no parameters. Pass "
                "the class as module."
            )
        backbone: nn.Module
        if self._frozen:
            backbone = nn.Identity()
        elif isinstance(self.module, str):
            backbone = MLP(data.X.shape[1], **kwargs)
        elif isinstance(self.module, nn.Module):
            backbone = copy.deepcopy(self.module)
        elif issubclass(self.module, nn.Module):
            backbone = self.module(**kwargs)
        else:
            raise TypeError(
                "module must be 'linear', 'mlp', or a subclass or instance of torch.nn.Module, "
                f"got {self.module!r}."
            )
        # An instance may come from a GPU; the net moves everything to its own device.
        dtype = torch.promote_types(data.X.dtype, torch.float32)
        backbone = backbone.to("cpu", dtype)
        n_features = n_features_of(backbone, data.X[:2].to("cpu", dtype))
        kwargs = {k.removeprefix("head__"): v for k, v in self._passthrough("head__").items()}
        head: LinearHead | CosineHead
        generator = torch.Generator().manual_seed(seed)
        if self.head == "linear":
            head = LinearHead(
                n_features,
                data.n_classes,
                bias=_resolve(self.fit_intercept, True),
                generator=None if self._frozen else generator,
                **kwargs,
            )
        else:
            head = CosineHead(
                n_features,
                data.n_classes,
                bias=_resolve(self.fit_intercept, False),
                generator=generator,
                **kwargs,
            )
        return HeadedModule(backbone, head.to(dtype))

    def _start_from(self, net: TensorNet, previous: TensorNet) -> None:
        super()._start_from(net, previous)
        if isinstance(net.criterion_, MR2Loss) and isinstance(previous.criterion_, MR2Loss):
            net.criterion_.load_state_dict(previous.criterion_.state_dict())
        ahead = None if self._path is None else self._path.ahead(net.head_l2)
        if ahead is not None:
            net.optimizer_.suggest(ahead)

    # ------------------------------------------------------------------ margins

    def _loss(self, module: HeadedModule, data: TrainingData, error: NDArray | None) -> MR2Loss:
        """Loss whose margins follow the features during training."""
        weight = 0.0 if self._frozen else _resolve(self.representation_weight, 0.003)
        loss = MR2Loss(
            data.n_classes,
            module.head.in_features,
            margin=self._mean_margin(error),
            margin_statistic=self.margin_statistic or "second_moment",
            margin_exponent=0.0 if self.margin_statistic is None else self.margin_exponent,
            margin_mode=self.margin_mode,
            margin_norm=self.margin_norm,
            representation_weight=weight,
            tau=self.representation_tau,
            # Frozen features that come by parts: the moments of all that was seen.
            momentum=None if self._frozen else self.momentum,
        )
        if data.X.dtype == torch.float64:
            loss.double()
        loss.weight_scale = data.total_weight / len(data.X)
        if error is not None and self.margin_statistic == "error":
            loss.set_class_spread(torch.as_tensor(error))
        return loss

    def _fixed_loss(
        self, module: HeadedModule, data: TrainingData, error: NDArray | None
    ) -> FixedMarginLoss:
        """Loss with margins from exact statistics of all training data."""
        if not isinstance(self.representation_weight, str) and self.representation_weight > 0:
            warnings.warn(
                "representation_weight has no effect with module='linear': the features are "
                "frozen, and the representation margin loss has no gradient.",
                stacklevel=6,
            )
        moments = None
        if self.margin_statistic is None:
            spread = torch.full((data.n_classes,), torch.nan, device=data.X.device)
        elif self.margin_statistic == "error":
            spread = torch.as_tensor(error, device=data.X.device)
        else:
            head, processes = module.head, self._processes()
            part = TensorDataset(data.X, data.y, data.sample_weight).share(processes)
            X = head.normalise(part.X) if isinstance(head, CosineHead) else part.X
            moments = class_moments(
                X,
                part.y,
                data.n_classes,
                part.sample_weight,
                norm=self.margin_norm,
                reduce=processes.sum,
            )
            spread = MARGIN_STATISTICS[self.margin_statistic](moments)
            spread = torch.where(moments.present, spread, torch.nan)
        margins = class_margins(
            spread,
            self._mean_margin(error),
            exponent=self.margin_exponent,
            floor=MARGIN_MODES[self.margin_mode].floor,
        )
        dtype = module.head.weight.dtype
        return FixedMarginLoss(margins.to(dtype), spread, moments, self.margin_mode)

    def _mean_margin(self, error: NDArray | None) -> float:
        if self.margin == "auto":
            assert error is not None
            return _MARGIN_PER_ERROR * float(np.nanmean(error))
        return self.margin

    def _out_of_fold_error(self, data: TrainingData) -> NDArray:
        """Error of each class, by models without margins that have not seen the samples."""
        X, y = data.X.cpu().numpy(), data.y.cpu().numpy()
        weight = np.ones(len(y)) if data.sample_weight is None else data.sample_weight.cpu().numpy()
        weight = weight.astype(np.float64) * (data.total_weight / len(y))
        n_folds = 5 if self.error_cv is None else self.error_cv
        largest = int(np.bincount(y).max())
        if isinstance(n_folds, int | np.integer) and n_folds > largest:
            raise ValueError(
                f"The class errors are measured on {n_folds} folds, but no class has more than "
                f"{largest} samples. Lower error_cv, or use another margin_statistic than 'error'."
            )
        folds = check_cv(n_folds, y, classifier=True)
        if hasattr(folds, "shuffle") and isinstance(self.error_cv, Integral | None):
            folds = type(folds)(folds.get_n_splits(), shuffle=True, random_state=self._seed())
        model = clone(self).set_params(
            margin=1.0,
            margin_statistic=None,
            margin_mode="divide",
            error_cv=None,
            class_weight=None,  # part of the weights already
            warm_start=False,
            validation_fraction=None,
            callbacks=None,
            checkpoint=None,
            lr="auto" if self._full_batch(by_parts=False) else self.lr,
            verbose=0,
        )
        for name in model._passthrough("callbacks__"):
            delattr(model, name)
        tested, predicted = [], []
        for train, test in folds.split(X, y):
            # A model cannot predict what it has not seen, which says nothing of the class.
            test = test[np.isin(y[test], y[train])]
            if len(test) and len(np.unique(y[train])) > 1:
                model.fit(X[train], y[train], sample_weight=weight[train])
                tested.append(test)
                predicted.append(model.predict(X[test]))
        if not tested:
            raise ValueError(
                "No fold of error_cv has two classes in its training part and one of them in its "
                "test part, so that no class error can be measured. Use stratified folds, as "
                "error_cv=5 does."
            )
        rows = np.concatenate(tested)
        return _class_error(y[rows], np.concatenate(predicted), weight[rows], data.n_classes)

    # ------------------------------------------------------------------ after training

    def _can_train_by_parts(self) -> bool:
        if self.margin_statistic == "error":
            raise AttributeError(
                "partial_fit is not available with margin_statistic='error', which needs all the "
                "data at once. Use 'second_moment' or 'dispersion'."
            )
        return super()._can_train_by_parts()

    def _prepare_partial(self, net: TensorNet, data: TrainingData) -> TensorNet:
        if isinstance(net.criterion_, FixedMarginLoss):
            # Continue a fit to all the data: its parameters, and its statistics as the past.
            fitted, seed = net, self._seed()
            rng = IsolatedRNG(seed, torch.device(self.device_))
            net = self._build_net(data, rng, seed, by_parts=True)
            self._start_from(net, fitted)
            net.n_seen = fitted.n_seen
            if fitted.criterion_.moments is not None:
                net.criterion_.running.load(fitted.criterion_.moments)
        net.class_error = None  # of models of the last fit
        net.head_l2 = self._head_l2(net.n_seen + len(data.X), net.criterion_)
        return net

    def _after_training(self, data: TrainingData, valid: TensorDataset | None) -> None:
        head = self.net_.module_.head
        if self._path is not None:
            self._path.add(self.net_)
        if head.weight.dtype == torch.float64 and self.dtype_ == np.float32:
            self.net_.module_.float()
            self.net_.criterion_.float()
        if isinstance(head, LinearHead):
            self.coef_ = head.weight.detach().cpu().numpy().copy()
            self.intercept_ = (
                np.zeros(len(self.coef_), self.coef_.dtype)
                if head.bias is None
                else head.bias.detach().cpu().numpy().copy()
            )
        criterion = self.net_.criterion_
        self.margins_ = criterion.margins.cpu().numpy()
        self.C_ = self._C_under(criterion)
        self._check_margins()
        self.class_spread_ = criterion.spread.cpu().numpy()
        error = self.net_.class_error
        source = None if error is None else "out_of_fold"
        if valid is not None:
            error, source = self._validation_error(valid), "validation"
        self.margin_error_source_ = source
        self.margin_error_correlation_ = _rank_correlation(self.margins_, error)

    def _check_margins(self) -> None:
        """Warn of a rule that does the opposite of what it is chosen for."""
        if self.margin_statistic != "error" or self.margin_mode != "divide":
            return
        if self.margins_.max() > _WIDE * self.margins_.min():
            warnings.warn(
                "Margins from class errors differ so much that dividing by them takes the gradient "
                "from the classes with the largest errors, which tend to get worse. Set "
                "margin_mode='subtract', or lower margin_exponent.",
                stacklevel=5,
            )

    def _validation_error(self, valid: TensorDataset) -> NDArray:
        predicted = torch.cat([z.argmax(1).cpu() for z, _ in self.net_.outputs(valid.X)]).numpy()
        y = np.asarray(valid.y.cpu()) if valid.y is not None else np.zeros(0, int)
        weight = None if valid.sample_weight is None else valid.sample_weight.cpu().numpy()
        return _class_error(y, predicted, weight, len(self.classes_))

    def to_sklearn(self) -> LogisticRegression:
        """Return a plain scikit-learn model with the same predictions, for use without torch.

        Returns
        -------
        LogisticRegression
            Fitted model with this one's `coef_`, `intercept_` and `classes_`.

        Raises
        ------
        ValueError
            If the model is not a linear probe.
        """
        check_is_fitted(self)
        if not self._frozen or self.head != "linear":
            raise ValueError(
                "to_sklearn is for linear probes with a linear head. For a network, "
                "put transform and a LogisticRegression with coef_ and intercept_ in a Pipeline."
            )
        model = LogisticRegression(C=self.C_, fit_intercept=_resolve(self.fit_intercept, True))
        model.coef_, model.intercept_ = self.coef_.copy(), self.intercept_.copy()
        model.classes_ = self.classes_.copy()
        model.n_features_in_ = self.n_features_in_
        model.n_iter_ = np.array([self.n_iter_], dtype=np.int32)
        if hasattr(self, "feature_names_in_"):
            model.feature_names_in_ = self.feature_names_in_.copy()
        return model


def _resolve(value: Any, default: Any) -> Any:
    """`default` in place of "auto"."""
    return default if isinstance(value, str) else value


def _class_error(y: NDArray, predicted: NDArray, weight: NDArray | None, n_classes: int) -> NDArray:
    """Weighted share of each class that is predicted wrongly; NaN for a class without samples."""
    missed = (predicted != y) * (1 if weight is None else weight)
    wrong = np.bincount(y, missed, minlength=n_classes)
    seen = np.bincount(y, weight, minlength=n_classes)
    return np.divide(wrong, seen, out=np.full(n_classes, np.nan), where=seen > 0)


def _rank_correlation(margins: NDArray, error: NDArray | None) -> float:
    """Spearman's correlation over the classes that have both; NaN where either is constant."""
    if error is None:
        return float("nan")
    both = np.isfinite(margins) & np.isfinite(error)
    if np.ptp(margins[both]) == 0 or np.ptp(error[both]) == 0:
        return float("nan")
    return float(spearmanr(margins[both], error[both]).statistic)


class Path:
    """What the fits to the same data with one penalty after the other hand on to the next."""

    def __init__(self) -> None:
        self.last_made: _ProbePreconditioner | None = None
        self._solutions: deque[tuple[float, list[Tensor]]] = deque(maxlen=2)

    def add(self, net: TensorNet) -> None:
        """Note a solution."""
        parameters = [p.detach().clone() for p in net.module_.parameters()]
        self._solutions.append((self._position(net.head_l2), parameters))

    def ahead(self, l2: float) -> list[Tensor] | None:
        """Where the last two solutions point to, as a line over the logarithm of the penalty."""
        if len(self._solutions) < 2:
            return None
        (x0, before), (x1, last) = self._solutions
        if x0 == x1:
            return None
        share = (self._position(l2) - x1) / (x1 - x0)
        return [q + share * (q - p) for p, q in zip(before, last, strict=True)]

    @staticmethod
    def _position(l2: float) -> float:
        return math.log(max(l2, sys.float_info.min))


class _ProbePreconditioner:
    """Makes preconditioners from the curvature of the loss at a net's current parameters.

    Parameters
    ----------
    known : HessianPreconditioner, optional
        From a fit to the same data with another penalty, whose solution this fit starts from.
    """

    def __init__(
        self,
        data: TrainingData,
        mode: str,
        fit_intercept: bool,
        known: HessianPreconditioner | None = None,
    ) -> None:
        self.data, self.mode, self.fit_intercept = data, mode, fit_intercept
        self.known = known
        self._inherits = known is not None
        self._n_made = 0

    @torch.no_grad()
    def __call__(self, net: TensorNet) -> Solve:
        self._n_made += 1
        if self._inherits and self.known is not None and self._n_made <= _INHERITED_TIMES:
            if self._n_made == 1:
                self.known = self.known.with_ridge(net.head_l2)
            return self.known.solve
        data, weight = self.data, net.module_.head.weight
        n, n_features = data.X.shape
        at_zero = not weight.any()
        largest = _HESSIAN_SIDES[min(self._n_made, len(_HESSIAN_SIDES)) - 1]
        # Two classes share one row of weights, for which the Gram matrix is the Hessian already.
        whole = len(weight) == data.n_classes and data.n_classes * n_features <= largest
        whole = whole and not at_zero
        factor, least = _FIRST_ROWS if at_zero else _LATER_ROWS
        n_rows = _HESSIAN_ROWS if whole else max(factor * n_features, least)
        rows: Tensor | slice = slice(None)
        if n > n_rows:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
            rows = order[:n_rows].to(data.X.device)
        X, y = data.X[rows].to(weight.dtype), data.y[rows]
        margin = net.criterion_.margins[y]
        logits, _ = net.module_(X)
        p = MARGIN_MODES[self.mode].apply(logits, y, margin).softmax(1)
        share = torch.full_like(margin, 1 / len(X), dtype=torch.float64)
        if self.mode == "divide":
            share /= margin.double().square()
        if data.sample_weight is not None:
            share *= data.sample_weight[rows]
        if whole:
            self.known = HessianPreconditioner(
                X, p, share, net.head_l2, fit_intercept=self.fit_intercept
            )
            return self.known.solve
        # The mean of p_k (1 - p_k), whose terms, other than 1 - sum p_k^2, cannot round below zero.
        curvature = (p * (1 - p)).mean(1).double() * share
        return GramPreconditioner(X, curvature, net.head_l2, fit_intercept=self.fit_intercept).solve
