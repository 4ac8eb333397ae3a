"""One clear line for whatever a damaged file makes its decoder raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def reading(path: Path, kind: str, cure: str) -> Iterator[None]:
    """Turn any exception of the block into a ValueError of one line naming file and cure.

    Meant for calls into decoders only: on damaged bytes numpy, zipfile, pandas and pyarrow raise
    a dozen unrelated exception types, and no list of them would stay complete.

    Parameters
    ----------
    path : Path
        File being read.
    kind : str
        What the file is taken for, such as ".npy file".
    cure : str
        What to do when it is not.

    Raises
    ------
    ValueError
        In place of every exception of the block.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: cannot be read as a {kind} ({reason}); {cure}") from error


def listing(names: list[str], limit: int = 10) -> str:
    """Quote names for an error message, the first ``limit`` of them and how many there are."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"
