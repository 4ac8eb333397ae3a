"""Tables and plots of the comparison, from its finished cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from selection import BASELINE, choose, most_accurate

from sklearn_mr2.metrics import difficulty_thirds

MEASURES = {
    "overall": "overall",
    "hard": "hard third",
    "medium": "medium third",
    "easy": "easy third",
    "worst": "worst class",
    "std": "std. over classes",
}
COLOURS = {"baseline": "#666666", "better rule": "#009E73", "MR2": "#0072B2"}
OTHER_COLOUR = "#D55E00"
GOAL_HARD, GOAL_OVERALL = 1.5, -0.2


def as_fixed(rows: Sequence[dict[str, Any]], groups: Iterable[str]) -> list[dict[str, Any]]:
    """Cells in which each candidate of some groups of methods is a method of its own.

    What a setting does that is used everywhere, without being tuned to the task.
    """
    cells = [row for row in rows if row["method"] == BASELINE]
    for row in rows:
        for candidate in row["candidates"] if row["group"] in groups else ():
            shown = {k: v for k, v in candidate["parameters"].items() if k != "kind"}
            name = f"{row['method']}: " + ", ".join(f"{k} {v}" for k, v in shown.items())
            cells.append({**row, "method": name, "candidates": [candidate]})
    return cells


def thirds_of(
    rows: Sequence[dict[str, Any]], reference_seeds: Iterable[int]
) -> dict[str, np.ndarray]:
    """Which third each class of each task is in, by cross-entropy's runs with reference seeds."""
    by_task: dict[str, list[np.ndarray]] = {}
    for row in rows:
        if row["method"] == BASELINE and row["seed"] in reference_seeds:
            recalls = np.array(most_accurate(row)["test"]["recalls"])
            by_task.setdefault(row["task"], []).append(recalls)
    return {
        task: difficulty_thirds(pd.Series(np.mean(runs, axis=0))).to_numpy()
        for task, runs in by_task.items()
    }


def measures(
    rows: Sequence[dict[str, Any]], reference_seeds: Iterable[int], stay: bool = True
) -> pd.DataFrame:
    """Measures in points of each cell, on thirds from cross-entropy's runs with reference seeds.

    `stay` is that of :func:`selection.choose`.
    """
    baselines = {(r["task"], r["seed"]): r for r in rows if r["method"] == BASELINE}
    thirds = thirds_of(rows, reference_seeds)
    records = []
    for row in rows:
        key = row["task"], row["seed"]
        if row["seed"] in reference_seeds or row["task"] not in thirds or key not in baselines:
            continue
        chosen = choose(row, baselines[key], stay)
        recall = 100 * np.array(chosen["test"]["recalls"])
        third = thirds[row["task"]]
        records.append(
            {
                **{k: row[k] for k in ("task", "method", "group", "seed")},
                "stayed": chosen not in row["candidates"],
                "overall": 100 * chosen["test"]["accuracy"],
                **{name: recall[third == name].mean() for name in ("hard", "medium", "easy")},
                "worst": recall.min(),
                "std": recall.std(),
                "fit": chosen["fit_seconds"],
            }
        )
    return pd.DataFrame(records)


def paired(table: pd.DataFrame, task: str, method: str, measure: str) -> pd.Series:
    """Differences to cross-entropy by seed."""
    of_task = table[table["task"] == task]

    def column(name: str) -> pd.Series:
        return of_task[of_task["method"] == name].set_index("seed")[measure]

    return (column(method) - column(BASELINE)).dropna()


def mean_interval(difference: pd.Series) -> tuple[float, float, float]:
    """Mean and 95% t-interval."""
    n = len(difference)
    if n < 2:
        return float(difference.mean()), -np.inf, np.inf
    half = stats.t.ppf(0.975, n - 1) * difference.std(ddof=1) / np.sqrt(n)
    return difference.mean(), difference.mean() - half, difference.mean() + half


def show(interval: tuple[float, float, float]) -> str:
    """A difference and its interval; bold where the interval excludes 0."""
    mean, low, high = interval
    if np.isinf(low):
        return f"{mean:+.2f}"
    text = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that GitHub and MyST both read."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def methods_of(table: pd.DataFrame, task: str | None = None) -> list[str]:
    """Methods in the order of the file, cross-entropy left out."""
    chosen = table if task is None else table[table["task"] == task]
    return [name for name in dict.fromkeys(chosen["method"]) if name != BASELINE]


def task_table(table: pd.DataFrame, task: str) -> str:
    """Cross-entropy's means and every method's difference to them."""
    base = table[(table["task"] == task) & (table["method"] == BASELINE)]
    rows = [
        [
            BASELINE,
            str(len(base)),
            *(f"{base[m].mean():.2f}" for m in MEASURES),
            f"{base['fit'].mean():.2f}",
        ]
    ]
    for method in methods_of(table, task):
        cells = table[(table["task"] == task) & (table["method"] == method)]
        differences = {m: paired(table, task, method, m) for m in MEASURES}
        rows.append(
            [
                method,
                f"{len(cells)} ({cells['stayed'].sum()})",
                *(show(mean_interval(differences[m])) for m in MEASURES),
                f"{cells['fit'].mean():.2f}",
            ]
        )
    return markdown(["method", "seeds (stayed)", *MEASURES.values(), "fit, CPU s"], rows)


def goal_table(table: pd.DataFrame, least_reached: int = 0) -> str:
    """On how many tasks a method reaches the goal, and where it does harm.

    Methods that reach it on fewer tasks than `least_reached` are left out.
    """
    rows = []
    tasks = list(dict.fromkeys(table["task"]))
    for method in methods_of(table):
        reached, worse, cells = 0, 0, []
        for task in tasks:
            hard = paired(table, task, method, "hard")
            if len(hard) < 2:
                cells.append("")
                continue
            overall = paired(table, task, method, "overall")
            mean, low, _ = mean_interval(hard)
            good = mean >= GOAL_HARD and low > 0 and overall.mean() >= GOAL_OVERALL
            reached += good
            worse += mean_interval(overall)[2] < 0
            text = f"{overall.mean():+.2f} / {mean:+.2f}"
            cells.append(f"**{text}**" if good else text)
        if reached < least_reached:
            continue
        rows.append((reached, [method, str(reached), str(worse), *cells]))
    rows.sort(key=lambda row: -row[0])
    header = ["method", "goal reached", "overall significantly lower", *tasks]
    return markdown(header, [row for _, row in rows])


def plot(table: pd.DataFrame, task: str, path: Path) -> None:
    """Overall against hard third, as differences to cross-entropy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9.5, 5.5), layout="constrained")
    axes.axhline(0, color="0.8", linewidth=1)
    axes.axvline(0, color="0.8", linewidth=1)
    points, groups = [], set()
    for method in methods_of(table, task):
        x = mean_interval(paired(table, task, method, "overall"))
        y = mean_interval(paired(table, task, method, "hard"))
        points.append((x[0], y[0], method))
        group = table[table["method"] == method]["group"].iloc[0]
        axes.errorbar(
            x[0],
            y[0],
            xerr=None if np.isinf(x[1]) else [[x[0] - x[1]], [x[2] - x[0]]],
            yerr=None if np.isinf(y[1]) else [[y[0] - y[1]], [y[2] - y[0]]],
            fmt="o",
            color=COLOURS.get(group, OTHER_COLOUR),
            elinewidth=0.6,
            alpha=0.8,
            markersize=4,
            label=None if group in groups else group,
        )
        groups.add(group)
    points.append((0.0, 0.0, BASELINE))
    front = sorted(p for p in points if not any(_dominates(q, p) for q in points))
    axes.plot([p[0] for p in front], [p[1] for p in front], color="0.5", linewidth=0.8, zorder=0)
    for number, (x0, y0, name) in enumerate(front, 1):
        axes.annotate(str(number), (x0, y0), xytext=(4, 4), textcoords="offset points")
        axes.plot([], [], " ", label=f"{number}  {name}")
    axes.set_xlabel("overall accuracy, points above cross-entropy")
    axes.set_ylabel("recall of the hardest third, points above cross-entropy")
    axes.set_title(f"{task}: means over seeds, 95% t-intervals; numbered: not dominated", size=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _dominates(a: tuple[float, float, str], b: tuple[float, float, str]) -> bool:
    return a[0] >= b[0] and a[1] >= b[1] and a[:2] != b[:2]


def write_report(
    rows: Sequence[dict[str, Any]], reference_seeds: Iterable[int], docs: Path
) -> None:
    """Replace the tables of the docs page, which stand between pairs of comments, and the plots."""
    seeds = tuple(reference_seeds)
    table, alone = (measures(rows, seeds, stay) for stay in (True, False))
    if table.empty:
        return
    tasks = list(dict.fromkeys(table["task"]))
    fixed = measures(as_fixed(rows, ["better rule", "MR2"]), seeds, stay=False)
    sections = {
        "goal": goal_table(table),
        "goal, methods alone": goal_table(alone),
        "fixed settings": goal_table(fixed, least_reached=2),
    }
    for task in tasks:
        plot(table, task, docs / "images" / f"disparity_{task}.png")
        image = f"![Overall against hardest third on {task}](../images/disparity_{task}.png)"
        sections[task] = f"{image}\n\n{task_table(table, task)}"
    replace_sections(docs / "benchmarks" / "disparity.md", sections)


def replace_sections(path: Path, sections: dict[str, str]) -> None:
    """Put tables between the comments of their names; those without are added at the end."""
    page = path.read_text() if path.exists() else ""
    for name, text in sections.items():
        begin, end = f"<!-- table: {name} -->", "<!-- end of table -->"
        if begin not in page:
            page += f"\n### {name}\n\n{begin}\n{end}\n"
        before, rest = page.split(begin, 1)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end, 1)[1]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
