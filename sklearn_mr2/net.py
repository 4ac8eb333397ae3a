"""skorch's side: a private net that trains on clean tensors.

Estimators hold a :class:`TensorNet`; they do not inherit from it. What is bypassed of skorch, and
why: batches are slices of tensors instead of a ``DataLoader`` (collating single rows costs more
than a small network), the loss is read once an epoch instead of once a batch, and validation of
the input is scikit-learn's. What remains is skorch's: initialisation, parameter groups, callbacks,
history, devices, compilation and pickling.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, EpochTimer, LRScheduler, ParamMapper, PrintLog
from skorch.dataset import unpack_data
from skorch.utils import TeeGenerator
from torch import Tensor, nn
from tqdm.auto import tqdm

from .checkpoint import load_checkpoint, save_checkpoint
from .distributed import ALONE, Processes


class IsolatedRNG:
    """A stream of torch's random numbers that neither reads nor disturbs the global one.

    Modules draw from torch's global generators when they are initialised and in layers such as
    dropout. Inside :meth:`scope` those generators run from this object's own state; outside, they
    are as the user left them. A lock keeps threads that train at the same time from mixing their
    streams.

    Parameters
    ----------
    seed : int
        Seed of the stream.
    device : torch.device
        Device whose generator is isolated besides the CPU's.
    """

    _lock: ClassVar = threading.RLock()

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        self._cuda = [torch.Generator(d).manual_seed(seed).get_state() for d in self._devices]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Draw from this stream for the duration of a ``with`` block."""
        with self._lock, torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._cpu)
            for device, state in zip(self._devices, self._cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._cpu = torch.get_rng_state()
            self._cuda = [torch.cuda.get_rng_state(d) for d in self._devices]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return {"cpu": self._cpu, "cuda": self._cuda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where another stream stood."""
        self._cpu, self._cuda = state["cpu"], state["cuda"]

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not torch.cuda.is_available():  # saved on a machine that has one
            state = {**state, "_devices": [], "_cuda": []}
        self.__dict__.update(state)


class TensorDataset(torch.utils.data.Dataset):
    """Features, labels and weights, as tensors.

    Parameters
    ----------
    X : Tensor of shape (n_samples, ...)
        Features.
    y : Tensor of shape (n_samples,), optional
        Class codes.
    sample_weight : Tensor of shape (n_samples,), optional
        Weights with mean 1.
    processes : Processes, optional
        Whom the rows of each batch are divided among. A batch then holds the features of this
        process's rows only, and all labels and weights.
    """

    def __init__(
        self,
        X: Tensor,
        y: Tensor | None = None,
        sample_weight: Tensor | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.X, self.y, self.sample_weight = X, y, sample_weight
        self.processes = processes

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, index: Any) -> Batch:
        y = torch.zeros(()) if self.y is None else self.y[index]
        w = None if self.sample_weight is None else self.sample_weight[index]
        return Batch(self.X[self.processes.own(index, len(self))], y, w, self.processes)

    def divided(self, processes: Processes) -> TensorDataset:
        """The same data, the rows of each batch divided among processes."""
        return TensorDataset(self.X, self.y, self.sample_weight, processes)

    def share(self, processes: Processes) -> TensorDataset:
        """One process's share of the rows."""
        rows = processes.share(len(self))
        y = None if self.y is None else self.y[rows]
        w = None if self.sample_weight is None else self.sample_weight[rows]
        return TensorDataset(self.X[rows], y, w)


class Batch(tuple):
    """The pair ``(X, y)`` that skorch's callbacks unpack, with the weights riding along.

    `processes` are those that its rows are divided among.
    """

    sample_weight: Tensor | None
    processes: Processes

    def __new__(
        cls,
        X: Tensor,
        y: Tensor,
        sample_weight: Tensor | None = None,
        processes: Processes = ALONE,
    ) -> Batch:
        self = super().__new__(cls, (X, y))
        self.sample_weight, self.processes = sample_weight, processes
        return self


class TensorLoader:
    """Iterate over a :class:`TensorDataset` in batches that are slices of its tensors.

    Parameters
    ----------
    dataset : TensorDataset
        What to iterate over.
    batch_size : int
        Rows in a batch; the last batch may be smaller.
    shuffle : bool, default=False
        Draw a new order at each pass.
    drop_last : bool, default=False
        Leave out a last batch that is smaller, unless it is the only one.
    generator : torch.Generator, optional
        Source of the orders.
    sampler : callable, optional
        Called as ``sampler(dataset, batch_size, generator)`` at each pass; returns an iterable of
        index tensors, one a batch, and overrides `shuffle` and `drop_last`. The loader has a length
        if the sampler has a method ``n_batches(dataset, batch_size)``.
    """

    def __init__(
        self,
        dataset: TensorDataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        sampler: Any = None,
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.shuffle, self.drop_last = shuffle, drop_last
        self.generator, self.sampler = generator, sampler

    def __len__(self) -> int:
        if self.sampler is not None:
            if not hasattr(self.sampler, "n_batches"):
                raise TypeError(
                    f"How many batches a pass has is known to the sampler "
                    f"{type(self.sampler).__name__} alone. Give it a method "
                    "n_batches(dataset, batch_size), or count them in a pass."
                )
            return self.sampler.n_batches(self.dataset, self.batch_size)
        n = len(self.dataset)
        return max(1, n // self.batch_size if self.drop_last else -(-n // self.batch_size))

    def __iter__(self) -> Iterator[Batch]:
        n, size = len(self.dataset), self.batch_size
        if self.sampler is not None:
            for index in self.sampler(self.dataset, size, self.generator):
                yield self.dataset[index]
            return
        order = torch.randperm(n, generator=self.generator) if self.shuffle and n > size else None
        for i in range(len(self)):
            rows = slice(i * size, (i + 1) * size)
            yield self.dataset[rows if order is None else order[rows].to(self.dataset.X.device)]


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode for the duration of a ``with`` block.

    Afterwards each part is in the mode it had, which need not be that of the whole.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def first_output_softmax(logits: Tensor) -> Tensor:
    """Class probabilities of a batch of logits, as skorch's ``predict_nonlinearity``."""
    return logits.softmax(-1)


class EpochBar(Callback):
    """Progress bar over epochs, with the losses and scores of the last one."""

    def on_train_begin(self, net: TensorNet, **kwargs: Any) -> None:
        self.bar_ = tqdm(total=net.n_epochs_asked, unit="epoch")
        self.before_ = len(net.history)  # of earlier calls of partial_fit

    def on_epoch_end(self, net: TensorNet, **kwargs: Any) -> None:
        self._show(net)

    def on_train_end(self, net: TensorNet, **kwargs: Any) -> None:
        if net.history:  # a callback that ends training comes before the bar
            self._show(net)
        self.bar_.close()
        del self.bar_  # holds a stream, which cannot be pickled

    def _show(self, net: TensorNet) -> None:
        shown = {
            name: f"{value:.4g}"
            for name, value in net.history[-1].items()
            if isinstance(value, float | np.floating) and name != "dur"
        }
        self.bar_.set_postfix(shown, refresh=False)
        self.bar_.update(len(net.history) - self.before_ - self.bar_.n)


class TensorNet(NeuralNetClassifier):
    """skorch net over :class:`TensorDataset`, with one synchronisation an epoch.

    Parameters
    ----------
    module, criterion : torch.nn.Module
        Instances. The module maps a batch to ``(logits, features)``; the criterion is called as
        ``criterion(logits, features, y, sample_weight)`` and returns the batch's mean loss.
    rng : IsolatedRNG
        Source of random numbers during training.
    stochastic : bool, default=True
        Whether training draws random numbers inside the module.
    accumulate : bool, default=False
        Give the optimiser one closure an epoch that sums over all batches, as full-batch
        optimisers want it; otherwise one step a batch.
    mixed_precision : "bfloat16" or None, default=None
        Type of matrix products during training. bfloat16 has the range of float32, so that
        gradients need no scaling.
    checkpoint : path, optional
        File that the state of training is written to after each epoch, and that it continues from
        where an earlier run was cut off. Removed when training is over.
    fingerprint : str, default=""
        What tells one training run from another, so that it never continues a foreign one.
    head_l2 : float, default=0
        Penalty ``head_l2 / 2 * ||W||^2`` on the weights of ``module.head``.
    processes : Processes, optional
        Those that train together. Each does its share of the rows of each batch; all end with the
        same parameters. The first one prints and writes the checkpoint.
    **kwargs
        skorch's.
    """

    # Callbacks may keep copies of the parameters, so skorch has to move them between devices too.
    cuda_dependent_attributes_ = ["callbacks_"]

    def __init__(
        self,
        module: nn.Module,
        *,
        criterion: nn.Module,
        rng: IsolatedRNG | None = None,
        stochastic: bool = True,
        accumulate: bool = False,
        mixed_precision: str | None = None,
        checkpoint: str | os.PathLike | None = None,
        fingerprint: str = "",
        head_l2: float = 0.0,
        processes: Processes = ALONE,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("iterator_train", TensorLoader)
        kwargs.setdefault("iterator_valid", TensorLoader)
        kwargs.setdefault("train_split", None)
        kwargs.setdefault("predict_nonlinearity", first_output_softmax)
        super().__init__(module, criterion=criterion, **kwargs)
        self.rng = rng
        self.stochastic = stochastic
        self.accumulate = accumulate
        self.mixed_precision = mixed_precision
        self.checkpoint = checkpoint
        self.fingerprint = fingerprint
        self.head_l2 = head_l2
        self.processes = processes
        self.n_seen = 0
        # Error of each class, measured out of fold before training, for the estimator.
        self.class_error: NDArray | None = None

    @property
    def _default_callbacks(self) -> list[tuple[str, Callback]]:
        callbacks: list[tuple[str, Callback]] = [("epoch_timer", EpochTimer())]
        if not self.processes.first:
            return callbacks
        if self.verbose == 1:
            callbacks.append(("progress_bar", EpochBar()))
        elif self.verbose:
            callbacks.append(("print_log", PrintLog()))
        return callbacks

    def initialize(self) -> TensorNet:
        super().initialize()
        # The instances now live in module_ and criterion_; a second reference would be pickled a
        # second time, and without skorch's mapping between devices.
        self.module, self.criterion = type(self.module_), type(self.criterion_)
        self._check_callbacks()
        # Names, for a second reference to the parts would be pickled a second time.
        self._given_in_evaluation = [
            name
            for name, part in self.module_.named_modules()
            if not part.training and any(True for _ in part.parameters())
        ]
        self._set_training(False)
        return self

    def _set_training(self, training: bool = True) -> None:
        """Change between training and evaluation.

        A frozen part that came in evaluation mode stays in it, as in a loop of one's own that
        leaves it there; freezing alone holds parameters only.
        """
        super()._set_training(training)
        for name in self._given_in_evaluation:
            part = self.module_.get_submodule(name)
            if not any(p.requires_grad for p in part.parameters()):
                part.eval()

    def get_params_for_optimizer(self, prefix: str, named_parameters: Any) -> Any:
        named = list(named_parameters)
        names = [name for name, _ in named]
        left = names
        for pattern, _ in self.get_params_for(prefix).get("param_groups", []):
            rest = [name for name in left if not fnmatch(name, pattern)]
            if len(rest) == len(left):
                taken = any(fnmatch(name, pattern) for name in names)
                raise ValueError(
                    f"{prefix}__param_groups: the pattern {pattern!r} matches no parameter"
                    f"{', but for those of earlier patterns' if taken else ''}. "
                    f"The parameters are {_listed(names)}."
                )
            left = rest
        return super().get_params_for_optimizer(prefix, named)

    def _check_callbacks(self) -> None:
        """Refuse callbacks that would do nothing, or fail in the middle of training."""
        for name, callback in self.callbacks_:
            if isinstance(callback, LRScheduler) and not all(
                "lr" in group for group in self.optimizer_.param_groups
            ):
                raise ValueError(
                    f"The callback {name} changes the learning rate, and the full-batch optimiser "
                    "of a linear probe has none. Leave the callback out, or set optimizer, for "
                    "example to torch.optim.Adam."
                )
            if isinstance(callback, ParamMapper):
                self._check_patterns(name, callback)

    def _check_patterns(self, name: str, callback: ParamMapper) -> None:
        named = list(callback.named_parameters(self))
        for pattern in callback.patterns:
            if not any(True for _ in callback.filter_parameters([pattern], named)):
                raise ValueError(
                    f"The callback {name}: the pattern {pattern!r} matches no parameter. The "
                    f"parameters are {_listed(name for name, _ in named)}."
                )

    def torch_compile(self, module: nn.Module, name: str) -> nn.Module:
        # In place: a wrapper would give the parameters other names, which patterns of parameter
        # groups and skorch's Freezer would then fail to match without a word.
        if self.compile:
            module.compile(**self.get_params_for("compile"))
        return module

    def initialize_callbacks(self) -> TensorNet:
        super().initialize_callbacks()
        known = {name for name, _ in self._uniquely_named_callbacks()} | {
            "progress_bar",
            "print_log",
        }
        for key in self.get_params_for("callbacks"):
            if key.split("__")[0] not in known:
                raise ValueError(
                    f"callbacks__{key} refers to no callback; their names are {sorted(known)}. "
                    "Name one by a pair in the list of callbacks, as in ('stop', EarlyStopping())."
                )
        # After those that score.
        self.callbacks_.sort(key=lambda item: item[0] == "progress_bar")
        return self

    def initialize_history(self) -> TensorNet:
        self._best: dict[str, float] = {}
        return super().initialize_history()

    def get_dataset(self, X: Any, y: Any = None) -> TensorDataset:
        return X if isinstance(X, TensorDataset) else TensorDataset(torch.as_tensor(X), y)

    def get_loss(
        self, y_pred: Any, y_true: Tensor, X: Any = None, training: bool = False, *, weight: Any
    ) -> Tensor:
        logits, features = y_pred
        return self.criterion_(logits, features, y_true, weight)

    def infer(self, x: Tensor, **fit_params: Any) -> Any:
        # Storage only: large arrays of float16 are converted a batch at a time.
        return super().infer(x.float() if x.dtype == torch.float16 else x, **fit_params)

    def penalty(self) -> Tensor | float:
        """Value of the penalty on the head's weights; of several processes the first counts it."""
        if not self.head_l2 or not self.processes.first:
            return 0.0
        return 0.5 * self.head_l2 * self.module_.head.weight.square().sum()

    def _batch_loss(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        X, y = unpack_data(batch)
        weight = batch.sample_weight
        device = self.device
        y, weight = y.to(device), None if weight is None else weight.to(device)
        with self._precision(training):
            output = self.infer(X)
        output = _gather(output, batch)
        return self.get_loss(output, y, training=training, weight=weight), output[0]

    def _precision(self, training: bool) -> Any:
        if not training or self.mixed_precision is None:
            return nullcontext()
        kind = torch.device(self.device).type
        return torch.autocast(kind, dtype=getattr(torch, self.mixed_precision))

    def train_step_single(self, batch: Batch, **fit_params: Any) -> dict[str, Tensor]:
        self._set_training(True)
        loss, output = self._batch_loss(batch, training=True)
        loss = loss + self.penalty()
        loss.backward()
        # Each process has differentiated the whole batch's loss with respect to its own rows.
        self.processes.sum(self._gradients())
        return {"loss": loss.detach(), "y_pred": output.detach()}

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.module_.parameters() if p.grad is not None]

    def _state(self) -> list[Tensor]:
        parts = (self.module_, self.criterion_)
        return [t.detach() for part in parts for t in (*part.parameters(), *part.buffers())]

    def validation_step(self, batch: Batch, **fit_params: Any) -> dict[str, Tensor]:
        self._set_training(False)
        with torch.no_grad():
            loss, output = self._batch_loss(batch, training=False)
        return {"loss": loss, "y_pred": output}

    def train_on(
        self, train: TensorDataset, valid: TensorDataset | None = None, *, epochs: int
    ) -> TensorNet:
        """Train for at most `epochs`, until a callback or the optimiser asks for the end.

        Parameters
        ----------
        train, valid : TensorDataset
            Training and validation data.
        epochs : int
            Number of passes over `train`, or of steps of a full-batch optimiser.
        """
        self._check_monitors(valid)
        data = {"dataset_train": train, "dataset_valid": valid}
        batches, valid_batches = self._iterators(train, valid)
        self.n_epochs_asked, self.n_rows = epochs, len(train)
        self.notify("on_train_begin", X=train.X, y=train.y)
        done = 0 if self.checkpoint is None else load_checkpoint(self, self.checkpoint)
        if not self.processes.same(done):
            raise ValueError(
                f"checkpoint={str(self.checkpoint)!r} is not the same file in all processes. Name "
                "one on a file system that their machines share."
            )
        self.processes.broadcast(self._state())  # modules of the user's may differ
        good, diverged = self._snapshot(), False
        for _ in range(done, epochs):
            self.notify("on_epoch_begin", **data)
            start = self._snapshot()
            with self._random_numbers():
                loss = self._train_epoch(batches)
            if not self._record("train_loss", loss):
                diverged = True
                break
            good = start  # the parameters that this finite loss belongs to
            if valid_batches is not None:
                loss = self._mean_loss(valid_batches, self.validation_step, training=False)
                self._record("valid_loss", loss)
            if not self.history[-1]["batches"]:
                self.history.new_batch()  # skorch's Checkpoint looks up the last one
            try:
                self.notify("on_epoch_end", **data)
                end = self.has_converged()
            except KeyboardInterrupt:  # how skorch's callbacks ask for the end of training
                end = True
            if self.processes.any(end):
                break
            if self.checkpoint is not None and self.processes.first:
                save_checkpoint(self, self.checkpoint)
        if diverged or not all(p.isfinite().all() for p in self.module_.parameters()):
            self._restore(good)
        self.notify("on_train_end", X=train.X, y=train.y)
        if self.checkpoint is not None and self.processes.first:
            Path(self.checkpoint).unlink(missing_ok=True)
        return self

    def _iterators(
        self, train: TensorDataset, valid: TensorDataset | None
    ) -> tuple[TensorLoader, TensorLoader | None]:
        if self.accumulate:
            # The loss is a sum over rows: each process goes through its own, and only sums are
            # exchanged. Validation costs less than gathering its outputs would.
            train = train.share(self.processes)
        else:
            train = train.divided(self.processes)
            valid = None if valid is None else valid.divided(self.processes)
        batches = self.get_iterator(train, training=True)
        return batches, None if valid is None else self.get_iterator(valid, training=False)

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Draw from the net's stream, or from one for each process that is seeded by it."""
        if self.rng is None or not self.stochastic:
            yield
            return
        with self.rng.scope():
            if self.processes.size == 1:
                yield
                return
            seed = int(torch.randint(2**31 - 1, ())) + self.processes.rank
            with IsolatedRNG(seed, torch.device(self.device)).scope():
                yield

    def has_converged(self) -> bool:
        """Whether training has nothing more to do."""
        return getattr(self.optimizer_, "converged", False)

    def _check_monitors(self, valid: TensorDataset | None) -> None:
        for name, callback in self.callbacks_:
            monitor = str(getattr(callback, "monitor", None))
            if valid is None and monitor.startswith("valid_loss"):
                raise ValueError(
                    f"The callback {name} monitors {monitor!r}, but there are no validation data, "
                    "as always in partial_fit. Set validation_fraction, give X_val and y_val to "
                    "fit, or let it monitor "
                    f"{monitor.replace('valid', 'train')!r}."
                )

    def _train_epoch(self, batches: TensorLoader) -> Tensor:
        if self.accumulate:
            return self._accumulated_step(batches)
        step = self.train_step if self._watches_batches() else self._unwatched_step
        loss = self._mean_loss(batches, step, training=True)
        # Equal up to rounding, and buffers such as those of batch normalisation are of one share.
        self.processes.broadcast(self._state())
        return loss

    def _mean_loss(
        self,
        batches: TensorLoader,
        step_fn: Callable[[Batch], dict[str, Tensor]],
        *,
        training: bool,
    ) -> Tensor:
        """Take a step with each batch; return the mean of the losses, still on the device."""
        total, count = torch.zeros((), device=self.device), 0
        watched = self._watches_batches()
        for batch in batches:
            size = len(batch[1])
            if watched:
                self.notify("on_batch_begin", batch=batch, training=training)
            step = step_fn(batch)
            total, count = total + size * step["loss"], count + size
            if watched:
                self._end_batch(batch, step, training=training)
        mean = total / count
        self.processes.broadcast([mean])  # callbacks decide by it
        return mean

    def _end_batch(self, batch: Batch, step: dict[str, Tensor], *, training: bool) -> None:
        self.history.record_batch(f"{'train' if training else 'valid'}_batch_size", len(batch[1]))
        self.notify("on_batch_end", batch=batch, training=training, **step)

    def _unwatched_step(self, batch: Batch) -> dict[str, Tensor]:
        """skorch's ``train_step`` without the notifications that no callback listens to."""
        result: dict[str, Tensor] = {}

        def closure() -> Tensor:
            self.optimizer_.zero_grad()
            step = self.train_step_single(batch)
            result.update({k: v for k, v in step.items() if k not in result})
            return step["loss"]

        self.optimizer_.step(closure)
        return result

    def _accumulated_step(self, batches: TensorLoader) -> Tensor:
        n, watched = self.n_rows, self._watches_batches()
        steps: list[tuple[Batch, dict[str, Tensor]]] = []

        def closure() -> Tensor:
            self.optimizer_.zero_grad()
            steps.clear()
            penalty = self.penalty()
            if isinstance(penalty, Tensor):
                penalty.backward()
                penalty = penalty.detach()
            total = torch.zeros((), dtype=torch.float64, device=self.device) + penalty
            for batch in batches:
                loss, output = self._batch_loss(batch, training=True)
                if watched:
                    steps.append((batch, {"loss": loss.detach(), "y_pred": output.detach()}))
                loss = loss * (len(batch[0]) / n)
                loss.backward()
                total += loss.detach()
            self.processes.sum([*self._gradients(), total])
            if watched:
                parameters = TeeGenerator(self.get_all_learnable_params())
                self.notify("on_grad_computed", named_parameters=parameters, training=True)
            return total

        self._set_training(True)
        parameters = [p.detach() for p in self.module_.parameters()]
        total = self.processes.follow_first(self.optimizer_.step, closure, parameters)
        # The optimiser may have evaluated several points; callbacks see the last one.
        for batch, step in steps:
            self.notify("on_batch_begin", batch=batch, training=True)
            self._end_batch(batch, step, training=True)
        return total

    def records(self) -> list[dict[str, Any]]:
        """What the history holds of each epoch, single batches left out."""
        return [{k: v for k, v in row.items() if k != "batches"} for row in self.history]

    def outputs(self, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``(logits, features)`` of each batch of `X`, in evaluation mode."""
        for batch in self.get_iterator(TensorDataset(X), training=False):
            yield self.evaluation_step(batch)

    def _watches_batches(self) -> bool:
        """Whether a callback listens to single batches."""
        hooks = ("on_batch_begin", "on_batch_end", "on_grad_computed")
        return any(
            getattr(type(callback), hook) is not getattr(Callback, hook)
            for _, callback in self.callbacks_
            for hook in hooks
        )

    def _record(self, name: str, loss: Tensor) -> bool:
        """Write a loss and whether it is the best so far; return whether it is finite."""
        value = loss.item()
        self.history.record(name, value)
        self.history.record(name + "_best", value < self._best.get(name, math.inf))
        self._best[name] = min(value, self._best.get(name, math.inf))
        return math.isfinite(value)

    def _snapshot(self) -> list[dict[str, Tensor]]:
        return [
            {key: value.detach().clone() for key, value in part.state_dict().items()}
            for part in (self.module_, self.criterion_)
        ]

    def _restore(self, good: list[dict[str, Tensor]]) -> None:
        self.module_.load_state_dict(good[0])
        self.criterion_.load_state_dict(good[1])
        self._warn_of_divergence()

    def _warn_of_divergence(self) -> None:
        warnings.warn(
            f"Training diverged in epoch {len(self.history)}: the loss or the parameters are not "
            "finite. The last parameters with a finite loss are kept. Lower lr, scale the "
            "features, or clip gradients with the callback skorch.callbacks.GradientNormClipping.",
            ConvergenceWarning,
            stacklevel=6,
        )


def _listed(names: Iterable[str], limit: int = 20) -> str:
    """The names in one line, the last ones counted where there are many."""
    names = list(names)
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _gather(output: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits and features of all rows of a batch, from those of this process's rows."""
    if batch.processes.size == 1:
        return output
    packed = batch.processes.gather_rows(torch.cat(output, 1), len(batch[1]))
    logits, features = packed.split([part.shape[1] for part in output], 1)
    return logits, features
