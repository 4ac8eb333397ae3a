"""Reduce cached Fashion-MNIST features to the small set that ships inside the package.

    python benchmarks/data/bundle_fashion_mnist.py --features CACHE_FOLDER/fashion_mnist_train.npz

needs the features of at least the first 20,000 training images, as written by
``fashion_mnist_features.py``. The set takes the first 600 of them in each class. The PCA is fitted
on the others of the 20,000 and only applied to the 6,000 taken, so no split of the shipped set
leaks into its own features; Fashion-MNIST's test images are not used at all.

Prints the accuracy of each class under repeated cross-validated logistic regression, the figures
of the README beside the data.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import RepeatedStratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

PACKAGE_DATA = Path(__file__).parents[2] / "sklearn_mr2" / "datasets" / "data"
N_SOURCE = 20_000
N_PER_CLASS = 600
N_COMPONENTS = 128
LARGEST_FILE = 2_000_000
# Fashion-MNIST's label codes 0 to 9.
CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def reduce(X, y):
    """Return the indices taken, sorted, and their principal components."""
    taken = np.sort(
        np.concatenate(
            [np.flatnonzero(y == code)[:N_PER_CLASS] for code in range(len(CLASS_NAMES))]
        )
    )
    others = np.setdiff1d(np.arange(len(y)), taken)
    pca = PCA(N_COMPONENTS, svd_solver="covariance_eigh").fit(X[others].astype(np.float64))
    print(
        f"PCA on {len(others)} images keeps {pca.explained_variance_ratio_.sum():.3f} of variance"
    )
    return taken, pca.transform(X[taken].astype(np.float64))


def class_accuracies(X, y):
    """Held-out accuracy per class, (n_splits, n_classes), for the best C of a short grid."""
    folds = RepeatedStratifiedKFold(n_splits=5, n_repeats=2, random_state=0)
    best = None
    for C in (0.001, 0.01, 0.1, 1.0):
        rows = []
        for train, test in folds.split(X, y):
            model = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=1000))
            right = model.fit(X[train], y[train]).predict(X[test]) == y[test]
            rows.append([right[y[test] == code].mean() for code in range(len(CLASS_NAMES))])
        rows = np.array(rows)
        print(f"C={C}: accuracy {rows.mean():.3f}")
        if best is None or rows.mean() > best.mean():
            best = rows
    return best


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, required=True, help="fashion_mnist_train.npz")
    parser.add_argument("--out", type=Path, default=PACKAGE_DATA, help="folder of the shipped file")
    args = parser.parse_args()
    if not args.features.is_file():
        parser.error(f"{args.features} not found: make it with fashion_mnist_features.py")
    with np.load(args.features, allow_pickle=False) as archive:
        X, y = archive["X"][:N_SOURCE], archive["y"][:N_SOURCE]
    if len(y) < N_SOURCE:
        parser.error(f"{args.features} has {len(y)} images; encode at least --limit {N_SOURCE}")

    index, components = reduce(X, y)
    components = components.astype(np.float16)
    codes = y[index]
    target = args.out / "fashion_mnist_features.npz"
    np.savez_compressed(
        target,
        X=components,
        y=codes,
        class_names=np.array(CLASS_NAMES),
        train_index=index.astype(np.uint16),
    )
    size = target.stat().st_size
    print(f"{target}: {components.shape}, {size} bytes")
    if size > LARGEST_FILE:
        raise SystemExit(f"larger than {LARGEST_FILE} bytes: take fewer samples or components")

    accuracies = class_accuracies(components.astype(np.float32), codes)
    for code in accuracies.mean(axis=0).argsort():
        mean, std = accuracies[:, code].mean(), accuracies[:, code].std()
        print(f"{CLASS_NAMES[code]:12s} {mean:.3f} (standard deviation over folds {std:.3f})")


if __name__ == "__main__":
    main()
