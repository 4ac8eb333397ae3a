"""Confirm settings of MR2Classifier on draws that nothing was chosen on.

    python benchmarks/disparity/confirm.py --cache CACHE_FOLDER

``compare.py`` has a few hundred settings, and the best of them on its seeds looks better than it
is. Here those of the user guide are fitted by the package's own classifier to other draws of the
same tasks. `C` of cross-entropy is tuned on inner folds and nothing else; ``margin="auto"`` gets
that `C`, fixed margins three times as much. Results are in ``results/confirmation.jsonl``, which
grows by a line for each fit, the table in ``docs/benchmarks/disparity.md``, the picture in
``docs/images/confirmation.png``.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from compare import REFERENCE_SEEDS, ROOT, Results, TrainingRun
from methods import METHODS
from report import MEASURES, markdown, mean_interval, replace_sections, show, thirds_of
from selection import BASELINE, most_accurate
from tasks import TASKS

from sklearn_mr2 import MR2Classifier

SEEDS = range(30, 40)
RESULTS = Path(__file__).parent / "results"
ERROR_RULE = {"margin_statistic": "error", "margin_exponent": 1.0, "margin_mode": "subtract"}
# Parameters of MR2Classifier, and the factor of C.
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    BASELINE: ({"margin_statistic": None}, 1.0),
    "the paper's margins": ({}, 1.0),
    "error rule, margin auto": ({**ERROR_RULE, "margin": "auto"}, 1.0),
    "error rule, margin 2, 3 C": ({**ERROR_RULE, "margin": 2.0}, 3.0),
}

RECOMMENDED = "error rule, margin auto"
# What the tasks are called in the picture.
SHOWN = {
    "vowel-probe": "vowel",
    "wordnet-probe": "WordNet glosses",
    "letter-probe": "letter",
    "satimage-probe": "satimage",
    "fashion-probe": "Fashion-MNIST",
    "segment-probe": "segment",
    "optdigits-probe": "optdigits",
    "texture-probe": "texture",
}


def run(results: Results, cache: Path, tasks: Sequence[str], seeds: Sequence[int]) -> None:
    """Fit what is missing."""
    for seed in seeds:
        for name in tasks:
            task = TASKS[name]
            missing = [m for m in MODELS if results.find(name, m, seed) is None]
            if not missing:
                continue
            split = task.split(cache, seed)
            tuned = TrainingRun(task, split, seed).cell(METHODS[0], None)
            C = most_accurate(tuned)["parameters"]["factor"]
            for model in missing:
                parameters, factor = MODELS[model]
                start = time.process_time()
                classifier = MR2Classifier(C=factor * C, **parameters, random_state=seed)
                classifier.fit(split.X_train, split.y_train)
                seconds = time.process_time() - start
                right = classifier.predict(split.X_test) == split.y_test
                row = {
                    "task": name,
                    "method": model,
                    "seed": seed,
                    "C": factor * C,
                    "accuracy": round(right.mean(), 6),
                    "recalls": [
                        round(right[split.y_test == k].mean(), 6) for k in classifier.classes_
                    ],
                    "fit_seconds": round(seconds, 3),
                }
                results.add(row)
                print(name, seed, model, f"{100 * row['accuracy']:.2f}", flush=True)


def values(results: Results, reference: Results) -> pd.DataFrame:
    """Measures in points, by task, method and seed."""
    records = []
    thirds = thirds_of(reference.rows, REFERENCE_SEEDS)
    for row in results.rows:
        recall, third = 100 * np.array(row["recalls"]), thirds[row["task"]]
        records.append(
            {
                **{key: row[key] for key in ("task", "method", "seed")},
                "overall": 100 * row["accuracy"],
                **{name: recall[third == name].mean() for name in ("hard", "medium", "easy")},
                "worst": recall.min(),
                "std": recall.std(),
            }
        )
    return pd.DataFrame(records).set_index(["task", "method", "seed"])


def table(measured: pd.DataFrame) -> str:
    """Differences to cross-entropy by task."""
    lines = []
    for task in SHOWN:
        base = measured.loc[task, BASELINE]
        means = [f"{base[measure].mean():.2f}" for measure in MEASURES]
        lines.append([task, BASELINE, str(len(base)), *means])
        for model in list(MODELS)[1:]:
            difference = (measured.loc[task, model] - base).dropna()
            cells = [show(mean_interval(difference[measure])) for measure in MEASURES]
            lines.append(["", model, str(len(difference)), *cells])
    return markdown(["task", "model", "draws", *MEASURES.values()], lines)


def plot(measured: pd.DataFrame, path: Path) -> None:
    """What the recommended rule changes on each task, with intervals over the draws."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    axes.axvline(0, color="0.6", linewidth=1)
    series = {
        "hardest third of the classes": ("hard", "s", "#E69F00", -0.14),
        "all classes": ("overall", "o", "#0072B2", 0.14),
    }
    for label, (measure, marker, colour, shift) in series.items():
        for row, task in enumerate(SHOWN):
            change = measured.loc[task, RECOMMENDED] - measured.loc[task, BASELINE]
            mean, low, high = mean_interval(change[measure].dropna())
            axes.errorbar(
                mean,
                row + shift,
                xerr=[[mean - low], [high - mean]],
                fmt=marker,
                color=colour,
                markersize=7,
                label=label if row == 0 else None,
            )
    accuracy = [measured.loc[(task, BASELINE), "overall"].mean() for task in SHOWN]
    labels = [
        f"{name} ({value:.0f} %)" for name, value in zip(SHOWN.values(), accuracy, strict=True)
    ]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.set_xlabel("Change of recall in points, mean and 95% interval over draws")
    axes.set_title("Margins from class errors, against a tuned probe (its accuracy)", size=11)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="without it, only the table is rebuilt")
    probes = [name for name, task in TASKS.items() if task.model == "probe"]
    parser.add_argument("--tasks", nargs="+", choices=probes, default=probes)
    parser.add_argument("--results", type=Path, default=RESULTS / "confirmation.jsonl")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(arguments.results)
    if arguments.cache is not None:
        run(results, arguments.cache, arguments.tasks, SEEDS)
    page = arguments.docs / "benchmarks" / "disparity.md"
    reference = Results(RESULTS / "comparison.jsonl")
    measured = values(results, reference).sort_index()
    replace_sections(page, {"confirmation": table(measured)})
    plot(measured, arguments.docs / "images" / "confirmation.png")


if __name__ == "__main__":
    main()
