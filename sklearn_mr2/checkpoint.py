"""Writing the state of training to a file, and continuing from it with the same result."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from .net import TensorNet

_FORMAT = 1


def save_checkpoint(net: TensorNet, path: str | os.PathLike) -> None:
    """Write all that the next epoch depends on; a reader never sees half a file.

    Parameters
    ----------
    net : TensorNet
        A net between two epochs.
    path : path
        File to write.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "format": _FORMAT,
        "fingerprint": net.fingerprint,
        "history": _plain(net.records()),
        "best": dict(net._best),
        "callbacks": {name: _state_of(callback) for name, callback in net.callbacks_},
        **{name: part.state_dict() for name, part in _parts(net).items()},
    }
    generator = _generator(net)
    if generator is not None:
        state["generator"] = generator.get_state()
    temporary = path.with_name(path.name + ".part")
    torch.save(state, temporary)
    os.replace(temporary, path)


def load_checkpoint(net: TensorNet, path: str | os.PathLike) -> int:
    """Continue from a file that :func:`save_checkpoint` wrote, if there is one.

    Parameters
    ----------
    net : TensorNet
        An initialised net.
    path : path
        File to read. Read without unpickling code.

    Returns
    -------
    int
        Number of epochs done already; 0 if there is no file.

    Raises
    ------
    ValueError
        If the file is not a checkpoint, or one of other data, parameters or seed.
    """
    path = Path(path)
    if not path.exists():
        return 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        known = state["format"] == _FORMAT
    except Exception as error:
        raise ValueError(
            f"checkpoint={str(path)!r} is not a readable checkpoint. Remove it, or name another "
            f"file. ({type(error).__name__})"
        ) from error
    if not known or state["fingerprint"] != net.fingerprint:
        raise ValueError(
            f"checkpoint={str(path)!r} is from a fit with other data, parameters or random_state. "
            "Remove it to start again, or name another file. Continuing needs random_state to be "
            "an integer."
        )
    for name, part in _parts(net).items():
        part.load_state_dict(state[name])
    for row in state["history"]:
        net.history.new_epoch()
        net.history[-1].update(row)
    net._best = state["best"]
    for name, callback in net.callbacks_:
        _restore(callback, state["callbacks"].get(name, {}))
    generator = _generator(net)
    if generator is not None:
        generator.set_state(state["generator"])
    return len(state["history"])


def fingerprint(
    estimator: Any, X: Tensor, y: Tensor, sample_weight: Tensor | None, seed: int
) -> str:
    """What a training run depends on, in short: parameters, data and seed.

    Parameters
    ----------
    estimator : estimator
        Its parameters count, a module with its weights, callbacks by their names and types only.
    X : Tensor of shape (n_samples, ...)
        Features.
    y : Tensor of shape (n_samples,)
        Class codes.
    sample_weight : Tensor of shape (n_samples,) or None
        Weights.
    seed : int
        Seed of the run.

    Returns
    -------
    str
        Hexadecimal digest.
    """
    parameters = {
        name: value
        for name, value in estimator.get_params(deep=False).items()
        if name not in ("callbacks", "verbose", "checkpoint", "device", "random_state")
    }
    modules = [value for value in parameters.values() if isinstance(value, torch.nn.Module)]
    callbacks = [_description(callback) for callback in estimator.callbacks or []]
    description = repr((sorted(parameters.items()), callbacks, seed))
    # The address of a function or object is another in each process.
    digest = hashlib.sha256(re.sub(r" at 0x[0-9a-fA-F]+", "", description).encode())
    weights = [
        value
        for module in modules
        for _, value in sorted(module.state_dict().items())
        if not is_lazy(value)  # which has no value yet; the seed decides on it
    ]
    for tensor in (X, y, sample_weight, *weights):
        if isinstance(tensor, Tensor):
            tensor = tensor.detach().cpu().contiguous()
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _description(callback: Any) -> Any:
    """Type of a callback, which may be a class and part of a pair with a name."""
    if isinstance(callback, tuple | list):
        return callback[0], _description(callback[1])
    return callback if isinstance(callback, type) else type(callback)


def _parts(net: TensorNet) -> dict[str, Any]:
    parts = {"module": net.module_, "criterion": net.criterion_, "optimizer": net.optimizer_}
    return parts if net.rng is None else {**parts, "rng": net.rng}


def _generator(net: TensorNet) -> torch.Generator | None:
    return net.get_params_for("iterator_train").get("generator")


def _state_of(callback: Any) -> dict[str, Any]:
    """Fitted attributes of a callback, as far as they are plain data."""
    state = {}
    for name, value in vars(callback).items():
        if name.endswith("_") and not isinstance(value, type):
            value = value.state_dict() if hasattr(value, "state_dict") else value
            try:
                state[name] = _plain(value)
            except TypeError:
                continue  # made anew in on_train_begin, such as functions and streams
    return state


def _restore(callback: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        current: Any = getattr(callback, name, None)
        if hasattr(current, "load_state_dict"):
            current.load_state_dict(value)
        else:
            setattr(callback, name, value)


def _plain(value: Any) -> Any:
    """`value` made of types that torch reads without unpickling code; TypeError if it is not."""
    if isinstance(value, Tensor):
        return value
    if getattr(value, "ndim", None) == 0:  # numpy's scalars, some of which are floats too
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        plain = [_plain(v) for v in value]
        return tuple(plain) if isinstance(value, tuple) else plain
    raise TypeError(f"{type(value).__name__} is not plain data")
