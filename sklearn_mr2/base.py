"""scikit-learn's side: what every classifier of the package shares."""

from __future__ import annotations

import copy
import difflib
import itertools
import zlib
from abc import abstractmethod
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
    _fit_context,
)
from sklearn.utils import assert_all_finite, check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    _num_samples,
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from .distributed import ALONE, Processes, join_processes, own_gpu
from .net import IsolatedRNG, TensorDataset, TensorNet

_LOW_PRECISION = {
    "float16", "bfloat16", "torch.float16", "torch.bfloat16", "Float16", "halffloat[pyarrow]",
}  # fmt: skip
_SINGLE = {"float32", "torch.float32", "Float32", "float[pyarrow]"}


class TrainingData(NamedTuple):
    """What :meth:`TorchClassifier.fit` hands to a subclass: clean tensors.

    `sample_weight` has mean 1, or is as the user gave it where the data come by parts; None stands
    for all ones. The mean of the weighted losses times `total_weight` is their sum under the
    weights as the user gave them.
    """

    X: Tensor
    y: Tensor
    sample_weight: Tensor | None
    total_weight: float
    n_classes: int


class TorchClassifier(
    ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator
):
    """Base of the package's classifiers: the contract of scikit-learn around a skorch net.

    A subclass defines ``__init__`` (calling :meth:`_set_passthrough` with its ``**kwargs``) and
    :meth:`_build_net`; it may override :meth:`_after_training`. Its parameters include
    `max_epochs`, `device`, `dtype`, `warm_start`, `callbacks`, `verbose`, `class_weight`,
    `validation_fraction` and `random_state`.
    """

    classes_: NDArray
    net_: TensorNet

    data_parallel = False  # a parameter of subclasses that offer it

    _passthrough_prefixes: tuple[str, ...] = (
        "module__",
        "optimizer__",
        "callbacks__",
        "iterator_train__",
    )

    _parameter_constraints: dict = {
        "max_epochs": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "device": [str, torch.device],
        "dtype": [StrOptions({"auto", "float32", "float64"})],
        "warm_start": ["boolean"],
        "callbacks": [list, None],
        "verbose": ["verbose"],
        "class_weight": [dict, StrOptions({"balanced"}), None],
        "validation_fraction": [Interval(Real, 0, 1, closed="neither"), None],
        "random_state": ["random_state"],
    }

    # ------------------------------------------------------------------ parameters

    def _set_passthrough(self, kwargs: dict[str, Any]) -> None:
        # scikit-learn wants parameters stored as they are given and checked in fit, but these
        # could be mistaken for something else.
        for name, value in kwargs.items():
            if name.startswith("_") or name.endswith("_") or hasattr(type(self), name):
                raise self._unknown_parameter(name)
            setattr(self, name, value)

    def _passthrough(self, *prefixes: str) -> dict[str, Any]:
        """Parameters that are not in the signature: those given as ``**kwargs``."""
        found = {
            name: value
            for name, value in vars(self).items()
            if name.startswith(prefixes or "")
            and not name.startswith("_")
            and not name.endswith("_")
        }
        # Reading the signature takes long, compared with a small fit.
        own = self._get_param_names() if found else ()
        return {name: value for name, value in found.items() if name not in own}

    def _check_passthrough(self) -> None:
        for name in self._passthrough():
            if not name.startswith(self._passthrough_prefixes):
                raise self._unknown_parameter(name)

    def _unknown_parameter(self, name: str) -> TypeError:
        close = difflib.get_close_matches(name, self._get_param_names(), 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return TypeError(
            f"{type(self).__name__} has no parameter {name!r}.{hint} Parameters for skorch start "
            f"with {', '.join(self._passthrough_prefixes)}."
        )

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Get the parameters, those passed on to skorch included.

        Parameters
        ----------
        deep : bool, default=True
            Include the parameters of nested estimators.

        Returns
        -------
        dict
            Names and values.
        """
        return {**super().get_params(deep=deep), **self._passthrough()}

    def set_params(self, **params: Any) -> Self:
        """Set parameters, those passed on to skorch included. A fitted net is not affected.

        Parameters
        ----------
        **params
            Names and values.

        Returns
        -------
        self
        """
        known = self._passthrough()
        foreign = {
            name: value
            for name, value in params.items()
            if name in known or name.startswith(self._passthrough_prefixes)
        }
        super().set_params(**{k: v for k, v in params.items() if k not in foreign})
        self._set_passthrough(foreign)
        return self

    # ------------------------------------------------------------------ input

    def _floating_type(self, X: Any) -> type[np.floating]:
        """float32 and float64 stay, shorter floats become float32, all else float64."""
        if self.dtype != "auto":
            return np.float32 if self.dtype == "float32" else np.float64
        if torch.device(self._device()).type == "mps":
            return np.float32  # Apple's GPUs have no float64
        dtypes = getattr(X, "dtypes", None)
        if dtypes is None:
            dtypes = [getattr(X, "dtype", None)]
        # The name of a numpy dtype is the same in either byte order.
        names = {str(getattr(dtype, "name", dtype)) for dtype in dtypes}
        return np.float32 if names and names <= _LOW_PRECISION | _SINGLE else np.float64

    def _device(self) -> str:
        if str(self.device) in ("auto", "cuda") and torch.cuda.is_available():
            return own_gpu() if self.data_parallel else "cuda"
        if str(self.device) == "auto":
            return "mps" if torch.backends.mps.is_available() else "cpu"
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError) as error:  # what torch raises differs by device
            raise ValueError(
                f"device={str(self.device)!r} cannot be used with this installation of torch on "
                "this machine. Use device='auto' or device='cpu'."
            ) from error
        return str(self.device)

    def _check_X(self, X: Any, *, reset: bool, y: Any = "no_validation") -> Any:
        _refuse_lazy(X)
        dtype = self._floating_type(X) if reset else self.dtype_.type
        half = dtype is np.float32 and self._keeps_half() and _is_half(X)
        if half:
            dtype = np.float16
        _refuse_sparse(X)
        if not isinstance(y, str):
            y = _check_labels(y, "y")
        X = _to_numpy(X)
        table = self._wants_2d() or len(getattr(X, "shape", None) or np.asarray(X).shape) <= 2
        checked = validate_data(
            self,
            X,
            y,
            reset=reset,
            dtype=dtype,
            ensure_2d=table,
            allow_nd=not table,
            ensure_all_finite=not half,
        )
        if half:  # a sum in float16 overflows, and scikit-learn then makes a mask as large as X
            values = checked if isinstance(y, str) else checked[0]
            for start in range(0, len(values), 4096):
                rows = values[start : start + 4096].astype(np.float32)
                assert_all_finite(rows, estimator_name=type(self).__name__, input_name="X")
        if not table:  # validate_data counts the features of tables only
            self._check_shape(checked if isinstance(y, str) else checked[0], reset=reset)
        return checked

    def _check_shape(self, X: NDArray, *, reset: bool) -> None:
        if reset:
            self.n_features_in_ = X.shape[1]
        elif X.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {X.shape[1]} features (entries along its second dimension), but "
                f"{type(self).__name__} is expecting {self.n_features_in_} features as input."
            )

    def _keeps_half(self) -> bool:
        """Whether arrays of float16 stay what they are, and are converted batch by batch."""
        return False

    def _wants_2d(self) -> bool:
        """Whether X must be a table; otherwise any rank is passed to the module."""
        return True

    def _check_weights(self, X: NDArray, y: NDArray, sample_weight: Any) -> NDArray | None:
        """Combine sample and class weights; None stands for all ones."""
        weight = None
        if sample_weight is not None:
            weight = _check_weight(sample_weight, X)
            if not weight.any():
                raise ValueError("sample_weight is zero for all samples; some must be positive.")
        if self.class_weight is None:
            return weight
        weight = np.ones(len(X)) if weight is None else weight
        return weight * self._class_factors(y, weight)[np.searchsorted(self.classes_, y)]

    def _class_factors(self, y: NDArray, weight: NDArray) -> NDArray:
        """Value of `class_weight` for each class."""
        classes = self.classes_.tolist()
        if not isinstance(self.class_weight, dict):
            totals = np.bincount(np.searchsorted(self.classes_, y), weight, minlength=len(classes))
            present = totals > 0
            factors = np.zeros(len(classes))
            factors[present] = totals.sum() / (present.sum() * totals[present])
            return factors
        unknown = set(self.class_weight) - set(classes)
        if unknown:
            raise ValueError(
                f"class_weight has keys that are no class of y: {sorted(map(str, unknown))}. "
                f"The classes are {classes}."
            )
        for label, value in self.class_weight.items():
            if not isinstance(value, Real) or not 0 <= float(value) < np.inf:
                raise ValueError(
                    f"class_weight must be numbers from 0 up, got {value!r} for {label!r}."
                )
        return np.array([float(self.class_weight.get(label, 1)) for label in classes])

    def _clean(
        self, X: NDArray, y: NDArray, weight: NDArray | None, *, by_parts: bool
    ) -> TrainingData:
        n_present = len(np.unique(y))
        if n_present < (1 if by_parts else 2):
            raise ValueError(
                f"{type(self).__name__} needs samples of at least 2 classes in y, but the training "
                f"data contain only one class: {y[:1].tolist()[0]!r} (samples of weight 0 and "
                "those held out for validation do not count). Add samples of another class."
                if n_present
                else "All samples have weight zero, so that no class is left to train on. Give "
                "some samples a positive sample_weight and their class a positive class_weight."
            )
        # Parts of the data must keep the proportions between them.
        scale = 1.0 if by_parts or weight is None else weight.mean()
        total = float(scale * len(X))
        tensors = self._tensors(X, y, None if weight is None else weight / scale)
        return TrainingData(*tensors, total, len(self.classes_))

    def _tensors(
        self, X: NDArray, y: NDArray, weight: NDArray | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        device = self.device_
        X_tensor, w_tensor = _as_tensor(X).to(device), None
        if weight is not None and (weight != 1).any():
            dtype = torch.promote_types(X_tensor.dtype, torch.float32)
            w_tensor = torch.as_tensor(weight, dtype=dtype, device=device)
        codes = torch.as_tensor(np.searchsorted(self.classes_, y), device=device)
        return X_tensor, codes, w_tensor

    # ------------------------------------------------------------------ training

    @abstractmethod
    def _build_net(
        self, data: TrainingData, rng: IsolatedRNG, seed: int, *, by_parts: bool
    ) -> TensorNet:
        """Return an initialised net for these data, which are all or only the first part."""

    def _after_training(self, data: TrainingData, valid: TensorDataset | None) -> None:
        """Set fitted attributes that need the data."""

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        X_val: Any = None,
        y_val: Any = None,
    ) -> Self:
        """Fit the classifier.

        Parameters
        ----------
        X : array-like, data frame or tensor of shape (n_samples, n_features)
            Training data. float32 and float64 are kept, float16 and bfloat16 become float32, other
            types become float64, unless `dtype` says otherwise. Memory-mapped arrays are read in
            place.
        y : array-like of shape (n_samples,)
            Class labels: integers, strings, booleans or categories.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative weights. A weight means the same as that many repetitions of the sample
            (exactly in full-batch training, in expectation in mini-batches).
        X_val, y_val : array-like, optional
            Validation data of the same form, for validation scores, early stopping and the class
            errors on validation data. Takes precedence over `validation_fraction`.

        Returns
        -------
        self
            The fitted estimator.

        Raises
        ------
        ValueError
            If the input is not numeric, contains NaN or infinity, has one class only, or if
            weights are negative or all zero.
        """
        self._check_passthrough()
        X, y = self._check_X(X, y=y, reset=True)
        check_classification_targets(y)
        classes = np.unique(y)
        previous = getattr(self, "net_", None) if self.warm_start else None
        if previous is not None and not np.array_equal(classes, self.classes_):
            raise ValueError(
                "warm_start=True needs the same classes in y as in the last fit: "
                f"{self.classes_.tolist()}, got {classes.tolist()}. Set warm_start=False to "
                "start again."
            )
        self.classes_ = classes
        self.dtype_ = np.result_type(X.dtype, np.float32)
        self.device_ = self._device()
        weight = self._check_weights(X, y, sample_weight)
        X, y, weight = _drop_weightless(X, y, weight)
        X, y, weight, held_out = self._hold_out(X, y, weight, X_val, y_val)
        data = self._clean(X, y, weight, by_parts=False)
        self._check_same_data(data)
        net = self._new_net(data, by_parts=False)
        if previous is not None:
            self._start_from(net, previous)
        net.train_on(_dataset(data), held_out, epochs=net.max_epochs)
        self._finish(net, data, held_out)
        return self

    def _can_train_by_parts(self) -> bool:
        """Whether there is a partial_fit; raise AttributeError with the reason if not."""
        if self.class_weight == "balanced":
            raise AttributeError(
                "partial_fit is not available with class_weight='balanced', which needs all the "
                "data at once. Give class_weight as a dictionary."
            )
        return True

    @available_if(lambda self: self._can_train_by_parts())
    @_fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Any = None,
        sample_weight: Any = None,
    ) -> Self:
        """Train for one epoch on a part of the data, by mini-batches.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training data.
        y : array-like of shape (n_samples,)
            Class labels.
        classes : array-like of shape (n_classes,), optional
            All classes that will ever occur; needed at the first call.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative weights.

        Returns
        -------
        self
            The estimator.

        Raises
        ------
        ValueError
            If `classes` is missing at the first call or differs later, or if `y` has a label that
            is not among them.
        """
        self._check_passthrough()
        first = not hasattr(self, "net_")
        if first and classes is None:
            raise ValueError(
                "classes must be given at the first call of partial_fit: the labels of all classes "
                "that will ever occur."
            )
        X, y = self._check_X(X, y=y, reset=first)
        check_classification_targets(y)
        if first:
            self.classes_ = np.unique(_check_labels(classes, "classes"))
            if len(self.classes_) < 2:
                raise ValueError("classes must name at least 2 classes.")
            self.dtype_ = np.result_type(X.dtype, np.float32)
            self.device_ = self._device()
        elif classes is not None:
            named = np.unique(_check_labels(classes, "classes"))
            if not np.array_equal(named, self.classes_):
                raise ValueError(
                    f"classes={named.tolist()} differs from the classes of the first call, "
                    f"{self.classes_.tolist()}. Leave it out, or fit a new estimator."
                )
        unseen = np.setdiff1d(y, self.classes_)
        if len(unseen):
            raise ValueError(
                f"y contains labels that are not in classes: {unseen.tolist()}. Name all classes "
                "at the first call of partial_fit."
            )
        weight = self._check_weights(X, y, sample_weight)
        data = self._clean(*_drop_weightless(X, y, weight), by_parts=True)
        self._check_same_data(data)
        if first:
            net = self._new_net(data, by_parts=True)
        else:
            net = self._prepare_partial(self.net_, data)
            net.processes = self._processes()
        net.train_on(_dataset(data), epochs=1)
        self._finish(net, data, None)
        return self

    def _new_net(self, data: TrainingData, *, by_parts: bool) -> TensorNet:
        seed = self._seed()
        rng = IsolatedRNG(seed, torch.device(self.device_))
        net = self._build_net(data, rng, seed, by_parts=by_parts)
        net.classes = list(range(data.n_classes))  # for the scorers of skorch's callbacks
        return net

    def _prepare_partial(self, net: TensorNet, data: TrainingData) -> TensorNet:
        """Make the net of an earlier call ready for one epoch on another part of the data."""
        return net

    def _seed(self) -> int:
        # None draws from the operating system, so that numpy's global state is left alone.
        rng = (
            np.random.default_rng()
            if self.random_state is None
            else check_random_state(self.random_state)
        )
        draw = rng.integers if isinstance(rng, np.random.Generator) else rng.randint
        processes = self._processes()
        seed = torch.tensor(int(draw(2**31 - 1)), device=processes.device)
        processes.broadcast([seed])
        return int(seed)

    def _processes(self) -> Processes:
        """Those that train together, each calling fit with the same data."""
        return join_processes(self.device_) if self.data_parallel else ALONE

    def _check_same_data(self, data: TrainingData) -> None:
        processes = self._processes()
        if processes.size == 1:
            return
        X, y = data.X, data.y
        # All of X would take long to go through. Other samples have other labels, most likely.
        parts = (y, X[0].contiguous(), X[-1].contiguous())
        digest = zlib.crc32(repr((tuple(X.shape), X.dtype)).encode())
        for part in parts:
            digest = zlib.crc32(part.cpu().numpy().data, digest)
        if not processes.same(digest):
            raise ValueError(
                "data_parallel=True needs the same X and y, in the same order, in every process: "
                "the rows are divided inside fit. Load all of the data everywhere, and give what "
                "splits or shuffles them a random_state."
            )

    def _hold_out(
        self, X: NDArray, y: NDArray, weight: NDArray | None, X_val: Any, y_val: Any
    ) -> tuple[NDArray, NDArray, NDArray | None, TensorDataset | None]:
        """Separate validation data, from the arguments or from the training data."""
        if (X_val is None) != (y_val is None):
            raise ValueError("X_val and y_val must be given together.")
        if X_val is not None:
            try:
                X_val, y_val = self._check_X(X_val, y=y_val, reset=False)
            except (TypeError, ValueError) as error:
                raise type(error)(f"In the validation data X_val, y_val: {error}") from error
            unseen = np.setdiff1d(y_val, self.classes_)
            if len(unseen):
                raise ValueError(
                    f"y_val contains labels that are not in y: {unseen.tolist()}. Leave out their "
                    "samples."
                )
            return X, y, weight, TensorDataset(*self._tensors(X_val, y_val, None))
        if self.validation_fraction is None:
            return X, y, weight, None
        valid = self._choose_validation(y)
        w_train = w_valid = None
        if weight is not None:
            w_train, w_valid = weight[~valid], weight[valid]
            w_valid = w_valid / w_valid.mean()
        held_out = TensorDataset(*self._tensors(X[valid], y[valid], w_valid))
        return X[~valid], y[~valid], w_train, held_out

    def _choose_validation(self, y: NDArray) -> NDArray:
        """Choose at random, class by class, what to hold out; returns a mask.

        Every class with two samples or more has some on both sides, a single one is for training.
        """
        _, codes, counts = np.unique(y, return_inverse=True, return_counts=True)
        if counts.max() == 1:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} needs a class with at least 2 "
                "samples. Give X_val and y_val instead."
            )
        rng = np.random.default_rng(self._seed())
        share = self.validation_fraction * counts
        # Round down, then up where most was lost, so that the total is right; ties at random.
        quota = np.floor(share).astype(int)
        loss = np.lexsort((rng.random(len(counts)), quota - share))
        quota[loss[: round(share.sum()) - quota.sum()]] += 1
        quota = np.minimum(np.maximum(quota, 1), counts - 1)
        shuffled = rng.permutation(len(y))
        by_class = shuffled[np.argsort(codes[shuffled], kind="stable")]
        rank = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
        mask = np.zeros(len(y), dtype=bool)
        mask[by_class] = rank < np.repeat(quota, counts)
        return mask

    def _fresh_callbacks(self) -> list | None:
        """Copies of the callbacks: training must not change what the user passed."""
        for item in self.callbacks or []:
            callback = item[1] if isinstance(item, (tuple, list)) and len(item) == 2 else item
            if not hasattr(callback, "on_train_begin"):
                raise TypeError(
                    "callbacks must be a list of skorch callbacks or of pairs of a name and a "
                    f"callback, got {item!r} in it."
                )
        return copy.deepcopy(self.callbacks)

    def _start_from(self, net: TensorNet, previous: TensorNet) -> None:
        """Continue from the parameters of an earlier fit."""
        try:
            net.module_.load_state_dict(previous.module_.state_dict())
        except RuntimeError as error:
            raise ValueError(
                "warm_start=True needs a network of the same shape as in the last fit. Set "
                f"warm_start=False to start again. ({error})"
            ) from error

    def _finish(self, net: TensorNet, data: TrainingData, held_out: TensorDataset | None) -> None:
        net.n_seen += len(data.X)
        self.net_ = net
        self.n_iter_ = len(net.history)
        self.history_ = pd.DataFrame(net.records())
        self._after_training(data, held_out)

    # ------------------------------------------------------------------ prediction

    def _outputs(self, X: Any, pick: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Collect what `pick` takes from the logits and the features of each batch."""
        check_is_fitted(self)
        X = _as_tensor(self._check_X(X, reset=False))
        parts = (pick(*batch).cpu() for batch in self.net_.outputs(X))
        first = next(parts)
        # One block filled batch by batch: a list of parts, joined, takes twice its memory.
        collected = first.new_empty(len(X), *first.shape[1:])
        filled = 0
        for part in itertools.chain([first], parts):
            collected[filled : filled + len(part)] = part
            filled += len(part)
        return collected

    def _logits(self, X: Any) -> Tensor:
        return self._outputs(X, lambda logits, _: logits)

    def decision_function(self, X: Any) -> NDArray:
        """Compute the logits.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Data.

        Returns
        -------
        ndarray of shape (n_samples,) or (n_samples, n_classes)
            Logit of each class; with two classes the difference of the second and the first.
        """
        logits = self._logits(X)
        return (logits if logits.shape[1] > 2 else logits[:, 1] - logits[:, 0]).numpy()

    def predict_log_proba(self, X: Any) -> NDArray:
        """Compute logarithms of class probabilities.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Data.

        Returns
        -------
        ndarray of shape (n_samples, n_classes)
            Log-probabilities, columns ordered as in `classes_`.
        """
        return self._logits(X).log_softmax(-1).numpy()

    def predict_proba(self, X: Any) -> NDArray:
        """Compute class probabilities, the softmax of the logits.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Data.

        Returns
        -------
        ndarray of shape (n_samples, n_classes)
            Probabilities, columns ordered as in `classes_`.
        """
        return self._logits(X).softmax(-1).numpy()

    def predict(self, X: Any) -> NDArray:
        """Predict the most probable class.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Data.

        Returns
        -------
        ndarray of shape (n_samples,)
            Class labels.
        """
        # Batch by batch: the probabilities of many samples and classes take much memory.
        best = self._outputs(X, lambda logits, _: logits.softmax(-1).argmax(1))
        return self.classes_[best.numpy()]

    def transform(self, X: Any) -> NDArray:
        """Compute the features under the head; for a linear probe these are `X` itself.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Data.

        Returns
        -------
        ndarray of shape (n_samples, n_features_out)
            Features.
        """
        return self._outputs(X, lambda _, features: features).numpy()

    @property
    def _n_features_out(self) -> int:
        return self.net_.module_.head.in_features

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "net_")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "net_"):  # which skorch moves to the CPU where there is no GPU
            self.device_ = str(self.net_.device)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        types = ["float64", "float32"] if self.dtype == "auto" else [self.dtype]
        tags.transformer_tags.preserves_dtype = types
        tags.input_tags.two_d_array = True
        tags.input_tags.three_d_array = not self._wants_2d()
        return tags


def _dataset(data: TrainingData) -> TensorDataset:
    return TensorDataset(data.X, data.y, data.sample_weight)


def _refuse_lazy(X: Any) -> None:
    if type(X).__name__ == "LazyFrame":
        raise TypeError("X is a LazyFrame, whose rows are not there yet. Use X.collect().")


def _refuse_sparse(X: Any) -> None:
    # scikit-learn refuses scipy's formats; these two it would trip over with an unclear error.
    if isinstance(X, Tensor):
        sparse = X.layout != torch.strided
    else:
        sparse = isinstance(X, pd.DataFrame) and all(
            isinstance(dtype, pd.SparseDtype) for dtype in X.dtypes
        )
    if sparse:
        cure = "X.to_dense()" if isinstance(X, Tensor) else "X.sparse.to_dense()"
        raise TypeError(f"Sparse data was passed for X, but dense data is required. Use {cure}.")


def _check_labels(y: Any, name: str) -> Any:
    """Refuse what scikit-learn lets pass, or refuses for reasons that do not help."""
    y = _to_numpy(y)
    if y is None:
        return y
    dtype = str(getattr(y, "dtype", "list"))
    values = np.asarray(y, dtype=object if dtype == "list" else None)
    n_missing = int(np.sum(pd.isna(values)))
    if n_missing:
        raise ValueError(
            f"{name} contains {n_missing} missing labels (NaN, None or NA). Remove their "
            "samples, or give them a label of their own."
        )
    if dtype in ("object", "list"):
        strings = {isinstance(label, str) for label in values.flat}
        if strings == {True, False} or (dtype == "object" and strings == {False}):
            kinds = sorted({type(label).__name__ for label in values.flat})
            raise ValueError(
                f"Unknown label type: {name} holds Python objects of type {', '.join(kinds)}. Use "
                f"labels of one type: {name}.astype(str), or {name}.astype(int) if all of them are "
                "integers."
            )
    # scikit-learn would make floats of pandas' nullable integers and booleans.
    nullable = getattr(getattr(y, "dtype", None), "numpy_dtype", None)
    return y if nullable is None else values.astype(nullable)


def _drop_weightless(
    X: NDArray, y: NDArray, weight: NDArray | None
) -> tuple[NDArray, NDArray, NDArray | None]:
    """Leave out samples of weight 0, which must not influence anything."""
    if weight is None or weight.all():
        return X, y, weight
    kept = weight > 0
    return X[kept], y[kept], weight[kept]


def _to_numpy(array: Any) -> Any:
    """Bring tensors of any device to numpy; leave everything else alone."""
    if not isinstance(array, Tensor):
        return array
    array = array.detach().cpu()
    return (array.float() if array.dtype == torch.bfloat16 else array).numpy()


def _is_half(X: Any) -> bool:
    return isinstance(X, np.ndarray) and X.dtype == np.float16


class _Borrowed:
    """Present an array's memory as writable, so that torch wraps read-only arrays silently.

    The package never writes to it; torch has no read-only tensors and warns otherwise.
    """

    def __init__(self, array: NDArray) -> None:
        self._array = array
        pointer, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}


def _check_weight(sample_weight: Any, X: Any) -> NDArray:
    """Weights of the samples as float64."""
    try:
        weight = _check_sample_weight(_to_numpy(sample_weight), X, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"sample_weight must be numbers, one for each of the {_num_samples(X)} samples, not "
            f"all of them zero. ({error})"
        ) from error
    if (weight < 0).any():
        raise ValueError(
            "sample_weight must not be negative. Give samples that are not to count the weight 0."
        )
    return weight


def _as_tensor(array: NDArray) -> Tensor:
    """Wrap an array as a tensor without copying it, where its layout allows."""
    array = np.asarray(array)
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    if not array.flags.writeable and array.size:
        array = np.asarray(_Borrowed(array))
    return torch.from_numpy(array)
