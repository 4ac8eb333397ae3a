"""Gaussian classes whose statistics are like those of image and sentence embeddings."""

import numpy as np
from benchopt import BaseDataset

#: Norms of the features around their class mean and of the mean of all, and extremes of the
#: factor by which classes spread more or less than others.
NORM, COMMON_NORM, SPREAD = 10.0, 5.0, (0.75, 1.25)
#: Between the classes, the variance in units of the variance within falls with this power.
BETWEEN_DECAY = 0.5
CHUNK = 8192


class Dataset(BaseDataset):
    """Classes with a common covariance up to a factor, in a randomly rotated basis.

    The singular values within classes are ``j ** -decay``. The class means lie in the same basis;
    measured in units of the spread within, they differ most along the leading directions, as those
    of real embeddings do. How far they are apart is set so that the best rule for classes of equal
    spread is right for the share `accuracy` of all samples.
    """

    name = "Synthetic"
    parameters = {
        "n_samples, n_features, n_classes": [
            (n, d, K)
            for n in (2_000, 20_000, 100_000)
            for d in (384, 1280)
            for K in (10, 100, 1000)
            if n >= 10 * K
        ],
        "decay": [0.7],
        "accuracy": [0.75],
        "seed": [0],
    }
    test_config = {"n_samples": 200, "n_features": 10, "n_classes": 3}
    requirements = []

    def get_data(self):
        n, d, K = self.n_samples, self.n_features, self.n_classes
        rng = np.random.default_rng([self.seed, n, d, K])
        index = np.arange(1, d + 1)
        scale = index**-self.decay
        scale *= NORM / np.linalg.norm(scale)
        # Directions in the whitened basis, so that distances there decide how well one can tell.
        offsets = rng.standard_normal((K, d)) * index ** (-BETWEEN_DECAY / 2)
        offsets *= separation(offsets, self.accuracy, rng)
        spread = np.linspace(*SPREAD, K)[rng.permutation(K)].astype(np.float32)
        y = rng.permutation(np.arange(n) % K)

        rotation, _ = np.linalg.qr(rng.standard_normal((d, d)))
        common = rng.standard_normal(d)
        common *= COMMON_NORM / np.linalg.norm(common)
        means = ((offsets * scale) @ rotation + common).astype(np.float32)
        mixing = (scale[:, None] * rotation).astype(np.float32)
        X = np.empty((n, d), np.float32)
        for start in range(0, n, CHUNK):
            codes = y[start : start + CHUNK]
            noise = rng.standard_normal((len(codes), d), np.float32)
            noise *= spread[codes, None]
            X[start : start + CHUNK] = noise @ mixing + means[codes]
        return {"X": X, "y": y}


def separation(offsets, accuracy, rng, n_draws=2000):
    """Factor of the class means at which the nearest one is right with this probability."""
    codes = rng.integers(len(offsets), size=n_draws)
    noise = rng.standard_normal((n_draws, offsets.shape[1])) @ offsets.T
    products = offsets @ offsets.T
    closeness = products[codes] - np.diag(products) / 2
    low, high = 0.0, 100.0
    for _ in range(40):
        factor = (low + high) / 2
        right = (noise + factor * closeness).argmax(1) == codes
        low, high = (factor, high) if right.mean() < accuracy else (low, factor)
    return high
