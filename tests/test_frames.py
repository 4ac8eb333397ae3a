"""Data frames in and out: polars gives what numpy gives, under names, in every public place."""

import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mr2 import (
    MirrorFlowClassifier,
    MR2Classifier,
    MR2ClassifierCV,
    NeuronSparsity,
    PerClassDisparityScorer,
)
from sklearn_mr2.display import (
    MarginDisplay,
    PerClassAccuracyDisplay,
    PruningCurveDisplay,
)
from sklearn_mr2.metrics import disparity_score, per_class_report, pruning_curve

pl = pytest.importorskip("polars")

X, codes = load_iris(return_X_y=True)
Y = np.array(["iris setosa", "iris versicolor", "iris virginica"])[codes]
WEIGHT = np.linspace(0.5, 1.5, len(Y))
NAMES = ["sepal length", "sepal width", "petal length", "petal width"]
FRAME = pl.DataFrame(X, schema=NAMES)
LABELS, WEIGHTS = pl.Series("species", Y), pl.Series("weight", WEIGHT)

MODELS = {
    "probe": MR2Classifier(random_state=0),
    "network": MR2Classifier(
        "mlp", module__hidden_layer_sizes=(8,), max_epochs=3, lr=0.01, random_state=0
    ),
    "search": MR2ClassifierCV(Cs=[0.1, 1.0], cv=3),
    "flow": MirrorFlowClassifier((8,), max_epochs=20, random_state=0),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
CLASSIFIERS = {k: v for k, v in MODELS.items() if k != "search"}
every_classifier = pytest.mark.parametrize("model", CLASSIFIERS.values(), ids=CLASSIFIERS)


def fit(model, *args, **kwargs):
    """Fit a clone without a word, but that it has had few steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        return clone(model).fit(*args, **kwargs)


@every_model
def test_polars_is_numpy_with_names(model):
    plain, named = fit(model, X, Y, WEIGHT), fit(model, FRAME, LABELS, WEIGHTS)
    assert_array_equal(named.feature_names_in_, NAMES)
    assert_array_equal(named.classes_, plain.classes_)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_array_equal(named.predict(FRAME), plain.predict(X))
        # Polars keeps columns, not rows, together, in which order sums round differently.
        for method in ("predict_proba", "predict_log_proba", "decision_function"):
            assert_allclose(getattr(named, method)(FRAME), getattr(plain, method)(X), rtol=1e-7)
        score = named.score(FRAME, LABELS, sample_weight=WEIGHTS)
    assert score == plain.score(X, Y, sample_weight=WEIGHT)
    with pytest.raises(ValueError, match="feature names"):
        named.predict(FRAME.rename({"sepal width": "width of the sepal"}))
    with pytest.raises(ValueError, match=r"same order|feature names"):
        named.predict(FRAME.select(NAMES[::-1]))


@every_classifier
def test_parts_in_polars(model):
    plain, named = clone(model), clone(model)
    classes = np.unique(Y)
    for rows in (slice(0, 75), slice(75, 150)):
        plain.partial_fit(X[rows], Y[rows], classes, WEIGHT[rows])
        named.partial_fit(FRAME[rows], LABELS[rows], pl.Series(classes), WEIGHTS[rows])
    assert_array_equal(named.feature_names_in_, NAMES)
    assert_allclose(named.predict_proba(FRAME), plain.predict_proba(X), rtol=1e-7)


@every_classifier
def test_validation_data_in_polars(model):
    plain = fit(model, X[::2], Y[::2], X_val=X[1::2], y_val=Y[1::2])
    named = fit(model, FRAME[::2], LABELS[::2], X_val=FRAME[1::2], y_val=LABELS[1::2])
    losses = ["train_loss", "valid_loss"]
    assert_allclose(named.history_[losses], plain.history_[losses], rtol=1e-7)


@pytest.mark.parametrize("dtype", ["Categorical", "Enum"])
def test_categories_are_labels(dtype):
    labels = LABELS.cast(pl.Categorical if dtype == "Categorical" else pl.Enum(np.unique(Y)))
    for model in (MODELS["probe"], MODELS["search"]):
        fitted = fit(model, FRAME, labels)
        assert_array_equal(fitted.classes_, np.unique(Y))
        assert_array_equal(fitted.predict(FRAME), fit(model, X, Y).predict(X))
        assert fitted.score(FRAME, labels) == fitted.score(FRAME, Y)


@every_classifier
@pytest.mark.parametrize(("library", "kind"), [("polars", pl.DataFrame), ("pandas", pd.DataFrame)])
def test_features_as_frames(model, library, kind):
    fitted = fit(model, FRAME, LABELS)
    plain = fitted.transform(FRAME)
    assert isinstance(plain, np.ndarray)
    frame = fitted.set_output(transform=library).transform(FRAME)
    assert type(frame) is kind
    assert list(frame.columns) == fitted.get_feature_names_out().tolist()
    assert_array_equal(frame.to_numpy(), plain)


def test_pipeline_of_frames():
    pipeline = make_pipeline(StandardScaler(), MR2Classifier(random_state=0))
    pipeline.set_output(transform="polars")
    search = GridSearchCV(
        pipeline, {"mr2classifier__C": [0.1, 1.0]}, scoring=PerClassDisparityScorer(), cv=3
    )
    search.fit(FRAME, LABELS)
    plain = clone(search).fit(X, Y)
    assert_array_equal(search.best_estimator_[-1].feature_names_in_, NAMES)
    for key in ("mean_test_score", "split0_test_score"):
        assert_array_equal(search.cv_results_[key], plain.cv_results_[key])


@every_model
def test_scores_in_polars(model):
    fitted = fit(model, FRAME, LABELS)
    predicted = fitted.predict(FRAME)
    for summary in ("gap", "worst", "hard", "std"):
        expected = disparity_score(Y, predicted, summary=summary, sample_weight=WEIGHT)
        scorer = PerClassDisparityScorer(summary=summary)
        assert scorer(fitted, FRAME, LABELS, sample_weight=WEIGHTS) == expected
        series = (LABELS, pl.Series(predicted))
        assert disparity_score(*series, summary=summary, sample_weight=WEIGHTS) == expected
    labels = ["iris virginica", "iris setosa"]
    report = per_class_report(
        LABELS, pl.Series(predicted), labels=pl.Series(labels), sample_weight=WEIGHTS
    )
    assert isinstance(report, pd.DataFrame)
    pd.testing.assert_frame_equal(
        report, per_class_report(Y, predicted, labels=labels, sample_weight=WEIGHT)
    )
    assert report.index.tolist() == labels


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", ["network", "flow"])
def test_sparsity_in_polars(name):
    fitted = fit(MODELS[name], FRAME, LABELS)
    sparsity = NeuronSparsity()
    assert 0 < sparsity(fitted, FRAME, LABELS) < 1
    assert isinstance(sparsity.per_layer(fitted, FRAME), pd.DataFrame)
    curve = pruning_curve(fitted, FRAME, LABELS, [0.0, 0.5], by="neuron")
    plain = pruning_curve(fit(MODELS[name], X, Y), X, Y, [0.0, 0.5], by="neuron")
    assert_array_equal(curve["score"], plain["score"])
    scores = cross_validate(clone(fitted), FRAME, LABELS, scoring=sparsity, cv=2)["test_score"]
    assert (scores > 0).all()


def test_displays_in_polars():
    fitted = fit(MODELS["probe"], FRAME, LABELS)
    predicted = fitted.predict(FRAME)
    expected = per_class_report(Y, predicted)["recall"].sort_values()
    for display in (
        PerClassAccuracyDisplay.from_estimator(fitted, FRAME, LABELS),
        PerClassAccuracyDisplay.from_predictions(LABELS, pl.Series(predicted)),
    ):
        drawn = next(iter(display.reports.values()))["recall"]
        assert_allclose(drawn.reindex(expected.index), expected)
    MarginDisplay.from_estimator(fitted, FRAME, LABELS)
    PruningCurveDisplay.from_estimator(
        fit(MODELS["flow"], FRAME, LABELS), FRAME, LABELS, amounts=[0.0, 0.5]
    )
    plt.close("all")


def test_a_lazy_frame_is_to_be_collected():
    for model in (MODELS["probe"], MODELS["search"]):
        with pytest.raises(TypeError, match=r"X is a LazyFrame.*X\.collect\(\)"):
            clone(model).fit(FRAME.lazy(), LABELS)


@every_classifier
def test_history_is_a_frame(model):
    fitted = fit(model, FRAME, LABELS)
    assert type(fitted.history_) is pd.DataFrame
    assert len(fitted.history_) == fitted.n_iter_
    assert fitted.history_["train_loss"].dtype == float
