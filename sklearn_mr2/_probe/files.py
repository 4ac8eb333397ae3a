"""What the main job leaves behind: a folder that appears complete or not at all."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import joblib
import numpy as np
import pandas as pd

from .._version import __version__
from .errors import InputError
from .job import RULES, Outcome, Tuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Every file the job can write, with what it is.
FILES = {
    "summary.json": "these results with settings, seed and versions",
    "per_class.csv": "every class under both models",
    "comparison.png": "the recall of every class, drawn",
    "model.joblib": "the MR2 pipeline, fitted on the training part",
}


@contextmanager
def new_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Give a temporary folder whose files move to `out` when the block ends without an exception.

    Parameters
    ----------
    out : Path
        Folder to be. In one that exists already, only the job's own `FILES` are replaced.
    force : bool
        Whether `out` may have files.

    Yields
    ------
    Path
        Folder to write to, on the same file system as `out`.

    Raises
    ------
    InputError
        If `out` is no folder, has files without `force`, or cannot be written; before the block
        is entered.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file, not a folder; name another with --out")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise InputError(
            f"{out}: is not empty; name another folder with --out, or replace earlier results "
            "with --force"
        )
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    partial = parent / f".{out.absolute().name}.partial-{os.getpid()}"
    try:
        partial.mkdir()
    except OSError as error:
        raise InputError(
            f"{out}: cannot be written ({error.strerror}); name another folder with --out"
        ) from error
    try:
        yield partial
        if out.is_dir():
            for name in FILES:
                if (partial / name).exists():
                    os.replace(partial / name, out / name)
                else:  # of an earlier run
                    (out / name).unlink(missing_ok=True)
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def can_plot() -> bool:
    """Return whether matplotlib is installed, without importing it."""
    return importlib.util.find_spec("matplotlib") is not None


def write_files(folder: Path, outcome: Outcome, source: str, seconds: float) -> None:
    """Write all `FILES`; without matplotlib all but the figure.

    Parameters
    ----------
    folder : Path
        Where to.
    outcome : Outcome
        What the job found.
    source : str
        Where the data came from.
    seconds : float
        How long the job took.
    """
    summary = json.dumps(_summary(outcome, source, seconds), indent=2, ensure_ascii=False)
    (folder / "summary.json").write_text(summary + "\n", encoding="utf-8")
    outcome.table.to_csv(folder / "per_class.csv", index=False, float_format="%.6g")
    joblib.dump(outcome.mr2.model, folder / "model.joblib")
    if can_plot():
        _plot(folder / "comparison.png", outcome, source)


def _summary(outcome: Outcome, source: str, seconds: float) -> dict[str, Any]:
    settings = outcome.settings
    correlation = outcome.margin_error_correlation
    classes = outcome.table["class"].astype(str)

    def tuning(tuned: Tuned) -> dict[str, Any]:
        return {
            "C": tuned.C,
            # What the model was fitted with: margins in proportion to errors raise C.
            "C_fitted": tuned.model[-1].C_,
            "cv_accuracy": [
                {"C": C, "accuracy": score}
                for C, score in zip(settings.Cs, tuned.cv_accuracy.tolist(), strict=True)
            ],
        }

    return {
        "data": {
            "source": source,
            "train_samples": outcome.n_train,
            "test_samples": outcome.n_test,
            "features": outcome.mr2.model.n_features_in_,
            "classes": len(outcome.classes),
        },
        "settings": dataclasses.asdict(settings),
        "margins": RULES[settings.rule],
        "cross_entropy": tuning(outcome.cross_entropy),
        "mr2": tuning(outcome.mr2),
        "difficulty": {
            third: classes[outcome.table["difficulty"] == third].tolist()
            for third in ("hard", "medium", "easy")
        },
        "worst_class": str(outcome.worst_class),
        "comparisons": {
            row.label: {
                "cross_entropy": row.cross_entropy,
                "mr2": row.mr2,
                "difference": row.difference.value,
                "interval_95": [row.difference.low, row.difference.high],
                "verdict": row.difference.verdict,
            }
            for row in outcome.comparisons
        },
        "margin_error_correlation": None if np.isnan(correlation) else correlation,
        "fits_not_converged": outcome.n_not_converged,
        "seconds": round(seconds, 1),
        "versions": {
            "python": platform.python_version(),
            "sklearn-mr2": __version__,
            **{name: version(name) for name in ("numpy", "scikit-learn", "skorch", "torch")},
        },
    }


def _plot(path: Path, outcome: Outcome, source: str) -> None:
    import matplotlib.pyplot as plt

    from ..display import PerClassAccuracyDisplay

    display = PerClassAccuracyDisplay(
        {"cross-entropy": outcome.cross_entropy.report, "MR2": outcome.mr2.report},
        # The third chosen in cross-validation, not the one that turned out hardest in testing.
        difficulty=pd.Series(outcome.table["difficulty"].to_numpy(), index=outcome.classes),
    ).plot()
    figure = cast("Figure", display.figure_)
    title = f"{source}, {outcome.n_test} test samples"
    # A name is no formula, whatever "$" it has.
    figure.suptitle(title, x=0.02, ha="left", fontsize=11, parse_math=False)
    with warnings.catch_warnings():
        # Names in a script that the font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(path, dpi=150)
    plt.close(figure)
