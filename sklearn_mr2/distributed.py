"""Reductions over the processes that train one model together.

Every process runs the same program on the same data (SPMD) and does its share of the rows of each
batch; what depends on the whole batch is summed, gathered or broadcast here. With one process
nothing is communicated, so that callers need not distinguish.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """The processes of torch's default group, seen from one of them.

    All methods but :meth:`share` and :meth:`own` are collective: every process has to call them,
    in the same order.

    Parameters
    ----------
    rank : int, default=0
        Number of this process.
    size : int, default=1
        Number of processes.
    device : str, default="cpu"
        Where tensors have to be for the group to exchange them.

    Examples
    --------
    >>> from sklearn_mr2.distributed import Processes
    >>> [Processes(rank, 3).share(10) for rank in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        """Whether this process is the one that prints and writes files."""
        return self.rank == 0

    def share(self, n: int) -> slice:
        """Which of `n` rows are this process's; none, if there are fewer than processes."""
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def own(self, index: Tensor | slice, n: int) -> Tensor | slice:
        """This process's part of an index into `n` rows.

        Where there are fewer rows than processes, some read a row of another: a network need not
        take an empty batch. :meth:`gather_rows` leaves it out again.
        """
        if self.size == 1:
            return index
        rows = range(n)[index] if isinstance(index, slice) else index
        share = self.share(len(rows))
        own = rows[share if share.stop > share.start else slice(0, 1)]
        return slice(own.start, own.stop) if isinstance(own, range) else own

    @torch.no_grad()
    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the processes.

        Parameters
        ----------
        tensors : iterable of Tensor
            Of the same shapes everywhere. One reduction for each dtype among them.
        """
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            dist.all_reduce(flat)
            for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
                tensor.copy_(part.view_as(tensor))

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by that of the first process.

        Parameters
        ----------
        tensors : iterable of Tensor
            Of the same shapes and dtypes everywhere, which may differ among them.
        """
        tensors = list(tensors)
        if self.size == 1 or not tensors:
            return
        # As bytes, since not every backend knows every dtype.
        pieces = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        flat = torch.cat(pieces)
        dist.broadcast(flat, 0)
        if self.first:
            return
        for tensor, part in zip(tensors, flat.split([len(p) for p in pieces]), strict=True):
            # The clone is aligned as its dtype needs it, a part of `flat` need not be.
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))

    def gather_rows(self, own: Tensor, n: int) -> Tensor:
        """All rows of a batch, of which each process has computed its :meth:`own`.

        Parameters
        ----------
        own : Tensor of shape (n_own, ...)
            This process's rows.
        n : int
            Rows of the batch.

        Returns
        -------
        Tensor of shape (n, ...)
            The same everywhere. Gradients flow into this process's rows alone: if every process
            differentiates the same function of all rows, the gradients with respect to the
            parameters of what made them have to be summed.
        """
        if self.size == 1:
            return own
        rows = self.share(n)
        own = own[: rows.stop - rows.start]
        # Shares differ in size, which gathering does not allow everywhere. Adding 0 is exact.
        whole = own.new_zeros(n, *own.shape[1:])
        whole[rows] = own.detach()
        dist.all_reduce(whole)
        return torch.cat((whole[: rows.start], own, whole[rows.stop :]))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.size == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def same(self, value: int) -> bool:
        """Whether an integer, of less than 63 bits, is the same in all processes."""
        if self.size == 1:
            return True
        bounds = torch.tensor([value, -value], dtype=torch.int64, device=self.device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        return bool(bounds[0] == -bounds[1])

    def follow_first(
        self,
        step: Callable[[Callable[[], Tensor]], Tensor],
        closure: Callable[[], Tensor],
        parameters: list[Tensor],
    ) -> Tensor:
        """Let the first process take a step; the others evaluate the closure where it does.

        A line search decides by comparing numbers. If all processes searched, one of them could
        come to another decision by a rounding error, and wait forever for the others.

        Parameters
        ----------
        step : callable
            An optimiser's, called with a closure.
        closure : callable
            Evaluates the objective at `parameters`, with reductions over the processes.
        parameters : list of Tensor
            What the step changes. The same everywhere afterwards.

        Returns
        -------
        Tensor
            What `step` returns, 0-d and float64.
        """
        if self.size == 1:
            return step(closure)
        evaluate = torch.zeros((), dtype=torch.bool, device=self.device)
        value = torch.zeros((), dtype=torch.float64, device=self.device)

        def evaluate_everywhere() -> Tensor:
            self.broadcast([evaluate.fill_(True), value, *parameters])
            return closure()

        if self.first:
            value.copy_(step(evaluate_everywhere))
            self.broadcast([evaluate.fill_(False), value, *parameters])
            return value
        while True:
            self.broadcast([evaluate, value, *parameters])
            if not evaluate:
                return value
            with torch.enable_grad():
                closure()


#: A process on its own.
ALONE = Processes()


def join_processes(device: str) -> Processes:
    """Take part in the process group that the launcher's script has set up.

    Parameters
    ----------
    device : str
        Where the model is trained.

    Returns
    -------
    Processes
        Torch's default group.

    Raises
    ------
    RuntimeError
        If there is no process group.
    ValueError
        If none of its backends exchanges tensors on `device`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "data_parallel=True needs a process group, and there is none. Either start the script "
            "by torchrun and call torch.distributed.init_process_group() before fit, or start it "
            "by accelerate launch and create accelerate.Accelerator() before fit (pip install "
            "'sklearn-mr2[distributed]'). For a single process set data_parallel=False."
        )
    backends = dist.get_backend_config()  # such as "cpu:gloo,cuda:nccl"
    if f"{torch.device(device).type}:" not in backends:
        raise ValueError(
            f"The process group ({backends}) cannot exchange data on device={device!r}. Call "
            "torch.distributed.init_process_group() without a backend, which serves CPUs and "
            "NVIDIA GPUs, or choose another device."
        )
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def own_gpu() -> str:
    """The GPU of this process, by the number that launchers give it among those of the machine."""
    number: Any = os.environ.get("LOCAL_RANK", torch.cuda.current_device())
    return f"cuda:{int(number) % torch.cuda.device_count()}"
