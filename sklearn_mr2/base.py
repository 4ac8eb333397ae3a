"""scikit-learn's side: what every classifier of the package shares."""

from __future__ import annotations

import difflib
import string
from abc import abstractmethod
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
    clone,
)
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from .net import IsolatedRNG, TensorDataset, TensorNet

_LOW_PRECISION = {"float16", "bfloat16", "torch.float16", "torch.bfloat16", "Float16"}
_SINGLE = {"float32", "torch.float32", "Float32", "float[pyarrow]"}


class TrainingData(NamedTuple):
    """What :meth:`TorchClassifier.fit` hands to a subclass: clean tensors.

    `sample_weight` has mean 1 (None: all weights are 1; given by parts they are as the user gave
    them) and `total_weight` is the sum of the
    weights as the user gave them, that is the number of samples they stand for.
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

    _passthrough_prefixes = ("module__", "optimizer__", "callbacks__", "iterator_train__")

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
        # scikit-learn wants parameters stored as they are given and checked in fit.
        for name, value in kwargs.items():
            setattr(self, name, value)

    def _passthrough(self, prefix: str = "") -> dict[str, Any]:
        """Parameters that are not in the signature: those given as ``**kwargs``."""
        own = self._get_param_names()
        return {
            name: value
            for name, value in vars(self).items()
            if name.startswith(prefix or tuple(string.ascii_letters))
            and not name.endswith("_")
            and name not in own
        }

    def _check_passthrough(self) -> None:
        for name in self._passthrough():
            if not name.startswith(self._passthrough_prefixes):
                close = difflib.get_close_matches(name, self._get_param_names(), 1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise TypeError(
                    f"{type(self).__name__} has no parameter {name!r}.{hint} Parameters for skorch "
                    f"start with {', '.join(self._passthrough_prefixes)}."
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
        names = {str(dtype) for dtype in dtypes}
        return np.float32 if names and names <= _LOW_PRECISION | _SINGLE else np.float64

    def _device(self) -> str:
        if str(self.device) != "auto":
            kind = torch.device(self.device).type
            if kind == "cuda" and not torch.cuda.is_available():
                raise ValueError(
                    f"device={str(self.device)!r} asks for a CUDA device and torch finds none. "
                    "Use device='auto' or device='cpu', or install a CUDA build of torch."
                )
            if kind == "mps" and not torch.backends.mps.is_available():
                raise ValueError(
                    "device='mps' asks for an Apple GPU and torch finds none. Use device='auto' "
                    "or device='cpu'."
                )
            return str(self.device)
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"

    def _check_X(self, X: Any, *, reset: bool, y: Any = "no_validation") -> Any:
        dtype = self._floating_type(X) if reset else self.dtype_.type
        X, y = _to_numpy(X), _to_numpy(y)
        return validate_data(
            self,
            X,
            y,
            reset=reset,
            dtype=dtype,
            ensure_2d=self._wants_2d(),
            allow_nd=not self._wants_2d(),
            ensure_min_samples=1,
        )

    def _wants_2d(self) -> bool:
        """Whether X must be a table; otherwise any rank is passed to the module."""
        return True

    def _check_weights(self, X: NDArray, y: NDArray, sample_weight: Any) -> NDArray | None:
        """Combine sample and class weights; None stands for all ones."""
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(
                _to_numpy(sample_weight), X, dtype=np.float64, ensure_non_negative=True
            )
            if not weight.any():
                raise ValueError("sample_weight must have at least one positive weight.")
        if self.class_weight is None:
            return weight
        weight = np.ones(len(X)) if weight is None else weight
        codes = np.searchsorted(self.classes_, y)
        if isinstance(self.class_weight, dict):
            unknown = set(self.class_weight) - set(self.classes_.tolist())
            if unknown:
                raise ValueError(
                    f"class_weight has keys that are no class of y: {sorted(map(str, unknown))}. "
                    f"The classes are {self.classes_.tolist()}."
                )
            factors = np.array([self.class_weight.get(c, 1.0) for c in self.classes_.tolist()])
            if (factors < 0).any():
                raise ValueError("class_weight must not be negative.")
        else:
            totals = np.bincount(codes, weight, minlength=len(self.classes_))
            present = totals > 0
            factors = np.zeros(len(totals))
            factors[present] = totals.sum() / (present.sum() * totals[present])
        return weight * factors[codes]

    def _clean(self, X: NDArray, y: NDArray, sample_weight: Any, *, by_parts: bool) -> TrainingData:
        weight = self._check_weights(X, y, sample_weight)
        if weight is not None and not weight.all():
            X, y, weight = X[weight > 0], y[weight > 0], weight[weight > 0]
        n_present = len(np.unique(y))
        if n_present < (1 if by_parts else 2):
            raise ValueError(
                f"{type(self).__name__} needs samples of at least 2 classes in y, but the data "
                f"contain only one class: {y[0]!r} (counting samples of positive weight)."
                if n_present
                else "All samples have weight zero, so that no class is left to train on."
            )
        device = self._device()
        X_tensor, scaled = _as_tensor(X).to(device), None
        if weight is not None:
            # Parts of the data must keep the proportions between them.
            scale = 1.0 if by_parts else weight.mean()
            if np.ptp(weight) > 0 or weight[0] != scale:
                scaled = torch.as_tensor(weight / scale, dtype=X_tensor.dtype, device=device)
        codes = torch.as_tensor(np.searchsorted(self.classes_, y), device=device)
        total = float(len(X) if weight is None else weight.sum())
        return TrainingData(X_tensor, codes, scaled, total, len(self.classes_))

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
            types become float64, unless `dtype` says otherwise.
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
        self.dtype_ = np.dtype(X.dtype)
        self.device_ = self._device()
        X, y, sample_weight, held_out = self._hold_out(X, y, sample_weight, X_val, y_val)
        data = self._clean(X, y, sample_weight, by_parts=False)
        seed = self._seed()
        rng = IsolatedRNG(seed, torch.device(self.device_))
        net = self._build_net(data, rng, seed, by_parts=False)
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
            raise ValueError("classes must be given at the first call of partial_fit.")
        X, y = self._check_X(X, y=y, reset=first)
        check_classification_targets(y)
        if first:
            self.classes_ = np.unique(np.asarray(classes))
            if len(self.classes_) < 2:
                raise ValueError("classes must name at least 2 classes.")
            self.dtype_ = np.dtype(X.dtype)
            self.device_ = self._device()
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"classes={np.unique(classes).tolist()} differs from the classes of the first "
                f"call, {self.classes_.tolist()}."
            )
        unseen = np.setdiff1d(y, self.classes_)
        if len(unseen):
            raise ValueError(
                f"y contains labels that are not in classes: {unseen.tolist()}. Name all classes "
                "at the first call of partial_fit."
            )
        data = self._clean(X, y, sample_weight, by_parts=True)
        if first:
            seed = self._seed()
            rng = IsolatedRNG(seed, torch.device(self.device_))
            net = self._build_net(data, rng, seed, by_parts=True)
        else:
            net = self._prepare_partial(self.net_, data)
        net.train_on(_dataset(data), epochs=1)
        self._finish(net, data, None)
        return self

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
        return int(draw(2**31 - 1))

    def _hold_out(
        self, X: NDArray, y: NDArray, sample_weight: Any, X_val: Any, y_val: Any
    ) -> tuple[NDArray, NDArray, Any, TensorDataset | None]:
        """Separate validation data, from the arguments or from the training data."""
        if (X_val is None) != (y_val is None):
            raise ValueError("X_val and y_val must be given together.")
        if X_val is not None:
            X_val, y_val = self._check_X(X_val, y=y_val, reset=False)
            unseen = np.setdiff1d(y_val, self.classes_)
            if len(unseen):
                raise ValueError(f"y_val contains labels that are not in y: {unseen.tolist()}.")
            return X, y, sample_weight, self._validation_set(X_val, y_val)
        if self.validation_fraction is None:
            return X, y, sample_weight, None
        train, valid = self._split(y)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(_to_numpy(sample_weight), X)[train]
        return X[train], y[train], sample_weight, self._validation_set(X[valid], y[valid])

    def _split(self, y: NDArray) -> tuple[NDArray, NDArray]:
        """Split by class at random; a class with a single sample stays in the training part."""
        _, codes, counts = np.unique(y, return_inverse=True, return_counts=True)
        plenty = np.flatnonzero(counts[codes] > 1)
        n_plenty = int((counts > 1).sum())
        n_valid = max(round(self.validation_fraction * len(y)), n_plenty)
        if len(plenty) - n_valid < n_plenty or not n_plenty:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} leaves too few of the "
                f"{len(y)} samples to train and validate on every class. Give X_val and y_val, "
                "or more samples."
            )
        splitter = StratifiedShuffleSplit(1, test_size=n_valid, random_state=self._seed())
        _, inner = next(splitter.split(plenty, codes[plenty]))
        valid = np.sort(plenty[inner])
        return np.setdiff1d(np.arange(len(y)), valid), valid

    def _validation_set(self, X: NDArray, y: NDArray) -> TensorDataset:
        codes = torch.as_tensor(np.searchsorted(self.classes_, y), device=self.device_)
        return TensorDataset(_as_tensor(X).to(self.device_), codes)

    def _fresh_callbacks(self) -> list | None:
        """Copies of the callbacks: training must not change what the user passed."""
        return None if self.callbacks is None else clone(self.callbacks, safe=False)

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
        self.history_ = pd.DataFrame(
            [{k: v for k, v in row.items() if k != "batches"} for row in net.history]
        )
        self._after_training(data, held_out)

    # ------------------------------------------------------------------ prediction

    def _logits(self, X: Any) -> Tensor:
        check_is_fitted(self)
        X = self._check_X(X, reset=False)
        return torch.cat([logits.cpu() for logits, _ in self.net_.outputs(_as_tensor(X))])

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
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

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
        check_is_fitted(self)
        X = self._check_X(X, reset=False)
        return torch.cat([f.cpu() for _, f in self.net_.outputs(_as_tensor(X))]).numpy()

    @property
    def _n_features_out(self) -> int:
        return self.net_.module_.head.in_features

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "net_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        types = ["float64", "float32"] if self.dtype == "auto" else [self.dtype]
        tags.transformer_tags.preserves_dtype = types
        tags.input_tags.two_d_array = True
        tags.input_tags.three_d_array = not self._wants_2d()
        return tags


def _dataset(data: TrainingData) -> TensorDataset:
    return TensorDataset(data.X, data.y, data.sample_weight)


def _to_numpy(array: Any) -> Any:
    """Bring tensors of any device to numpy; leave everything else alone."""
    if not isinstance(array, Tensor):
        return array
    array = array.detach().cpu()
    return (array.float() if array.dtype == torch.bfloat16 else array).numpy()


class _Borrowed:
    """Present an array's memory as writable, so that torch wraps read-only arrays silently.

    The package never writes to it; torch has no read-only tensors and warns otherwise.
    """

    def __init__(self, array: NDArray) -> None:
        self._array = array
        pointer, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}


def _as_tensor(array: NDArray) -> Tensor:
    """Wrap an array as a tensor without copying it, where its layout allows."""
    array = np.asarray(array)
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    if not array.flags.writeable and array.size:
        array = np.asarray(_Borrowed(array))
    return torch.from_numpy(array)
