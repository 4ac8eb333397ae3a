"""Fashion-MNIST as the benchmarks of networks train on it.

    python benchmarks/data/fashion_mnist_images.py --out CACHE_FOLDER

writes ``fashion_mnist_images.npz``, the training images as X (60000, 28, 28) uint8 and their labels
y, for the comparison of methods; the other benchmarks read the original files.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fashion_mnist_features import DEBIAN_FOLDER, FILE_PREFIX, read_idx, save_whole
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="cache folder")
    parser.add_argument(
        "--source", type=Path, default=DEBIAN_FOLDER, help="folder of the original files"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    X, y = (
        read_idx(arguments.source / f"{FILE_PREFIX['train']}-{kind}-ubyte.gz")
        for kind in ("images-idx3", "labels-idx1")
    )
    save_whole(
        arguments.out / "fashion_mnist_images.npz",
        lambda path: np.savez_compressed(path, X=X, y=y),
    )


if __name__ == "__main__":
    main()
