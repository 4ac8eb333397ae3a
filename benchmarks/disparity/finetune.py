"""MR2 while the last stage of a pretrained encoder is trained on.

    python benchmarks/disparity/finetune.py --cache CACHE_FOLDER

Fine-tunes the last block, the last convolution and a new head of EfficientNet-Lite0 on 2,000 images
of Fashion-MNIST, on top of what the frozen stages before them give, which is computed once and kept
in the cache folder. The learning rate is that of cross-entropy, chosen among three; each method has
three candidates, judged on 1,000 validation images by the comparison's rule of choice. A line for
each method and seed is added to ``results/finetuning.jsonl``; a later call trains what is missing
and rebuilds the section of ``docs/benchmarks/disparity.md``.
"""

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from compare import ROOT, Results, judge
from numpy.typing import NDArray
from report import measures, replace_sections, task_table
from selection import BASELINE, most_accurate
from skorch.callbacks import LRScheduler
from torch import nn

from sklearn_mr2 import MR2Classifier

sys.path.insert(0, str(ROOT / "benchmarks" / "data"))
from fashion_mnist_features import (
    DEBIAN_FOLDER,
    FILE_PREFIX,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PIXELS,
    load_encoder,
    read_idx,
)

TASK = "fine-tuning"
N_IMAGES = {"train": 10_000, "test": 4_000}
N_TRAIN, N_VALIDATION = 2_000, 1_000
MAX_EPOCHS, BATCH_SIZE = 6, 64
SEEDS, REFERENCE_SEEDS = range(10, 15), (900, 901)
RATES = (3e-3, 1e-2, 3e-2)
ERROR_RULE = {"margin_statistic": "error", "margin_exponent": 1.0, "margin_mode": "subtract"}
# Parameters of MR2Classifier, and what each candidate changes of them.
METHODS: dict[str, tuple[dict[str, Any], Sequence[dict[str, Any]]]] = {
    BASELINE: ({"margin_statistic": None}, [{"lr": lr} for lr in RATES]),
    f"{BASELINE}, other seeds": ({"margin_statistic": None}, [{"random_state": 10_000}]),
    "MR2 (paper)": ({}, [{"representation_weight": w} for w in (1e-3, 3e-3, 1e-2)]),
    "MR2 without representation term": ({}, [{"margin": m} for m in (0.5, 1.0, 2.0)]),
    "MR2 without margins": (
        {"margin_statistic": None},
        [{"representation_weight": w} for w in (1e-3, 3e-3, 1e-2)],
    ),
    "error, in proportion": ({**ERROR_RULE, "error_cv": 2}, [{"margin": "auto"}]),
}


class Part(NamedTuple):
    """Feature maps (n, channels, height, width) and labels."""

    X: NDArray[np.float32]
    y: NDArray


@torch.inference_mode()
def maps_before_last_block(images: NDArray, encoder: Any) -> NDArray:
    """What the frozen stages give for uint8 images (n, 28, 28), float16."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    found = []
    for batch in torch.from_numpy(images.copy()).split(100):
        grey = nn.functional.interpolate(
            batch[:, None].float() / 255, size=(PIXELS, PIXELS), mode="bilinear"
        )
        x = encoder._swish(encoder._bn0(encoder._conv_stem((grey - mean) / std)))
        for block in encoder._blocks[:-1]:
            x = block(x)
        found.append(x.half())
    return torch.cat(found).numpy()


def load(cache: Path, encoder: Any) -> dict[str, Part]:
    """Both parts, encoded at the first call."""
    path = cache / "fashion_mnist_last_block.npz"
    if not path.exists():
        arrays = {}
        for part, n in N_IMAGES.items():
            images = read_idx(DEBIAN_FOLDER / f"{FILE_PREFIX[part]}-images-idx3-ubyte.gz")[:n]
            arrays[part] = maps_before_last_block(images, encoder)
            labels = read_idx(DEBIAN_FOLDER / f"{FILE_PREFIX[part]}-labels-idx1-ubyte.gz")[:n]
            arrays[f"{part}_y"] = labels
        np.savez(path, **arrays)
    with np.load(path) as file:
        return {p: Part(file[p].astype(np.float32), file[f"{p}_y"]) for p in N_IMAGES}


def last_stage(encoder: Any) -> nn.Module:
    """Pretrained: maps to features (n, 1280)."""
    parts = encoder._blocks[-1], encoder._conv_head, encoder._bn1, nn.ReLU6()
    return nn.Sequential(*copy.deepcopy(parts), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def cell(
    parts: dict[str, Part], encoder: Any, method: str, seed: int, lr: float | None
) -> dict[str, Any]:
    """Fit and judge all candidates of a method on one draw."""
    order = np.random.default_rng(seed).permutation(N_IMAGES["train"])
    train, validation = np.split(order[: N_TRAIN + N_VALIDATION], [N_TRAIN])
    pool, test = parts["train"], parts["test"]
    parameters, candidates = METHODS[method]
    judged = []
    for candidate in candidates:
        model = MR2Classifier(
            last_stage(encoder),
            C=1e9,
            representation_weight=0.0,
            max_epochs=MAX_EPOCHS,
            batch_size=BATCH_SIZE,
            callbacks=[LRScheduler("CosineAnnealingLR", T_max=MAX_EPOCHS)],
            random_state=seed,
        )
        model.set_params(**{"lr": lr, **parameters, **candidate})
        start = time.process_time()
        model.fit(pool.X[train], pool.y[train])
        seconds = time.process_time() - start
        judged.append(
            {
                "parameters": candidate,
                "validation": judge(
                    model.decision_function(pool.X[validation]), pool.y[validation]
                ),
                "test": judge(model.decision_function(test.X), test.y),
                "fit_seconds": round(seconds, 2),
            }
        )
    group = "baseline" if method.startswith(BASELINE) else "MR2"
    return {"task": TASK, "method": method, "group": group, "seed": seed, "candidates": judged}


def run(results: Results, cache: Path) -> None:
    """Train whatever is missing."""
    torch.set_num_threads(1)
    encoder = load_encoder()
    parts = load(cache, encoder)
    for seed in [*REFERENCE_SEEDS, *SEEDS]:
        for method in METHODS if seed in SEEDS else [BASELINE]:
            if results.find(TASK, method, seed) is not None:
                continue
            baseline = results.find(TASK, BASELINE, seed)
            lr = None if baseline is None else most_accurate(baseline)["parameters"]["lr"]
            row = cell(parts, encoder, method, seed, lr)
            results.add(row)
            seconds = sum(c["fit_seconds"] for c in row["candidates"])
            accuracy = [round(100 * c["test"]["accuracy"], 2) for c in row["candidates"]]
            print(f"seed {seed} {method:32s} {seconds:.0f} s, {accuracy}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="without it, only the table is rebuilt")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    arguments = parser.parse_args()
    results = Results(arguments.results / "finetuning.jsonl")
    if arguments.cache is not None:
        run(results, arguments.cache)
    table = task_table(measures(results.rows, REFERENCE_SEEDS), TASK)
    replace_sections(arguments.docs / "benchmarks" / "disparity.md", {TASK: table})


if __name__ == "__main__":
    main()
