"""The benchmarks of speed on a GPU: the linear probe, mini-batches, losses and optimisers.

    pip install benchopt
    python benchmarks/speed/gpu.py

- ``probe``: the cells of ``probe/table.py`` named by ``--cells``, MR2Classifier and torch's L-BFGS
  on the GPU against LogisticRegression on the CPU with all its threads. The time includes the way
  of the data to the GPU. Written to ``results/gpu_probe.jsonl`` run by run; a later call runs
  what is missing.
- ``fit``: ``MR2Classifier`` on a multilayer perceptron against a raw torch loop over tensors on the
  GPU, and against skorch.
- ``loss``: MR2's loss and gradients against cross-entropy.
- ``optimiser``: a step of ``MirrorDescent`` against one of ``torch.optim.SGD`` and ``Adam``.

The last three are written to ``results/gpu_steps.csv``, as medians of ratios of times taken right
after one another. All tables go to ``docs/benchmarks/speed.md``. On an H200 about five minutes.
Without a GPU nothing is measured; ``--device cpu`` rehearses the script.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from skorch import NeuralNetClassifier
from steps import markdown, ratios
from torch import Tensor, nn
from torch.nn import functional as F

from sklearn_mr2 import MR2Classifier
from sklearn_mr2.mirror.optimizer import MirrorDescent
from sklearn_mr2.mirror.potentials import POTENTIALS
from sklearn_mr2.mr2.heads import LinearHead
from sklearn_mr2.mr2.losses import MR2Loss
from sklearn_mr2.mr2.modules import MLP, HeadedModule

sys.path.insert(0, str(Path(__file__).parent / "probe"))
import table

CELLS = [
    "fashion-bundled n=6000 d=128 K=10 C=1",
    "synthetic n=20000 d=384 K=100 C=1",
    "synthetic n=20000 d=1280 K=1000 C=1",
    "synthetic n=100000 d=384 K=10 C=1",
    "synthetic n=100000 d=1280 K=100 C=1",
]
SEED = 0


def interleaved(
    calls: dict[str, Callable[[], object]], device: str, repetitions: int, inner: int = 1
) -> pd.DataFrame:
    """Seconds of each call until the device has finished, one row a repetition."""

    def timed(call: Callable[[], object], times: int) -> float:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(times):
            call()
        synchronise(device)
        return (time.perf_counter() - start) / times

    names = list(calls)
    for name in names:
        timed(calls[name], 2)
    rows = []
    for repetition in range(repetitions):
        shift = repetition % len(names)
        order = names[shift:] + names[:shift]
        rows.append({name: timed(calls[name], inner) for name in order})
    return pd.DataFrame(rows)


def synchronise(device: str) -> None:
    """Wait until the device has done all that was asked of it."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def on(device: str) -> Callable[[str], str]:
    """Name of a solver of the probe on a device."""
    return lambda name: name if device == "cpu" else f"{name} on {device}"


# ------------------------------------------------------------------ the probe


def probe(device: str, results: table.Results, cells: list[str], options) -> str:
    """Run the cells; return the table."""
    benchmark = table.Benchmark(table.FOLDER)
    classes = {solver.name: solver for solver in benchmark.get_solvers()}
    solvers = [
        classes["MR2Classifier"].get_instance(device=device),
        classes["torch LBFGS"].get_instance(device=device),
        classes["LogisticRegression"].get_instance(solver="lbfgs", features="raw"),
    ]
    chosen = [cell for cell in table.all_cells(benchmark, [0.01, 1.0, 100.0]) if cell.name in cells]
    table.run_cells(
        benchmark,
        chosen,
        solvers,
        results,
        repetitions=options.repetitions,
        limit=options.limit,
        threads=os.cpu_count() or 1,
        device=device,
    )
    times = table.medians(results.table())
    found = table.compare(times, on(device)("MR2Classifier"))
    torch_times = times[times["solver"] == on(device)("torch LBFGS")].set_index("cell")
    lines = []
    for _, row in found.iterrows():
        other = torch_times.loc[row["cell"]]
        lines.append(
            (
                row["cell"],
                table.number(row["ours"], row["ours reached"]),
                table.number(other["time"], other["reached"]),
                table.number(row["baseline"], row["baseline reached"]),
                table.ratio_text(row, "baseline"),
            )
        )
    return table.markdown_table(
        ["cell", "MR2Classifier, s", "torch LBFGS, s", "lbfgs on the CPU, s", "ratio"], lines
    )


# ------------------------------------------------------------------ steps


def fit(device: str, repetitions: int) -> list[dict]:
    """Three epochs of a multilayer perceptron."""
    n_samples, n_features, n_classes, width, epochs = 50_000, 512, 100, 512, 3
    rng = np.random.default_rng(SEED)
    X = rng.standard_normal((n_samples, n_features), np.float32)
    y = (X @ rng.standard_normal((n_features, n_classes), np.float32)).argmax(1)

    def module() -> HeadedModule:
        head = LinearHead(width, n_classes, generator=torch.Generator().manual_seed(SEED))
        return HeadedModule(MLP(n_features, (width,)), head)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.headed = module()

        def forward(self, X: Tensor) -> Tensor:
            return self.headed(X)[0]

    def raw(size: int) -> None:
        model = module().to(device)
        criterion = MR2Loss(n_classes, width, representation_weight=0.003).to(device)
        X_device, y_device = torch.from_numpy(X).to(device), torch.from_numpy(y).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(epochs):
            order = torch.randperm(n_samples, device=device)
            for start in range(0, n_samples, size):
                index = order[start : start + size]
                optimizer.zero_grad()
                criterion(*model(X_device[index]), y_device[index]).backward()
                optimizer.step()

    def estimator(size: int, **more: Any) -> None:
        MR2Classifier(
            "mlp",
            module__hidden_layer_sizes=(width,),
            max_epochs=epochs,
            batch_size=size,
            lr=1e-3,
            device=device,
            random_state=SEED,
            **more,
        ).fit(X, y)

    def skorch(size: int) -> None:
        NeuralNetClassifier(
            Logits,
            criterion=nn.CrossEntropyLoss,
            optimizer=torch.optim.Adam,
            lr=1e-3,
            max_epochs=epochs,
            batch_size=size,
            train_split=None,
            iterator_train__shuffle=True,
            verbose=0,
            device=device,
        ).fit(X, y)

    rows = []
    for size in (128, 1024):
        calls: dict[str, Callable[[], object]] = {
            "MR2Classifier": partial(estimator, size),
            "MR2Classifier, margins only": partial(estimator, size, representation_weight=0.0),
            "MR2Classifier, bfloat16": partial(estimator, size, mixed_precision="bfloat16"),
            "raw loop, MR2Loss": partial(raw, size),
            "skorch, cross-entropy": partial(skorch, size),
        }
        times = interleaved(calls, device, repetitions)
        case = f"{n_samples} x {n_features}, batches of {size}, {epochs} epochs"
        ours = "MR2Classifier"
        pairs = [
            (ours, "raw loop, MR2Loss"),
            (ours, "skorch, cross-entropy"),
            ("MR2Classifier, margins only", "skorch, cross-entropy"),
        ]
        rows += ratios(times, "fit", case, [*pairs, ("MR2Classifier, bfloat16", ours)])
    return rows


def loss(device: str, repetitions: int) -> list[dict]:
    """Logits of a linear head, the loss and its gradients."""
    n_samples, n_features, n_classes = 512, 512, 1000
    generator = torch.Generator().manual_seed(SEED)
    y = torch.randint(n_classes, (n_samples,), generator=generator).to(device)
    h = torch.randn(n_samples, n_features, generator=generator).to(device).requires_grad_()
    W = (torch.randn(n_classes, n_features, generator=generator) / 20).to(device).requires_grad_()

    def step(criterion: Callable[..., Tensor]) -> None:
        h.grad = W.grad = None
        criterion(h @ W.T, h, y).backward()

    rows = []
    for weight, terms in ((0.0, "margins only"), (0.003, "both terms")):
        ours = MR2Loss(n_classes, n_features, representation_weight=weight).to(device)
        calls: dict[str, Callable[[], object]] = {
            "cross-entropy": partial(step, lambda logits, _, y: F.cross_entropy(logits, y)),
            "MR2Loss": partial(step, ours),
        }
        times = interleaved(calls, device, 10 * repetitions, inner=10)
        case = f"{n_samples} x {n_features}, {n_classes} classes, {terms}"
        rows += ratios(times, "loss", case, [("MR2Loss", "cross-entropy")])
    return rows


def optimiser(device: str, repetitions: int) -> list[dict]:
    """A step on parameters in one tensor and in fifty."""
    rows = []
    for n_tensors, size in ((1, 10**6), (50, 10**6), (50, 25 * 10**6)):
        generator = torch.Generator().manual_seed(SEED)
        values = torch.randn(n_tensors, size // n_tensors, generator=generator).to(device) / 10

        def parameters(values: Tensor = values) -> list[nn.Parameter]:
            made = [nn.Parameter(row.clone()) for row in values]
            for p in made:
                p.grad = p.detach() / 10
            return made

        calls: dict[str, Callable[[], object]] = {
            "SGD": torch.optim.SGD(parameters(), lr=1e-4).step,
            "Adam": torch.optim.Adam(parameters(), lr=1e-4).step,
        }
        for name in POTENTIALS:
            calls[name] = MirrorDescent(parameters(), lr=1e-4, potential=name).step
        times = interleaved(calls, device, 10 * repetitions, inner=10)
        case = f"{n_tensors} tensor{'s' * (n_tensors > 1)}, {size} parameters"
        rows += ratios(
            times, "optimiser", case, [(c, base) for c in POTENTIALS for base in ("SGD", "Adam")]
        )
    return rows


# ------------------------------------------------------------------ the command

STEPS = {"fit": fit, "loss": loss, "optimiser": optimiser}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=["probe", *STEPS], default=["probe", *STEPS])
    parser.add_argument("--cells", nargs="+", default=CELLS, help="whole names")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--limit", type=float, default=40.0, help="seconds a probe may take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--docs", type=Path, default=table.ROOT / "docs")
    options = parser.parse_args()
    device = options.device
    if device != "cpu" and not torch.cuda.is_available():
        print("There is no CUDA device here: nothing is measured.")
        return
    page, contents = options.docs / "benchmarks" / "speed.md", {}
    options.results.mkdir(parents=True, exist_ok=True)
    setting = {"device": "CPU" if device == "cpu" else torch.cuda.get_device_name(device)}
    setting |= {"cpu": table.processor(), "python": platform.python_version()}
    setting |= {package: version(package) for package in table.PACKAGES}
    # The short parts first.
    rows = [
        row
        for part in STEPS
        if part in options.parts
        for row in STEPS[part](device, options.repetitions)
    ]
    if rows:
        steps = pd.DataFrame(rows)
        steps.assign(**setting).to_csv(
            options.results / "gpu_steps.csv", index=False, float_format="%.4g"
        )
        contents["gpu steps"] = markdown(steps)
        print(contents["gpu steps"], flush=True)
        table.write_tables(page, contents)
    if "probe" in options.parts:
        results = table.Results(options.results / "gpu_probe.jsonl")
        contents["gpu probe"] = probe(device, results, options.cells, options)
        print(contents["gpu probe"], flush=True)
        table.write_tables(page, contents)


if __name__ == "__main__":
    main()
