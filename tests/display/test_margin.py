from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import rankdata
from sklearn.datasets import make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mr2 import MR2Classifier
from sklearn_mr2.display import MarginDisplay
from sklearn_mr2.metrics import per_class_report


def make_predictions(n_classes, n_samples=20):
    rng = np.random.default_rng(n_classes)
    error = rng.beta(2, 5, n_classes)
    names = np.array([f"name {label}" for label in range(n_classes)])
    y = np.repeat(np.arange(n_classes), n_samples)
    hit = rng.random(len(y)) > error[y]
    margins = dict(zip(names.tolist(), error + rng.random(n_classes), strict=True))
    return names[y], names[np.where(hit, y, (y + 1) % n_classes)], margins


def test_points_are_margins_and_errors():
    y, y_pred, margins = make_predictions(12)
    display = MarginDisplay.from_predictions(y, y_pred, margins=margins, name="probe")
    x, error = display.points_.get_data()
    classes = sorted(set(y))
    assert_array_equal(x, [margins[label] for label in classes])
    assert_allclose(error, [np.mean(y_pred[y == label] != label) for label in classes])
    report = per_class_report(y, y_pred)
    ends = np.array(display.intervals_.get_segments())[:, :, 1]
    assert_allclose(ends, 1 - report[["recall_high", "recall_low"]])
    ranks = rankdata(x), rankdata(error)
    expected = np.corrcoef(*ranks)[0, 1]
    assert_allclose(display.correlation_, expected)
    (entry,) = (text.get_text() for text in display.ax_.get_legend().get_texts())
    assert entry == f"probe: 12 classes, rank correlation {expected:.2f}"


def test_extreme_classes_are_named():
    y, y_pred, margins = make_predictions(30)
    display = MarginDisplay.from_predictions(y, y_pred, margins=margins, n_named=2)
    error = 1 - per_class_report(y, y_pred)["recall"]
    named = {name.get_text() for name in display.names_}
    by_margin = sorted(margins, key=margins.get)
    assert {*by_margin[:2], *by_margin[-2:]} <= named
    hardest = named - {*by_margin[:2], *by_margin[-2:]}
    assert error.idxmax() in named
    assert len(hardest) <= 2
    assert MarginDisplay.from_predictions(y, y_pred, margins=margins, n_named=0).names_ == []


@pytest.mark.parametrize("n_classes", [2, 10, 50, 1000])
def test_names_can_be_read(n_classes):
    y, y_pred, margins = make_predictions(n_classes)
    display = MarginDisplay.from_predictions(y, y_pred, margins=margins)
    display.figure_.canvas.draw()
    assert len(display.names_) >= min(n_classes, 7)
    boxes = [name.get_window_extent() for name in display.names_]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    inside = display.ax_.get_window_extent().padded(1)
    for box in boxes:
        assert inside.contains(*box.min)
        assert inside.contains(*box.max)
    assert (display.intervals_ is None) == (n_classes > 50)


def test_correlation_of_what_does_not_vary_is_not_defined():
    y, y_pred, margins = make_predictions(5)
    display = MarginDisplay.from_predictions(y, y_pred, margins=dict.fromkeys(margins, 1.0))
    assert np.isnan(display.correlation_)
    (entry,) = (text.get_text() for text in display.ax_.get_legend().get_texts())
    assert entry == "Classifier: 5 classes, rank correlation not defined"
    assert np.isnan(MarginDisplay.from_predictions(y, y, margins=margins).correlation_)


@pytest.mark.parametrize("labels", [["ant", "bee", "cat"], [-4, 0, 9], [r"$\frac$", "_b", "c\nd"]])
def test_from_estimator(labels):
    X, codes = make_blobs(240, centers=3, cluster_std=5.0, random_state=0)
    y = np.array(labels)[codes]
    model = make_pipeline(StandardScaler(), MR2Classifier(C=1.0)).fit(X, y)
    display = MarginDisplay.from_estimator(model, X, y)
    classes = model.classes_.tolist()
    assert display.margins == dict(zip(classes, model[-1].margins_.tolist(), strict=True))
    expected = per_class_report(y, model.predict(X))
    pd.testing.assert_frame_equal(display.report, expected)
    display.figure_.canvas.draw()
    weights = np.random.default_rng(0).random(240)
    display = MarginDisplay.from_estimator(
        model, X, y, labels=classes[:2], sample_weight=weights, n_named=1
    )
    assert len(display.points_.get_xdata()) == 2
    expected = per_class_report(y, model.predict(X), labels=classes[:2], sample_weight=weights)
    pd.testing.assert_frame_equal(display.report, expected)


def test_classes_without_samples_are_not_drawn():
    display = MarginDisplay.from_predictions(
        ["a", "b"], ["a", "c"], margins={"a": 1.0, "b": 2.0, "d": 3.0}
    )
    assert_array_equal(display.points_.get_xdata(), [1.0, 2.0])


def test_given_axes_and_plotting_again():
    y, y_pred, margins = make_predictions(5)
    figure, ax = plt.subplots()
    display = MarginDisplay.from_predictions(y, y_pred, margins=margins, ax=ax)
    assert display.ax_ is ax
    assert display.figure_ is figure
    assert display.plot() is display
    assert display.ax_ is not ax


def test_bad_input():
    y, y_pred, margins = make_predictions(5)
    with pytest.raises(ValueError, match="margins has no entry for the classes 'name 1', 'name 2'"):
        MarginDisplay.from_predictions(y, y_pred, margins={"name 0": 1.0})
    with pytest.raises(ValueError, match="report has no class with samples"):
        MarginDisplay.from_predictions(y, y_pred, margins=margins, labels=["other"])
    with pytest.raises(ValueError, match="n_named must not be negative, got -1"):
        MarginDisplay.from_predictions(y, y_pred, margins=margins, n_named=-1)
    X = [[0.0], [1.0]]
    with pytest.raises(
        TypeError, match=r"a fitted MR2Classifier.*got LogisticRegression inside of P"
    ):
        MarginDisplay.from_estimator(
            make_pipeline(StandardScaler(), LogisticRegression()).fit(X, [0, 1]), X, [0, 1]
        )
    with pytest.raises(NotFittedError):
        MarginDisplay.from_estimator(MR2Classifier(), X, [0, 1])
