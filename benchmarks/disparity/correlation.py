"""Do difficult classes spread more? Rank correlation of class spread and class error.

    python benchmarks/disparity/correlation.py --cache CACHE_FOLDER

measures, on the draws of ``compare.py``, how the statistics behind MR2's margins go with the
out-of-fold errors of cross-entropy, writes ``results/correlation.csv`` and the table of
``docs/benchmarks/disparity.md``. `C` is that of the comparison's cross-entropy, whose results have
to be there.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from compare import FIRST_SEED, ROOT, Results
from report import markdown, mean_interval, replace_sections, show
from selection import BASELINE, most_accurate
from tasks import TASKS

from sklearn_mr2 import MR2Classifier

STATISTICS = {"second_moment": "second moment (the paper's)", "dispersion": "dispersion"}
RESULTS = Path(__file__).parent / "results"


def measure(results: Results, cache: Path) -> pd.DataFrame:
    """Correlations of each probe task, seed and statistic."""
    rows = []
    for task in TASKS.values():
        if task.model != "probe":
            continue
        for seed in range(FIRST_SEED, FIRST_SEED + task.seeds):
            baseline = results.find(task.name, BASELINE, seed)
            if baseline is None:
                continue
            C = most_accurate(baseline)["parameters"]["factor"]
            split = task.split(cache, seed)
            for statistic in STATISTICS:
                model = MR2Classifier(
                    C=C, margin_statistic=statistic, error_cv=5, tol=1e-3, random_state=seed
                ).fit(split.X_train, split.y_train)
                correlation = model.margin_error_correlation_
                rows.append((task.name, seed, len(model.classes_), statistic, correlation))
                print(*rows[-1], flush=True)
    return pd.DataFrame(rows, columns=["task", "seed", "classes", "statistic", "correlation"])


def table(correlations: pd.DataFrame) -> str:
    """Means and intervals over seeds."""
    rows = []
    for (task, classes), part in correlations.groupby(["task", "classes"], sort=False):
        by_statistic = part.groupby("statistic")["correlation"]
        cells = [show(mean_interval(by_statistic.get_group(name))) for name in STATISTICS]
        rows.append([str(task), str(classes), *cells])
    return markdown(["task", "classes", *STATISTICS.values()], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="without it, only the table is rebuilt")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "correlation.csv"
    if arguments.cache is not None:
        measure(Results(RESULTS / "comparison.jsonl"), arguments.cache).to_csv(path, index=False)
    page = ROOT / "docs" / "benchmarks" / "disparity.md"
    replace_sections(page, {"correlation": table(pd.read_csv(path))})


if __name__ == "__main__":
    main()
