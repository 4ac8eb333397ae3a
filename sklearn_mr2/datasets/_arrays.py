"""Embeddings in numpy's own files: .npz archives, and .npy with labels beside it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ._errors import listing, reading
from ._labels import read_text_labels

FEATURE_ARRAYS = ("X", "features", "embeddings", "data", "arr_0")
LABEL_ARRAYS = ("y", "labels", "target", "targets", "arr_1")

_NPY_CURE = "write it again with np.save, as numbers or strings and not as Python objects"
_NPZ_CURE = "write it again with np.savez(path, X=X, y=y), without Python objects"


def read_npz(path: Path, label: str | None) -> tuple[NDArray, NDArray]:
    """Read X and y from an .npz archive by their usual names.

    Pickled arrays are never loaded; only the two arrays returned are decompressed.

    Parameters
    ----------
    path : Path
        The archive.
    label : str or None
        Name of the labels' array; None looks for one of `LABEL_ARRAYS`.

    Returns
    -------
    X, y : ndarray
        As stored.

    Raises
    ------
    ValueError
        If the archive is damaged, or if it has no, or several, arrays to choose from.
    """
    with reading(path, ".npz file", _NPZ_CURE):
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no complete zip archive")
        archive = np.load(path, allow_pickle=False)
    with archive:
        x_name = _choose_array(archive.files, FEATURE_ARRAYS, "features", path)
        y_name = _choose_array(
            archive.files, LABEL_ARRAYS if label is None else (label,), "labels", path
        )
        with reading(path, ".npz file", _NPZ_CURE):
            return np.asarray(archive[x_name]), np.asarray(archive[y_name])


def _choose_array(present: list[str], wanted: tuple[str, ...], what: str, path: Path) -> str:
    found = [name for name in wanted if name in present]
    if len(found) == 1:
        return found[0]
    number = "several arrays" if found else "no array"
    raise ValueError(
        f"{path}: {number} for the {what} (looked for {', '.join(wanted)}; "
        f"found {listing(present) or 'nothing'}); save with np.savez(path, X=X, y=y)"
    )


def read_npy(path: Path, labels_path: Path | None, mmap: bool) -> tuple[NDArray, NDArray, Path]:
    """Read X from a .npy file and y from the labels file beside it.

    Parameters
    ----------
    path : Path
        File of X.
    labels_path : Path or None
        Labels as .npy, or as .csv or .txt with one label a line; None looks for
        ``<stem>_labels.npy``, ``<stem>_y.npy``, ``labels.npy`` and ``y.npy`` in X's folder.
    mmap : bool
        Whether to map X read-only instead of reading it.

    Returns
    -------
    X, y : ndarray
        As stored.
    labels_path : Path
        Where y was found.

    Raises
    ------
    FileNotFoundError
        If there is no labels file.
    ValueError
        If a file is damaged or the labels file has another suffix.
    """
    X = _load_npy(path, mmap)
    if labels_path is None:
        names = [f"{path.stem}_labels.npy", f"{path.stem}_y.npy", "labels.npy", "y.npy"]
        candidates = [path.with_name(name) for name in names if name != path.name]
        labels_path = next((file for file in candidates if file.is_file()), None)
        if labels_path is None:
            raise FileNotFoundError(
                f"{path}: no labels beside it (looked for {', '.join(names)}); "
                "give labels_path, a .npy, .csv or .txt file with one label a sample"
            )
    suffix = labels_path.suffix.lower()
    if suffix == ".npy":
        return X, _load_npy(labels_path, mmap=False), labels_path
    if suffix in (".csv", ".txt"):
        return X, read_text_labels(labels_path, len(X) if X.ndim else 0), labels_path
    raise ValueError(f"{labels_path}: labels have to be a .npy, .csv or .txt file, not {suffix!r}")


def _load_npy(path: Path, mmap: bool) -> NDArray:
    with reading(path, ".npy file", _NPY_CURE):
        # np.load looks at the content and takes anything unknown for a pickle.
        with path.open("rb") as file:
            if file.read(6) != b"\x93NUMPY":
                raise ValueError("it does not start with numpy's mark")
        return np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
