"""What the mirror-flow benchmarks share: data, the flow, results that grow cell by cell, tables."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from sklearn_mr2.mirror.losses import log_total_loss, margins
from sklearn_mr2.mirror.networks import HomogeneousMLP, layer_groups
from sklearn_mr2.mirror.optimizer import MirrorDescent
from sklearn_mr2.mirror.potentials import Potential

ROOT = Path(__file__).parents[2]
PAGE = Path("benchmarks") / "mirror.md"
# Okabe and Ito: told apart by everyone.
BLUE, ORANGE, GREEN, PINK, SKY, RED = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
)

# ------------------------------------------------------------------ data and networks


def student_teacher(
    n_samples: int, n_features: int, n_teachers: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Gaussian samples and the sign of a random ReLU teacher whose output signs alternate."""
    X = torch.randn(n_samples, n_features, generator=generator, dtype=torch.float64)
    W = torch.randn(n_teachers, n_features, generator=generator, dtype=torch.float64)
    signs = torch.tensor([(-1.0) ** j for j in range(n_teachers)], dtype=torch.float64)
    return X, (torch.relu(X @ W.T) @ signs > 0).long()


def linear_teacher(
    n_samples: int, n_features: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Samples of length 1 and the side of a random hyperplane on which they are.

    Their length does not depend on the dimension, so that a margin measures the parameters alone.
    """
    X = torch.randn(n_samples, n_features, generator=generator, dtype=torch.float64)
    X = nn.functional.normalize(X)
    w = torch.randn(n_features, generator=generator, dtype=torch.float64)
    return X, (X @ w > 0).long()


def two_layer(n_features: int, width: int, std: float, generator: torch.Generator) -> nn.Module:
    """A ReLU network without biases, in double precision."""
    return HomogeneousMLP(
        n_features, (width,), fit_intercept=False, weight_init=std, generator=generator
    ).double()


def linear(n_features: int) -> nn.Module:
    """The linear model at zero, in double precision."""
    return HomogeneousMLP(n_features, (), fit_intercept=False, weight_init="zeros").double()


# ------------------------------------------------------------------ the flow


class State(NamedTuple):
    """The flow at one time."""

    log_time: float
    log_loss: float
    margin: float
    groups: list[dict[str, Any]]


def mirror_flow(
    network: nn.Module,
    X: Tensor,
    y: Tensor,
    potential: Potential | Sequence[Potential],
    step_size: float,
    max_steps: int,
) -> Iterator[State]:
    """Follow the flow on the full batch: yields the state before each step, in place."""
    optimizer = MirrorDescent(
        layer_groups(network, potential), lr=step_size, step_size="normalised"
    )
    for _ in range(max_steps):
        optimizer.zero_grad()
        outputs = network(X)
        log_loss = log_total_loss(outputs, y)
        log_loss.backward()
        value = log_loss.detach()
        smallest = margins(outputs.detach(), y).min().item()
        yield State(optimizer.log_time, value.item(), smallest, optimizer.param_groups)
        optimizer.step(lambda value=value: value)


# ------------------------------------------------------------------ results


@dataclass
class Results:
    """Finished cells in a CSV file. A cell is a run, named by its key, and may have many rows."""

    path: Path
    setting: Any

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = pd.DataFrame()
        if self.path.exists():
            self.rows = pd.read_csv(self.path)

    def add(self, key: Mapping[str, Any], run: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Run a cell and write its rows, unless it was run before."""
        if not self.of(**key).empty:
            return
        self._check_same_setting()
        new = pd.DataFrame([{**key, **row} for row in run()])
        print(new.iloc[-1, :16].to_dict(), flush=True)
        self.rows = pd.concat([self.rows, new], ignore_index=True)
        # Through a temporary name, so that an interruption leaves no half cell.
        partial = self.path.with_suffix(".partial")
        self.rows.to_csv(partial, index=False, float_format="%.10g")
        os.replace(partial, self.path)

    def of(self, **key: Any) -> pd.DataFrame:
        """The rows of a cell, or of all cells with these parts of a key."""
        if self.rows.empty:
            return self.rows
        chosen = pd.Series(True, index=self.rows.index)
        for name, value in key.items():
            chosen &= self.rows[name] == value
        return self.rows[chosen]

    def _check_same_setting(self) -> None:
        packages = ["numpy", "scikit-learn", "scipy", "sklearn-mr2", "skorch", "torch"]
        versions = {"python": platform.python_version(), **{p: version(p) for p in packages}}
        setting = json.loads(json.dumps(asdict(self.setting)))
        path = self.path.with_suffix(".json")
        if self.rows.empty:
            path.write_text(json.dumps({"setting": setting, "versions": versions}, indent=2) + "\n")
        elif json.loads(path.read_text())["setting"] != setting:
            sys.exit(
                f"{self.path} was made with the setting in {path}, which is not that of now. "
                "Remove both files to start anew."
            )


# ------------------------------------------------------------------ command, tables and plots


def parse_arguments(description: str | None, *more: tuple[str, dict]) -> argparse.Namespace:
    """Folders of the results and of the docs, and whatever else a benchmark needs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder of the CSV"
    )
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="folder of the docs page and its images"
    )
    for name, options in more:
        parser.add_argument(name, **options)
    torch.set_num_threads(1)
    return parser.parse_args()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that GitHub and MyST both read."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean_and_range(values: pd.Series, digits: int = 1) -> str:
    """The mean over the seeds, and their smallest and largest value."""
    low, mean, high = values.min(), values.mean(), values.max()
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def mean_and_std(values: pd.Series, digits: int = 2) -> str:
    """The mean over the seeds and their standard deviation."""
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def write_tables(docs: Path, tables: Mapping[str, str]) -> None:
    """Replace tables of the docs page, which stand between pairs of comments."""
    path = docs / PAGE
    page = path.read_text() if path.exists() else ""
    for name, table in tables.items():
        begin, end = f"<!-- table: {name} -->", "<!-- end of table -->"
        if begin not in page:
            page += f"\n{begin}\n{end}\n"
        before, rest = page.split(begin, 1)
        page = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end, 1)[1]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)


def new_figure(*args: Any, **options: Any) -> Any:
    """Figure and axes for a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(*args, layout="constrained", **options)
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, docs: Path, name: str) -> None:
    """Write ``docs/images/mirror_<name>.png``."""
    from matplotlib import pyplot as plt

    path = docs / "images" / f"mirror_{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
