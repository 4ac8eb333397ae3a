"""Ablation of MR2 on a small convolutional network trained from scratch on Fashion-MNIST.

    python benchmarks/disparity/ablation.py

Compares cross-entropy, one margin for all classes, the margins of MR2 alone, its representation
term alone, and both. Every method has the same number of candidates, chosen by the accuracy on
validation images; then all are trained anew with other seeds (training images, initialisation and
order of mini-batches) and measured on the test images, paired by seed.

Each finished run is a row of ``results/ablation.csv``. A later call trains only what is missing
there, and rebuilds the tables of ``docs/benchmarks/ablation.md`` and the plot. One run takes about
10 seconds of one core, all together a quarter of an hour.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats
from skorch.callbacks import LRScheduler

from sklearn_mr2 import MR2Classifier
from sklearn_mr2.metrics import difficulty_thirds, per_class_report
from sklearn_mr2.mr2.statistics import class_moments

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / folder) for folder in ("data", "disparity")]
from fashion_mnist_features import DEBIAN_FOLDER  # noqa: E402
from fashion_mnist_images import Images, Part, load_images  # noqa: E402
from networks import ConvNet  # noqa: E402

METHODS = ["cross-entropy", "uniform margin", "margins only", "representation term only", "both"]
BASELINE, FULL = METHODS[0], METHODS[-1]
MEASURES = {
    "overall": "overall",
    "hard": "hard third",
    "medium": "medium third",
    "easy": "easy third",
    "worst": "worst class",
    "std": "std. over classes",
}


@dataclass(frozen=True)
class Setting:
    """What is trained and how often; recorded beside the results."""

    n_train: int = 5_000
    n_validation: int = 10_000
    max_epochs: int = 10
    batch_size: int = 128
    lr: float = 1e-2
    tuning_seeds: tuple[int, ...] = (101,)
    # Of cross-entropy, for the thirds of the classes.
    reference_seeds: tuple[int, ...] = (101, 102)
    seeds: tuple[int, ...] = tuple(range(10))
    weight_decays: tuple[float, ...] = (0.0, 0.03, 0.1, 0.3)
    # 1 would be cross-entropy.
    uniform_margins: tuple[float, ...] = (0.25, 0.5, 2.0, 4.0)
    margins: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    representation_weights: tuple[float, ...] = (3e-3, 1e-2, 3e-2, 1e-1)
    margins_of_both: tuple[float, ...] = (0.5, 1.0)
    representation_weights_of_both: tuple[float, ...] = (1e-2, 3e-2)
    # Of the representation term, with and without normalised features.
    scale_weights: tuple[float, ...] = (0.0, 1e-3, 1e-2)


class Recipe(NamedTuple):
    """The parameters in which the methods differ; the defaults are plain cross-entropy."""

    weight_decay: float = 0.0
    margin_statistic: Literal["none", "second_moment"] = "none"
    margin: float = 1.0
    representation_weight: float = 0.0
    batch_norm: bool = True


PARAMETERS = list(Recipe._fields)


def candidates(setting: Setting, method: str, weight_decay: float) -> list[Recipe]:
    """The recipes `method` chooses from, on top of the weight decay chosen for cross-entropy."""
    paper: Literal["second_moment"] = "second_moment"
    if method == "cross-entropy":
        return [Recipe(decay) for decay in setting.weight_decays]
    if method == "uniform margin":
        return [Recipe(weight_decay, "none", margin) for margin in setting.uniform_margins]
    if method == "margins only":
        return [Recipe(weight_decay, paper, margin) for margin in setting.margins]
    if method == "representation term only":
        return [Recipe(weight_decay, "none", 1.0, w) for w in setting.representation_weights]
    return [
        Recipe(weight_decay, paper, margin, w)
        for margin in setting.margins_of_both
        for w in setting.representation_weights_of_both
    ]


def scale_recipes(setting: Setting, weight_decay: float) -> list[Recipe]:
    """Representation terms of several weights, with and without normalised features."""
    return [
        Recipe(weight_decay, representation_weight=weight, batch_norm=batch_norm)
        for batch_norm in (True, False)
        for weight in setting.scale_weights
    ]


def draw(pool: Part, n_train: int, seed: int) -> Part:
    """Draw a training set with equally many images of each class."""
    order = np.random.default_rng(seed).permutation(len(pool.y))
    classes = np.unique(pool.y)
    per_class = n_train // len(classes)
    rows = np.concatenate([order[pool.y[order] == k][:per_class] for k in classes])
    return Part(pool.X[rows], pool.y[rows])


def train_and_measure(
    setting: Setting, recipe: Recipe, seed: int, pool: Part, judge: Part
) -> dict[str, float]:
    """One fit: recall of each class of `judge`, training accuracy, CPU seconds, features.

    Of the features of the training images: their mean spread within classes, which the
    representation term compares squared distances with, and the share that is constant.
    """
    train = draw(pool, setting.n_train, seed)
    classifier = MR2Classifier(
        ConvNet,
        module__batch_norm=recipe.batch_norm,
        margin=recipe.margin,
        margin_statistic=None if recipe.margin_statistic == "none" else recipe.margin_statistic,
        representation_weight=recipe.representation_weight,
        # Weight decay of the whole network in place of a penalty on its head.
        C=1e9,
        optimizer=torch.optim.AdamW,
        optimizer__weight_decay=recipe.weight_decay,
        lr=setting.lr,
        max_epochs=setting.max_epochs,
        batch_size=setting.batch_size,
        callbacks=[LRScheduler("CosineAnnealingLR", T_max=setting.max_epochs)],
        random_state=seed,
    )
    # Of this process alone, so that it does not depend on what else the machine does.
    start = time.process_time()
    classifier.fit(train.X, train.y)
    seconds = time.process_time() - start
    features = classifier.transform(train.X)
    moments = class_moments(torch.from_numpy(features), torch.from_numpy(train.y).long(), 10)
    report = per_class_report(judge.y, classifier.predict(judge.X))
    return {
        "fit_seconds": round(seconds, 2),
        "feature_spread": float(moments.mean_spread),
        "dead_features": float(np.mean(features.max(axis=0) == features.min(axis=0))),
        "train_accuracy": classifier.score(train.X, train.y),
        "accuracy": float(np.average(report["recall"], weights=report["support"])),
        **{f"recall_{k}": recall for k, recall in report["recall"].items()},
    }


@dataclass
class Results:
    """The finished runs, in a file that grows by a row with each."""

    setting: Setting
    path: Path
    rows: pd.DataFrame = field(init=False)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = pd.DataFrame()
        if self.path.exists():
            # "none" is a value here, not a missing one.
            self.rows = pd.read_csv(self.path, keep_default_na=False)

    def of(self, images: str, recipe: Recipe) -> pd.DataFrame:
        """The runs of a recipe judged on "validation" or "test" images, by seed."""
        if self.rows.empty:
            return pd.DataFrame(index=pd.Index([], name="seed"))
        chosen = (self.rows[PARAMETERS] == pd.Series(recipe._asdict())).all(axis=1)
        return self.rows[chosen & (self.rows["images"] == images)].set_index("seed").sort_index()

    def add(
        self,
        images: str,
        method: str,
        recipe: Recipe,
        seed: int,
        run: Callable[[str, Recipe, int], dict[str, float]],
    ) -> None:
        """Run and write, unless it was before."""
        if seed in self.of(images, recipe).index:
            return
        self._check_same_configuration()
        row = {"images": images, "method": method, "seed": seed, **recipe._asdict()}
        row |= run(images, recipe, seed)
        print({k: v for k, v in row.items() if not k.startswith("recall_")}, flush=True)
        self.rows = pd.concat([self.rows, pd.DataFrame([row])], ignore_index=True)
        # Through a temporary name, so that an interruption leaves no half row.
        partial = self.path.with_suffix(".partial")
        self.rows.to_csv(partial, index=False)
        os.replace(partial, self.path)

    def _check_same_configuration(self) -> None:
        packages = ["numpy", "scikit-learn", "scipy", "sklearn-mr2", "skorch", "torch"]
        setting = asdict(self.setting)
        now = {
            # More seeds may be added later; which there are is in the rows.
            "setting": {k: v for k, v in setting.items() if not k.endswith("seeds")},
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in packages},
            },
        }
        now = json.loads(json.dumps(now))
        path = self.path.with_suffix(".json")
        if self.rows.empty:
            path.write_text(json.dumps(now, indent=2) + "\n")
        elif json.loads(path.read_text()) != now:
            sys.exit(
                f"{self.path} was made with the setting and versions of {path}, which are not "
                "those of now. Finish it with those, or remove both files to start anew."
            )


def tuning_runs(results: Results, recipe: Recipe) -> pd.DataFrame:
    """The runs on validation images that count for the choice of candidates."""
    return results.of("validation", recipe).loc[list(results.setting.tuning_seeds)]


def run_all(results: Results, load: Callable[[], Images]) -> dict[str, Recipe]:
    """Train whatever is missing; return the recipe chosen for each method."""
    setting = results.setting
    load_once = cache(load)

    def run(judge: str, recipe: Recipe, seed: int) -> dict[str, float]:
        images = load_once()
        return train_and_measure(setting, recipe, seed, images.pool, getattr(images, judge))

    chosen: dict[str, Recipe] = {}
    for method in METHODS:
        decay = chosen[BASELINE].weight_decay if chosen else 0.0
        recipes = candidates(setting, method, decay)
        for recipe in recipes:
            for seed in setting.tuning_seeds:
                results.add("validation", method, recipe, seed, run)
        chosen[method] = max(recipes, key=lambda r: tuning_runs(results, r)["accuracy"].mean())
    for seed in setting.reference_seeds:
        results.add("validation", BASELINE, chosen[BASELINE], seed, run)
    for seed in setting.seeds:
        for method, recipe in chosen.items():
            results.add("test", method, recipe, seed, run)
    # Last, because it only explains: what the representation term does to features of any scale.
    for recipe in scale_recipes(setting, chosen[BASELINE].weight_decay):
        for seed in setting.tuning_seeds:
            method = METHODS[3] if recipe.representation_weight else BASELINE
            results.add("validation", method, recipe, seed, run)
    return chosen


# ------------------------------------------------------------------ tables and plot


def recalls(runs: pd.DataFrame) -> pd.DataFrame:
    """Recall by seed (rows) and class (columns)."""
    table = runs.filter(like="recall_")
    return table.rename(columns=lambda name: name.removeprefix("recall_")).astype(float)


def measures(runs: pd.DataFrame, thirds: pd.Series) -> pd.DataFrame:
    """`MEASURES` in points, by seed."""
    recall = 100 * recalls(runs)
    means = {third: recall.loc[:, thirds == third].mean(axis=1) for third in thirds.unique()}
    return pd.DataFrame(
        {
            "overall": 100 * runs["accuracy"],
            **means,
            "worst": recall.min(axis=1),
            "std": recall.std(axis=1, ddof=0),
        }
    )[list(MEASURES)]


def paired_difference(a: pd.Series, b: pd.Series) -> tuple[float, float, float]:
    """Mean of `a` minus `b` over their common seeds, and its 95% t-interval."""
    difference = (a - b).dropna()
    n = len(difference)
    half = stats.t.ppf(0.975, n - 1) * difference.std(ddof=1) / np.sqrt(n)
    return difference.mean(), difference.mean() - half, difference.mean() + half


@dataclass
class Summary:
    """What the tables and the plot show."""

    chosen: dict[str, Recipe]
    thirds: pd.Series
    # By method: the measures and the whole rows of the test runs, by seed.
    by_method: dict[str, pd.DataFrame]
    runs: dict[str, pd.DataFrame]
    # Means of the tuning runs, in points: of the candidates, and of the representation term with
    # normalised and free features.
    tuning: list[tuple[str, Recipe, pd.Series]]
    scale: list[tuple[Recipe, pd.Series]]


def summarise(results: Results, chosen: dict[str, Recipe]) -> Summary:
    """Measure the chosen recipes' runs on thirds that reference runs of cross-entropy give."""
    setting, decay = results.setting, chosen[BASELINE].weight_decay
    reference = results.of("validation", chosen[BASELINE]).loc[list(setting.reference_seeds)]
    thirds = difficulty_thirds(recalls(reference).mean())

    def tuned(recipe: Recipe) -> pd.Series:
        runs = tuning_runs(results, recipe)
        hard = 100 * recalls(runs).loc[:, thirds == "hard"].mean(axis=1).mean()
        points = 100 * runs[["accuracy", "train_accuracy", "dead_features"]].mean()
        return pd.Series({**points, "hard": hard, "spread": runs["feature_spread"].mean()})

    runs = {
        method: results.of("test", recipe).loc[list(setting.seeds)]
        for method, recipe in chosen.items()
    }
    return Summary(
        chosen,
        thirds,
        {method: measures(table, thirds) for method, table in runs.items()},
        runs,
        [(m, recipe, tuned(recipe)) for m in METHODS for recipe in candidates(setting, m, decay)],
        [(recipe, tuned(recipe)) for recipe in scale_recipes(setting, decay)],
    )


def describe(method: str, recipe: Recipe) -> str:
    """The tuned parameters of a method, for the tables."""
    parts = []
    if method == BASELINE:
        parts.append(f"weight decay {recipe.weight_decay:g}")
    if method in ("uniform margin", "margins only", FULL):
        parts.append(f"margin {recipe.margin:g}")
    if recipe.representation_weight:
        parts.append(f"weight {recipe.representation_weight:g}")
    return ", ".join(parts)


def markdown_table(header: list[str], rows: Iterator[list[str]]) -> str:
    """A table that GitHub and MyST both read."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def interval(difference: tuple[float, float, float]) -> str:
    """A difference and its interval; bold where the interval excludes 0."""
    mean, low, high = difference
    text = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def tables(summary: Summary) -> dict[str, str]:
    """The tables of the docs page, by name."""
    chosen, by_method = summary.chosen, summary.by_method

    def differences(pairs: list[tuple[str, str]]) -> str:
        rows = (
            [
                f"{a} − {b}",
                *(interval(paired_difference(by_method[a][m], by_method[b][m])) for m in MEASURES),
            ]
            for a, b in pairs
        )
        return markdown_table(["difference", *MEASURES.values()], rows)

    return {
        "means": markdown_table(
            ["method", "chosen", *MEASURES.values(), "training accuracy", "fit, CPU s"],
            (
                [
                    method,
                    describe(method, chosen[method]),
                    *(f"{table[m].mean():.2f}" for m in MEASURES),
                    f"{100 * summary.runs[method]['train_accuracy'].mean():.1f}",
                    f"{summary.runs[method]['fit_seconds'].mean():.1f}",
                ]
                for method, table in by_method.items()
            ),
        ),
        "against cross-entropy": differences([(method, BASELINE) for method in METHODS[1:]]),
        "against both": differences([(FULL, method) for method in METHODS[1:-1]]),
        "tuning": markdown_table(
            ["method", "candidate", "accuracy", "hard third", "training accuracy"],
            (
                [
                    method,
                    describe(method, recipe) + (" (chosen)" if recipe == chosen[method] else ""),
                    *(f"{tuned[name]:.2f}" for name in ("accuracy", "hard", "train_accuracy")),
                ]
                for method, recipe, tuned in summary.tuning
            ),
        ),
        "scale": markdown_table(
            ["features", "weight", "accuracy", "hard third", "spread", "constant features, %"],
            (
                [
                    "normalised" if recipe.batch_norm else "free",
                    f"{recipe.representation_weight:g}",
                    f"{tuned['accuracy']:.2f}",
                    f"{tuned['hard']:.2f}",
                    f"{tuned['spread']:.1f}",
                    f"{tuned['dead_features']:.0f}",
                ]
                for recipe, tuned in summary.scale
            ),
        ),
    }


def write_page(path: Path, summary: Summary) -> None:
    """Replace the tables of the docs page, which stand between pairs of comments."""
    page = path.read_text() if path.exists() else ""
    for name, table in tables(summary).items():
        begin, end = f"<!-- table: {name} -->", "<!-- end of table -->"
        if begin not in page:
            page += f"\n{begin}\n{end}\n"
        before, rest = page.split(begin, 1)
        page = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end, 1)[1]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)


def plot(path: Path, summary: Summary) -> None:
    """Paired differences from cross-entropy, with their intervals and every seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [m for m in MEASURES if m != "std"]
    methods = [method for method in summary.by_method if method != BASELINE]
    colours = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]  # Okabe and Ito: told apart by everyone
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.axhline(0, color="0.4", linewidth=1)
    for i, (method, colour) in enumerate(zip(methods, colours, strict=True)):
        x = np.arange(len(shown)) + 0.18 * (i - (len(methods) - 1) / 2)
        differences = summary.by_method[method] - summary.by_method[BASELINE]
        mean, low, high = np.transpose(
            [
                paired_difference(summary.by_method[method][m], summary.by_method[BASELINE][m])
                for m in shown
            ]
        )
        axes.errorbar(
            x, mean, [mean - low, high - mean], fmt="o", color=colour, capsize=3, label=method
        )
        for _, row in differences.iterrows():
            axes.plot(x + 0.05, row[shown], ".", color=colour, alpha=0.4, markersize=4)
    axes.set_xticks(range(len(shown)), [MEASURES[m] for m in shown])
    axes.set_ylabel("recall, points above cross-entropy")
    axes.set_title(
        "Mean and 95% t-interval of the paired difference; small dots are single seeds", fontsize=10
    )
    axes.legend(frameon=False, loc="best", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", type=Path, default=DEBIAN_FOLDER, help="folder of IDX .gz files"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "disparity" / "results",
        help="folder of ablation.csv and ablation.json",
    )
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="folder of the docs page and its images"
    )
    args = parser.parse_args()

    def load() -> Images:
        if not (args.source / "train-images-idx3-ubyte.gz").exists():
            parser.error(
                f"{args.source} holds no train-images-idx3-ubyte.gz: install Debian's "
                "dataset-fashion-mnist, or give --source with the four .gz files of "
                "https://github.com/zalandoresearch/fashion-mnist"
            )
        return load_images(args.source, Setting.n_validation)

    torch.set_num_threads(1)
    results = Results(Setting(), args.results / "ablation.csv")
    summary = summarise(results, run_all(results, load))
    write_page(args.docs / "benchmarks" / "ablation.md", summary)
    plot(args.docs / "images" / "ablation.png", summary)


if __name__ == "__main__":
    main()
