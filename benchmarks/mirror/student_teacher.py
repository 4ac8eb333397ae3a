"""Active neurons by potential: a wide student learns what a teacher of three neurons says.

    python benchmarks/mirror/student_teacher.py

A two-layer ReLU network follows the mirror flow until its smallest margin is 100. Each finished run
is in ``results/student_teacher.csv``; a later call makes what is missing and rebuilds the tables of
``docs/benchmarks/mirror.md`` and the plot. A run takes 1 to 5 seconds of one core, all together
about 2 minutes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    Results,
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

from sklearn_mr2.mirror.kkt import kkt_ratio
from sklearn_mr2.mirror.neurons import hidden_layers
from sklearn_mr2.mirror.potentials import Euclidean, HyperbolicEntropy, Potential, SmoothedPower
from sklearn_mr2.mirror.theory import (
    active_count,
    layer_balance,
    layer_duals,
    participation_ratio,
    q_margin,
)

DEGREE = 2
POTENTIALS: dict[str, Potential | Sequence[Potential]] = {
    "SmoothedPower(3, 0.01)": SmoothedPower(3, 0.01),
    "Euclidean": Euclidean(),
    "HyperbolicEntropy(0.03)": HyperbolicEntropy(0.03),
    "HyperbolicEntropy(0.1)": HyperbolicEntropy(0.1),
    "HyperbolicEntropy(0.3)": HyperbolicEntropy(0.3),
    "HyperbolicEntropy(1)": HyperbolicEntropy(1),
    "HyperbolicEntropy(10)": HyperbolicEntropy(10),
    "HyperbolicEntropy(0.1), then Euclidean": [HyperbolicEntropy(0.1), Euclidean()],
}
NORMS = {"L1": 1, "L2": 2, "L3": 3}


@dataclass(frozen=True)
class Setting:
    """What is trained and how often; recorded beside the results."""

    n_samples: int = 60
    n_features: int = 5
    n_teachers: int = 3
    width: int = 30
    init_std: float = 0.3
    margins: tuple[float, ...] = (1, 3, 10, 30, 100)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    # 0.3 follows the flow of the stiff power potential as closely as 0.1 does that of others.
    step_size: float = 0.1
    step_size_power: float = 0.3
    max_steps: int = 60_000
    measure_kkt: bool = True


def run(setting: Setting, name: str, seed: int) -> Iterator[dict[str, float]]:
    """One row for each of the margins that are reached."""
    generator = torch.Generator().manual_seed(seed)
    X, y = student_teacher(setting.n_samples, setting.n_features, setting.n_teachers, generator)
    network = two_layer(setting.n_features, setting.width, setting.init_std, generator)
    potential = POTENTIALS[name]
    power = isinstance(potential, SmoothedPower)
    step_size = setting.step_size_power if power else setting.step_size
    goals = list(setting.margins)
    balance, smoothed = None, []
    states = mirror_flow(network, X, y, potential, step_size, setting.max_steps)
    for step, state in enumerate(states):
        if balance is None:
            balance = layer_balance(state.groups, DEGREE)
        if state.log_loss < 0 and step % 10 == 0:
            # -log L in place of the smallest margin: the smoothed Q-margin.
            smoothed.append(q_margin(-state.log_loss, state.groups, DEGREE))
        if state.margin < goals[0]:
            continue
        goal = goals.pop(0)
        c = hidden_layers(network)[0].effective_weights()
        theta = torch.cat([p.detach().flatten() for p in network.parameters()])
        drift = layer_balance(state.groups, DEGREE) - balance
        yield {
            "margin": goal,
            "steps": step,
            "log_time": state.log_time,
            "active": active_count(c),
            "participation_ratio": participation_ratio(c),
            **{f"margin_{k}": state.margin / float(theta.norm(p)) ** 2 for k, p in NORMS.items()},
            "balance_drift": float(drift.abs().max() / layer_duals(state.groups).sum()),
            "largest_fall": largest_fall(smoothed),
            "kkt_ratio": kkt_ratio(network, X, y, state.groups, DEGREE)
            if setting.measure_kkt and not goals
            else float("nan"),
        }
        if not goals:
            return
    raise RuntimeError(f"{name}, seed {seed}: margin {goals[0]} not reached")


def largest_fall(values: Sequence[float]) -> float:
    """The most that values come below their largest one so far, relative to the last."""
    if not values:
        return float("nan")
    return float((np.maximum.accumulate(values) - values).max() / values[-1])


def run_all(results: Results) -> None:
    """Train whatever is missing."""
    for seed in results.setting.seeds:
        for name in POTENTIALS:
            results.add(
                {"potential": name, "seed": seed},
                lambda: run(results.setting, name, seed),  # noqa: B023
            )


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """The tables of the docs page."""
    last = rows[rows["margin"] == rows["margin"].max()]
    by_name = {name: last[last["potential"] == name] for name in POTENTIALS}
    neurons = markdown_table(
        ["potential", "active neurons", "participation ratio", "log t", "steps"],
        [
            [
                name,
                mean_and_range(runs["active"]),
                mean_and_range(runs["participation_ratio"]),
                f"{runs['log_time'].mean():.1f}",
                f"{runs['steps'].mean():.0f}",
            ]
            for name, runs in by_name.items()
        ],
    )
    # Margins relative to those of the Euclidean potential, seed by seed.
    columns = [f"margin_{k}" for k in NORMS]
    reference = by_name["Euclidean"].set_index("seed")[columns]
    relative = {
        name: (runs.set_index("seed")[columns] / reference).mean() for name, runs in by_name.items()
    }
    theory = markdown_table(
        [
            "potential",
            *(f"{k} margin" for k in NORMS),
            "KKT ratio",
            "balance drift",
            "largest fall",
        ],
        [
            [
                name,
                *(f"{relative[name][column]:.2f}" for column in columns),
                mean_and_range(runs["kkt_ratio"], 3),
                f"{runs['balance_drift'].max():.1e}",
                f"{runs['largest_fall'].max():.1e}",
            ]
            for name, runs in by_name.items()
        ],
    )
    return {"student-teacher neurons": neurons, "student-teacher theory": theory}


def plot(rows: pd.DataFrame, setting: Setting, docs: Path) -> None:
    """Neurons at the end, seed by seed, and on the way there."""
    colours = dict(zip(POTENTIALS, [ORANGE, BLUE, SKY, GREEN, GREEN, PINK, RED], strict=False))
    figure, (left, right) = new_figure(1, 2, figsize=(10, 4), width_ratios=[1.15, 1])
    last = rows[rows["margin"] == rows["margin"].max()]
    names = list(POTENTIALS)
    for i, name in enumerate(names):
        runs = last[last["potential"] == name]
        for measure, marker, shift in (("participation_ratio", "o", 0.15), ("active", "|", -0.15)):
            colour = "0.25" if measure == "active" else BLUE
            y = [i + shift] * len(runs)
            left.plot(runs[measure], y, marker, color=colour, alpha=0.5, markersize=6)
    left.plot([], [], "|", color="0.25", label="active neurons")
    left.plot([], [], "o", color=BLUE, alpha=0.5, label="participation ratio")
    left.set_yticks(range(len(names)), [n.replace(", then", ",\nthen") for n in names], fontsize=8)
    left.invert_yaxis()
    left.axvline(setting.n_teachers, color="0.6", linestyle=":", linewidth=1)
    left.set_xlim(0, setting.width + 1)
    left.set_xlabel(f"of {setting.width} neurons (dotted: the teacher's {setting.n_teachers})")
    left.set_title(f"At margin {rows['margin'].max():g}, one mark a seed", fontsize=10)
    left.legend(frameon=False, fontsize=8, loc="lower right")
    for name in names:
        if name not in colours or name == "HyperbolicEntropy(0.3)":
            continue
        path = rows[rows["potential"] == name].groupby("margin")["participation_ratio"].mean()
        right.plot(path.index, path, ".-", color=colours[name], label=name)
    right.set_xscale("log")
    right.set_ylim(0, setting.width)
    right.set_xlabel("smallest margin")
    right.set_ylabel("participation ratio, mean over seeds")
    right.legend(frameon=False, fontsize=7, loc="center right", bbox_to_anchor=(1, 0.63))
    save_figure(figure, docs, "student_teacher")


def main() -> None:
    arguments = parse_arguments(__doc__)
    results = Results(arguments.results / "student_teacher.csv", Setting())
    run_all(results)
    write_tables(arguments.docs, tables(results.rows))
    plot(results.rows, results.setting, arguments.docs)


if __name__ == "__main__":
    main()
