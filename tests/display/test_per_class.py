import subprocess
import sys
import warnings
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.datasets import make_blobs
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mr2.display import PerClassAccuracyDisplay
from sklearn_mr2.metrics import per_class_report


def make_predictions(n_classes, models=("a", "b"), n_samples=20, skill=(6, 1.6)):
    """Labels and each model's predictions, with recalls that differ between classes and models."""
    rng = np.random.default_rng(n_classes)
    y = np.repeat(np.arange(n_classes), n_samples)
    base = rng.beta(*skill, n_classes)
    names = np.array([f"name {label}" for label in range(n_classes)])
    predictions = {}
    for model in models:
        hit = rng.random(len(y)) < base[y]
        predictions[model] = names[np.where(hit, y, (y + 1) % n_classes)]
    return names[y], predictions


def recalls_of(y_true, y_pred):
    return pd.Series({label: np.mean(y_pred[y_true == label] == label) for label in set(y_true)})


def legend_of(display):
    return [text.get_text() for text in display.ax_.get_legend().get_texts()]


def test_dots_show_recalls_and_intervals_hardest_on_top():
    y, predictions = make_predictions(12)
    display = PerClassAccuracyDisplay.from_predictions(y, predictions)
    recalls = {name: recalls_of(y, y_pred) for name, y_pred in predictions.items()}
    mean = (recalls["a"] + recalls["b"]) / 2
    assert_array_equal(mean[display.order_], sorted(mean))
    assert list(display.artists_) == ["a", "b"]
    for name, artist in display.artists_.items():
        assert isinstance(artist, ErrorbarContainer)
        x, rows = artist.lines[0].get_data()
        assert_array_equal(x, recalls[name][display.order_])
        assert_array_equal(np.round(rows), np.arange(12))
        report = per_class_report(y, predictions[name]).loc[display.order_]
        (whiskers,) = artist.lines[2]
        ends = np.array(whiskers.get_segments())[:, :, 0]
        assert_allclose(ends, report[["recall_low", "recall_high"]], rtol=1e-12)
    labels = [label.get_text() for label in display.ax_.get_yticklabels()]
    assert labels == list(display.order_)
    bottom, top = display.ax_.get_ylim()
    assert top < 0 < 11 < bottom
    assert display.text_ is None
    assert display.ax_.get_xlabel() == "Recall of the class, with 95% interval"


def test_legend_sums_up_each_model():
    y, predictions = make_predictions(12)
    display = PerClassAccuracyDisplay.from_predictions(y, predictions)
    expected = []
    for name, y_pred in predictions.items():
        recall = recalls_of(y, y_pred)
        hard = recall[display.order_[:4]].mean()  # a third of 12
        expected.append(f"{name}: mean {recall.mean():.3f}, hardest third {hard:.3f}")
    assert legend_of(display) == expected


def test_shade_covers_the_hardest_third():
    y, predictions = make_predictions(10)
    display = PerClassAccuracyDisplay.from_predictions(y, predictions)
    (shade,) = display.ax_.patches
    rows = display.ax_.transData.inverted().transform(shade.get_extents())[:, 1]
    assert_allclose(sorted(rows), [-0.5, 2.5])
    (note,) = (text for text in display.ax_.texts if text.get_text() == "hardest third")
    assert note.xy == (1, 1)


def test_given_difficulty_is_marked_and_summed_up():
    y, predictions = make_predictions(10)
    hard = {"name 1", "name 2", "name 7"}
    given = {label: "hard" if label in hard else "easy" for label in set(y)}
    display = PerClassAccuracyDisplay.from_predictions(y, predictions, difficulty=given)
    expected = []
    for name, y_pred in predictions.items():
        recall = recalls_of(y, y_pred)
        expected.append(
            f"{name}: mean {recall.mean():.3f}, hard classes {recall[list(hard)].mean():.3f}"
        )
    assert legend_of(display) == [*expected, "hard classes, as given"]
    shaded = set()
    for patch in display.ax_.patches:
        to_rows = display.ax_.transData.inverted().transform
        rows = sorted(to_rows(patch.get_window_extent())[:, 1])
        shaded.update(display.order_[round(rows[0] + 0.5) : round(rows[1] + 0.5)])
    assert shaded == hard
    assert "hardest third" not in [text.get_text() for text in display.ax_.texts]
    curves = display.plot(kind="curve")
    assert legend_of(curves) == expected
    with pytest.raises(ValueError, match="difficulty has no entry for the classes"):
        PerClassAccuracyDisplay.from_predictions(y, predictions, difficulty={"name 1": "hard"})
    with pytest.raises(ValueError, match='difficulty has no "hard" class'):
        PerClassAccuracyDisplay.from_predictions(
            y, predictions, difficulty=dict.fromkeys(given, "easy")
        )


def test_difficulty_reaches_estimators_and_reports():
    X, y = make_blobs(60, centers=3, random_state=0)
    model = LogisticRegression().fit(X, y)
    given = pd.Series({0: "easy", 1: "hard", 2: "medium"})
    display = PerClassAccuracyDisplay.from_estimator(model, X, y, difficulty=given)
    recall = recalls_of(y, model.predict(X))
    assert legend_of(display)[0].endswith(f"hard classes {recall[1]:.3f}")


@pytest.mark.parametrize("kind", ["dots", "curve"])
def test_names_are_written_as_they_are(kind):
    names = [r"$\frac$", "a\n  b", "_c", "50 % of $x_1$", "苹果"]
    models = {r"$\frac$": names, "_hidden": names}
    display = PerClassAccuracyDisplay.from_predictions(names, models, kind=kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        display.figure_.canvas.draw()  # fails where a name is read as mathematics
    entries = legend_of(display)
    assert entries[0].startswith(r"$\frac$: mean 1.000")
    assert entries[1].strip().startswith("_hidden: mean 1.000")
    if kind == "dots":
        shown = {label.get_text() for label in display.ax_.get_yticklabels()}
        assert shown == {r"$\frac$", "a b", "_c", "50 % of $x_1$", "苹果"}
    else:
        assert len(display.text_.get_text().splitlines()) == 6


def test_ties_keep_the_order_of_labels():
    y = ["b", "a", "c"]
    assert PerClassAccuracyDisplay.from_predictions(y, y).order_.tolist() == ["a", "b", "c"]
    display = PerClassAccuracyDisplay.from_predictions(y, y, labels=["c", "a", "b"])
    assert display.order_.tolist() == ["c", "a", "b"]


def test_sort_by_one_model():
    y, predictions = make_predictions(12)
    for name, y_pred in predictions.items():
        display = PerClassAccuracyDisplay.from_predictions(y, predictions, sort_by=name)
        recall = recalls_of(y, y_pred)
        assert_array_equal(recall[display.order_], sorted(recall))
    assert legend_of(display)[1].endswith(f"third {np.sort(recall)[:4].mean():.3f}")


def test_models_of_a_class_are_closer_than_classes():
    for models in (["a"], list("abc"), list("abcdefg")):
        y, predictions = make_predictions(9, models)
        display = PerClassAccuracyDisplay.from_predictions(y, predictions)
        rows = np.array([artist.lines[0].get_ydata() for artist in display.artists_.values()])
        assert_allclose(rows.mean(axis=0), np.arange(9), atol=1e-12)
        within = np.diff(rows, axis=0)
        between = rows[0, 1] - rows[-1, 0]
        assert (within > 0).all()
        assert (within < between).all()


def test_models_differ_in_marker_colour_and_lightness():
    y, predictions = make_predictions(6, list("abcdef"))
    display = PerClassAccuracyDisplay.from_predictions(y, predictions)
    lines = [artist.lines[0] for artist in display.artists_.values()]
    assert len({line.get_marker() for line in lines}) == 6
    assert len({line.get_color() for line in lines}) == 6
    grey = [np.dot(to_rgb(line.get_color()), [0.299, 0.587, 0.114]) for line in lines]
    assert np.abs(np.diff(grey)).min() > 0.1
    display.plot(kind="curve")
    assert len({line.get_color() for line in display.artists_.values()}) == 6
    assert len({str(line._dash_pattern) for line in display.artists_.values()}) == 6


@pytest.mark.parametrize(("n_classes", "kind"), [(50, ErrorbarContainer), (51, Line2D)])
def test_many_classes_become_curves(n_classes, kind):
    y, predictions = make_predictions(n_classes)
    display = PerClassAccuracyDisplay.from_predictions(y, predictions)
    assert all(isinstance(artist, kind) for artist in display.artists_.values())


def test_curves_are_each_models_sorted_recalls():
    y, predictions = make_predictions(90)
    display = PerClassAccuracyDisplay.from_predictions(y, predictions)
    for name, curve in display.artists_.items():
        report = per_class_report(y, predictions[name]).sort_values("recall", kind="stable")
        assert_array_equal(curve.get_xdata(), np.arange(1, 91))
        assert_array_equal(curve.get_ydata(), report["recall"])
        band = display.ax_.collections[list(display.artists_).index(name)]
        corners = {tuple(point) for point in band.get_paths()[0].vertices.round(9)}
        for rank, low, high in zip(
            range(1, 91), report["recall_low"], report["recall_high"], strict=True
        ):
            assert (rank, round(low, 9)) in corners
            assert (rank, round(high, 9)) in corners
    recall = [np.sort(recalls_of(y, y_pred)) for y_pred in predictions.values()]
    assert legend_of(display) == [
        f"a: mean {recall[0].mean():.3f}, hardest third {recall[0][:30].mean():.3f}",
        f"b: mean {recall[1].mean():.3f}, hardest third {recall[1][:30].mean():.3f}",
        "hardest third of each model",
    ]


def test_table_names_the_hardest_classes():
    y, predictions = make_predictions(90)
    display = PerClassAccuracyDisplay.from_predictions(y, predictions, n_named=3)
    header, *rows = display.text_.get_text().splitlines()
    assert header.split() == ["Hardest", "classes", "a", "b"]
    assert len(rows) == 3
    recalls = [recalls_of(y, y_pred) for y_pred in predictions.values()]
    for label, row in zip(display.order_, rows, strict=False):
        assert row.startswith(label)
        assert row.split()[-2:] == [f"{recall[label]:.2f}" for recall in recalls]
    assert len({len(line) for line in (header, *rows)}) == 1
    assert PerClassAccuracyDisplay.from_predictions(y, predictions, n_named=0).text_ is None


@pytest.mark.parametrize("skill", [(6, 1.6), (1.2, 6)], ids=["high", "low"])
def test_table_leaves_the_curves_free(skill):
    y, predictions = make_predictions(1000, skill=skill)
    display = PerClassAccuracyDisplay.from_predictions(y, predictions)
    display.figure_.canvas.draw()
    box = display.text_.get_bbox_patch().get_window_extent()
    for curve in display.artists_.values():
        points = display.ax_.transData.transform(np.column_stack(curve.get_data()))
        assert not any(box.contains(*point) for point in points)


@pytest.mark.parametrize("n_classes", [2, 10, 38, 50])
@pytest.mark.parametrize("own_axes", [False, True])
def test_names_can_be_read(n_classes, own_axes):
    y, predictions = make_predictions(n_classes)
    ax = plt.subplots(figsize=(6.4, 6.4))[1] if own_axes else None
    display = PerClassAccuracyDisplay.from_predictions(y, predictions, ax=ax)
    display.figure_.canvas.draw()
    boxes = [label.get_window_extent() for label in display.ax_.get_yticklabels()]
    assert all(upper.y0 >= lower.y1 - 0.5 for upper, lower in pairwise(boxes))
    assert min(label.get_fontsize() for label in display.ax_.get_yticklabels()) >= 5
    if not own_axes:
        width, height = display.figure_.bbox.max
        legend = display.ax_.get_legend().get_window_extent()
        for box in (*boxes, legend):
            assert 0 <= box.x0 <= box.x1 <= width
            assert 0 <= box.y0 <= box.y1 <= height


def test_long_names_are_shortened():
    long = "a name of a class that does not end so soon"
    display = PerClassAccuracyDisplay.from_predictions([long, "b"], [long, "b"])
    shown = [label.get_text() for label in display.ax_.get_yticklabels()]
    assert shown == ["a name of a class that does…", "b"]
    display = display.plot(kind="curve")
    assert "a name of a class that does…  " in display.text_.get_text()


@pytest.mark.parametrize("as_type", [list, np.array, lambda y: pd.Series(y, dtype="category")])
@pytest.mark.parametrize("labels", [["ant", "bee", "cat"], [-4, 0, 9], [False, True]])
def test_kinds_of_labels(as_type, labels):
    y = labels * 4
    display = PerClassAccuracyDisplay.from_predictions(as_type(y), y)
    shown = [label.get_text() for label in display.ax_.get_yticklabels()]
    assert shown == [str(label) for label in labels]
    assert legend_of(display) == ["Classifier: mean 1.000, hardest third 1.000"]
    display.plot(kind="curve", n_named=2)
    assert [row.split()[0] for row in display.text_.get_text().splitlines()[1:]] == shown[:2]


def test_classes_without_samples_are_not_drawn():
    # The models name different classes that have no samples.
    y, predictions = ["a", "b", "b"], {"one": ["a", "c", "b"], "two": ["d", "b", "b"]}
    display = PerClassAccuracyDisplay.from_predictions(y, predictions, labels=list("abce"))
    assert display.order_.tolist() == ["a", "b"]
    display = PerClassAccuracyDisplay.from_predictions(y, predictions)
    assert display.order_.tolist() == ["a", "b"]
    assert_array_equal(display.artists_["one"].lines[0].get_xdata(), [1, 0.5])


def test_labels_and_weights_reach_the_report():
    y, y_pred, weights = [0, 0, 1, 1, 2], [0, 1, 1, 0, 2], [3, 1, 1, 4, 1]
    display = PerClassAccuracyDisplay.from_predictions(
        y, y_pred, labels=[0, 1], sample_weight=weights
    )
    expected = per_class_report(y, y_pred, labels=[0, 1], sample_weight=weights)
    pd.testing.assert_frame_equal(display.reports["Classifier"], expected)
    assert display.order_.tolist() == [1, 0]
    assert_array_equal(display.artists_["Classifier"].lines[0].get_xdata(), [0.2, 0.75])


def test_from_estimator():
    X, y = make_blobs(200, centers=4, cluster_std=4.0, random_state=0)
    weights = np.random.default_rng(0).uniform(size=200)
    models = {
        "weak": LogisticRegression(C=1e-4).fit(X, y),
        "scaled": make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y),
    }
    display = PerClassAccuracyDisplay.from_estimator(models, X, y, sample_weight=weights)
    assert list(display.reports) == ["weak", "scaled"]
    for name, model in models.items():
        expected = per_class_report(y, model.predict(X), sample_weight=weights)
        pd.testing.assert_frame_equal(display.reports[name], expected)
    display = PerClassAccuracyDisplay.from_estimator(
        models["weak"], X, y, labels=[3, 0], kind="curve", n_named=1
    )
    assert list(display.reports) == ["LogisticRegression"]
    assert sorted(display.order_) == [0, 3]
    assert len(display.text_.get_text().splitlines()) == 2
    display = PerClassAccuracyDisplay.from_estimator(models, X, y, sort_by="weak")
    assert_array_equal(
        display.reports["weak"].loc[display.order_, "recall"],
        sorted(display.reports["weak"]["recall"]),
    )


def test_given_axes_are_used():
    y, predictions = make_predictions(5)
    figure, ax = plt.subplots()
    display = PerClassAccuracyDisplay.from_predictions(y, predictions, ax=ax)
    assert display.ax_ is ax
    assert display.figure_ is figure
    again = display.plot()
    assert again is display
    assert display.ax_ is not ax


def test_bad_input():
    y, predictions = make_predictions(5)
    make = PerClassAccuracyDisplay.from_predictions
    with pytest.raises(ValueError, match="kind must be one of 'auto', 'dots', 'curve', got 'bar'"):
        make(y, predictions, kind="bar")
    with pytest.raises(ValueError, match="sort_by must be None or one of 'a', 'b', got 'c'"):
        make(y, predictions, sort_by="c")
    with pytest.raises(ValueError, match="n_named must not be negative, got -1"):
        make(y, predictions, n_named=-1)
    with pytest.raises(ValueError, match="y_true has 100 samples but y_pred has 99"):
        make(y, predictions["a"][:-1])
    with pytest.raises(ValueError, match="reports is empty"):
        make(y, {})
    with pytest.raises(ValueError, match="reports has no class with samples"):
        make(y, predictions, labels=["other"])
    with pytest.raises(TypeError, match="got StandardScaler for 'StandardScaler', which has no pr"):
        PerClassAccuracyDisplay.from_estimator(StandardScaler(), [[0.0]], [0])
    reports = {"a": per_class_report(y, y), "b": per_class_report(["z"], ["z"])}
    with pytest.raises(ValueError, match="reports differ in their classes"):
        PerClassAccuracyDisplay(reports)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"from_estimator needs .*'sklearn-mr2\[plot\]'"):
        PerClassAccuracyDisplay.from_estimator(None, [[0.0]], [0])
    with pytest.raises(ImportError, match=r"PerClassAccuracyDisplay.plot needs matplotlib"):
        PerClassAccuracyDisplay.from_predictions([0, 1], [0, 1])


def test_import_leaves_matplotlib_alone():
    code = "import sys, sklearn_mr2.display; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
