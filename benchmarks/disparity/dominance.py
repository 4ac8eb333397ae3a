"""Is the recommended setting dominated by another method, on draws that nothing was chosen on?

    python benchmarks/disparity/dominance.py --cache CACHE_FOLDER

Of some thirty methods on five draws, a few come out better than any given one by chance alone. Here
all other methods are tuned, with the candidates and by the rule of ``compare.py``, on the draws of
``confirm.py``, and compared with its recommended setting, which has no candidates. Results are in
``results/rivals.jsonl``, which grows by a line for each method and draw; the table is part of
``docs/benchmarks/disparity.md``.

What is compared are gains over cross-entropy as the same solver fits it: with weak penalties the
solver of the comparison stops so early that its cross-entropy is not that of MR2Classifier.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from compare import REFERENCE_SEEDS, ROOT, Results, TrainingRun
from confirm import RECOMMENDED, RESULTS, SEEDS, SHOWN, values
from methods import METHODS, methods_for
from report import markdown, mean_interval, measures, paired, replace_sections, show
from selection import BASELINE
from tasks import TASKS

GROUPS = ("MR2", "other methods")


def run(results: Results, cache: Path, tasks: Sequence[str], seeds: Sequence[int]) -> None:
    """Train what is missing."""
    for seed in seeds:
        for name in tasks:
            rivals = [m for m in methods_for("probe") if m.group in GROUPS]
            missing = [m for m in rivals if results.find(name, m.name, seed) is None]
            if not missing:
                continue
            training_run = TrainingRun(TASKS[name], TASKS[name].split(cache, seed), seed)
            baseline = results.find(name, BASELINE, seed)
            if baseline is None:
                baseline = training_run.cell(METHODS[0], None)
                results.add(baseline)
            for method in missing:
                results.add(training_run.cell(method, baseline))
            print(name, seed, flush=True)


def table(rivals: pd.DataFrame, recommended: pd.DataFrame) -> str:
    """Methods with better means in both measures than the recommended setting, by task."""
    lines = []
    for task in SHOWN:
        setting = recommended.loc[(task, RECOMMENDED)] - recommended.loc[(task, BASELINE)]
        names = [n for n in rivals[rivals["task"] == task]["method"].unique() if n != BASELINE]
        better = []
        for name in names:
            lead = {
                measure: (paired(rivals, task, name, measure) - setting[measure]).dropna()
                for measure in ("overall", "hard")
            }
            intervals = [mean_interval(lead[measure]) for measure in lead]
            if all(mean > 0 for mean, *_ in intervals):
                dominates = all(low > 0 for _, low, _ in intervals)
                draws = len(lead["overall"])
                better.append([name, str(draws), *map(show, intervals), "yes" if dominates else ""])
        if not names:
            continue
        first = f"{SHOWN[task]}, {len(names)} methods"
        for line in better or [["none", "", "", "", ""]]:
            lines.append([first, *line])
            first = ""
    header = ["task", "better in both means", "draws", "overall", "hard third", "both significant"]
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="without it, only the table is rebuilt")
    probes = [name for name, task in TASKS.items() if task.model == "probe"]
    parser.add_argument("--tasks", nargs="+", choices=probes, default=probes)
    parser.add_argument("--results", type=Path, default=RESULTS / "rivals.jsonl")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(arguments.results)
    if arguments.cache is not None:
        run(results, arguments.cache, arguments.tasks, SEEDS)
    reference = Results(RESULTS / "comparison.jsonl")
    recommended = values(Results(RESULTS / "confirmation.jsonl"), reference).sort_index()
    # The reference seeds say which classes are the hardest third.
    references = [row for row in reference.rows if row["seed"] in REFERENCE_SEEDS]
    rivals = measures([*references, *results.rows], REFERENCE_SEEDS)
    page = arguments.docs / "benchmarks" / "disparity.md"
    replace_sections(page, {"dominance": table(rivals, recommended)})


if __name__ == "__main__":
    main()
