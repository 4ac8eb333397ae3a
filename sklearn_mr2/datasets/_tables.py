"""Embeddings in tables: .csv and .parquet with a label column."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ._errors import listing, reading
from ._labels import LABEL_NAMES, parse_labels

MISSING_NUMBERS = ["", "NA", "N/A", "NaN", "nan", "null", "None"]


def read_csv(path: Path, label: str | None) -> tuple[NDArray, NDArray, list[str]]:
    """Read features and labels from a comma-separated table with a header.

    Parameters
    ----------
    path : Path
        The table.
    label : str or None
        Label column; None looks for one of `LABEL_NAMES`, in any case.

    Returns
    -------
    X : ndarray of shape (n_samples, n_features)
        All columns but the label.
    y : ndarray of shape (n_samples,)
        Labels.
    feature_names : list of str
        Names of the feature columns.

    Raises
    ------
    ValueError
        If the table cannot be parsed, the label column is not found or not unique, or a feature
        column is not numeric.
    """
    cure = "give a comma-separated UTF-8 table whose first line names the columns"
    with reading(path, ".csv table", cure):
        header = pd.read_csv(path, nrows=0)
    column = _choose_label(list(header.columns), label, path)
    with reading(path, ".csv table", cure), warnings.catch_warnings():
        # Too many fields in every row: pandas would drop one, or take the first for an index.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        frame = pd.read_csv(
            path,
            dtype={column: str},
            # Words such as "None" or "NA" are missing numbers, but may well be class names.
            keep_default_na=False,
            na_values={name: MISSING_NUMBERS for name in header.columns if name != column},
            index_col=False,
            low_memory=False,
        )
    # A row cut short has no label field at all, which pandas gives as NaN all the same.
    words = frame.pop(column).fillna("").str.strip().tolist()
    X, names = _features(frame, path)
    return X, parse_labels(words), names


def read_parquet(path: Path, label: str | None) -> tuple[NDArray, NDArray, list[str]]:
    """Read features and labels from a parquet table.

    Parameters
    ----------
    path : Path
        The table.
    label : str or None
        Label column; None looks for one of `LABEL_NAMES`, in any case.

    Returns
    -------
    X : ndarray of shape (n_samples, n_features)
        All columns but the label; a column of equally long lists gives one feature an entry.
    y : ndarray of shape (n_samples,)
        Labels.
    feature_names : list of str
        Names of the feature columns; those of a list column are ``<column>_<position>``.

    Raises
    ------
    ImportError
        If pyarrow is not installed.
    ValueError
        If the file is damaged, the label column is not found or not unique, a label is missing,
        or a feature column is not numeric.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{path}: reading .parquet needs pyarrow; pip install pyarrow") from error
    with reading(path, ".parquet table", "write it again, for instance with DataFrame.to_parquet"):
        frame = pd.read_parquet(path, engine="pyarrow")
        frame.columns = [str(name) for name in frame.columns]
    column = _choose_label(list(frame.columns), label, path)
    labels = frame.pop(column)
    missing = labels.isna().to_numpy()
    if missing.any():
        raise ValueError(
            f"{path}: {missing.sum()} of {len(missing)} labels in column {column!r} are missing, "
            f"the first in row {missing.argmax()} counting from 0; remove these rows or label them"
        )
    with reading(path, f"table with labels in column {column!r}", "give one label a row"):
        y = np.asarray(labels.tolist())
    X, names = _features(frame, path)
    return X, y, names


def _choose_label(columns: list[str], label: str | None, path: Path) -> str:
    if label is None:
        found = [name for name in columns if name.lower() in LABEL_NAMES]
        searched = f"looked for {', '.join(LABEL_NAMES)}"
    else:
        found = [name for name in columns if name == label]
        searched = f"looked for {label!r}"
    if len(found) == 1:
        return found[0]
    number = "several label columns" if found else "no label column"
    raise ValueError(
        f"{path}: {number} ({searched}; columns are {listing(columns) or 'none'}); "
        "give label, the name of the one that holds the classes"
    )


def _features(frame: pd.DataFrame, path: Path) -> tuple[NDArray, list[str]]:
    if frame.empty and len(frame.columns):
        raise ValueError(f"{path}: the table has no rows; add one row a sample")
    blocks: list[NDArray] = []
    names: list[str] = []
    for position, name in enumerate(frame.columns):
        column = frame.iloc[:, position]
        if name.startswith("Unnamed: ") or name == "__index_level_0__":
            # A row number kept as a feature predicts the class of a sorted table perfectly.
            raise ValueError(
                f"{path}: column {name!r} has no name of its own and looks like row numbers; "
                "write the table without its index, or name the column"
            )
        if pd.api.types.is_numeric_dtype(column) and column.dtype.kind != "c":
            blocks.append(_numbers(column)[:, None])
            names.append(name)
        elif isinstance(column.iloc[0], np.ndarray):
            blocks.append(_stack_lists(column, path))
            names.extend(f"{name}_{entry}" for entry in range(blocks[-1].shape[1]))
        else:
            raise ValueError(
                f"{path}: column {name!r} is not numeric (type {column.dtype}); remove or encode "
                "it, or give it as label if it holds the classes"
            )
    if not blocks:
        raise ValueError(f"{path}: no feature columns beside the label; add the embeddings")
    return np.hstack(blocks), names


def _numbers(column: pd.Series) -> NDArray:
    if isinstance(column.dtype, np.dtype):
        return column.to_numpy()
    # pandas' nullable types: a missing entry becomes NaN, which the caller refuses by name.
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def _stack_lists(column: pd.Series, path: Path) -> NDArray:
    lengths = {np.shape(entry) for entry in column}
    if len(lengths) != 1 or len(next(iter(lengths))) != 1:
        raise ValueError(
            f"{path}: the lists in column {column.name!r} are missing, nested or of different "
            "lengths; give every row a flat list of the same length"
        )
    stacked = np.stack(column.to_list())
    if stacked.dtype.kind not in "biuf":
        raise ValueError(f"{path}: the lists in column {column.name!r} do not hold numbers")
    return stacked
