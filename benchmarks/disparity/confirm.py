"""Confirm settings of MR2Classifier on draws that nothing was chosen on.

    python benchmarks/disparity/confirm.py --cache CACHE_FOLDER

``compare.py`` has a few hundred settings, and the best of them on its seeds looks better than it
is. Here those of the user guide are fitted by the package's own classifier to other draws of the
same tasks. `C` of cross-entropy is tuned on inner folds and nothing else; ``margin="auto"`` gets
that `C`, fixed margins three times as much. Results are in ``results/confirmation.jsonl``, which
grows by a line for each fit, the table in ``docs/benchmarks/disparity.md``.
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


def table(results: Results, reference: Results) -> str:
    """Differences to cross-entropy by task."""
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
    values = pd.DataFrame(records).set_index(["task", "method", "seed"])
    tasks, values = values.index.unique("task"), values.sort_index()
    lines = []
    for task in tasks:
        base = values.loc[task, BASELINE]
        means = [f"{base[measure].mean():.2f}" for measure in MEASURES]
        lines.append([task, BASELINE, str(len(base)), *means])
        for model in list(MODELS)[1:]:
            difference = (values.loc[task, model] - base).dropna()
            cells = [show(mean_interval(difference[measure])) for measure in MEASURES]
            lines.append(["", model, str(len(difference)), *cells])
    return markdown(["task", "model", "draws", *MEASURES.values()], lines)


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
    replace_sections(page, {"confirmation": table(results, reference)})


if __name__ == "__main__":
    main()
