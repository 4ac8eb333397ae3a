"""How much memory a linear probe takes above the file that its features are mapped from.

    python benchmarks/speed/memory.py

writes a file of synthetic embeddings in float16 (2 GB by default), fits a probe to it, predicts all
samples, and appends the peak of the process's anonymous memory to ``results/memory.csv``. Needs
Linux: mapped pages are told from the process's own by ``/proc/self/status``.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

import sklearn_mr2
from sklearn_mr2 import MR2Classifier

RESULTS = Path(__file__).parent / "results" / "memory.csv"
ROWS = 8192


def anonymous_megabytes() -> float:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this needs Linux 4.5 or later.")


class PeakMemory:
    """The largest anonymous memory inside a ``with`` block, sampled every 5 ms."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = anonymous_megabytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, anonymous_megabytes())

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def write_embeddings(path: Path, n: int, d: int, n_classes: int, seed: int) -> np.ndarray:
    """Write features whose spectrum falls as a power law; return the labels."""
    rng = np.random.default_rng(seed)
    scale = np.arange(1, d + 1) ** -0.4
    means = 0.7 * scale * rng.standard_normal((n_classes, d))
    y = rng.integers(n_classes, size=n)
    X = np.lib.format.open_memmap(path, "w+", np.float16, (n, d))
    for start in range(0, n, ROWS):
        labels = y[start : start + ROWS]
        noise = rng.standard_normal((len(labels), d), dtype=np.float32)
        X[start : start + ROWS] = means[labels] + scale * noise
    X.flush()
    return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2_000_000)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=2000, help="max_epochs of the probe")
    parser.add_argument("--C", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to write the file; temporary by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "X.npy"
        y = write_embeddings(
            path, arguments.samples, arguments.features, arguments.classes, arguments.seed
        )
        X = np.load(path, mmap_mode="r")
        model = MR2Classifier(
            C=arguments.C, margin_statistic=None, max_epochs=arguments.iterations, device="cpu"
        )
        with PeakMemory() as fitting:
            start = time.perf_counter()
            model.fit(X, y)
            seconds = time.perf_counter() - start
        with PeakMemory() as predicting:
            accuracy = (model.predict(X) == y).mean()
        row = {
            "samples": arguments.samples,
            "features": arguments.features,
            "classes": arguments.classes,
            "C": arguments.C,
            "seed": arguments.seed,
            "file_mb": round(path.stat().st_size / 2**20),
            "before_mb": round(fitting.before),
            "fit_mb": round(fitting.peak - fitting.before),
            "predict_mb": round(predicting.peak - predicting.before),
            "seconds": round(seconds, 1),
            "iterations": model.n_iter_,
            "train_accuracy": round(float(accuracy), 4),
            "sklearn_mr2": sklearn_mr2.__version__,
            "torch": torch.__version__,
        }
    RESULTS.parent.mkdir(exist_ok=True)
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if new:
            writer.writeheader()
        writer.writerow(row)
    print("\n".join(f"{key}: {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
