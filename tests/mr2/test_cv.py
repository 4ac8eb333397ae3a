"""The search for C against cold fits, a grid search and LogisticRegressionCV."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import check_scoring, make_scorer
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from sklearn_mr2 import MR2Classifier, MR2ClassifierCV
from sklearn_mr2.metrics import BestWithinTolerance, PerClassDisparityScorer
from sklearn_mr2.mr2.classifier import Path

CS = [1e-4, 1e-3, 1e-2, 1e-1]


@pytest.fixture(scope="module")
def data():
    X, y = load_digits(return_X_y=True)
    return X[:900] / 16, y[:900]


@pytest.fixture(scope="module")
def folds():
    return StratifiedKFold(3, shuffle=True, random_state=0)


@pytest.mark.parametrize("scoring", ["neg_log_loss", None])
def test_scores_are_those_of_a_grid_search(data, folds, scoring):
    template = MR2Classifier(tol=1e-9)
    search = MR2ClassifierCV(template, Cs=CS[::-1], cv=folds, scoring=scoring).fit(*data)
    grid = GridSearchCV(template, {"C": CS}, cv=folds, scoring=scoring).fit(*data)
    np.testing.assert_array_equal(search.Cs_, CS)
    assert grid.best_params_["C"] == search.C_
    assert search.cv_results_["params"] == grid.cv_results_["params"]
    assert search.best_score_ == pytest.approx(grid.best_score_, rel=1e-4)
    for key in [k for k in grid.cv_results_ if "_test_" in k]:
        np.testing.assert_allclose(search.cv_results_[key], grid.cv_results_[key], rtol=1e-4)
    np.testing.assert_allclose(search.coef_, grid.best_estimator_.coef_, atol=1e-6)
    np.testing.assert_array_equal(search.predict(data[0]), grid.predict(data[0]))


@pytest.mark.parametrize("scoring", [None, "neg_log_loss"])
@pytest.mark.parametrize("refit", [True, "any name"])
def test_scored_as_it_was_chosen(data, folds, scoring, refit):
    search = MR2ClassifierCV(Cs=CS[:2], cv=folds, scoring=scoring, refit=refit).fit(*data)
    expected = check_scoring(search.best_estimator_, scoring)(search.best_estimator_, *data)
    assert search.score(*data) == pytest.approx(expected)


def test_starts_ahead_of_the_last_solution_save_iterations(data, monkeypatch):
    X, y = data
    # Too many weights for the Hessian, with which most fits end at once.
    X = np.tanh(X @ np.random.default_rng(0).normal(size=(64, 256)) / 4)

    def search(Cs):
        iterations = []

        def count(model, X, y):
            iterations.append(model.n_iter_)
            return model.score(X, y)

        estimator = MR2Classifier(tol=1e-5)
        found = MR2ClassifierCV(estimator, Cs=Cs, cv=2, scoring=count).fit(X, y)
        return sum(iterations), found.cv_results_["mean_test_score"]

    Cs = np.logspace(0, 3, 7)
    ahead, scores = search(Cs)
    monkeypatch.setattr(Path, "ahead", lambda self, l2: None)
    behind, expected = search(Cs)
    np.testing.assert_allclose(scores, expected, atol=3e-3)
    assert ahead < 0.8 * behind


def test_penalties_that_no_number_tells_apart(folds):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(90, 3)), np.arange(90) % 3
    X[:, 0] += y
    search = MR2ClassifierCV(Cs=[1e305, 1e306, 1e307, 1e308], cv=folds).fit(X, y)
    assert np.ptp(search.cv_results_["mean_test_score"]) == 0


def test_several_scores(data, folds):
    scoring = {"loss": "neg_log_loss", "worst": PerClassDisparityScorer(summary="worst")}
    search = MR2ClassifierCV(Cs=CS[:2], cv=folds, scoring=scoring, refit="worst").fit(*data)
    X, y = data
    weight = np.random.default_rng(0).integers(1, 4, len(y))
    worst = scoring["worst"](search.best_estimator_, X, y, sample_weight=weight)
    assert search.score(X, y, weight) == pytest.approx(worst)
    search.set_params(refit=lambda results: np.argmax(results["mean_test_loss"])).fit(X, y)
    assert search.score(X, y) == pytest.approx(np.mean(search.predict(X) == y))


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [(1.0, TypeError, "must return an integer"), (2, IndexError, "index 2, but there are 2 Cs_")],
)
def test_functions_that_choose_no_index(data, folds, chosen, error, message):
    with pytest.raises(error, match=message):
        MR2ClassifierCV(Cs=CS[:2], cv=folds, refit=lambda results: chosen).fit(*data)


def plain_accuracy(y_true, y_pred):
    return np.mean(y_true == y_pred)


SCORERS_WITHOUT_WEIGHTS = {
    "function": lambda model, X, y: model.score(X, y),
    "made": make_scorer(plain_accuracy),
    "one of several": {"loss": "neg_log_loss", "a": make_scorer(plain_accuracy)},
}


@pytest.mark.parametrize("kind", SCORERS_WITHOUT_WEIGHTS)
def test_a_scorer_without_weights(data, folds, kind):
    scoring = SCORERS_WITHOUT_WEIGHTS[kind]
    search = MR2ClassifierCV(Cs=CS[:2], cv=folds, scoring=scoring, refit="a")
    assert search.fit(*data).best_score_ > 0.5
    for call in (search.score, search.fit):
        with pytest.raises(TypeError, match="does not take sample_weight"):
            call(*data, sample_weight=np.ones(len(data[1])))


@pytest.mark.parametrize("scoring", [None, "accuracy", ["accuracy", "neg_log_loss"]])
def test_scorers_with_weights(data, folds, scoring):
    weight = np.where(data[1] == 8, 0.1, 1.0)
    search = MR2ClassifierCV(Cs=CS[:2], cv=folds, scoring=scoring, refit="accuracy")
    expected = np.average(search.fit(*data, weight).predict(data[0]) == data[1], weights=weight)
    assert search.score(*data, weight) == pytest.approx(expected)


def test_a_function_that_returns_named_scores(data, folds):
    def scorer(model, X, y):
        return {"score": model.score(X, y)}

    search = MR2ClassifierCV(Cs=CS[:2], cv=folds, scoring=scorer).fit(*data)
    assert search.score(*data) == search.best_estimator_.score(*data)


def test_an_unfitted_search_has_no_score(data):
    with pytest.raises(NotFittedError):
        MR2ClassifierCV().score(*data)


def test_test_parts_and_weights_that_count_nothing(data, folds):
    X, y = data
    empty = [(np.arange(len(y)), np.arange(0))]
    with pytest.raises(ValueError, match="test part of fold 0 is empty"):
        MR2ClassifierCV(Cs=CS[:2], cv=empty).fit(X, y)
    with pytest.raises(ValueError, match="must not be negative"):
        MR2ClassifierCV(Cs=CS[:2], cv=folds).fit(X, y, np.where(y == 3, -1, 1))


def test_folds_without_weight(data):
    X, y = data
    splits = [(np.arange(0, 600), np.arange(600, 900)), (np.arange(300, 900), np.arange(300))]
    weight = np.ones(900)
    weight[:300] = 0
    with pytest.raises(ValueError, match="sample_weight is 0 for all samples in the test part"):
        MR2ClassifierCV(Cs=CS[:2], cv=splits).fit(X, y, weight)
    weight = np.where((y == 3) & (np.arange(900) < 600), 0, 1)
    with pytest.raises(ValueError, match=r"fold 0 has no sample of the classes \[3\]"):
        MR2ClassifierCV(Cs=CS[:2], cv=splits).fit(X, y, weight)
    # A class without any weight is none.
    search = MR2ClassifierCV(Cs=CS[:2], cv=splits).fit(X, y, np.where(y == 3, 0, 1))
    assert search.best_score_ > 0.5


@pytest.mark.filterwarnings("ignore::FutureWarning")  # about defaults that differ by version
def test_without_margins_it_is_logistic_regression_cv(data, folds):
    X, y = data
    template = MR2Classifier(margin_statistic=None, tol=1e-10)
    search = MR2ClassifierCV(template, Cs=CS, cv=folds).fit(X, y)
    plain = LogisticRegressionCV(Cs=CS, cv=folds, tol=1e-8, max_iter=5000).fit(X, y)
    assert (search.C_ == plain.C_).all()
    np.testing.assert_allclose(search.predict_proba(X), plain.predict_proba(X), atol=1e-4)


def test_choice_by_disparity(data, folds):
    scoring = {"accuracy": "accuracy", "worst": PerClassDisparityScorer(summary="worst")}
    rule = BestWithinTolerance("mean_test_worst", tolerance=0.01)
    search = MR2ClassifierCV(Cs=CS, cv=folds, scoring=scoring, refit=rule).fit(*data)
    assert search.best_index_ == rule(search.cv_results_)
    assert search.C_ == search.best_estimator_.C == CS[search.best_index_]
    named = MR2ClassifierCV(Cs=CS, cv=folds, scoring=scoring, refit="worst").fit(*data)
    assert named.best_index_ == named.cv_results_["mean_test_worst"].argmax()
    assert named.best_score_ == named.cv_results_["mean_test_worst"].max()
    named.set_params(refit=rule).fit(*data)
    assert not hasattr(named, "best_score_")  # as in GridSearchCV


def test_sample_weights_reach_fits_and_scores(data, folds):
    """A class of next to no weight decides nothing."""
    X, y = data
    weight = np.where(y == 8, 1e-9, 1.0)
    search = MR2ClassifierCV(Cs=CS, cv=folds).fit(X, y, weight)
    model, (train, test) = clone(search.best_estimator_), next(iter(folds.split(X, y)))
    model.fit(X[train], y[train], weight[train])
    expected = np.average(model.predict(X[test]) == y[test], weights=weight[test])
    assert search.cv_results_["split0_test_score"][search.best_index_] == pytest.approx(expected)
    assert expected > model.score(X[test], y[test]) + 0.05


def test_a_search_prints_nothing(data, folds, capfd):
    X, y = data[0][:200], data[1][:200]
    MR2ClassifierCV(Cs=CS[:2], cv=folds).fit(X, y).predict(X)
    assert capfd.readouterr() == ("", "")


def test_networks_start_afresh(data, folds):
    """Training on from the last C would make scores depend on the order."""
    X, y = data[0][:200], data[1][:200]
    template = MR2Classifier(nn.Linear(64, 8), max_epochs=2, random_state=0)
    search = MR2ClassifierCV(template, Cs=[0.1, 10.0], cv=folds, scoring="neg_log_loss").fit(X, y)
    alone = MR2ClassifierCV(template, Cs=[10.0], cv=folds, scoring="neg_log_loss").fit(X, y)
    assert search.cv_results_["mean_test_score"][1] == alone.cv_results_["mean_test_score"][0]


def test_pipeline_frames_and_template(data):
    X, y = pd.DataFrame(data[0]).add_prefix("pixel"), pd.Series(data[1]).map("class {}".format)
    template = MR2Classifier(margin_statistic="dispersion")
    search = MR2ClassifierCV(template, Cs=2, cv=2)
    search.fit(X, y)
    assert list(search.feature_names_in_) == list(X.columns)
    assert search.score(X, y) > 0.9
    assert template.C == 1.0
    assert not hasattr(template, "coef_")
    make_pipeline(StandardScaler(), clone(search)).fit(X, y)


@pytest.mark.parametrize("names", [np.arange(10), np.array([f"digit {k}" for k in range(10)])])
def test_folds_without_a_class(data, names):
    X, y = data[0], names[data[1]]
    once = (data[1] != 7) | (np.arange(900) == np.flatnonzero(data[1] == 7)[0])
    with (
        pytest.warns(UserWarning, match="least populated class"),
        pytest.raises(
            ValueError, match=r"fold \d has no sample of the classes \[.*7'?\].*leave out"
        ),
    ):
        MR2ClassifierCV(cv=3).fit(X[once], y[once])
    by_class = [(np.flatnonzero(data[1] > 2), np.flatnonzero(data[1] <= 2))]
    with pytest.raises(ValueError, match=r"fold 0 has .*0.*1.*2'?\]\, so"):
        MR2ClassifierCV(cv=by_class).fit(X, y)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"Cs": [0.1, -1.0]}, "Cs must be positive"),
        ({"Cs": []}, "Cs must be positive"),
        ({"scoring": ["accuracy", "neg_log_loss"]}, "refit must name"),
        ({"scoring": ["accuracy", "neg_log_loss"], "refit": "worst"}, "refit must name the score"),
        ({"refit": False}, "refit must be True or a function"),
        ({"estimator": MR2Classifier(head="cosine")}, "C does not apply to head='cosine'"),
    ],
)
def test_bad_parameters(data, params, message):
    with pytest.raises(ValueError, match=message):
        MR2ClassifierCV(**{"Cs": [0.1], "cv": 2, **params}).fit(data[0][:100], data[1][:100])
