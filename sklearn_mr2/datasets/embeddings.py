"""One reader for embeddings and labels in the files people keep them in."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ._arrays import read_npy, read_npz
from ._labels import check_labels
from ._tables import read_csv, read_parquet

SUFFIXES = (".npz", ".npy", ".parquet", ".csv")


def load_embeddings(
    path: str | PathLike[str],
    *,
    label: str | None = None,
    labels_path: str | PathLike[str] | None = None,
    mmap: bool = False,
) -> tuple[NDArray, NDArray, list[str] | None]:
    """Read embeddings and class labels from an .npz, .npy, .parquet or .csv file.

    - ``.npz``: arrays by their usual names, X, features, embeddings, data or arr_0 for the
      features and y, labels, target, targets or arr_1 for the labels.
    - ``.npy``: the features; the labels lie in `labels_path`, or beside the file as
      ``<stem>_labels.npy``, ``<stem>_y.npy``, ``labels.npy`` or ``y.npy``.
    - ``.parquet`` and ``.csv``: one row a sample, one column holding the labels, every other
      column a number. A parquet column of equally long lists gives one feature an entry.

    Pickled data are never loaded, so a file from elsewhere cannot run code.

    Parameters
    ----------
    path : str or path-like
        File of the embeddings.
    label : str, default=None
        Column (.parquet, .csv) or array (.npz) that holds the labels. By default a column named
        label, target, class or y in any case, or an array named as above.
    labels_path : str or path-like, default=None
        For .npy: labels as .npy, or as .csv or .txt with one label a line.
    mmap : bool, default=False
        For .npy: map the file read-only instead of reading it. Types other than float are
        converted and so read all the same. A mapped X is not searched for NaN.

    Returns
    -------
    X : ndarray of shape (n_samples, n_features)
        Features, in the floating-point type of the file; integers and booleans become float64.
    y : ndarray of shape (n_samples,)
        Labels: integers, booleans or strings.
    feature_names : list of str or None
        Column names; None for numpy's files, which have none.

    Raises
    ------
    FileNotFoundError
        If there is no such file, or no labels beside a .npy file.
    ImportError
        If a .parquet file is given and pyarrow is not installed.
    ValueError
        If an argument does not go with the kind of file, or if the file is empty, damaged, of
        another kind, has no labels or missing ones, features that are not numbers or not finite,
        or not as many labels as samples. The message is one line with the file and the cure.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from sklearn_mr2.datasets import load_embeddings
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "clip.npz"
    ...     np.savez(path, embeddings=np.eye(3, dtype="float32"), labels=["cat", "dog", "cat"])
    ...     X, y, feature_names = load_embeddings(path)
    >>> X.shape, X.dtype, y.tolist()
    ((3, 3), dtype('float32'), ['cat', 'dog', 'cat'])
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: suffix {suffix!r} is not known; give a file in {SUFFIXES}")
    if labels_path is not None and suffix != ".npy":
        raise ValueError(f"{path}: labels_path goes with .npy only; leave it out, or give label")
    if mmap and suffix != ".npy":
        raise ValueError(f"{path}: mmap goes with .npy only; save X with np.save, or leave it out")
    if label is not None and suffix == ".npy":
        raise ValueError(f"{path}: a .npy file names no arrays; give labels_path instead of label")
    _check_file(path)

    feature_names = None
    label_file = path
    if suffix == ".npz":
        X, y = read_npz(path, label)
    elif suffix == ".npy":
        if labels_path is not None:
            labels_path = Path(labels_path)
            _check_file(labels_path)
        X, y, label_file = read_npy(path, labels_path, mmap)
    elif suffix == ".parquet":
        X, y, feature_names = read_parquet(path, label)
    else:
        X, y, feature_names = read_csv(path, label)

    X = _check_features(X, path, feature_names)
    return X, check_labels(y, len(X), label_file), feature_names


def _check_file(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; check the name and the folder")
    if not path.is_file():
        raise ValueError(f"{path}: is not a file; give one file in {SUFFIXES}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: is empty; write it again")


def _check_features(X: NDArray, path: Path, feature_names: list[str] | None) -> NDArray:
    if X.dtype.kind not in "biuf":
        raise ValueError(f"{path}: features of type {X.dtype} are not numbers; save X as float32")
    if X.ndim != 2 or 0 in X.shape:
        raise ValueError(
            f"{path}: features have shape {X.shape}; give a 2-D array with one row a sample "
            "(X.reshape(len(X), -1) flattens more dimensions)"
        )
    kind = X.dtype.newbyteorder("=") if X.dtype.kind == "f" else np.dtype(np.float64)
    if X.dtype != kind:
        X = np.array(X, dtype=kind)
    # Searching a mapped file would read all of it.
    if not isinstance(X, np.memmap):
        finite = np.isfinite(X)
        if not finite.all():
            row, column = np.argwhere(~finite)[0].tolist()
            name = column if feature_names is None else repr(feature_names[column])
            raise ValueError(
                f"{path}: the features have NaN or infinite values ({int((~finite).sum())}, the "
                f"first in row {row} counting from 0, column {name}); remove or fill these samples"
            )
    return X
