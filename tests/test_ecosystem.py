"""The classifier inside scikit-learn's own estimators.

Without margins a linear probe is LogisticRegression, which makes every meta-estimator around it an
oracle: it must come to the same result with either inside.
"""

import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    StackingClassifier,
    VotingClassifier,
)
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.feature_selection import SelectFromModel
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import recall_score
from sklearn.model_selection import (
    GridSearchCV,
    HalvingGridSearchCV,
    StratifiedKFold,
    cross_val_predict,
    cross_val_score,
    cross_validate,
)
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from sklearn_mr2 import MR2Classifier
from sklearn_mr2.metrics import PerClassDisparityScorer

X, CODES = load_iris(return_X_y=True)
X += np.random.default_rng(0).normal(0, 0.3, X.shape)  # overlapping classes
Y = np.array(["setosa", "versicolor", "virginica"])[CODES]
WEIGHT = np.random.default_rng(1).integers(1, 9, len(Y)).astype(float)

PROBE = MR2Classifier(margin_statistic=None, tol=1e-12)
LOGISTIC = LogisticRegression(tol=1e-10, max_iter=10_000)
DEFAULT = MR2Classifier(random_state=0)
NETWORK = MR2Classifier(
    "mlp", module__hidden_layer_sizes=(8,), max_epochs=12, lr=0.05, batch_size=40, random_state=1
)
KINDS = {"probe": DEFAULT, "network": NETWORK}

META = {
    "pipeline": lambda base: make_pipeline(StandardScaler(), base),
    "calibrated": lambda base: CalibratedClassifierCV(base, cv=3),
    "calibrated without ensemble": lambda base: CalibratedClassifierCV(base, ensemble=False, cv=3),
    "calibrated, isotonic": lambda base: CalibratedClassifierCV(base, method="isotonic", cv=3),
    "stacking": lambda base: StackingClassifier(
        [("base", base), ("bayes", GaussianNB())], final_estimator=clone(base), cv=3
    ),
    "stacking decisions": lambda base: StackingClassifier(
        [("base", base)], GaussianNB(), stack_method="decision_function", passthrough=True, cv=3
    ),
    "soft voting": lambda base: VotingClassifier(
        [("base", base), ("bayes", GaussianNB())], voting="soft"
    ),
    "hard voting": lambda base: VotingClassifier(
        [("base", base), ("bayes", GaussianNB()), ("other", clone(base).set_params(C=1e-3))]
    ),
    "bagging": lambda base: BaggingClassifier(base, 4, max_features=0.8, random_state=0),
    "one against the rest": OneVsRestClassifier,
    "one against one": OneVsOneClassifier,
    "boosting": lambda base: AdaBoostClassifier(base, n_estimators=5, random_state=0),
    "frozen": lambda base: FrozenEstimator(clone(base).fit(X[::2], Y[::2])),
    "calibrated, frozen": lambda base: CalibratedClassifierCV(
        FrozenEstimator(clone(base).fit(X[::2], Y[::2])), cv=3
    ),
    "selection": lambda base: make_pipeline(SelectFromModel(base, max_features=2), GaussianNB()),
    "grid search": lambda base: GridSearchCV(base, {"C": [0.01, 0.1, 1.0, 10.0]}, cv=3),
    "halving": lambda base: HalvingGridSearchCV(
        base, {"C": [0.01, 1.0]}, cv=3, factor=2, min_resources=70, random_state=0
    ),
}
every_meta = pytest.mark.parametrize("build", META.values(), ids=META)


@every_meta
def test_results_are_those_of_logistic_regression(build):
    model, oracle = (build(clone(base)).fit(X, Y) for base in (PROBE, LOGISTIC))
    assert_array_equal(model.classes_, oracle.classes_)
    assert_array_equal(model.predict(X), oracle.predict(X))
    assert model.score(X, Y) > 0.8
    for use in ("predict_proba", "decision_function"):
        assert hasattr(model, use) == hasattr(oracle, use)
        if hasattr(model, use):
            assert_allclose(getattr(model, use)(X), getattr(oracle, use)(X), atol=1e-4)


WEIGHTED = [
    "calibrated", "stacking", "soft voting", "bagging", "boosting", "calibrated without ensemble",
]  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_pass_through_meta_estimators(name):
    build = META[name]
    if "stacking" in name:  # its cross-validated part cannot do without weights

        def build(base):
            return StackingClassifier([("base", base)], final_estimator=clone(base), cv=3)

    model, oracle = (
        build(clone(base)).fit(X, Y, sample_weight=WEIGHT) for base in (PROBE, LOGISTIC)
    )
    assert_allclose(model.predict_proba(X), oracle.predict_proba(X), atol=1e-4)
    unweighted = build(clone(PROBE)).fit(X, Y)
    assert np.abs(model.predict_proba(X) - unweighted.predict_proba(X)).max() > 1e-3


@pytest.mark.parametrize("base", KINDS.values(), ids=KINDS)
@every_meta
def test_margins_and_networks_work_inside(build, base):
    if base is NETWORK and build in (META["grid search"], META["halving"], META["selection"]):
        pytest.skip("a network has no coef_ of its input, and C is not what it is tuned by")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)  # of scikit-learn itself
        model = build(clone(base)).fit(X, Y)
    assert model.score(X, Y) > 0.6
    assert set(model.predict(X)) == set(Y)


def test_column_transformer():
    frame = pd.DataFrame(X, columns=["a", "b", "c", "d"]).assign(kind=np.array(list("uvw"))[CODES])
    frame["kind"] = frame["kind"].sample(frac=1, random_state=0).to_numpy()
    columns = ColumnTransformer(
        [("numbers", StandardScaler(), ["a", "b"]), ("kinds", OneHotEncoder(), ["kind"])]
    )
    model, oracle = (make_pipeline(columns, clone(b)).fit(frame, Y) for b in (PROBE, LOGISTIC))
    assert_allclose(model.predict_proba(frame), oracle.predict_proba(frame), atol=1e-4)
    assert model[-1].n_features_in_ == 5
    shuffled = frame[["kind", "d", "b", "a", "c"]]
    assert_allclose(model.predict_proba(shuffled), model.predict_proba(frame))


# ---------------------------------------------------------------------------- selection


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_grid_search(n_jobs):
    grid = {"C": [1e-3, 0.03, 1.0], "class_weight": [None, "balanced"]}
    scoring = ["accuracy", "neg_log_loss", "roc_auc_ovr"]
    search, oracle = (
        GridSearchCV(clone(b), grid, scoring=scoring, refit="neg_log_loss", cv=3, n_jobs=n)
        for b, n in ((PROBE, n_jobs), (LOGISTIC, 1))
    )
    state = torch.get_rng_state()
    search.fit(X, Y)
    oracle.fit(X, Y)
    assert torch.equal(torch.get_rng_state(), state)
    for name in scoring:
        key = f"mean_test_{name}"
        assert_allclose(search.cv_results_[key], oracle.cv_results_[key], atol=1e-4)
    assert search.best_params_ == oracle.best_params_
    assert_allclose(search.predict_proba(X), oracle.predict_proba(X), atol=1e-4)


def test_grid_search_over_parameters_of_skorch():
    grid = {
        "module__hidden_layer_sizes": [(2,), (8,)],
        "optimizer__weight_decay": [0.0, 100.0],
        "max_epochs": [10],
    }
    one, two = (
        GridSearchCV(NETWORK, grid, cv=2, n_jobs=n_jobs, error_score="raise").fit(X, Y)
        for n_jobs in (1, 2)
    )
    assert_array_equal(one.cv_results_["mean_test_score"], two.cv_results_["mean_test_score"])
    assert two.best_params_["optimizer__weight_decay"] == 0.0
    best = two.best_estimator_
    assert best.net_.optimizer_.param_groups[0]["weight_decay"] == 0.0
    assert best.transform(X).shape[1] == two.best_params_["module__hidden_layer_sizes"][-1]


def test_cross_validation():
    model, oracle = (
        make_pipeline(StandardScaler(), PROBE),
        make_pipeline(StandardScaler(), LOGISTIC),
    )
    assert_allclose(cross_val_score(model, X, Y, cv=4), cross_val_score(oracle, X, Y, cv=4))
    for method in ("predict_proba", "decision_function", "predict_log_proba"):
        assert_allclose(
            cross_val_predict(model, X, Y, cv=4, method=method),
            cross_val_predict(oracle, X, Y, cv=4, method=method),
            atol=1e-3,
        )
    results = cross_validate(
        DEFAULT, X, Y, cv=3, return_estimator=True, return_train_score=True, n_jobs=2
    )
    assert (results["test_score"] > 0.8).all()
    assert len({est.coef_.tobytes() for est in results["estimator"]}) == 3


def test_halving_on_samples_and_on_epochs():
    samples = HalvingGridSearchCV(
        DEFAULT, {"C": [1e-3, 0.1, 10.0]}, cv=3, min_resources=40, random_state=0
    ).fit(X, Y)
    assert samples.n_resources_ == [40, 120]
    assert samples.best_params_["C"] > 1e-3
    epochs = HalvingGridSearchCV(
        NETWORK, {"lr": [1e-6, 1e-5, 1e-4, 0.05]}, resource="max_epochs", min_resources=5,
        max_resources=20, factor=2, cv=3, random_state=0,
    ).fit(X, Y)  # fmt: skip
    assert epochs.n_resources_ == [5, 10, 20]
    assert epochs.best_params_ == {"lr": 0.05, "max_epochs": 20}
    assert epochs.best_estimator_.n_iter_ == 20


def test_select_from_model():
    noisy = np.hstack([np.random.default_rng(2).normal(size=(150, 3)), X[:, 2:]])
    selector = SelectFromModel(DEFAULT, max_features=2, threshold=-np.inf).fit(noisy, Y)
    assert_array_equal(selector.get_support(indices=True), [3, 4])
    assert_array_equal(selector.transform(noisy), noisy[:, 3:])
    assert_array_equal(
        SelectFromModel(selector.estimator_, prefit=True).transform(noisy).shape[0], 150
    )


def test_a_frozen_estimator_is_not_fitted_again():
    model = clone(DEFAULT).fit(X, Y)
    expected = model.predict_proba(X)
    frozen = clone(FrozenEstimator(model)).fit(X[:3], Y[:3])
    assert frozen.estimator is model
    assert_array_equal(frozen.predict_proba(X), expected)
    assert_array_equal(frozen.transform(X), X)


def test_a_network_gives_features_to_others():
    pipeline = make_pipeline(StandardScaler(), NETWORK, LogisticRegression())
    pipeline.fit(X, Y)
    assert pipeline[-1].n_features_in_ == 8
    assert pipeline.score(X, Y) > 0.85
    assert pipeline[:-1].get_feature_names_out().tolist() == [f"mr2classifier{i}" for i in range(8)]


# ---------------------------------------------------------------------------- metadata routing


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def _worst_recall(model, X, y, weight):
    return recall_score(y, model.predict(X), average=None, sample_weight=weight).min()


@pytest.mark.usefixtures("routing")
@pytest.mark.parametrize(
    ("fit_weighted", "score_weighted"), [(True, True), (True, False), (False, True)]
)
def test_weights_are_routed(fit_weighted, score_weighted):
    weight = WEIGHT**2
    pipeline = Pipeline(
        [
            ("scale", StandardScaler().set_fit_request(sample_weight=False)),
            ("probe", clone(PROBE).set_fit_request(sample_weight=fit_weighted)),
        ]
    )
    scorer = PerClassDisparityScorer(summary="worst")
    scorer.set_score_request(sample_weight=score_weighted)
    folds = StratifiedKFold(3)
    search = GridSearchCV(pipeline, {"probe__C": [0.001, 0.1, 1.0]}, scoring=scorer, cv=folds)
    search.fit(X, Y, sample_weight=weight)

    expected = []
    for C in (0.001, 0.1, 1.0):
        scores = []
        for train, test in folds.split(X, Y):
            oracle = make_pipeline(StandardScaler(), clone(LOGISTIC).set_params(C=C))
            oracle[-1].set_fit_request(sample_weight=True)
            oracle[0].set_fit_request(sample_weight=False)
            oracle.fit(X[train], Y[train], sample_weight=weight[train] ** fit_weighted)
            scores.append(_worst_recall(oracle, X[test], Y[test], weight[test] ** score_weighted))
        expected.append(np.mean(scores))
    assert_allclose(search.cv_results_["mean_test_score"], expected)
    assert search.best_score_ == max(expected)


@pytest.mark.usefixtures("routing")
def test_a_pipeline_transforms_routed_validation_data():
    network = clone(NETWORK).set_fit_request(X_val=True, y_val=True).set_params(max_epochs=3)
    network.set_params(margin_statistic=None, representation_weight=0)
    pipeline = Pipeline(
        [("scale", StandardScaler()), ("network", network)], transform_input=["X_val"]
    )
    pipeline.fit(X[:120] * 1e3, Y[:120], X_val=X[::3] * 1e3, y_val=Y[::3])
    log_proba = pipeline.predict_log_proba(X[::3] * 1e3)
    loss = -log_proba[np.arange(50), CODES[::3]].mean()
    assert_allclose(pipeline[-1].history_["valid_loss"].iloc[-1], loss, rtol=1e-5)


@pytest.mark.usefixtures("routing")
def test_requests_exist_for_what_can_be_routed():
    model = clone(DEFAULT)
    model.set_fit_request(sample_weight=True, X_val=False, y_val=False)
    model.set_partial_fit_request(sample_weight=True, classes=True)
    model.set_score_request(sample_weight=True)
    requests = model.get_metadata_routing()
    assert requests.fit.requests["sample_weight"] is True
    assert requests.fit.requests["X_val"] is False
    assert requests.partial_fit.requests == {"classes": True, "sample_weight": True}
    assert clone(model).get_metadata_routing().fit.requests == requests.fit.requests


def test_weights_without_routing():
    pipeline = make_pipeline(StandardScaler(), clone(PROBE))
    pipeline.fit(X, Y, mr2classifier__sample_weight=WEIGHT)
    oracle = make_pipeline(StandardScaler(), clone(LOGISTIC))
    oracle.fit(X, Y, logisticregression__sample_weight=WEIGHT)
    assert_allclose(pipeline.predict_proba(X), oracle.predict_proba(X), atol=1e-4)


# ---------------------------------------------------------------------------- output and display


@pytest.mark.parametrize("kind", KINDS)
def test_pandas_output_by_configuration(kind):
    frame = pd.DataFrame(X, columns=["a", "b", "c", "d"], index=np.arange(150)[::-1])
    with sklearn.config_context(transform_output="pandas"):
        model = make_pipeline(StandardScaler(), clone(KINDS[kind])).fit(frame, Y)
        features = model.transform(frame)
        predicted = model.predict(frame)
    width = 4 if kind == "probe" else 8
    assert features.columns.tolist() == [f"mr2classifier{i}" for i in range(width)]
    assert_array_equal(features.index, frame.index)
    plain = make_pipeline(StandardScaler(), clone(KINDS[kind])).fit(X, Y)
    assert_allclose(features.to_numpy(), plain.transform(X), rtol=1e-6, atol=1e-9)
    assert isinstance(predicted, np.ndarray)


def test_repr_shows_what_was_set():
    assert repr(MR2Classifier()) == "MR2Classifier()"
    model = MR2Classifier(C=0.5, optimizer__weight_decay=0.1, optimizer=torch.optim.AdamW)
    text = "MR2Classifier(C=0.5, optimizer=<class 'torch.optim.adamw.AdamW'>,"
    assert repr(model).startswith(text)
    assert "optimizer__weight_decay=0.1" in repr(model)
    assert "optimizer__weight_decay=0.1" in repr(make_pipeline(model))
    assert "C=" not in repr(model.set_params(C=1.0))
    with sklearn.config_context(print_changed_only=False):
        assert "margin_mode='divide'" in repr(model)
        assert "optimizer__weight_decay=0.1" in repr(model)


def test_html_shows_what_was_set():
    model = MR2Classifier(max_epochs=3, optimizer__weight_decay=0.125, optimizer=torch.optim.AdamW)
    unfitted = make_pipeline(StandardScaler(), model)._repr_html_()
    assert "optimizer__weight_decay" in unfitted
    assert "0.125" in unfitted
    assert "MR2Classifier" in unfitted
    assert "Not fitted" in unfitted
    fitted = model.fit(X, Y)._repr_html_()
    assert "optimizer__weight_decay" in fitted
    assert "Not fitted" not in fitted
