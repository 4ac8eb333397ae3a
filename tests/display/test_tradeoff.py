import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mr2.display import DisparityTradeoffDisplay
from sklearn_mr2.metrics import BestWithinTolerance, PerClassDisparityScorer

HARD = PerClassDisparityScorer(summary="hard")


def legend_of(display):
    return [text.get_text() for text in display.ax_.get_legend().get_texts()]


@pytest.fixture(scope="module")
def search():
    X, y = load_iris(return_X_y=True)
    return GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression()),
        {
            "logisticregression__C": [1e-4, 0.01, 1.0],
            "logisticregression__class_weight": [None, {0: 9, 1: 1, 2: 1}],
            "logisticregression__max_iter": [500],
        },
        scoring={"accuracy": "accuracy", "hard": HARD},
        refit=BestWithinTolerance("mean_test_hard", tolerance=0.02),
        cv=3,
    ).fit(X, y)


def test_candidates_choice_and_tolerance_are_drawn(search):
    display = DisparityTradeoffDisplay.from_estimator(search)
    results = search.cv_results_
    (points,) = display.points_.values()
    assert_array_equal(points.get_xdata(), results["mean_test_accuracy"])
    assert_array_equal(points.get_ydata(), results["mean_test_hard"])
    assert display.chosen == search.best_index_
    best = results["mean_test_accuracy"].max()
    x, y = display.chosen_point_.get_data()
    assert x == results["mean_test_accuracy"][search.best_index_]
    assert y == results["mean_test_hard"][search.best_index_]
    band = display.band_.get_window_extent()
    edges = display.ax_.transData.inverted().transform([band.min, band.max])[:, 0]
    assert_allclose(edges, [best - 0.02, best])
    assert display.ax_.get_xlabel() == "Accuracy, mean over folds"
    assert display.ax_.get_ylabel() == "Recall of the hardest third, mean over folds"
    entries = legend_of(display)
    assert entries[0] == "6 candidates"
    # max_iter is the same for all, so it says nothing.
    assert entries[2] == "chosen: C=1.0, class_weight=None"
    assert entries[3] == "within 0.02 of the best"


def test_groups_have_their_own_points(search):
    display = DisparityTradeoffDisplay.from_estimator(search, group_by="logisticregression__C")
    assert list(display.points_) == ["C=0.0001", "C=0.01", "C=1.0"]
    for C, line in zip([1e-4, 0.01, 1.0], display.points_.values(), strict=True):
        members = search.cv_results_["param_logisticregression__C"] == C
        assert_array_equal(line.get_xdata(), search.cv_results_["mean_test_accuracy"][members])
    assert len({line.get_marker() for line in display.points_.values()}) == 3


@given(
    st.lists(
        st.tuples(*[st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.7, np.nan])] * 2),
        min_size=1,
        max_size=12,
    )
)
def test_front_is_what_no_candidate_beats(scores):
    accuracy, disparity = np.transpose(scores)
    known = [k for k, pair in enumerate(scores) if not np.isnan(pair).any()]
    if not known:
        with pytest.raises(ValueError, match="no candidate has a finite accuracy"):
            DisparityTradeoffDisplay(accuracy, disparity)
        return
    expected = {
        k
        for k in known
        if not any(
            accuracy[j] >= accuracy[k]
            and disparity[j] >= disparity[k]
            and (accuracy[j], disparity[j]) != (accuracy[k], disparity[k])
            for j in known
        )
    }
    front = DisparityTradeoffDisplay(accuracy, disparity).front_
    assert set(front) == expected
    assert (np.diff(accuracy[front]) >= 0).all()
    assert (np.diff(disparity[front]) <= 0).all()


def test_failed_candidates_are_not_drawn():
    display = DisparityTradeoffDisplay([0.9, np.nan, 0.8], [0.5, 0.9, np.nan]).plot()
    (points,) = display.points_.values()
    assert_array_equal(points.get_xdata(), [0.9])
    assert legend_of(display)[0] == "1 candidates"
    assert display.chosen_point_ is None
    assert display.band_ is None


def test_front_line_is_a_staircase_under_what_is_not_reached():
    display = DisparityTradeoffDisplay([0.7, 0.9, 0.8, 0.75], [0.6, 0.4, 0.5, 0.3]).plot()
    assert display.front_line_.get_drawstyle() == "steps-pre"
    path = display.front_line_.get_transform().transform_path(display.front_line_.get_path())
    corners = display.ax_.transData.inverted().transform(path.vertices)
    assert {(0.7, 0.6), (0.8, 0.5), (0.9, 0.4)} <= {tuple(c) for c in corners.round(9)}


def test_several_scorers_need_a_choice():
    X, y = load_iris(return_X_y=True)
    scoring = {"accuracy": "accuracy", "gap": PerClassDisparityScorer(), "loss": "neg_log_loss"}
    search = GridSearchCV(
        LogisticRegression(C=0.1), {"max_iter": [500, 600]}, scoring=scoring, refit=False
    )
    search.fit(X, y)
    with pytest.raises(ValueError, match="disparity=None is not in cv_results_, which has mean_te"):
        DisparityTradeoffDisplay.from_estimator(search)
    display = DisparityTradeoffDisplay.from_estimator(search, disparity="mean_test_gap")
    assert display.ax_.get_ylabel() == "Recall: worst class minus best, mean over folds"
    assert display.chosen is None  # refit=False chose none
    display = DisparityTradeoffDisplay.from_estimator(search, disparity="split0_test_loss")
    assert display.ax_.get_ylabel() == "split0_test_loss"


def test_given_axes_and_plotting_again(search):
    _, ax = plt.subplots()
    display = DisparityTradeoffDisplay.from_estimator(search, ax=ax)
    assert display.ax_ is ax
    assert display.plot() is display
    assert display.ax_ is not ax


def test_many_candidates_and_odd_names():
    rng = np.random.default_rng(0)
    display = DisparityTradeoffDisplay(
        *rng.random((2, 1000)),
        chosen=3,
        chosen_name=r"$\frac$" * 30,
        groups=[r"$\frac$", "_b"] * 500,
        accuracy_name="a",
    ).plot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        display.figure_.canvas.draw()
    legend = display.ax_.get_legend().get_window_extent()
    width, height = display.figure_.bbox.max
    assert 0 <= legend.x0 <= legend.x1 <= width
    assert 0 <= legend.y0 <= legend.y1 <= height
    assert legend_of(display)[1].strip() == "_b"


def test_bad_input(search):
    make = DisparityTradeoffDisplay
    with pytest.raises(ValueError, match=r"one score for each candidate, got shapes \(2,\) and"):
        make([0.1, 0.2], [0.1])
    with pytest.raises(ValueError, match="chosen must be from 0 to 1"):
        make([0.1, 0.2], [0.1, 0.3], chosen=2)
    with pytest.raises(ValueError, match="groups has 7 different values, and no more than 6"):
        make(np.ones(7), np.ones(7), groups=range(7))
    with pytest.raises(ValueError, match="groups must have an entry for each of the 2"):
        make([0.1, 0.2], [0.1, 0.3], groups=["a"])
    with pytest.raises(
        TypeError, match=r"a fitted search such as GridSearchCV.*LogisticRegression"
    ):
        make.from_estimator(LogisticRegression().fit([[0.0], [1.0]], [0, 1]))
    with pytest.raises(NotFittedError):
        make.from_estimator(GridSearchCV(LogisticRegression(), {"C": [1]}))
    with pytest.raises(
        ValueError, match="group_by='C' is no parameter of the search, which has lo"
    ):
        make.from_estimator(search, group_by="C")
    with pytest.raises(ValueError, match="accuracy='acc' is not in cv_results_"):
        make.from_estimator(search, accuracy="acc")
