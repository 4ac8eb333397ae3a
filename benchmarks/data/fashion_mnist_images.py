"""Fashion-MNIST as the benchmarks of networks train on it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from fashion_mnist_features import FILE_PREFIX, read_idx
from numpy.typing import NDArray

# Mean and standard deviation of the training pixels.
PIXEL_MEAN, PIXEL_STD = 0.286, 0.353


class Part(NamedTuple):
    """Standardised images (n, 1, 28, 28) float32 and their labels."""

    X: NDArray[np.float32]
    y: NDArray[np.uint8]


class Images(NamedTuple):
    """Images to draw training sets from, to tune on and to judge on."""

    pool: Part
    validation: Part
    test: Part


def load_images(source: Path, n_validation: int) -> Images:
    """Read Fashion-MNIST; the last `n_validation` of its training images are for validation."""

    def read(part: str) -> Part:
        pixels = read_idx(source / f"{FILE_PREFIX[part]}-images-idx3-ubyte.gz")
        X = (pixels[:, None].astype(np.float32) / 255 - PIXEL_MEAN) / PIXEL_STD
        return Part(X, read_idx(source / f"{FILE_PREFIX[part]}-labels-idx1-ubyte.gz"))

    train = read("train")
    return Images(
        Part(train.X[:-n_validation], train.y[:-n_validation]),
        Part(train.X[-n_validation:], train.y[-n_validation:]),
        read("test"),
    )
