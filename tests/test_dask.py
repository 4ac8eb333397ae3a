"""Searches spread over a Dask cluster through joblib, against the same searches in sequence."""

import os

import joblib
import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mr2 import MirrorFlowClassifier, MR2Classifier, PerClassDisparityScorer

distributed = pytest.importorskip("distributed")

SEARCHES = {
    "probe": (
        make_pipeline(StandardScaler(), MR2Classifier()),
        {"mr2classifier__C": [0.01, 0.1], "mr2classifier__margin_statistic": ["dispersion", None]},
    ),
    "network": (
        MR2Classifier("mlp", max_epochs=3, random_state=0),
        {"lr": [1e-3, 1e-2], "module__hidden_layer_sizes": [(8,), (16, 8)]},
    ),
    "mirror flow": (
        MirrorFlowClassifier((8,), batch_size=64, max_epochs=3, random_state=0),
        {"potential": ["euclidean", "hyperbolic_entropy"]},
    ),
}


def search(name):
    X, y = load_digits(return_X_y=True)
    X, y = X[:300] / 16, y[:300]
    estimator, grid = SEARCHES[name]
    weighted = {"mr2classifier__sample_weight": 1.0 + np.arange(300) % 2} if name == "probe" else {}

    def process(estimator, X, y):
        """A score that says where it was computed."""
        return os.getpid()

    scoring = {
        "accuracy": "accuracy",
        "gap": PerClassDisparityScorer(summary="gap"),
        "process": process,
    }
    fitted = GridSearchCV(estimator, grid, scoring=scoring, refit="accuracy", cv=3)
    return fitted.fit(X, y, **weighted), X


def assert_same_search(on_cluster, in_sequence, X):
    compared = [key for key in in_sequence.cv_results_ if key.endswith(("_accuracy", "_gap"))]
    assert len(compared) == 2 * (3 + 3)  # for each score: folds, mean, deviation and rank
    for key in compared:
        assert_allclose(
            on_cluster.cv_results_[key], in_sequence.cv_results_[key], rtol=1e-12, err_msg=key
        )
    assert on_cluster.best_params_ == in_sequence.best_params_
    assert_allclose(on_cluster.predict_proba(X), in_sequence.predict_proba(X), rtol=1e-12)


@pytest.fixture(scope="module")
def threads():
    with distributed.Client(
        processes=False, n_workers=1, threads_per_worker=2, dashboard_address=":0"
    ) as client:
        yield client


@pytest.mark.parametrize("name", SEARCHES)
def test_search_in_threads(threads, name):
    with joblib.parallel_config(backend="dask"):
        on_cluster, X = search(name)
    assert_same_search(on_cluster, search(name)[0], X)


def test_search_in_another_process():
    with (
        distributed.Client(n_workers=1, threads_per_worker=2, dashboard_address=":0"),
        joblib.parallel_config(backend="dask"),
    ):
        on_cluster, X = search("probe")
    in_sequence, _ = search("probe")
    assert_same_search(on_cluster, in_sequence, X)
    assert (in_sequence.cv_results_["mean_test_process"] == os.getpid()).all()
    assert (on_cluster.cv_results_["mean_test_process"] != os.getpid()).all()
