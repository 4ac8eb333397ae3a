"""Compare MR2, variants of it and other methods against class disparity.

    python benchmarks/disparity/compare.py --cache CACHE_FOLDER

trains what is missing in ``results/comparison.jsonl``, a line for each task, method and seed, and
rebuilds the tables of ``docs/benchmarks/disparity.md`` and its plots. The folder holds the files
that the scripts of ``benchmarks/data`` write; the environment variable DISPARITY_CACHE names it as
well.

Each candidate of a method is judged on the inner folds of the training set, and, fitted to all of
it, on the test set. Which of them counts is decided by ``selection.py`` from the inner folds.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learners import LEARNERS, Learner, recalls
from methods import Method, methods_for
from numpy.typing import NDArray
from report import write_report
from rules import WithOffsets
from selection import BASELINE, most_accurate
from tasks import TASKS, Split, Task

ROOT = Path(__file__).parents[2]
# Seeds of the runs that say which classes are the hardest third, which no comparison uses.
REFERENCE_SEEDS = (900, 901, 902)
# The seeds below were looked at while the methods and the rule of choice were made.
FIRST_SEED = 10


def judge(logits: NDArray, y: NDArray) -> dict[str, Any]:
    """Accuracy and recall of each class."""
    return {
        "accuracy": round(float(np.mean(logits.argmax(1) == y)), 6),
        "recalls": recalls(logits, y).round(6).tolist(),
    }


def out_of_fold(learner: Learner, method: Method, candidate: dict[str, Any]) -> NDArray:
    """Logits of the training samples from fits to the other inner folds."""
    if isinstance(method.fit, WithOffsets):
        return method.fit.out_of_fold(learner, **candidate)
    logits = np.empty((len(learner.y), learner.n_classes))
    for part, rows in learner.inner:
        logits[rows] = method.fit(part, **candidate)(learner.X[rows])
    return logits


class Results:
    """The finished cells, in a file that grows by a line with each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def find(self, task: str, method: str, seed: int) -> dict[str, Any] | None:
        """The cell, if it is finished."""
        wanted = (task, method, seed)
        return next((r for r in self.rows if (r["task"], r["method"], r["seed"]) == wanted), None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class TrainingRun:
    """One draw of a task: the split, and learners that all methods share."""

    def __init__(self, task: Task, split: Split, seed: int) -> None:
        self.task, self.split, self.seed = task, split, seed
        self.n_classes = int(split.y_train.max()) + 1
        self._learners: dict[int, Learner] = {}

    def learner(self, seed_offset: int) -> Learner:
        if seed_offset not in self._learners:
            self._learners[seed_offset] = LEARNERS[self.task.model](
                self.task,
                self.split.X_train,
                self.split.y_train,
                self.n_classes,
                self.seed + seed_offset,
            )
        return self._learners[seed_offset]

    def cell(self, method: Method, baseline: dict[str, Any] | None) -> dict[str, Any]:
        """Fit and judge all candidates of a method; without a baseline, of cross-entropy."""
        learner = self.learner(method.seed_offset)
        if baseline is None:
            learner.set_strength(1.0)
            candidates = [{"factor": strength} for strength in self.task.strengths]
        else:
            learner.set_strength(most_accurate(baseline)["parameters"]["factor"])
            candidates = method.candidates(self.task.model)
        judged = []
        for candidate in candidates:
            start = time.process_time()
            validation = judge(out_of_fold(learner, method, candidate), learner.y)
            validated = time.process_time()
            logits = method.fit(learner, **candidate)(self.split.X_test)
            fitted = time.process_time()
            judged.append(
                {
                    "parameters": candidate,
                    "validation": validation,
                    "test": judge(logits, self.split.y_test),
                    "validation_seconds": round(validated - start, 3),
                    "fit_seconds": round(fitted - validated, 3),
                }
            )
        return {
            "task": self.task.name,
            "method": method.name,
            "group": method.group,
            "seed": self.seed,
            "candidates": judged,
        }


def run(results: Results, tasks: Iterable[Task], cache: Path, args: argparse.Namespace) -> None:
    """Train whatever is missing."""
    for seed_index in range(max(task.seeds for task in tasks)):
        for task in tasks:
            n_seeds = min(task.seeds, args.seeds or task.seeds)
            seeds = [FIRST_SEED + seed_index] if seed_index < n_seeds else []
            if seed_index == 0:
                seeds = [*REFERENCE_SEEDS, *seeds]
            for seed in seeds:
                run_seed(results, task, cache, seed, args.methods)


def run_seed(results: Results, task: Task, cache: Path, seed: int, only: list[str] | None) -> None:
    """All missing cells of one draw; of the reference seeds cross-entropy alone."""
    methods = methods_for(task.model)
    if seed in REFERENCE_SEEDS:
        methods = methods[:1]
    missing = [
        method
        for method in methods
        if (only is None or method.name in (*only, BASELINE))
        and results.find(task.name, method.name, seed) is None
    ]
    if not missing:
        return
    training_run = TrainingRun(task, task.split(cache, seed), seed)
    for method in missing:
        is_baseline = method.name.startswith(BASELINE)
        baseline = None if is_baseline else results.find(task.name, BASELINE, seed)
        row = training_run.cell(method, baseline)
        results.add(row)
        seconds = sum(c["validation_seconds"] + c["fit_seconds"] for c in row["candidates"])
        print(f"{task.name:15s} seed {seed:3d} {method.name:40s} {seconds:.0f} s", flush=True)


def check_configuration(path: Path, fresh: bool) -> None:
    """Write down versions and tasks, or stop if they are not those of the results."""
    packages = ["numpy", "scikit-learn", "scipy", "sklearn-mr2", "torch"]
    now = {
        "tasks": {task.name: task.settings() for task in TASKS.values()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }
    now = json.loads(json.dumps(now))
    if fresh:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now, indent=2) + "\n")
        return
    before = json.loads(path.read_text())
    changed = [n for n, s in before["tasks"].items() if now["tasks"].get(n) != s]
    if changed or before["versions"] != now["versions"]:
        sys.exit(f"The results were made with other settings or versions, see {path}: {changed}.")
    path.write_text(json.dumps(now, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=os.environ.get("DISPARITY_CACHE"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", help="train these only, and cross-entropy")
    parser.add_argument("--seeds", type=int, help="at most so many of each task")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    results = Results(args.results / "comparison.jsonl")
    if args.cache is not None:
        torch.set_num_threads(1)
        check_configuration(args.results / "comparison.json", fresh=not results.rows)
        run(results, [TASKS[name] for name in args.tasks], Path(args.cache), args)
    elif not results.rows:
        parser.error("--cache is needed to train; without it tables are rebuilt from results")
    write_report(results.rows, REFERENCE_SEEDS, args.docs)


if __name__ == "__main__":
    main()
