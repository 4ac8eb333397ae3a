"""Batches in which samples have others of their class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..net import TensorDataset


@dataclass(frozen=True)
class ClassBalancedSampler:
    """Make batches of a few classes with several samples each.

    The representation margin loss compares samples of a class within a batch. With many classes a
    random batch holds few such pairs, or none; these batches always do. The classes of a batch
    and the samples of a class are drawn without replacement, one after another, so that each
    sample of the smallest class is seen about once an epoch, and all classes equally often.

    Pass it as ``iterator_train__sampler=ClassBalancedSampler(4)``.

    Parameters
    ----------
    samples_per_class : int, default=4
        Samples of each class in a batch; the batch holds ``batch_size // samples_per_class``
        classes, or all of them if there are fewer, with more samples each.

    Examples
    --------
    >>> import torch
    >>> from sklearn_mr2.net import TensorDataset
    >>> from sklearn_mr2.mr2.sampling import ClassBalancedSampler
    >>> data = TensorDataset(torch.zeros(60, 1), torch.arange(60) % 20)
    >>> batches = ClassBalancedSampler(3)(data, 12, torch.Generator().manual_seed(0))
    >>> [data.y[index].unique(return_counts=True)[1].tolist() for index in batches]
    [[3, 3, 3, 3], [3, 3, 3, 3], [3, 3, 3, 3], [3, 3, 3, 3], [3, 3, 3, 3]]
    """

    samples_per_class: int = 4

    def __post_init__(self) -> None:
        if self.samples_per_class < 2:
            raise ValueError(
                f"samples_per_class={self.samples_per_class!r} must be at least 2, or no sample "
                "has another of its class."
            )

    def _shape(self, n_present: int, batch_size: int) -> tuple[int, int]:
        """Number of classes of a batch and of samples of each."""
        n_classes = min(n_present, max(1, batch_size // self.samples_per_class))
        return n_classes, max(self.samples_per_class, batch_size // n_classes)

    def n_batches(self, dataset: TensorDataset, batch_size: int) -> int:
        """Number of batches of an epoch."""
        if dataset.y is None:
            raise ValueError("ClassBalancedSampler needs the labels of the data set.")
        n_classes, per_class = self._shape(len(dataset.y.unique()), batch_size)
        return max(1, round(len(dataset) / (n_classes * per_class)))

    def __call__(
        self, dataset: TensorDataset, batch_size: int, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Yield the indices of each batch of an epoch."""
        if dataset.y is None:
            raise ValueError("ClassBalancedSampler needs the labels of the data set.")
        y = dataset.y.cpu()
        members = [(y == k).nonzero()[:, 0] for k in y.unique()]
        n_classes, per_class = self._shape(len(members), batch_size)
        streams = [_endless(rows, generator) for rows in members]
        order = _endless(torch.arange(len(members)), generator)
        for _ in range(self.n_batches(dataset, batch_size)):
            classes = _take(order, n_classes)
            yield torch.tensor(
                [i for k in classes for i in _take(streams[k], min(per_class, len(members[k])))]
            )


def _endless(rows: Tensor, generator: torch.Generator | None) -> Iterator[int]:
    """Go through `rows` in a random order, then in another, and so on."""
    while True:
        yield from rows[torch.randperm(len(rows), generator=generator)].tolist()


def _take(stream: Iterator[int], count: int) -> list[int]:
    """The next `count` distinct values of an endless stream."""
    taken: dict[int, None] = {}
    while len(taken) < count:
        taken[next(stream)] = None
    return list(taken)
