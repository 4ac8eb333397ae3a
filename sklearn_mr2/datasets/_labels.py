"""Class labels from files: parsing text and refusing what is not a class."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ._errors import reading

# Names under which a column or the header of a labels file is recognised without being told.
LABEL_NAMES = ("label", "target", "class", "y")

# Floats beyond this are not all whole numbers of their own, so they cannot name classes.
_LARGEST_WHOLE_FLOAT = 2.0**53


def read_text_labels(path: Path, n_samples: int) -> NDArray:
    """Read a .txt or .csv file with one label a line.

    Parameters
    ----------
    path : Path
        Text file in UTF-8. One line more than there are samples is accepted when the first is
        one of `LABEL_NAMES`: it is a header then.
    n_samples : int
        Number of samples the labels belong to.

    Returns
    -------
    labels : ndarray
        Integers if all labels are whole numbers, else strings. Not yet checked for length.

    Raises
    ------
    ValueError
        If the text cannot be decoded or a .csv line has several fields.
    """
    with reading(path, "text file of labels", "give a UTF-8 file with one label a line"):
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            rows = list(csv.reader(text.splitlines()))
            if any(len(row) > 1 for row in rows):
                raise ValueError("a line has several fields")
            lines = [row[0] if row else "" for row in rows]
        else:
            lines = text.splitlines()
    if len(lines) == n_samples + 1 and lines[0].strip().lower() in LABEL_NAMES:
        lines = lines[1:]
    return parse_labels([line.strip() for line in lines])


def parse_labels(words: list[str]) -> NDArray:
    """Turn words into integers or floats if all of them are such numbers, else keep strings.

    Words like "007" stay strings: read as numbers, two different labels could become one.

    Parameters
    ----------
    words : list of str
        Labels without surrounding blanks.

    Returns
    -------
    labels : ndarray of shape (len(words),)
        int64, float64 or str.
    """
    if all(word.removeprefix("-").isdecimal() for word in words):
        if not all(str(int(word)) == word for word in words):
            return np.array(words, dtype=str)
        try:
            return np.array([int(word) for word in words], dtype=np.int64)
        except OverflowError:
            return np.array(words, dtype=str)
    try:
        return np.array([float(word) for word in words])
    except ValueError:
        return np.array(words, dtype=str)


def check_labels(y: NDArray, n_samples: int, path: Path) -> NDArray:
    """Check that an array holds one class label a sample, and bring it to a plain type.

    Parameters
    ----------
    y : ndarray
        Labels as stored, of shape (n_samples,) or (n_samples, 1).
    n_samples : int
        Number of rows of X.
    path : Path
        File the labels come from, for the messages.

    Returns
    -------
    y : ndarray of shape (n_samples,)
        Integers, booleans or strings. Floats that are whole numbers become int64, bytes are
        decoded as UTF-8.

    Raises
    ------
    ValueError
        If the shape is wrong, a label is missing (NaN or an empty string), or the values are not
        classes (fractions, objects, dates).
    """
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise ValueError(
            f"{path}: labels have shape {y.shape}; give one label a sample, as a 1-D array "
            "(for one-hot rows, y.argmax(axis=1))"
        )
    if len(y) != n_samples:
        raise ValueError(
            f"{path}: {len(y)} labels for {n_samples} samples; give as many labels as X has rows"
        )
    if y.dtype.kind == "S":
        with reading(path, "file of text labels", "save the labels as str, y.astype(str)"):
            y = np.char.decode(y, "utf-8")
    if y.dtype.kind == "U":
        _refuse_missing(np.isin(np.char.lower(np.char.strip(y)), ("", "nan")), path)
        return y
    if y.dtype.kind == "f":
        _refuse_missing(np.isnan(y), path)
        if np.any(y != np.trunc(y)) or np.any(np.abs(y) > _LARGEST_WHOLE_FLOAT):
            raise ValueError(
                f"{path}: labels are not whole numbers, so they are no classes; "
                "give integers or strings"
            )
        return y.astype(np.int64)
    if y.dtype.kind in "iu":
        return y.astype(y.dtype.newbyteorder("="), copy=False)
    if y.dtype.kind == "b":
        return y
    raise ValueError(
        f"{path}: labels of type {y.dtype} are no classes; give integers, booleans or strings"
    )


def _refuse_missing(missing: NDArray[np.bool_], path: Path) -> None:
    if missing.any():
        raise ValueError(
            f"{path}: {int(missing.sum())} of {len(missing)} labels are missing (NaN or empty), "
            f"the first in row {int(missing.argmax())} counting from 0; remove these samples or "
            "label them"
        )
