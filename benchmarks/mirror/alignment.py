"""How long the hyperbolic entropy takes to show its L1 geometry, by lam and by width.

    python benchmarks/mirror/alignment.py

Measures log t at which the alignment A = Q / |theta|_1 has come down to 2, for a linear model
(degree L = 1) and a two-layer ReLU network (L = 2). The theory's bound grows like (lam sqrt(n))^L
with n parameters: on a log-log scale with slope L in lam and L / 2 in n. Each finished run is in
``results/alignment.csv``; a later call makes what is missing and rebuilds the tables of
``docs/benchmarks/mirror.md`` and the plot. All together about 3 minutes of one core.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import (
    BLUE,
    ORANGE,
    Results,
    linear,
    linear_teacher,
    markdown_table,
    mean_and_range,
    mirror_flow,
    new_figure,
    parse_arguments,
    save_figure,
    student_teacher,
    two_layer,
    write_tables,
)
from torch import nn

from sklearn_mr2.mirror.potentials import HyperbolicEntropy
from sklearn_mr2.mirror.theory import alignment

COLOURS = {"linear": BLUE, "two-layer": ORANGE}
DEGREES = {"linear": 1, "two-layer": 2}


@dataclass(frozen=True)
class Setting:
    """What is trained and how often; recorded beside the results."""

    n_samples: int = 40
    # Linear: the width is the number of features, which is that of the parameters.
    linear_lams: tuple[float, ...] = (3, 10, 30, 100)
    linear_widths: tuple[int, ...] = (20, 80, 320, 1280)
    linear_lam: float = 30
    linear_width: int = 20
    # Two layers: the width is that of the hidden layer.
    n_features: int = 5
    n_teachers: int = 3
    init_std: float = 0.3
    two_layer_lams: tuple[float, ...] = (1, 2, 4, 8, 16)
    two_layer_widths: tuple[int, ...] = (10, 30, 90)
    two_layer_lam: float = 4
    two_layer_width: int = 30
    goal: float = 2.0
    seeds: tuple[int, ...] = (0, 1, 2)
    step_size: float = 0.3
    max_steps: int = 60_000


def sweeps(setting: Setting) -> Iterator[tuple[str, str, float, int]]:
    """Model, what is varied, lam and width of each run."""
    for lam in setting.linear_lams:
        yield "linear", "lam", lam, setting.linear_width
    for width in setting.linear_widths:
        yield "linear", "width", setting.linear_lam, width
    for lam in setting.two_layer_lams:
        yield "two-layer", "lam", lam, setting.two_layer_width
    for width in setting.two_layer_widths:
        yield "two-layer", "width", setting.two_layer_lam, width


def run(
    setting: Setting, model: str, lam: float, width: int, seed: int
) -> Iterator[dict[str, float]]:
    """Follow the flow until the alignment is the goal, and interpolate when that was."""
    generator = torch.Generator().manual_seed(seed)
    network: nn.Module
    if model == "linear":
        X, y = linear_teacher(setting.n_samples, width, generator)
        network = linear(width)
    else:
        X, y = student_teacher(setting.n_samples, setting.n_features, setting.n_teachers, generator)
        network = two_layer(setting.n_features, width, setting.init_std, generator)
    before = (0.0, np.inf)
    flow = mirror_flow(network, X, y, HyperbolicEntropy(lam), setting.step_size, setting.max_steps)
    for step, state in enumerate(flow):
        if step % 5 or step == 0:
            continue
        now = (state.log_time, alignment(state.groups))
        if now[1] <= setting.goal:
            (t0, a0), (t1, a1) = before, now
            log_time = t1 if np.isinf(a0) else t0 + (t1 - t0) * (a0 - setting.goal) / (a0 - a1)
            yield {
                "n_parameters": sum(p.numel() for p in network.parameters()),
                "log_time": log_time,
                "margin": state.margin,
                "steps": step,
            }
            return
        before = now
    raise RuntimeError(f"{model}, lam={lam}, width {width}, seed {seed}: A = {now[1]:.3g} at last")


def run_all(results: Results) -> None:
    """Train whatever is missing."""
    for seed in results.setting.seeds:
        for model, varied, lam, width in sweeps(results.setting):
            results.add(
                {"model": model, "varied": varied, "lam": lam, "width": width, "seed": seed},
                lambda: run(results.setting, model, lam, width, seed),  # noqa: B023
            )


def slope(runs: pd.DataFrame, varied: str) -> float:
    """Slope of log log t over the logarithm of what is varied, all seeds together."""
    x = np.log(runs["lam" if varied == "lam" else "n_parameters"].astype(float))
    return float(np.polyfit(x, np.log(runs["log_time"]), 1)[0])


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """The tables of the docs page."""
    slopes, times = [], []
    for (model, varied), runs in rows.groupby(["model", "varied"]):
        degree = DEGREES[str(model)]
        predicted = degree if varied == "lam" else degree / 2
        by_seed = pd.Series([slope(one, str(varied)) for _, one in runs.groupby("seed")])
        parameter = "lam" if varied == "lam" else "number of parameters"
        slopes.append(
            [f"{model} (L = {degree})", parameter, mean_and_range(by_seed, 2), f"{predicted:g}"]
        )
    # The point that both sweeps share is one row.
    for (model, lam, width), cell in rows.groupby(["model", "lam", "width"]):
        times.append(
            [
                f"{model} (L = {DEGREES[str(model)]})",
                f"{lam:g}",
                f"{width}",
                f"{cell['n_parameters'].iloc[0]}",
                mean_and_range(cell["log_time"]),
                f"{cell['margin'].mean():.1f}",
            ]
        )
    return {
        "alignment slopes": markdown_table(["model", "varied", "slope", "theory"], slopes),
        "alignment times": markdown_table(
            ["model", "lam", "width", "parameters", "log t until A ≤ 2", "margin then"], times
        ),
    }


def plot(rows: pd.DataFrame, docs: Path) -> None:
    """Times over lam and over the number of parameters, with the theory's slopes."""
    figure, axes = new_figure(1, 2, figsize=(9, 4), sharey=True)
    for ax, varied in zip(axes, ("lam", "width"), strict=True):
        for model, colour in COLOURS.items():
            runs = rows[(rows["model"] == model) & (rows["varied"] == varied)]
            x = runs["lam" if varied == "lam" else "n_parameters"].astype(float)
            ax.plot(x, runs["log_time"], "o", color=colour, alpha=0.6, label=f"{model}")
            grid = np.array([x.min(), x.max()])
            degree = DEGREES[model] / (1 if varied == "lam" else 2)
            # Through the middle of the points.
            level = np.log(runs["log_time"]).mean() - degree * np.log(x).mean()
            ax.plot(
                grid, np.exp(level) * grid**degree, "--", color=colour, label=f"slope {degree:g}"
            )
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("lam" if varied == "lam" else "number of parameters")
        ax.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("log t until A ≤ 2")
    save_figure(figure, docs, "alignment")


def main() -> None:
    arguments = parse_arguments(__doc__)
    results = Results(arguments.results / "alignment.csv", Setting())
    run_all(results)
    write_tables(arguments.docs, tables(results.rows))
    plot(results.rows, arguments.docs)


if __name__ == "__main__":
    main()
