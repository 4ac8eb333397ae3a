"""Displays of networks: pruning curve, neuron spectrum, trajectory of mirror flow."""

import ast
import copy
import sys
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import sklearn_mr2.display
from sklearn_mr2 import MirrorFlowClassifier
from sklearn_mr2.display import (
    MirrorTrajectoryDisplay,
    NeuronSpectrumDisplay,
    PruningCurveDisplay,
)

X, y = load_iris(return_X_y=True)
X, y = X[:100], y[:100]


@pytest.fixture(scope="module")
def models():
    make = {"hidden_layer_sizes": (12,), "target_margin": 8, "random_state": 0}
    return {
        "sparse": MirrorFlowClassifier(**make).fit(X, y),
        "euclidean": make_pipeline(
            StandardScaler(), MirrorFlowClassifier(potential="euclidean", **make)
        ).fit(X, y),
    }


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


# ---------------------------------------------------------------- pruning


def test_pruning_curve_removes_the_smallest_neurons(models):
    before = copy.deepcopy(models["sparse"].coefs_)
    amounts = [0.75, 0, 0.25, 1]
    display = PruningCurveDisplay.from_estimator(
        models, X, y, amounts=iter(amounts), scoring="balanced_accuracy"
    )
    kept, score = display.lines_["sparse"].get_data()
    assert_allclose(kept, [0, 0.25, 0.75, 1])
    model = models["sparse"]
    w_in, w_out = model.coefs_
    bias = model.intercepts_[0]
    c = np.sqrt((w_in**2).sum(axis=0) + bias**2) * np.linalg.norm(w_out, axis=1)
    for share, value in zip(kept, score, strict=True):
        order = np.argsort(c)[::-1][: round(share * len(c))]
        logit = np.maximum(X @ w_in[:, order] + bias[order], 0) @ w_out[order]
        predicted = logit.argmax(axis=1) if logit.shape[1] > 1 else (logit[:, 0] > 0).astype(int)
        assert_allclose(value, balanced_accuracy_score(y, predicted))
    for kept_weights, old in zip(model.coefs_, before, strict=True):
        assert_array_equal(kept_weights, old)
    assert display.ax_.get_ylabel() == "balanced_accuracy"
    assert display.ax_.get_xlabel() == "Share of hidden neurons kept"
    assert legend_of(display.ax_) == ["sparse", "euclidean"]


def test_pruning_curve_of_weights_and_one_model(models):
    display = PruningCurveDisplay.from_estimator(models["sparse"], X, y, by="magnitude")
    assert list(display.lines_) == ["MirrorFlowClassifier"]
    assert_allclose(display.lines_["MirrorFlowClassifier"].get_xdata(), np.linspace(0, 1, 21))
    assert display.ax_.get_xlabel() == "Share of weights kept"
    assert display.ax_.get_ylabel() == "Accuracy"


def test_pruning_curve_bad_input(models):
    curve = pd.DataFrame({"amount": [0.0], "score": [1.0]})
    with pytest.raises(ValueError, match="curves is empty"):
        PruningCurveDisplay({})
    with pytest.raises(ValueError, match="curves has no amounts for 'a'"):
        PruningCurveDisplay({"a": curve[:0]})
    with pytest.raises(ValueError, match="by must be one of 'magnitude', 'neuron', got 'layer'"):
        PruningCurveDisplay({"a": curve}, by="layer")
    with pytest.raises(ValueError, match="amounts must be numbers from 0 to 1, got 2"):
        PruningCurveDisplay.from_estimator(models, X, y, amounts=[2])
    with pytest.raises(ValueError, match="estimator is an empty mapping"):
        PruningCurveDisplay.from_estimator({}, X, y)
    with pytest.raises(TypeError, match="holds no torch network"):
        PruningCurveDisplay.from_estimator(LogisticRegression().fit(X, y), X, y)


# ---------------------------------------------------------------- spectrum


def test_spectrum_is_sorted_and_relative(models):
    display = NeuronSpectrumDisplay.from_estimator(models, threshold=0.1)
    for name, model in models.items():
        part = model if name == "sparse" else model[-1]
        (w_in, w_out), (bias, _) = part.coefs_, part.intercepts_
        c = [
            np.sqrt(sum(w_in[:, j] ** 2) + bias[j] ** 2) * np.sqrt(sum(w_out[j] ** 2))
            for j in range(12)
        ]
        rank, values = display.lines_[name].get_data()
        assert_array_equal(rank, np.arange(1, 13))
        assert_allclose(values, np.array(sorted(c, reverse=True)) / max(c), rtol=1e-6)
        assert f"{name}: {(values > 0.1).sum()} of 12 active" in legend_of(display.ax_)
    assert display.ax_.get_yscale() == "log"
    assert_array_equal(display.threshold_line_.get_ydata(), [0.1, 0.1])
    assert NeuronSpectrumDisplay({"a": [1, 2]}, threshold=0).plot().threshold_line_ is None


def test_spectrum_of_any_layer_and_of_scikit_learns_networks():
    model = MLPClassifier((5, 7), max_iter=3, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, y)
    assert len(NeuronSpectrumDisplay.from_estimator(model).weights["MLPClassifier"]) == 5
    last = NeuronSpectrumDisplay.from_estimator(model, layer=-1).weights["MLPClassifier"]
    second = NeuronSpectrumDisplay.from_estimator(model, layer=1).weights["MLPClassifier"]
    assert len(second) == 7
    assert_array_equal(last, second)
    for layer in (2, -3):
        with pytest.raises(ValueError, match=f"hidden layer, got {layer}, and MLPClassifier has 2"):
            NeuronSpectrumDisplay.from_estimator(model, layer=layer)
    with pytest.raises(TypeError, match="layer must be an integer, got float"):
        NeuronSpectrumDisplay.from_estimator(model, layer=1.0)


def test_weights_of_zero_leave_the_axes_below():
    display = NeuronSpectrumDisplay({"a": [1.0, 0.0, 1e-3], "b": [1e-30, 1.0]}).plot()
    display.figure_.canvas.draw()
    bottom, top = display.ax_.get_ylim()
    assert bottom == 1e-8
    assert top > 1
    assert_array_equal(display.lines_["a"].get_ydata(), [1.0, 1e-3, 0.0])


def test_spectrum_bad_input():
    make = NeuronSpectrumDisplay
    with pytest.raises(ValueError, match="weights is empty"):
        make({})
    for bad in ([[1.0]], [np.nan, 1], [-1, 1]):
        with pytest.raises(ValueError, match="weights of 'a' must be one finite number"):
            make({"a": bad})
    with pytest.raises(ValueError, match="weights of 'a' are all zero"):
        make({"a": [0, 0]})
    with pytest.raises(ValueError, match="threshold must be from 0 to less than 1, got 1"):
        make({"a": [1]}, threshold=1)
    with pytest.raises(TypeError, match=r"a fitted multi-layer perceptron.*got LogisticRegression"):
        make.from_estimator(LogisticRegression().fit(X, y))
    with pytest.raises(NotFittedError):
        make.from_estimator(MirrorFlowClassifier())


# ---------------------------------------------------------------- trajectory


def test_trajectory_follows_the_history(models):
    display = MirrorTrajectoryDisplay.from_estimator(models)
    assert len(display.axes_) == 3
    for name, model in models.items():
        history = (model if name == "sparse" else model[-1]).history_
        lines = display.lines_[name]
        assert_array_equal(lines["log_loss"].get_xdata(), history["log_time"])
        assert_array_equal(lines["log_loss"].get_ydata(), history["log_loss"])
        recorded = history[history["sparsity"].notna()]
        assert_array_equal(lines["sparsity"].get_xdata(), recorded["log_time"])
        assert_array_equal(lines["sparsity"].get_ydata(), recorded["sparsity"])
        separated = recorded[recorded["q_margin"] > 0]
        last = recorded["q_margin"].iloc[-1]
        assert_array_equal(lines["q_margin"].get_xdata(), separated["log_time"])
        assert_allclose(lines["q_margin"].get_ydata(), separated["q_margin"] / last)
        assert f"{name}: last Q-margin {last:.3g}" in legend_of(display.axes_[0])
    labels = [ax.get_ylabel().split("\n")[0] for ax in display.axes_]
    assert labels == ["ln of the", "Q-margin", "Sparsity"]
    assert display.axes_[2].get_xlabel() == "ln t, the logarithm of the flow's time"


def history(**columns):
    rows = {"log_time": [0.0, 1.0, 2.0], "log_loss": [2.0, 1.0, 0.0]}
    return pd.DataFrame(rows | columns)


def test_panels_without_values_are_left_out():
    plain = MirrorTrajectoryDisplay({"a": history()}).plot()
    assert len(plain.axes_) == 1
    assert legend_of(plain.axes_[0]) == ["a"]
    # Never separated: the last margin is negative.
    display = MirrorTrajectoryDisplay(
        {"a": history(q_margin=[-3.0, -2.0, -1.0], sparsity=[np.nan, 0.5, 0.6]), "b": history()}
    ).plot()
    assert list(display.lines_["a"]) == ["log_loss", "sparsity"]
    assert list(display.lines_["b"]) == ["log_loss"]


def test_trajectory_on_given_axes(models):
    figure, grid = plt.subplots(2, 3)
    display = MirrorTrajectoryDisplay.from_estimator(models, ax=grid[:, 0].tolist() + [grid[0, 1]])
    assert list(display.axes_) == [grid[0, 0], grid[1, 0], grid[0, 1]]
    assert display.figure_ is figure
    spot = grid[1, 2]
    figure.canvas.draw()
    place = spot.get_position()
    display.plot(ax=spot)
    figure.canvas.draw()
    assert not spot.axison
    for ax in display.axes_:
        box = ax.get_position()
        assert place.x0 - 1e-9 <= box.x0 < box.x1 <= place.x1 + 1e-9
        assert place.y0 - 1e-9 <= box.y0 < box.y1 <= place.y1 + 1e-9
    with pytest.raises(ValueError, match="ax must be a single axes, or 3, one for each panel; got"):
        display.plot(ax=grid.ravel())
    free = plt.figure().add_axes((0, 0, 1, 1))
    with pytest.raises(ValueError, match="ax must be one of a grid of subplots"):
        display.plot(ax=free)


def test_trajectory_bad_input():
    with pytest.raises(ValueError, match="histories is empty"):
        MirrorTrajectoryDisplay({})
    with pytest.raises(ValueError, match="'a' has no log_time and no log_loss: mini-batches"):
        MirrorTrajectoryDisplay({"a": pd.DataFrame({"train_loss": [1.0]})})
    with pytest.raises(ValueError, match="histories have no finite values"):
        MirrorTrajectoryDisplay({"a": history(log_loss=[np.nan] * 3)})
    with pytest.raises(TypeError, match=r"a fitted MirrorFlowClassifier.*got LogisticRegression"):
        MirrorTrajectoryDisplay.from_estimator(LogisticRegression().fit(X, y))
    batches = MirrorFlowClassifier((4,), batch_size=50, max_epochs=2, random_state=0).fit(X, y)
    with pytest.raises(ValueError, match=r"'MirrorFlowClassifier' has no .*without batch_size"):
        MirrorTrajectoryDisplay.from_estimator(batches)


# ---------------------------------------------------------------- all


def six_models():
    rng = np.random.default_rng(0)
    long = "a name of a model that does not end so soon, if it ends at all"
    names = ["a", r"$\frac$", "_c", long, "e", "f"]
    return {name: rng.random(1000) for name in names}


@pytest.mark.parametrize("which", ["pruning", "spectrum", "trajectory"])
def test_models_can_be_told_apart_and_the_legend_is_whole(which):
    models = six_models()
    if which == "pruning":
        amount = np.linspace(0, 1, 1000)
        curves = {k: pd.DataFrame({"amount": amount, "score": v}) for k, v in models.items()}
        display = PruningCurveDisplay(curves).plot()
    elif which == "spectrum":
        display = NeuronSpectrumDisplay(models).plot()
    else:
        time = np.linspace(0, 50, 1000)
        histories = {
            k: pd.DataFrame({"log_time": time, "log_loss": -v, "q_margin": v, "sparsity": v})
            for k, v in models.items()
        }
        display = MirrorTrajectoryDisplay(histories).plot()
    figure = display.figure_
    figure.canvas.draw()
    if which == "trajectory":
        legend = display.axes_[0].get_legend()
        lines = [line["sparsity"] for line in display.lines_.values()]
    else:
        legend = display.ax_.get_legend()
        lines = list(display.lines_.values())
    box, (width, height) = legend.get_window_extent(), figure.bbox.max
    assert 0 <= box.x0 <= box.x1 <= width
    assert 0 <= box.y0 <= box.y1 <= height
    assert len(legend.get_texts()) >= 6
    for aspect in ("get_marker", "get_color", "_dash_pattern"):
        values = [getattr(line, aspect) for line in lines]
        assert len({str(v() if callable(v) else v) for v in values}) == 6


@pytest.mark.parametrize("name", sklearn_mr2.display.__all__)
def test_without_matplotlib_the_error_names_the_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    display = object.__new__(getattr(sklearn_mr2.display, name))
    with pytest.raises(ImportError, match=rf"{name}.plot needs .*'sklearn-mr2\[plot\]'"):
        display.plot()


def test_displays_do_not_import_the_estimators_modules():
    for path in Path(sklearn_mr2.display.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not {"mr2", "mirror"} & set((node.module or "").split(".")), path
