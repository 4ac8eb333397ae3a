"""Mirror descent on Fashion-MNIST: accuracy, weights, pruning and neurons by potential.

    python benchmarks/mirror/fashion_mnist.py --model mlp
    python benchmarks/mirror/fashion_mnist.py --model cnn

Trains a ReLU network with two hidden layers, or a small VGG-style convolutional network, by
mini-batch mirror descent with a learning rate that falls along a cosine. Every potential has the
same number of learning rates to start from, chosen by the accuracy on validation images with one
seed; then all are trained anew with other seeds (training images, initialisation and order of
mini-batches) and measured on the test images. Each finished run is a row of
``results/fashion_mnist_MODEL.csv``; a later call trains what is missing and rebuilds the tables of
``docs/benchmarks/mirror.md`` and the plot. One run takes 3 to 15 seconds of one core.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    ROOT,
    Results,
    markdown_table,
    mean_and_std,
    new_figure,
    parse_arguments,
    save_figure,
    write_tables,
)
from numpy.typing import NDArray
from skorch.callbacks import LRScheduler
from torch import nn

from sklearn_mr2.metrics import NeuronSparsity, pruning_curve
from sklearn_mr2.mirror import MirrorFlowClassifier
from sklearn_mr2.mirror.networks import HomogeneousCNN
from sklearn_mr2.mirror.neurons import weight_layers
from sklearn_mr2.mirror.potentials import Euclidean, HyperbolicEntropy, Potential, SmoothedPower
from sklearn_mr2.mirror.theory import participation_ratio

sys.path.insert(0, str(ROOT / "benchmarks" / "data"))
from fashion_mnist_features import DEBIAN_FOLDER
from fashion_mnist_images import Images, Part, load_images

POTENTIALS: dict[str, Potential] = {
    "SmoothedPower(3, 0.01)": SmoothedPower(3, 0.01),
    "Euclidean": Euclidean(),
    "HyperbolicEntropy(0.1)": HyperbolicEntropy(0.1),
    "HyperbolicEntropy(0.01)": HyperbolicEntropy(0.01),
}
COLOURS = dict(zip(POTENTIALS, [ORANGE, BLUE, GREEN, PINK], strict=True))
AMOUNTS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
PRUNED = ("magnitude", "neuron")
QUANTILES = (0.001, 0.01, *np.round(np.arange(0.025, 1, 0.025), 3).tolist(), 0.99, 0.999)


@dataclass(frozen=True)
class Setting:
    """What is trained and how often; recorded beside the results."""

    model: str
    max_epochs: int
    # Potentials differ in r'', and so in the size of a step: each has a grid of its own.
    lrs: dict[str, tuple[float, ...]]
    hidden_layer_sizes: tuple[int, ...] = (128, 64)
    block_channels: tuple[int, ...] = (8, 16, 32)
    convolutions_per_block: int = 1
    n_train: int = 10_000
    n_validation: int = 5_000
    batch_size: int = 128
    tuning_seed: int = 101
    seeds: tuple[int, ...] = (0, 1, 2)
    # Share of a layer's largest effective weight below which compact() removes a neuron.
    compact_threshold: float = 0.01


SETTINGS = {
    "mlp": Setting(
        "mlp",
        max_epochs=20,
        lrs={
            "SmoothedPower(3, 0.01)": (0.003, 0.01, 0.03),
            "Euclidean": (0.03, 0.1, 0.3),
            "HyperbolicEntropy(0.1)": (0.3, 1.0, 3.0),
            "HyperbolicEntropy(0.01)": (1.0, 3.0, 10.0),
        },
    ),
    "cnn": Setting(
        "cnn",
        max_epochs=8,
        batch_size=64,
        lrs={
            "SmoothedPower(3, 0.01)": (0.03, 0.1),
            "Euclidean": (0.1, 0.3),
            "HyperbolicEntropy(0.1)": (0.5, 1.5),
        },
    ),
}


def make_classifier(setting: Setting, name: str, lr: float, seed: int) -> MirrorFlowClassifier:
    """The classifier, not fitted yet."""
    network: dict[str, Any] = {"hidden_layer_sizes": setting.hidden_layer_sizes}
    if setting.model == "cnn":
        network = {
            "module": HomogeneousCNN,
            "module__n_channels": 1,
            "module__n_outputs": 10,
            "module__block_channels": setting.block_channels,
            "module__convolutions_per_block": setting.convolutions_per_block,
        }
    return MirrorFlowClassifier(
        **network,
        potential=POTENTIALS[name],
        batch_size=setting.batch_size,
        lr=lr,
        max_epochs=setting.max_epochs,
        device="cpu",
        # At a constant rate the last step decides whether test accuracy is 70 or 80 %.
        callbacks=[LRScheduler("CosineAnnealingLR", T_max=setting.max_epochs)],
        random_state=seed,
    )


def train_and_measure(
    setting: Setting, name: str, lr: float, seed: int, pool: Part, judge: Part, *, details: bool
) -> dict[str, float]:
    """Accuracy of one fit, and, with `details`, what its weights are like."""

    def shaped(X: NDArray[np.float32]) -> NDArray[np.float32]:
        return X.reshape(len(X), -1) if setting.model == "mlp" else X

    rows = np.random.default_rng(seed).choice(len(pool.y), setting.n_train, replace=False)
    X, y, X_judge = shaped(pool.X[rows]), pool.y[rows], shaped(judge.X)
    classifier = make_classifier(setting, name, lr, seed)
    # Of this process alone, so that it does not depend on what else the machine does.
    start = time.process_time()
    classifier.fit(X, y)
    seconds = time.process_time() - start
    network = classifier.net_.module_.network
    row = {
        "accuracy": accuracy(network, X_judge, judge.y),
        "train_accuracy": accuracy(network, X, y),
        "train_loss": classifier.history_["train_loss"].iloc[-1],
        "fit_seconds": round(seconds, 2),
    }
    if details:
        for layer, measured in NeuronSparsity(threshold=0.1).per_layer(classifier).iterrows():
            row |= {f"{layer}_{name}": value for name, value in measured.items()}
        row |= weight_measures(network)
        for by in PRUNED:
            curve = pruning_curve(classifier, X_judge, judge.y, AMOUNTS, by=by)
            row |= {f"{by}_{a:g}": v for a, v in zip(AMOUNTS, curve["score"], strict=True)}
        if setting.model == "mlp":
            row |= compact_measures(setting, classifier, X_judge, judge.y)
    return row


@torch.inference_mode()
def accuracy(network: nn.Module, X: NDArray[np.float32], y: NDArray[np.uint8]) -> float:
    """Share of right predictions."""
    network = network.eval()
    predicted = [network(part).argmax(1) for part in torch.from_numpy(X).split(1000)]
    return float((torch.cat(predicted).numpy() == y).mean())


def weight_measures(network: nn.Module) -> dict[str, float]:
    """Density and quantiles of the weights of each layer, and of all."""
    row: dict[str, float] = {}
    weights = {name: layer.weight.detach().flatten() for name, layer in weight_layers(network)}
    weights["all"] = torch.cat(list(weights.values()))
    for name, w in weights.items():
        # 1 if all weights are of the same size, 2 / pi = 0.64 if they are normal.
        row[f"{name}_density"] = participation_ratio(w.abs()) / len(w)
        levels = np.quantile(w.numpy(), QUANTILES)
        row |= {f"{name}@{q:g}": v for q, v in zip(QUANTILES, levels, strict=True)}
    return row


def compact_measures(
    setting: Setting, classifier: MirrorFlowClassifier, X: NDArray, y: NDArray
) -> dict[str, float]:
    """Size, speed and accuracy of what `compact` leaves."""
    small = classifier.compact(setting.compact_threshold)
    row = {f"compact_{i}": width for i, width in enumerate(small.hidden_layer_sizes, start=1)} | {
        "compact_accuracy": accuracy(small.net_.module_.network, X, y)
    }
    for label, model in (("whole", classifier), ("compact", small)):
        row[f"{label}_parameters"] = sum(w.size for w in model.coefs_) + len(model.intercepts_[0])
        seconds = []
        for _ in range(5):
            start = time.process_time()
            model.predict(X)
            seconds.append(time.process_time() - start)
        row[f"{label}_milliseconds"] = 1000 * min(seconds)
    return row


def run_all(results: Results, load: Callable[[], Images]) -> dict[str, float]:
    """Train whatever is missing; return the learning rate chosen for each potential."""
    setting, images = results.setting, None

    def run(name: str, lr: float, seed: int, judge: str) -> list[dict[str, float]]:
        nonlocal images
        images = images or load()
        return [
            train_and_measure(
                setting,
                name,
                lr,
                seed,
                images.pool,
                getattr(images, judge),
                details=judge == "test",
            )
        ]

    chosen = {}
    for name, lrs in setting.lrs.items():
        for lr in lrs:
            key = {"stage": "tune", "potential": name, "lr": lr, "seed": setting.tuning_seed}
            results.add(key, lambda: run(name, lr, setting.tuning_seed, "validation"))  # noqa: B023
        tuned = results.of(stage="tune", potential=name)
        chosen[name] = float(tuned.loc[tuned["accuracy"].idxmax(), "lr"])
    for seed in setting.seeds:
        for name, lr in chosen.items():
            key = {"stage": "test", "potential": name, "lr": lr, "seed": seed}
            results.add(key, lambda: run(name, lr, seed, "test"))  # noqa: B023
    return chosen


# ------------------------------------------------------------------ tables and plot


def hidden_names(rows: pd.DataFrame) -> list[str]:
    return [c.removesuffix("_PR") for c in rows.columns if c.endswith("_PR")]


def tables(results: Results, chosen: dict[str, float]) -> dict[str, str]:
    """The tables of the docs page."""
    model, layers = results.setting.model, hidden_names(results.rows)
    runs = {name: results.of(stage="test", potential=name, lr=lr) for name, lr in chosen.items()}
    means = [
        [
            name,
            f"{chosen[name]:g}",
            mean_and_std(100 * r["accuracy"]),
            f"{100 * r['train_accuracy'].mean():.1f}",
            f"{r['all_density'].mean():.3f}",
            *(f"{r[f'{k}_PR'].mean():.1f} / {r[f'{k}_active'].mean():.0f}" for k in layers),
            f"{r['fit_seconds'].mean():.1f}",
        ]
        for name, r in runs.items()
    ]
    widths = [
        f"{k.removeprefix('network.')} ({int(results.rows[f'{k}_width'].max())})" for k in layers
    ]
    header = ["potential", "lr", "test accuracy", "training", "weight density", *widths]
    pruning = [
        [f"{name}, by {by}", *(mean_and_std(100 * r[f"{by}_{a:g}"], 1) for a in AMOUNTS)]
        for by in PRUNED
        for name, r in runs.items()
    ]
    tuning = [
        [name, *(f"{r.lr:g}: {100 * r.accuracy:.1f}" for r in tuned.itertuples())]
        for name in chosen
        for tuned in [results.of(stage="tune", potential=name)]
    ]
    n_lrs = len(results.setting.lrs["Euclidean"])
    named = {
        f"{model} means": markdown_table([*header, "fit, CPU s"], means),
        f"{model} pruning": markdown_table(
            ["potential", *(f"{100 * a:g} %" for a in AMOUNTS)], pruning
        ),
        f"{model} tuning": markdown_table(
            ["potential", *(f"candidate {i + 1}" for i in range(n_lrs))], tuning
        ),
    }
    if model == "mlp":
        lines = [
            [
                name,
                f"{r['compact_1'].mean():.0f}, {r['compact_2'].mean():.0f}",
                f"{r['whole_parameters'].mean():.0f} → {r['compact_parameters'].mean():.0f}",
                f"{r['whole_milliseconds'].mean():.0f} → {r['compact_milliseconds'].mean():.0f}",
                f"{100 * r['accuracy'].mean():.2f} → {100 * r['compact_accuracy'].mean():.2f}",
            ]
            for name, r in runs.items()
        ]
        header = ["potential", "neurons left", "parameters", "predicting 10,000, ms", "accuracy"]
        named["mlp compact"] = markdown_table(header, lines)
    return named


def plot(results: Results, chosen: dict[str, float], docs: Path) -> None:
    """Pruning curves and distributions of the weights."""
    figure, axes = new_figure(1, 3, figsize=(13, 4))
    *curves, right = axes
    for name, lr in chosen.items():
        runs, colour = results.of(stage="test", potential=name, lr=lr), COLOURS[name]
        x = 100 * np.array(AMOUNTS)
        for ax, by in zip(curves, PRUNED, strict=True):
            curve = 100 * runs[[f"{by}_{a:g}" for a in AMOUNTS]]
            ax.plot(x, curve.mean(), "o-", color=colour, label=name, markersize=4)
            ax.fill_between(x, curve.min(), curve.max(), color=colour, alpha=0.2, linewidth=0)
        levels = runs[[f"all@{q:g}" for q in QUANTILES]].mean().to_numpy()
        # The same spread between the outer quantiles, so that shapes compare.
        scale = (levels[-2] - levels[1]) / 2
        density = np.diff(QUANTILES) / np.diff(levels / scale)
        right.stairs(density, levels / scale, color=colour, label=name, linewidth=1.5)
    for ax, what in zip(curves, ("weights", "neurons"), strict=True):
        ax.set_xlabel(f"{what} removed, %")
        ax.set_ylim(0, 100)
        ax.set_ylabel("test accuracy, %")
        ax.set_title(f"Pruning of {what} (mean and range over seeds)", fontsize=10)
    curves[0].legend(frameon=False, fontsize=8)
    right.set_yscale("log")
    right.set_xlabel("weight / half of its 1 % to 99 % range")
    right.set_ylabel("density")
    right.set_title("Weights of all layers, from their quantiles", fontsize=10)
    save_figure(figure, docs, f"fashion_mnist_{results.setting.model}")


def main() -> None:
    arguments = parse_arguments(
        __doc__,
        ("--model", {"choices": list(SETTINGS), "required": True, "help": "which network"}),
        ("--source", {"type": Path, "default": DEBIAN_FOLDER, "help": "folder of IDX .gz files"}),
    )

    def load() -> Images:
        if not (arguments.source / "train-images-idx3-ubyte.gz").exists():
            sys.exit(
                f"{arguments.source} holds no train-images-idx3-ubyte.gz: install Debian's "
                "dataset-fashion-mnist, or give --source with the four .gz files of "
                "https://github.com/zalandoresearch/fashion-mnist"
            )
        return load_images(arguments.source, setting.n_validation)

    setting = SETTINGS[arguments.model]
    results = Results(arguments.results / f"fashion_mnist_{setting.model}.csv", setting)
    chosen = run_all(results, load)
    write_tables(arguments.docs, tables(results, chosen))
    plot(results, chosen, arguments.docs)


if __name__ == "__main__":
    main()
