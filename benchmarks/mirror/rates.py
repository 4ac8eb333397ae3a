"""Convergence rates of the loss and of the dual potential Q, against the theorem.

    python benchmarks/mirror/rates.py

The theorem says Q ~ (log t)^(alpha / L) and loss ~ 1 / (t (log t)^(2 - alpha / L)), with the
potential's growth rate alpha and the network's degree L. A linear model and a two-layer ReLU
network follow the flow to a margin of 300; the exponents are fitted over the last part of the path,
where log t is more than a quarter of its last value. Each finished path is in
``results/rates.csv``; a later call makes what is missing and rebuilds the table of
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
    GREEN,
    ORANGE,
    RED,
    Results,
    linear,
    linear_teacher,
    markdown_table,
    mean_and_std,
    mirror_flow,
    new_figure,
    parse_arguments,
    save_figure,
    student_teacher,
    two_layer,
    write_tables,
)

from sklearn_mr2.mirror.potentials import Euclidean, HyperbolicEntropy, Potential, SmoothedPower
from sklearn_mr2.mirror.theory import Rates, fit_rates, layer_duals

POTENTIALS: dict[str, Potential] = {
    "SmoothedPower(3, 0.01)": SmoothedPower(3, 0.01),
    "Euclidean": Euclidean(),
    "HyperbolicEntropy(0.1)": HyperbolicEntropy(0.1),
    "HyperbolicEntropy(10)": HyperbolicEntropy(10),
}
COLOURS = dict(zip(POTENTIALS, [ORANGE, BLUE, GREEN, RED], strict=True))
MODELS = {"linear": 1, "two-layer": 2}  # with their degrees


@dataclass(frozen=True)
class Setting:
    """What is trained and how often; recorded beside the results."""

    n_samples: int = 40
    n_features_linear: int = 20
    n_features: int = 5
    n_teachers: int = 3
    width: int = 30
    init_std: float = 0.3
    target_margin: float = 300
    records_per_e: int = 20
    seeds: tuple[int, ...] = (0, 1, 2)
    step_size: float = 0.3
    max_steps: int = 60_000


def run(setting: Setting, model: str, name: str, seed: int) -> Iterator[dict[str, float]]:
    """The path, recorded on a geometric grid of the margin from 1 on."""
    generator = torch.Generator().manual_seed(seed)
    if model == "linear":
        X, y = linear_teacher(setting.n_samples, setting.n_features_linear, generator)
        network = linear(setting.n_features_linear)
    else:
        X, y = student_teacher(setting.n_samples, setting.n_features, setting.n_teachers, generator)
        network = two_layer(setting.n_features, setting.width, setting.init_std, generator)
    goal = 1.0
    states = mirror_flow(network, X, y, POTENTIALS[name], setting.step_size, setting.max_steps)
    for state in states:
        if state.margin >= goal:
            yield {
                "log_time": state.log_time,
                "log_loss": state.log_loss,
                "margin": state.margin,
                "dual": float(layer_duals(state.groups).sum()),
            }
            goal = state.margin * np.exp(1 / setting.records_per_e)
        if state.margin >= setting.target_margin:
            return
    raise RuntimeError(f"{model}, {name}, seed {seed}: margin {state.margin:.3g} at the last step")


def run_all(results: Results) -> None:
    """Train whatever is missing."""
    for seed in results.setting.seeds:
        for model in MODELS:
            for name in POTENTIALS:
                results.add(
                    {"model": model, "potential": name, "seed": seed},
                    lambda: run(results.setting, model, name, seed),  # noqa: B023
                )


def fits(rows: pd.DataFrame) -> pd.DataFrame:
    """Fitted exponents and the theory's, one row for each path."""

    def fit(path: pd.DataFrame, model: str, name: str) -> Rates:
        return fit_rates(
            path["log_time"],
            path["log_loss"],
            path["dual"],
            alpha=POTENTIALS[name].alpha,
            degree=MODELS[model],
        )

    return pd.DataFrame(
        [
            {"model": model, "potential": name, "seed": seed, **vars(fit(path, model, name))}
            for (model, name, seed), path in rows.groupby(["model", "potential", "seed"])
        ]
    )


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """The table of the docs page."""
    fitted = fits(rows)
    lines = []
    for model, degree in MODELS.items():
        for name in POTENTIALS:
            runs = fitted[(fitted["model"] == model) & (fitted["potential"] == name)]
            lines.append(
                [
                    f"{model} (L = {degree}), {name}",
                    mean_and_std(runs["dual_exponent"]),
                    f"{runs['dual_exponent_theory'].iloc[0]:g}",
                    mean_and_std(runs["loss_exponent"]),
                    f"{runs['loss_exponent_theory'].iloc[0]:g}",
                ]
            )
    header = ["model, potential", "exponent of Q", "theorem", "exponent of the loss", "theorem"]
    return {"rates": markdown_table(header, lines)}


def plot(rows: pd.DataFrame, docs: Path) -> None:
    """Paths of the first seed, and lines with the slopes of the theorem."""
    figure, axes = new_figure(2, 2, figsize=(9.5, 7), sharex="col")
    first = rows[rows["seed"] == rows["seed"].min()]
    for column, (model, degree) in enumerate(MODELS.items()):
        for name, colour in COLOURS.items():
            path = first[(first["model"] == model) & (first["potential"] == name)]
            log_time = path["log_time"].to_numpy()
            exponent = POTENTIALS[name].alpha / degree
            late = log_time > log_time[-1] / 4
            # (log t)^e is what the loss falls faster than 1 / t.
            faster = np.exp(-path["log_loss"].to_numpy() - log_time)
            measured = (path["dual"].to_numpy() / path["dual"].iloc[-1], faster / faster[-1])
            for row, (values, e) in enumerate(zip(measured, (exponent, 2 - exponent), strict=True)):
                ax = axes[row, column]
                ax.plot(log_time, values, color=colour, label=name)
                line = (log_time[late] / log_time[-1]) ** e
                ax.plot(log_time[late], line, "--", color="0.2", linewidth=1)
        axes[0, column].set_title(f"{model} model, L = {degree}", fontsize=10)
        axes[1, column].set_xlabel("log t")
    for ax in axes.flat:
        ax.set_xscale("log")
        ax.set_xlim(left=0.5)
        ax.set_yscale("log")
    axes[0, 0].set_ylabel("Q, relative to its last value")
    axes[1, 0].set_ylabel("1 / (t loss), relative to its last value")
    axes[0, 0].plot([], [], "--", color="0.2", linewidth=1, label="theorem")
    axes[0, 0].legend(frameon=False, fontsize=8)
    save_figure(figure, docs, "rates")


def main() -> None:
    arguments = parse_arguments(__doc__)
    results = Results(arguments.results / "rates.csv", Setting())
    run_all(results)
    write_tables(arguments.docs, tables(results.rows))
    plot(results.rows, arguments.docs)


if __name__ == "__main__":
    main()
