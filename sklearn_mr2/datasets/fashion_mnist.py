"""The bundled default: frozen features of Fashion-MNIST, balanced and yet unequal by class."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import pandas as pd
from sklearn.utils import Bunch


def load_fashion_mnist_features(*, return_X_y: bool = False, as_frame: bool = False) -> Any:
    """Load frozen features of 6,000 Fashion-MNIST images with their ten classes.

    Each image went through EfficientNet-Lite0 with its ImageNet weights; the 1280 pooled features
    were reduced to 128 principal components, fitted on other images. All classes have 600 samples,
    yet a linear classifier finds shirts far harder than trousers, which makes the set a small test
    of class-wise disparity.

    =================   ==============
    Classes                         10
    Samples per class              600
    Samples total                 6000
    Dimensionality                 128
    Features              real, float32
    =================   ==============

    Parameters
    ----------
    return_X_y : bool, default=False
        If True, return ``(data, target)`` instead of a Bunch.
    as_frame : bool, default=False
        If True, data is a DataFrame and target a Series.

    Returns
    -------
    data : :class:`~sklearn.utils.Bunch`
        Dictionary-like object with the attributes

        data : {ndarray, DataFrame} of shape (6000, 128)
            Features, float32.
        target : {ndarray, Series} of shape (6000,)
            Class names, so that per-class results carry them.
        feature_names : list of str
            Names of the features, pca0 to pca127.
        target_names : ndarray of shape (10,)
            Class names in the order of Fashion-MNIST's codes 0 to 9.
        train_index : ndarray of shape (6000,)
            Position of each sample among Fashion-MNIST's 60,000 training images. Its test images
            are not in the set.
        frame : DataFrame of shape (6000, 129)
            Only with ``as_frame=True``: data and target together.
        DESCR : str
            Where the set comes from, how it was made, and its licences.
    (data, target) : tuple if ``return_X_y`` is True
        Features and class names alone.

    References
    ----------
    Xiao, Rasul and Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine
    learning algorithms", arXiv:1708.07747.

    Examples
    --------
    >>> from sklearn_mr2.datasets import load_fashion_mnist_features
    >>> features = load_fashion_mnist_features()
    >>> features.data.shape
    (6000, 128)
    >>> features.target_names.tolist()[:3]
    ['T-shirt/top', 'Trouser', 'Pullover']
    """
    folder = resources.files("sklearn_mr2.datasets") / "data"
    with (
        (folder / "fashion_mnist_features.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        data = archive["X"].astype(np.float32)
        target_names = archive["class_names"]
        target = target_names[archive["y"]]
        train_index = archive["train_index"].astype(np.intp)
    feature_names = [f"pca{component}" for component in range(data.shape[1])]

    frame = None
    if as_frame:
        data = pd.DataFrame(data, columns=feature_names)
        target = pd.Series(target, name="target")
        frame = pd.concat([data, target], axis=1)
    if return_X_y:
        return data, target
    return Bunch(
        data=data,
        target=target,
        frame=frame,
        feature_names=feature_names,
        target_names=target_names,
        train_index=train_index,
        DESCR=(folder / "README.md").read_text(encoding="utf-8"),
    )
