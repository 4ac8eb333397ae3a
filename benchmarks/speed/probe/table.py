"""Time to a relative suboptimality of 1e-4 of MR2Classifier's probe and of its rivals.

    pip install benchopt
    SKLEARN_MR2_CACHE=FOLDER python benchmarks/speed/probe/table.py

runs the solvers of this benchmark on its data sets, one thread each, and writes

- ``results/probe.jsonl``: one line a run with its whole curve, added as soon as the run is over;
- ``results/probe.csv``: one row a run, made of it;
- the tables of ``docs/benchmarks/speed.md`` and ``docs/images/speed_*.png``.

A later call runs only what is missing. ``--cells`` and ``--solvers`` choose by parts of the names,
``--max-gflop`` leaves out cells whose passes over the data take too many operations, ``--no-run``
only rebuilds tables and plots. Data sets whose file is not in ``SKLEARN_MR2_CACHE`` are left out.

How it is measured. The clock starts with the call of ``fit`` and stands still while an iterate is
copied and evaluated. The first 67 iterates are evaluated, later ones at every step of 3 % in
their number, so that times are too long by at most that. A run ends at a suboptimality of 1e-6,
at the time limit, when the solver itself ends, or when half of its time has not improved its best
value by 1e-7. The optimum of a cell is the best value over all solvers and a run of MR2Classifier
in float64 with ``tol=1e-12``. Solvers take turns; times are medians over the repetitions. A run
that did not get to 1e-4 is not repeated.
"""

import argparse
import bisect
import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from benchopt.benchmark import Benchmark
from threadpoolctl import threadpool_limits

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
LEVELS = (1e-2, 1e-3, 1e-4, 1e-6)
TARGET = 1e-4
OURS, BASELINE = "MR2Classifier", "LogisticRegression lbfgs"
REFERENCE = "reference"
TIMERS = {"wall": time.perf_counter, "cpu": time.process_time}
PACKAGES = ("numpy", "scikit-learn", "scipy", "skorch", "torch", "sklearn-mr2")

# ------------------------------------------------------------------ what is measured


@dataclass(frozen=True)
class Cell:
    """A problem: a data set of the benchmark with its parameters, and the strength C."""

    kind: str
    dataset: str
    parameters: tuple[tuple[str, Any], ...]
    n: int
    d: int
    K: int
    C: float

    @property
    def name(self) -> str:
        return f"{self.kind} n={self.n} d={self.d} K={self.K} C={self.C:g}"

    @property
    def gflop(self) -> float:
        """Operations of an evaluation of the objective and its gradient."""
        return 4e-9 * self.n * self.d * self.K


def all_cells(benchmark: Benchmark, Cs: Sequence[float]) -> list[Cell]:
    """The cells, cheap ones first; those of a data set are neighbours."""
    datasets = {dataset.name: dataset for dataset in benchmark.get_datasets()}
    shapes = {"wordnet_glosses": (384, 38), "fashion_mnist_train": (1280, 10)}
    sets: list[tuple[str, str, dict, int, int, int]] = [
        ("fashion-bundled", "Bundled", {}, 6_000, 128, 10)
    ]
    for file, n in datasets["Cached"].parameters["file, n_samples"]:
        kind = file.split("_")[0]
        sets.append((kind, "Cached", {"file": file, "n_samples": n}, n, *shapes[file]))
    synthetic = datasets["Synthetic"].parameters
    for n, d, K in synthetic["n_samples, n_features, n_classes"]:
        sizes = {"n_samples": n, "n_features": d, "n_classes": K}
        sets.append(("synthetic", "Synthetic", sizes, n, d, K))
    sets.sort(key=lambda item: math.prod(item[3:]))
    return [
        Cell(kind, dataset, tuple(parameters.items()), n, d, K, C)
        for kind, dataset, parameters, n, d, K in sets
        for C in Cs
    ]


def instances(solver: Any, **fixed: Any) -> Iterator[Any]:
    """A solver with each combination of its parameters."""
    names = [name for name in solver.parameters if name not in fixed]
    for values in itertools.product(*(solver.parameters[name] for name in names)):
        chosen = dict(fixed)
        for name, value in zip(names, values, strict=True):
            parts = [part.strip() for part in name.split(",")]
            chosen.update(zip(parts, value if len(parts) > 1 else [value], strict=True))
        yield solver.get_instance(**chosen)


class Clock:
    """What a solver calls with each iterate: evaluates some of them, and ends the run.

    The counterpart of benchopt's own callback, which evaluates more seldom and has no time limit
    for a single run.
    """

    growth = 1.03
    patience, progress = 30, 1e-7

    def __init__(
        self,
        solver: Any,
        evaluate: Callable[..., dict],
        limit: float,
        goal: float = -math.inf,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.solver, self.evaluate, self.limit, self.goal = solver, evaluate, limit, goal
        self.timer = timer
        self.seconds: list[float] = []
        self.passes: list[float] = []
        self.value: list[float] = []
        self.accuracy = math.nan
        self.status = "ended"
        self.elapsed = 0.0
        self._calls = self._next = 0

    def run(self) -> None:
        """Run the solver."""
        self._start = self.timer()
        self.solver.run(self)
        if self.status == "ended":
            self._record()

    def expired(self) -> bool:
        """Whether the time is over, asked inside an iteration."""
        over = self.elapsed + self.timer() - self._start > self.limit
        if over:
            self.elapsed += self.timer() - self._start
            self.status = "limit"
        return over

    def __call__(self) -> bool:
        self.elapsed += self.timer() - self._start
        if self._calls == self._next or self.elapsed > self.limit:
            self._record()
            self._next = max(self._calls + 1, int(self.growth * self._calls))
        self._calls += 1
        if self.value[-1] <= self.goal:
            self.status = "reached"
        elif self.elapsed > self.limit:
            self.status = "limit"
        elif self._stalls():
            self.status = "stalled"
        self._start = self.timer()
        return self.status == "ended"

    def _record(self) -> None:
        result = self.evaluate(**self.solver.get_result())
        value = result["value"] if math.isfinite(result["value"]) else math.inf
        if not self.value or value < min(self.value):
            self.accuracy = result["training_accuracy"]
        self.seconds.append(self.elapsed)
        self.passes.append(self.solver.passes)
        self.value.append(value)

    def _stalls(self) -> bool:
        if len(self.value) < self.patience:
            return False
        half = bisect.bisect_left(self.seconds, self.elapsed / 2)
        earlier, now = min(self.value[: max(half, 1)]), min(self.value)
        return half > self.patience / 2 and earlier - now <= self.progress * abs(now)


def best_so_far(clock: Clock) -> dict[str, list[float]]:
    """The points of a curve that improve on all before."""
    curve: dict[str, list[float]] = {"seconds": [], "passes": [], "value": []}
    for seconds, passes, value in zip(clock.seconds, clock.passes, clock.value, strict=True):
        if not curve["value"] or value < curve["value"][-1]:
            curve["seconds"].append(float(f"{seconds:.5g}"))
            curve["passes"].append(float(passes))
            curve["value"].append(float(f"{value:.13g}"))
    return curve


# ------------------------------------------------------------------ results


@dataclass
class Results:
    """Runs in a file of JSON lines, each with its curve."""

    path: Path
    runs: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines(keepends=True)
        # An interruption may have left half a line.
        whole = [line for line in lines if line.endswith("\n")]
        self.path.write_text("".join(whole))
        self.runs = [json.loads(line) for line in whole]

    def add(self, run: dict) -> None:
        self.runs.append(run)
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")

    def of(self, cell: str, solver: str | None = None) -> list[dict]:
        return [
            run
            for run in self.runs
            if run["cell"] == cell and (solver is None or run["solver"] == solver)
        ]

    def optimum(self, cell: str) -> float:
        """Best value that any run has found."""
        return min(value for run in self.of(cell) for value in run["value"])

    def solved(self, run: dict) -> bool:
        """Whether a run got to the target."""
        found = times_to_levels(run, self.optimum(run["cell"]))
        return math.isfinite(found[seconds_to(TARGET)])

    def table(self) -> pd.DataFrame:
        """One row a run: seconds to each level of suboptimality, NaN where it was not reached."""
        optimum = {cell: self.optimum(cell) for cell in {run["cell"] for run in self.runs}}
        rows = []
        for run in self.runs:
            curve = ("seconds", "passes", "value")
            row = {name: value for name, value in run.items() if name not in curve}
            if row["solver"] != REFERENCE:
                rows.append({**row, **times_to_levels(run, optimum[run["cell"]])})
        return pd.DataFrame(rows)


def seconds_to(level: float) -> str:
    """Name of the column with the time to a level of suboptimality."""
    return f"seconds to {level:.0e}"


def times_to_levels(curve: dict, optimum: float) -> dict[str, float]:
    """Where a curve first is within each level of the optimum."""
    gap = (np.array(curve["value"]) - optimum) / abs(optimum)
    found = {}
    for level in LEVELS:
        reached = np.flatnonzero(gap <= level)
        first = reached[0] if len(reached) else None
        found[seconds_to(level)] = math.nan if first is None else curve["seconds"][first]
        if level == TARGET:
            passes = math.nan if first is None else curve["passes"][first]
    return {**found, "passes": passes, "suboptimality": gap.min() if len(gap) else math.nan}


# ------------------------------------------------------------------ running


def processor() -> str:
    """Name of the processor as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def measure(
    solver: Any,
    problem: dict,
    evaluate: Callable[..., dict],
    limit: float,
    goal: float = -math.inf,
    timer: Callable[[], float] = time.perf_counter,
) -> dict:
    """Run a solver on a problem; return what is to be written down."""
    skip, reason = solver.skip(**problem)
    if skip:
        empty: dict = {"seconds": [], "passes": [], "value": []}
        return {"status": f"skipped: {reason}", "spent": 0.0, "accuracy": math.nan, **empty}
    solver.set_objective(**problem)
    clock = Clock(solver, evaluate, limit, goal, timer)
    clock.run()
    return {
        "status": clock.status,
        "spent": float(f"{clock.elapsed:.5g}"),
        "accuracy": clock.accuracy,
        **best_so_far(clock),
    }


def warm_up(solver: Any, objective_class: Any) -> None:
    """Let a solver do once what only the first call in a process has to: load and compile."""
    objective = objective_class.get_instance(C=1.0)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 4)).astype(np.float32)
    objective.set_data(X=X, y=np.arange(60) % 3)
    measure(solver, objective.get_objective(), objective.evaluate_result, 0.3)


def run_cells(
    benchmark: Benchmark,
    cells: Sequence[Cell],
    solvers: Sequence[Any],
    results: Results,
    *,
    repetitions: int,
    limit: float,
    threads: int = 1,
    clock: str = "wall",
    device: str = "cpu",
) -> None:
    """Run what is missing of these cells; `device` is where the reference is computed."""
    objective_class = benchmark.get_benchmark_objective()
    dataset_classes = {dataset.name: dataset for dataset in benchmark.get_datasets()}
    ours = {solver.name: solver for solver in benchmark.get_solvers()}["MR2Classifier"]
    setting = {
        "limit": limit,
        "clock": clock,
        "threads": threads,
        "cpu": processor(),
        **{package: version(package) for package in PACKAGES},
    }

    for solver in solvers:
        warm_up(solver, objective_class)

    def wanted(cell: Cell, solver: str, repetition: int) -> bool:
        earlier = results.of(cell.name, solver)
        if any(run["repetition"] == repetition for run in earlier):
            return False
        # What was skipped or did not get there would not do better once more.
        return all(results.solved(run) for run in earlier)

    def unfinished(cell: Cell) -> bool:
        return any(
            wanted(cell, solver.label, repetition)
            for solver in solvers
            for repetition in range(repetitions)
        )

    for key, group in itertools.groupby(cells, lambda cell: (cell.dataset, cell.parameters)):
        todo = [cell for cell in group if unfinished(cell)]
        if not todo:
            continue
        try:
            data = dataset_classes[key[0]].get_instance(**dict(key[1])).get_data()
        except FileNotFoundError as error:
            print(f"{todo[0].name.rsplit(' ', 1)[0]} is left out: {error}", flush=True)
            continue
        for cell in todo:
            objective = objective_class.get_instance(C=cell.C)
            objective.set_data(**data)
            problem = objective.get_objective()
            assert (*problem["X"].shape, problem["n_classes"]) == (cell.n, cell.d, cell.K)

            def record(
                solver: Any,
                repetition: int,
                limit: float,
                goal: float,
                label: str | None = None,
                *,
                cell: Cell = cell,
                problem: dict = problem,
                evaluate: Callable[..., dict] = objective.evaluate_result,
            ) -> None:
                run = measure(solver, problem, evaluate, limit, goal, TIMERS[clock])
                sizes = {
                    k: v for k, v in asdict(cell).items() if k not in ("dataset", "parameters")
                }
                names = {"cell": cell.name, **sizes, "solver": label or solver.label}
                results.add({**names, "repetition": repetition, **run, **setting})
                print(
                    f"{cell.name:45} {names['solver']:38} {run['status'][:12]:12} "
                    f"{run['spent']:8.2f} s",
                    flush=True,
                )

            with threadpool_limits(threads):
                torch.set_num_threads(threads)
                if not results.of(cell.name, REFERENCE):
                    double = {**problem, "X": problem["X"].astype(np.float64)}
                    record(
                        ours.get_instance(tol=1e-12, device=device),
                        0,
                        10 * limit,
                        -math.inf,
                        REFERENCE,
                        problem=double,
                    )
                optimum = results.optimum(cell.name)
                goal = optimum + min(LEVELS) * abs(optimum)
                for repetition in range(repetitions):
                    shift = repetition % len(solvers)
                    for solver in [*solvers[shift:], *solvers[:shift]]:
                        if wanted(cell, solver.label, repetition):
                            record(solver, repetition, limit, goal)


# ------------------------------------------------------------------ summaries


def medians(table: pd.DataFrame) -> pd.DataFrame:
    """One row for each cell and solver: the median time, a lower bound if it was not reached."""
    column = seconds_to(TARGET)
    table = table[~table["status"].str.startswith("skipped")].copy()
    table["reached"] = table[column].notna()
    table["time"] = table[column].fillna(table["spent"])
    keys = ["cell", "kind", "n", "d", "K", "C", "solver"]
    grouped = table.groupby(keys, sort=False, observed=True)
    return grouped.agg(
        time=("time", "median"),
        reached=("reached", "all"),
        passes=("passes", "median"),
        status=("status", "first"),
        accuracy=("accuracy", "max"),
    ).reset_index()


#: A rival that was not run.
UNKNOWN = {"time": math.nan, "reached": False}


def compare(times: pd.DataFrame, ours: str = OURS) -> pd.DataFrame:
    """One row a cell: ours, the baseline, the best rival and both ratios.

    A ratio is a bound where one of the two was stopped by the limit or ended by itself before it
    got there, and NaN where that is so of both.
    """
    rows = []
    for cell, part in times.groupby("cell", sort=False):
        by_solver = part.set_index("solver")
        if ours not in by_solver.index:
            continue
        own = by_solver.loc[ours]
        row = {"cell": cell, **{name: own[name] for name in ("kind", "n", "d", "K", "C")}}
        row |= {"ours": own["time"], "ours reached": own["reached"], "ours passes": own["passes"]}
        row["accuracy"] = part["accuracy"].max()
        rivals = by_solver.drop(ours)
        solved = rivals[rivals["reached"]].sort_values("time")
        # Of those stopped by the limit, the one with the least time gives the bound for all.
        stopped = rivals[rivals["status"] == "limit"].sort_values("time")
        order = [*solved.index, *stopped.index]
        for name, rival in (("best", order[0] if order else None), ("baseline", BASELINE)):
            found = rivals.loc[rival] if rival in rivals.index else UNKNOWN
            known = own["reached"] or found["reached"]
            row |= {
                f"{name} solver": rival,
                name: found["time"],
                f"{name} reached": found["reached"],
                f"{name} ratio": found["time"] / own["time"] if known else math.nan,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def growth(times: pd.DataFrame) -> pd.DataFrame:
    """Exponents of the time in n, d and K on synthetic data, by least squares of logarithms.

    With an intercept for each C, over the cells in which the solver reached the target.
    """
    rows = []
    part = times[(times["kind"] == "synthetic") & times["reached"]]
    for solver, own in part.groupby("solver", sort=False):
        sizes = [name for name in ("n", "d", "K") if own[name].nunique() > 1]
        design = pd.get_dummies(own["C"], dtype=float).to_numpy()
        design = np.column_stack([np.log(own[sizes].to_numpy(float)), design])
        row = {"solver": solver, "cells": len(own)}
        if sizes and np.linalg.matrix_rank(design) == design.shape[1] <= len(own):
            solution = np.linalg.lstsq(design, np.log(own["time"].to_numpy()), rcond=None)[0]
            row |= dict(zip(sizes, solution, strict=False))
        rows.append(row)
    return pd.DataFrame(rows, columns=["solver", "cells", "n", "d", "K"])


def number(value: float, reached: bool = True) -> str:
    """Seconds or a ratio; a bound is marked as one."""
    if not math.isfinite(value):
        return "-"
    return ("" if reached else "> ") + (f"{value:.0f}" if value >= 100 else f"{value:.2g}")


def ratio_text(row: Any, name: str) -> str:
    """A ratio, marked as lower or upper bound where one of its times is."""
    if row["ours reached"]:
        return number(row[f"{name} ratio"], row[f"{name} reached"])
    return "-" if math.isnan(row[f"{name} ratio"]) else "< " + number(row[f"{name} ratio"])


def cell_table(found: pd.DataFrame) -> str:
    """One line a cell."""
    header = [
        "cell",
        "training accuracy, %",
        "MR2Classifier, s",
        "passes",
        "lbfgs, s",
        "ratio",
        "best rival, s",
        "ratio to it",
    ]
    lines = []
    for _, row in found.iterrows():
        best = "-"
        if isinstance(row["best solver"], str):
            best = f"{row['best solver']}, {number(row['best'], row['best reached'])}"
        lines.append(
            (
                row["cell"],
                f"{100 * row['accuracy']:.0f}",
                number(row["ours"], row["ours reached"]),
                number(row["ours passes"]),
                number(row["baseline"], row["baseline reached"]),
                ratio_text(row, "baseline"),
                best,
                ratio_text(row, "best"),
            )
        )
    return markdown_table(header, lines)


def summary_table(found: pd.DataFrame) -> str:
    """Geometric means and smallest ratios, over all cells and over parts of them."""
    parts = [
        ("all cells", found),
        *found.groupby("kind", sort=False),
        *((f"C={C:g}", part) for C, part in found.groupby("C")),
    ]
    lines = []
    for title, part in parts:
        line = [str(title), f"{part['ours reached'].sum()} of {len(part)}"]
        for name in ("baseline", "best"):
            ratio = part[f"{name} ratio"].dropna()
            line += [number(np.exp(np.log(ratio).mean())), number(ratio.min())]
        lines.append(line)
    header = ["", "cells solved", "mean against lbfgs", "smallest"]
    return markdown_table([*header, "mean against the best rival", "smallest"], lines)


def solver_table(times: pd.DataFrame) -> str:
    """How many cells each solver has solved, and its times where MR2Classifier has, too."""
    ours = times[(times["solver"] == OURS) & times["reached"]].set_index("cell")["time"]
    lines = []
    for solver, part in times.groupby("solver", sort=False):
        both = part[part["cell"].isin(ours.index) & part["reached"]]
        ratio = both["time"] / both["cell"].map(ours).astype(float)
        mean = np.exp(np.log(ratio).mean()) if len(ratio) else math.nan
        cells = f"{part['reached'].sum()} of {len(part)}"
        lines.append((str(solver), cells, number(mean), number(ratio.min())))
    return markdown_table(
        ["solver", "cells solved", "mean time, MR2Classifier = 1", "smallest"], lines
    )


def growth_table(times: pd.DataFrame) -> str:
    """Exponents of each solver."""
    lines = [
        (row["solver"], str(row["cells"]), *(number(row[name]) for name in "ndK"))
        for _, row in growth(times).iterrows()
    ]
    return markdown_table(["solver", "cells", "n", "d", "K"], lines)


PLOTS = """\
![Relative suboptimality against time for some cells](../images/speed_suboptimality.png)

![Time of the rivals in units of MR2Classifier's in each cell](../images/speed_ratio.png)"""


def tables(times: pd.DataFrame) -> dict[str, str]:
    """What is written into the page."""
    found = compare(times)
    return {
        "probe plots": PLOTS,
        "probe summary": summary_table(found),
        "probe solvers": solver_table(times),
        "probe growth": growth_table(times),
        "probe cells": cell_table(found),
    }


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_tables(page: Path, contents: dict[str, str]) -> None:
    """Replace parts of a page, which stand between pairs of comments."""
    text = page.read_text() if page.exists() else ""
    for name, table in contents.items():
        begin, end = f"<!-- table: {name} -->", "<!-- end of table -->"
        if begin not in text:
            text += f"\n{begin}\n{end}\n"
        before, rest = text.split(begin, 1)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end, 1)[1]}"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)


# ------------------------------------------------------------------ plots


def pick_curves(cells: pd.DataFrame, most: int = 6) -> list[str]:
    """Cells to draw: for each kind of data those with the most work, C in the middle."""
    cells = cells.assign(work=cells["n"] * cells["d"] * cells["K"], off=np.log(cells["C"]).abs())
    chosen = cells.sort_values(["off", "work"], ascending=[True, False])
    chosen["rank"] = chosen.groupby("kind").cumcount()
    return chosen.sort_values(["rank", "off"])["cell"].head(most).tolist()


def plot(results: Results, times: pd.DataFrame, images: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    images.mkdir(parents=True, exist_ok=True)
    found = compare(times)
    names = times["solver"].unique()
    # MR2Classifier stands out.
    colours = {name: f"C{i}" for i, name in enumerate(n for n in names if n != OURS)}
    cells = pick_curves(found)
    columns = min(3, len(cells))
    lines = math.ceil(len(cells) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4 * columns, 3 * lines + 1), layout="constrained", squeeze=False
    )
    for ax, cell in itertools.zip_longest(axes.flat, cells):
        if cell is None:
            ax.axis("off")
            continue
        optimum = results.optimum(cell)
        for run in results.of(cell):
            if run["solver"] == REFERENCE or run["repetition"]:
                continue
            gap = (np.array(run["value"]) - optimum) / abs(optimum)
            own = run["solver"] == OURS
            ax.step(
                run["seconds"],
                np.maximum(gap, 1e-9),
                where="post",
                color="black" if own else colours[run["solver"]],
                linewidth=2.5 if own else 1.2,
                zorder=3 if own else 2,
                label=run["solver"],
            )
        # The first points are those at zero, after no time.
        starts = [run["seconds"][1] for run in results.of(cell) if len(run["seconds"]) > 1]
        ax.set_xlim(left=min(starts) / 2)
        ax.axhline(TARGET, color="0.8", linewidth=1, zorder=1)
        ax.set(xscale="log", yscale="log", ylim=(5e-7, 3), title=cell)
        ax.title.set_fontsize(9)
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("seconds")
    figure.supylabel("relative suboptimality")
    handles: dict[str, Any] = {}
    for ax in axes.flat:
        handles |= {
            label: line for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper center", ncols=3, fontsize=8
    )
    figure.savefig(images / "speed_suboptimality.png", dpi=120)
    plt.close(figure)

    shown = found.dropna(subset=["best ratio"]).sort_values("best ratio")
    figure, ax = plt.subplots(figsize=(8, 1.5 + 0.17 * len(shown)), layout="constrained")
    for y, (_, row) in enumerate(shown.iterrows()):
        for name, colour, size in (("baseline", "#0072B2", 7), ("best", "#D55E00", 4)):
            marker = "o" if row[f"{name} reached"] else ">"
            marker = marker if row["ours reached"] else "<"
            ax.plot(row[f"{name} ratio"], y, marker, color=colour, markersize=size)
    ax.axvline(1, color="0.5", linewidth=1)
    ax.set(xscale="log", xlabel="time of the rival in units of MR2Classifier's")
    ax.set_yticks(range(len(shown)), shown["cell"], fontsize=7)
    for label, colour in (("LogisticRegression lbfgs", "#0072B2"), ("best rival", "#D55E00")):
        ax.plot([], [], "o", color=colour, label=label)
    ax.plot([], [], ">", color="0.4", label="a bound: one was not solved")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(images / "speed_ratio.png", dpi=120)
    plt.close(figure)


# ------------------------------------------------------------------ the command


def chosen(name: str, patterns: Sequence[str] | None) -> bool:
    """Whether a name has all words of one of the patterns; words such as C=1 as a whole."""

    def has(word: str) -> bool:
        return word in (name.split() if "=" in word else name)

    return patterns is None or any(all(map(has, pattern.split())) for pattern in patterns)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cells", nargs="+", help="names, or words that have to be in them: 'synthetic K=10 C=1'"
    )
    parser.add_argument("--solvers", nargs="+", help="the same for the rivals")
    parser.add_argument("--C", nargs="+", type=float, default=[0.01, 1.0, 100.0])
    parser.add_argument("--max-gflop", type=float, default=150.0, help="largest pass")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a run may take")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--clock", choices=TIMERS, default="wall", help="cpu on a machine that does other things"
    )
    parser.add_argument("--list", action="store_true", help="name the cells and end")
    parser.add_argument("--no-run", action="store_true", help="only make tables and plots")
    parser.add_argument("--results", type=Path, default=FOLDER.parent / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args(arguments)

    benchmark = Benchmark(FOLDER)
    cells = [
        cell
        for cell in all_cells(benchmark, options.C)
        if chosen(cell.name, options.cells) and cell.gflop <= options.max_gflop
    ]
    if options.list:
        print("\n".join(f"{cell.name:50} {cell.gflop:8.3g} Gflop a pass" for cell in cells))
        return
    results = Results(options.results / "probe.jsonl")
    solvers = [
        solver
        for solver_class in benchmark.get_solvers()
        for solver in instances(solver_class)
        if solver.label == OURS or chosen(solver.label, options.solvers)
    ]
    solvers.sort(key=lambda solver: solver.label != OURS)

    def write() -> None:
        table = results.table()
        table.to_csv(options.results / "probe.csv", index=False, float_format="%.5g")

    if not options.no_run:
        try:
            run_cells(
                benchmark,
                cells,
                solvers,
                results,
                repetitions=options.repetitions,
                limit=options.limit,
                clock=options.clock,
            )
        finally:
            if results.runs:
                write()
    if not results.runs:
        parser.error("there are no results yet")
    write()
    times = medians(results.table())
    write_tables(options.docs / "benchmarks" / "speed.md", tables(times))
    plot(results, times, options.docs / "images")


if __name__ == "__main__":
    main()
