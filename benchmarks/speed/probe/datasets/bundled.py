"""The embeddings of Fashion-MNIST that come with the package."""

import numpy as np
from benchopt import BaseDataset

from sklearn_mr2.datasets import load_fashion_mnist_features


class Dataset(BaseDataset):
    """6,000 images, 128 principal components of EfficientNet-Lite0 features, 10 classes."""

    name = "Bundled"
    requirements = ["pip::sklearn-mr2"]

    def get_data(self):
        X, y = load_fashion_mnist_features(return_X_y=True)
        codes = np.unique(y, return_inverse=True)[1]
        return {"X": np.ascontiguousarray(X, dtype=np.float32), "y": codes.astype(np.int64)}
