"""Embeddings that the scripts in benchmarks/data have made."""

import os
from pathlib import Path

import numpy as np
from benchopt import BaseDataset

VARIABLE = "SKLEARN_MR2_CACHE"


class Dataset(BaseDataset):
    """A random part of an .npz file with X and y, in the folder that SKLEARN_MR2_CACHE names."""

    name = "Cached"
    parameters = {
        "file, n_samples": [
            ("wordnet_glosses", 9_120),
            ("fashion_mnist_train", 2_000),
            ("fashion_mnist_train", 20_000),
            ("fashion_mnist_train", 60_000),
        ]
    }
    requirements = []

    def get_data(self):
        folder = os.environ.get(VARIABLE)
        path = Path(folder or "") / f"{self.file}.npz"
        if folder is None or not path.exists():
            raise FileNotFoundError(
                f"{self.file}.npz is not there. Make it with the script of benchmarks/data, and "
                f"set the environment variable {VARIABLE} to its folder (now {folder!r})."
            )
        with np.load(path, allow_pickle=False) as archive:
            X, labels = archive["X"], archive["y"]
        rows = np.random.default_rng(0).permutation(len(X))[: self.n_samples]
        y = np.unique(labels[rows], return_inverse=True)[1]
        return {"X": X[rows].astype(np.float32), "y": y.astype(np.int64)}
