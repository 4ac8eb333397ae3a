"""What a training step costs: mirror descent, the loss of MR2 and its estimator's mini-batches.

    python benchmarks/speed/steps.py

Each measurement is a ratio of two CPU times taken shortly after one another in one process, on one
thread, with the order changing from repetition to repetition. The median of the ratios
and their quartiles are written to ``results/steps.csv`` and printed as a table. It takes about
four minutes.

- ``optimiser``: a step of ``MirrorDescent`` against one of ``torch.optim.SGD`` on a million
  parameters, in one tensor and in fifty. The rows of single functions say what one pass of them
  over the same numbers costs, which bounds what a step that needs them can cost.
- ``loss``: logits of a linear head, the loss and its gradients, against cross-entropy; and a plain
  loop over the classes with the same mathematics against the loss of the package.
- ``fit``: ``MR2Classifier`` on a multilayer perceptron against a raw torch loop over the same
  model, objective and Adam, and against skorch.
"""

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
from skorch import NeuralNetClassifier
from torch import Tensor, nn
from torch.nn import functional as F

from sklearn_mr2 import MR2Classifier
from sklearn_mr2.mirror.optimizer import MirrorDescent
from sklearn_mr2.mirror.potentials import POTENTIALS
from sklearn_mr2.mr2.heads import LinearHead
from sklearn_mr2.mr2.losses import MR2Loss
from sklearn_mr2.mr2.modules import MLP, HeadedModule

RESULTS = Path(__file__).parent / "results" / "steps.csv"
REPRESENTATION_WEIGHT = 0.01


def interleaved(
    calls: dict[str, Callable[[], object]],
    repetitions: int,
    inner: int = 1,
) -> pd.DataFrame:
    """Seconds of CPU time of each call, one row a repetition."""
    names = list(calls)
    for name in names:
        calls[name]()
    rows = []
    for repetition in range(repetitions):
        shift = repetition % len(names)
        row = {}
        for name in names[shift:] + names[:shift]:
            start = time.process_time()
            for _ in range(inner):
                calls[name]()
            row[name] = (time.process_time() - start) / inner
        rows.append(row)
    return pd.DataFrame(rows)


def ratios(times: pd.DataFrame, part: str, case: str, pairs: list[tuple[str, str]]) -> list[dict]:
    """One row of results for each pair of a measured call and what it is divided by."""
    rows = []
    for measured, base in pairs:
        ratio = times[measured] / times[base]
        low, median, high = ratio.quantile([0.25, 0.5, 0.75])
        rows.append(
            {
                "part": part,
                "case": case,
                "measured": measured,
                "against": base,
                "ratio": median,
                "lower quartile": low,
                "upper quartile": high,
                "milliseconds": 1e3 * times[measured].median(),
                "milliseconds against": 1e3 * times[base].median(),
                "repetitions": len(times),
            }
        )
    return rows


# ------------------------------------------------------------------ optimisers


def optimiser(repetitions: int, seed: int) -> list[dict]:
    rows = []
    for n_tensors in (1, 50):
        shape = (n_tensors, 10**6 // n_tensors)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(shape, generator=generator) / 10
        gradients = torch.randn(shape, generator=generator) / 100

        def parameters(values=values, gradients=gradients) -> list[nn.Parameter]:
            made = [nn.Parameter(row.clone()) for row in values]
            for p, gradient in zip(made, gradients, strict=True):
                p.grad = gradient.clone()
            return made

        calls: dict[str, Callable[[], object]] = {
            "SGD": torch.optim.SGD(parameters(), lr=1e-4).step
        }
        for name in POTENTIALS:
            calls[name] = MirrorDescent(parameters(), lr=1e-4, potential=name).step
        if n_tensors == 1:
            positive, out = values.abs(), torch.empty_like(values)
            calls["torch.amax"] = partial(torch.amax, positive)
            for function in (torch.sqrt, torch.rsqrt, torch.exp, torch.sinh):
                calls[f"torch.{function.__name__}"] = partial(function, positive, out=out)
        times = interleaved(calls, 10 * repetitions, inner=5)
        case = f"{n_tensors} tensor{'s' * (n_tensors > 1)}, {values.numel()} parameters"
        rows += ratios(times, "optimiser", case, [(c, "SGD") for c in calls if c != "SGD"])
    return rows


# ------------------------------------------------------------------ losses


class ClassLoop(nn.Module):
    """MR2's loss at its defaults, written class by class."""

    def __init__(self, n_classes: int, n_features: int, representation_weight: float) -> None:
        super().__init__()
        self.representation_weight = representation_weight
        self.weight = torch.zeros(n_classes)
        self.mean = torch.zeros(n_classes, n_features)
        self.variance = torch.zeros(n_classes)

    def forward(self, logits: Tensor, features: Tensor, y: Tensor) -> Tensor:
        n_classes = len(self.weight)
        with torch.no_grad():
            for k in range(n_classes):
                rows = features[y == k]
                if not len(rows):
                    continue
                old = 0.95 * self.weight[k]
                new = old + len(rows)
                share = len(rows) / new
                mean = rows.mean(0)
                within = (rows - mean).square().sum(1).mean()
                shift = (mean - self.mean[k]).square().sum()
                self.variance[k] = (
                    (1 - share) * self.variance[k] + share * within + share * (1 - share) * shift
                )
                self.mean[k] += share * (mean - self.mean[k])
                self.weight[k] = new
            present = self.weight > 0
            spread = self.mean.square().sum(1) + self.variance
            score = torch.where(present, spread ** (1 / 3), torch.nan)
            score = torch.maximum(score, 0.1 * score.nanmean())
            margins = (score / score.nanmean()).nan_to_num(1.0)
            usual = 2 * self.variance.sum() / present.sum()
        loss = F.cross_entropy(logits / margins[y][:, None], y)
        if not self.representation_weight:
            return loss
        total, anchors = features.new_zeros(()), 0
        for k in range(n_classes):
            rows = features[y == k]
            if len(rows) < 2:
                continue
            distance = (rows[:, None] - rows).square().sum(2) - usual
            own = torch.eye(len(rows), dtype=torch.bool)
            total = total + distance.masked_fill(own, 0).logsumexp(1).sum()
            anchors += len(rows)
        return loss + self.representation_weight * total / max(anchors, 1)


def loss(repetitions: int, seed: int) -> list[dict]:
    n_samples, n_features, n_classes = 512, 512, 1000
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(n_classes, (n_samples,), generator=generator)
    h = torch.randn(n_samples, n_features, generator=generator, requires_grad=True)
    W = (torch.randn(n_classes, n_features, generator=generator) / 20).requires_grad_()

    def step(criterion: Callable[..., Tensor]) -> Tensor:
        h.grad = W.grad = None
        value = criterion(h @ W.T, h, y)
        value.backward()
        return value.detach()

    def cross_entropy(logits: Tensor, features: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y)

    def alone(criterion: Callable[..., Tensor]) -> None:
        """The loss and its gradients with respect to logits and features, without the head."""
        h.grad = z.grad = None
        criterion(z, h, y).backward()

    z = (h @ W.T).detach().requires_grad_()
    rows = []
    for weight in (0.0, REPRESENTATION_WEIGHT):
        ours = MR2Loss(n_classes, n_features, representation_weight=weight)
        loop = ClassLoop(n_classes, n_features, weight)
        for _ in range(3):
            expected = step(loop)
            gradients = h.grad, W.grad
            torch.testing.assert_close(step(ours), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close((h.grad, W.grad), gradients, rtol=1e-3, atol=1e-5)
        case = f"{n_samples} x {n_features}, {n_classes} classes, " + (
            "both terms" if weight else "margins only"
        )
        # Two at a time: the loop leaves caches and the allocator as no training would.
        pairs: list[tuple[str, Callable[[], object], str, Callable[[], object]]] = [
            ("MR2Loss", partial(step, ours), "cross-entropy", partial(step, cross_entropy)),
            ("loop over classes", partial(step, loop), "MR2Loss", partial(step, ours)),
            (
                "loop over classes without head",
                partial(alone, loop),
                "MR2Loss without head",
                partial(alone, ours),
            ),
        ]
        for measured, call, base, other in pairs:
            times = interleaved({measured: call, base: other}, 4 * repetitions)
            rows += ratios(times, "loss", case, [(measured, base)])
    return rows


# ------------------------------------------------------------------ mini-batches


def fit(repetitions: int, seed: int) -> list[dict]:
    n_samples, n_features, n_classes, width = 20_000, 128, 10, 128
    size, epochs = 128, 3
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n_samples, n_features, generator=generator)
    centres = torch.randn(n_classes, n_features, generator=generator)
    y = (X @ centres.T + torch.randn(n_samples, n_classes, generator=generator)).argmax(1)

    def module() -> HeadedModule:
        head = LinearHead(width, n_classes, generator=torch.Generator().manual_seed(seed))
        return HeadedModule(MLP(n_features, (width,)), head)

    def train_raw(make_criterion: Callable[[], nn.Module], l2: float = 1 / n_samples) -> None:
        """The objective of `MR2Classifier` at C=1, without anything around it."""
        criterion, model = make_criterion(), module()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        model.train()
        for _ in range(epochs):
            order = torch.randperm(n_samples)
            total = 0.0
            for start in range(0, n_samples, size):
                index = order[start : start + size]
                optimizer.zero_grad()
                value = criterion(*model(X[index]), y[index])
                value = value + 0.5 * l2 * model.head.weight.square().sum()
                value.backward()
                optimizer.step()
                total = total + value.detach() * len(index)
            float(total)

    class CrossEntropy(nn.Module):
        def forward(self, logits: Tensor, features: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(logits, y)

    class Together(nn.Module):
        """A loss for skorch, which hands over the outputs of a module as one argument."""

        def __init__(self, criterion: nn.Module) -> None:
            super().__init__()
            self.criterion = criterion

        def forward(self, output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
            return self.criterion(*output, y)

    def estimator(representation_weight: float) -> None:
        MR2Classifier(
            "mlp",
            module__hidden_layer_sizes=(width,),
            representation_weight=representation_weight,
            max_epochs=epochs,
            batch_size=size,
            lr=1e-3,
            device="cpu",
            random_state=seed,
        ).fit(X_array, y_array)

    def skorch(make_criterion: Callable[[], nn.Module]) -> None:
        NeuralNetClassifier(
            module(),
            criterion=Together(make_criterion()),
            optimizer=torch.optim.Adam,
            lr=1e-3,
            max_epochs=epochs,
            batch_size=size,
            train_split=None,
            iterator_train__shuffle=True,
            verbose=0,
        ).fit(X_array, y_array)

    X_array, y_array = X.numpy(), y.numpy()
    rows = []
    for weight in (0.0, REPRESENTATION_WEIGHT):
        ours = partial(MR2Loss, n_classes, width, representation_weight=weight)

        calls: dict[str, Callable[[], object]] = {
            "raw loop, cross-entropy": partial(train_raw, CrossEntropy),
            "raw loop, MR2Loss": partial(train_raw, ours),
            "MR2Classifier": partial(estimator, weight),
            "skorch, cross-entropy": partial(skorch, CrossEntropy),
            "skorch, MR2Loss": partial(skorch, ours),
        }
        times = interleaved(calls, max(3, repetitions // 2))
        case = f"{n_samples} x {n_features}, batches of {size}, {epochs} epochs, " + (
            "both terms" if weight else "margins only"
        )
        against = [
            "raw loop, MR2Loss",
            "raw loop, cross-entropy",
            "skorch, MR2Loss",
            "skorch, cross-entropy",
        ]
        rows += ratios(times, "fit", case, [("MR2Classifier", base) for base in against])
    return rows


# ------------------------------------------------------------------ the command

PARTS: dict[str, Callable[[int, int], list[dict]]] = {
    "optimiser": optimiser,
    "loss": loss,
    "fit": fit,
}


def markdown(table: pd.DataFrame) -> str:
    lines = [
        "| part | case | measured | against | ratio | quartiles | ms | ms against |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    for row in table.itertuples(index=False):
        _, _, _, _, ratio, low, high, ms, base, *_ = row
        cells = [*row[:4], f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{ms:.3g}", f"{base:.3g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=10, help="more is slower and steadier")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rows = [row for part in options.parts for row in PARTS[part](options.repetitions, options.seed)]
    table = pd.DataFrame(rows)
    table["seed"] = options.seed
    for package in ("torch", "skorch", "scikit-learn", "sklearn-mr2"):
        table[package] = version(package)
    table["python"] = platform.python_version()
    table["instructions"] = torch.backends.cpu.get_cpu_capability()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output, index=False, float_format="%.4g")
    print(markdown(table))


if __name__ == "__main__":
    main()
