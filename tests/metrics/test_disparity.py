import pickle

import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import binomtest
from sklearn import clone, config_context
from sklearn.datasets import make_blobs
from sklearn.exceptions import UndefinedMetricWarning, UnsetMetadataPassedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, make_scorer, precision_score, recall_score
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    PredefinedSplit,
    StratifiedKFold,
    cross_val_score,
    cross_validate,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.fixes import parse_version

from sklearn_mr2.metrics import (
    BestWithinTolerance,
    PerClassDisparityScorer,
    difficulty_thirds,
    disparity_score,
    per_class_report,
)

METRICS = {"recall": recall_score, "precision": precision_score, "f1": f1_score}
SUMMARIES = ("gap", "worst", "hard", "std")


@pytest.fixture
def blobs():
    X, y = make_blobs(240, centers=4, cluster_std=4.0, random_state=3)
    weights = np.random.default_rng(0).uniform(0.1, 5.0, len(y))
    return X, np.array(["ant", "bee", "cat", "dog"])[y], weights


def brute_force(y_true, y_pred, weights, label):
    """(support, recall, precision, f1, effective sample size) of one class, sample by sample."""
    support = predicted = hits = squares = 0.0
    for true, pred, weight in zip(y_true, y_pred, weights, strict=True):
        if true == label:
            support += weight
            squares += weight**2
        if pred == label:
            predicted += weight
        if true == label and pred == label:
            hits += weight
    recall = hits / support if support else np.nan
    if support + predicted == 0:
        return support, recall, np.nan, np.nan, np.nan
    precision = hits / predicted if predicted else 0.0
    f1 = 2 * hits / (support + predicted)
    return support, recall, precision, f1, support**2 / squares if squares else np.nan


def wilson_by_inversion(p, n):
    """The interval as the set of q with |p - q| <= z sqrt(q (1 - q) / n): roots of a quadratic."""
    z2 = 1.959963984540054**2
    return np.sort(np.roots([1 + z2 / n, -(2 * p + z2 / n), p**2]).real)


def summarise(values, summary):
    values = sorted(values)
    if summary == "gap":
        return values[0] - values[-1]
    if summary == "worst":
        return values[0]
    if summary == "std":
        mean = sum(values) / len(values)
        return -((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5)
    size = max(1, int(len(values) / 3 + 0.5))
    return sum(values[:size]) / size


@st.composite
def predictions(draw, weighted=True):
    n_classes = draw(st.integers(1, 6))
    n_samples = draw(st.integers(1, 40))
    code = st.integers(0, n_classes - 1)
    y_true = draw(st.lists(code, min_size=n_samples, max_size=n_samples))
    y_pred = draw(st.lists(code, min_size=n_samples, max_size=n_samples))
    weights = draw(st.lists(st.integers(0, 4), min_size=n_samples, max_size=n_samples))
    if not weighted or not any(weights):
        weights = [1] * n_samples
    return np.array(y_true), np.array(y_pred), np.array(weights)


# per_class_report


def test_report_columns_and_a_small_case_by_hand():
    y_true = ["cat"] * 4 + ["dog"] * 4 + ["fox"] * 2
    y_pred = ["cat", "cat", "cat", "dog", "dog", "dog", "cat", "fox", "fox", "fox"]
    report = per_class_report(y_true, y_pred)
    assert list(report.columns) == [
        "support",
        "recall",
        "precision",
        "f1",
        "recall_low",
        "recall_high",
        "difficulty",
    ]
    assert list(report.index) == ["cat", "dog", "fox"]
    assert report.index.name == "class"
    assert report["support"].tolist() == [4, 4, 2]
    assert report["support"].dtype.kind == "i"
    assert report["recall"].tolist() == [3 / 4, 2 / 4, 1]
    assert report["precision"].tolist() == [3 / 4, 2 / 3, 2 / 3]
    assert_allclose(report["f1"], [3 / 4, 4 / 7, 4 / 5], rtol=1e-15)
    assert report["difficulty"].tolist() == ["medium", "hard", "easy"]
    assert report["difficulty"].cat.categories.tolist() == ["hard", "medium", "easy"]
    assert report["difficulty"].cat.ordered


@given(predictions())
def test_report_equals_a_loop_over_samples(case):
    y_true, y_pred, weights = case
    report = per_class_report(y_true, y_pred, sample_weight=weights)
    assert list(report.index) == sorted({*y_true, *y_pred})
    for label, row in report.iterrows():
        *expected, n = brute_force(y_true, y_pred, weights, label)
        assert_allclose(
            row[["support", "recall", "precision", "f1"]].astype(float), expected, rtol=1e-12
        )
        if row["support"] == 0:
            assert np.isnan(row["recall_low"])
            assert np.isnan(row["recall_high"])
        else:
            interval = wilson_by_inversion(row["recall"], n)
            assert_allclose([row["recall_low"], row["recall_high"]], interval, atol=1e-7)
            assert 0 <= row["recall_low"] <= row["recall"] <= row["recall_high"] <= 1


@given(predictions())
def test_report_equals_scikit_learn(case):
    y_true, y_pred, weights = case
    report = per_class_report(y_true, y_pred, sample_weight=weights)
    report = report[report["support"] > 0]
    for name, function in METRICS.items():
        expected = function(
            y_true,
            y_pred,
            labels=report.index,
            average=None,
            sample_weight=weights,
            zero_division=0,
        )
        assert_allclose(report[name], expected, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_interval_equals_published_values(hits, n, low, high):
    report = per_class_report([1] * n, [1] * hits + [0] * (n - hits), labels=[1])
    assert_allclose(
        report.loc[1, ["recall_low", "recall_high"]].astype(float), [low, high], atol=5e-5
    )


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_interval_equals_scipy(n):
    for hits in sorted({0, 1, n // 2, n - 1, n}):
        report = per_class_report([1] * n, [1] * hits + [0] * (n - hits), labels=[1])
        expected = binomtest(hits, n).proportion_ci(method="wilson")
        assert_allclose(report.loc[1, "recall_low"], expected.low, rtol=1e-12, atol=1e-15)
        assert_allclose(report.loc[1, "recall_high"], expected.high, rtol=1e-12)
    assert report.loc[1, "recall_high"] == 1


@given(predictions(), st.randoms(use_true_random=False))
def test_report_ignores_the_order_of_samples(case, random):
    y_true, y_pred, weights = case
    order = list(range(len(y_true)))
    random.shuffle(order)
    report = per_class_report(y_true, y_pred, sample_weight=weights)
    shuffled = per_class_report(y_true[order], y_pred[order], sample_weight=weights[order])
    pd.testing.assert_frame_equal(report, shuffled, rtol=1e-12)


@given(predictions(), st.permutations(["a", "bb", "c", "d", "e", "ff"]))
def test_relabelling_moves_the_rows_and_changes_no_number(case, names):
    y_true, y_pred, weights = case
    names = np.array(names)
    report = per_class_report(y_true, y_pred, sample_weight=weights)
    renamed = per_class_report(names[y_true], names[y_pred], sample_weight=weights)
    renamed = renamed.loc[names[report.index]]
    # Equal recalls may change thirds, since ties go by the order of the labels.
    columns = [column for column in report if column != "difficulty"]
    assert_allclose(report[columns], renamed[columns], rtol=1e-12)
    if report["recall"].is_unique:
        assert report["difficulty"].tolist() == renamed["difficulty"].tolist()


@given(predictions())
def test_weights_equal_repetitions_but_for_the_interval(case):
    y_true, y_pred, weights = case
    weighted = per_class_report(y_true, y_pred, sample_weight=weights)
    repeated = per_class_report(np.repeat(y_true, weights), np.repeat(y_pred, weights))
    columns = ["support", "recall", "precision", "f1"]
    assert_allclose(
        weighted.loc[repeated.index, columns].astype(float),
        repeated[columns].astype(float),
        rtol=1e-12,
    )
    # Classes that only samples of weight 0 name are reported as empty.
    rest = weighted.drop(repeated.index)
    assert (rest["support"] == 0).all()
    assert rest["precision"].isna().all()


@given(predictions(weighted=False), st.floats(1e-200, 1e200))
def test_scale_of_the_weights_leaves_the_interval(case, scale):
    y_true, y_pred, _ = case
    plain = per_class_report(y_true, y_pred)
    # A scale for each class: equal weights within a class.
    weights = np.where(y_true == 0, scale, 1.0)
    weighted = per_class_report(y_true, y_pred, sample_weight=weights)
    columns = ["recall", "recall_low", "recall_high"]
    assert_allclose(weighted[columns], plain[columns], rtol=1e-9, atol=1e-12)


def test_unequal_weights_widen_the_interval():
    y_true, y_pred = [0] * 8, [0, 1] * 4
    plain = per_class_report(y_true, y_pred).loc[0]
    weighted = per_class_report(y_true, y_pred, sample_weight=[9, 9] + [1] * 6).loc[0]
    assert weighted["recall"] == plain["recall"] == 0.5
    # (9 + 9 + 6)^2 / (81 + 81 + 6) = 24/7 samples.
    expected = wilson_by_inversion(0.5, 24 / 7)
    assert_allclose([weighted["recall_low"], weighted["recall_high"]], expected, rtol=1e-9)
    assert weighted["recall_low"] < plain["recall_low"]


def test_absent_classes():
    # 2 is predicted but absent, 3 is neither, 1 is present but never predicted.
    report = per_class_report([0, 0, 1], [0, 2, 2], labels=[3, 2, 1, 0])
    assert list(report.index) == [3, 2, 1, 0]
    assert report["support"].tolist() == [0, 0, 1, 2]
    assert_array_equal(report["recall"], [np.nan, np.nan, 0, 0.5])
    assert_array_equal(report["precision"], [np.nan, 0, 0, 1])
    assert_array_equal(report["f1"], [np.nan, 0, 0, 2 / 3])
    assert_array_equal(report["recall_low"].isna(), [True, True, False, False])
    assert_array_equal(report["difficulty"].isna(), [True, True, False, False])
    assert report["difficulty"].tolist()[2:] == ["hard", "easy"]


def test_labels_choose_classes_but_all_predictions_count():
    y_true, y_pred = [0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2]
    full, part = per_class_report(y_true, y_pred), per_class_report(y_true, y_pred, labels=[2, 1])
    columns = [column for column in full if column != "difficulty"]
    pd.testing.assert_frame_equal(part[columns], full.loc[[2, 1], columns])
    assert part.loc[1, "precision"] == 0.5


NAMES = np.array(["ash", "elm", "fir"])
CODES = np.array([0, 1, 2, 2, 1, 0, 0])
PREDICTED = np.array([0, 1, 2, 0, 1, 1, 0])


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(lambda codes: NAMES[codes], id="string array"),
        pytest.param(lambda codes: NAMES[codes].astype(object), id="object array"),
        pytest.param(lambda codes: NAMES[codes].tolist(), id="list"),
        pytest.param(lambda codes: pd.Series(NAMES[codes], index=codes + 5), id="pandas"),
        pytest.param(lambda codes: pd.Series(NAMES[codes], dtype="string"), id="pandas string"),
        pytest.param(lambda codes: pd.Series(NAMES[codes], dtype="category"), id="categorical"),
        pytest.param(lambda codes: pl.Series(NAMES[codes]), id="polars"),
        pytest.param(lambda codes: pl.Series(NAMES[codes], dtype=pl.Categorical), id="polars cat"),
        pytest.param(lambda codes: np.array([-7, 3, 1000])[codes], id="ints with gaps"),
        pytest.param(lambda codes: pd.Series(codes, dtype="Int64"), id="pandas Int64"),
        pytest.param(lambda codes: codes.astype(np.float32), id="whole floats"),
    ],
)
def test_kinds_of_labels(convert):
    expected = per_class_report(CODES, PREDICTED)
    plain = np.asarray(convert(PREDICTED)).tolist()
    for y_pred in (convert(PREDICTED), plain):
        report = per_class_report(convert(CODES), y_pred, labels=plain[:3])
        assert list(report.index) == plain[:3]
        assert_array_equal(report.to_numpy(), expected.to_numpy())
        given_thirds = per_class_report(
            convert(CODES), y_pred, difficulty=report["difficulty"].to_dict()
        )
        pd.testing.assert_frame_equal(given_thirds, report, check_index_type=False)


@pytest.mark.parametrize("dtype", [bool, object, "boolean"])
def test_boolean_labels(dtype):
    y_true = pd.Series([True, True, False, False], dtype=dtype)
    report = per_class_report(y_true, np.array([True, False, False, False]))
    assert report.index.tolist() == [False, True]
    assert report["recall"].tolist() == [1, 0.5]


def test_inputs_are_left_alone(blobs):
    _, y, weights = blobs
    y_pred = np.roll(y, 1)
    before = y.copy(), y_pred.copy(), weights.copy()
    per_class_report(y, y_pred, sample_weight=weights)
    for left, right in zip(before, (y, y_pred, weights), strict=True):
        assert_array_equal(left, right)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1], [0]), "y_true has 2 samples but y_pred has 1"),
        (([], []), "y_true is empty"),
        (([0, 1], [[0.2, 0.8], [0.5, 0.5]]), r"y_pred must be one-dimensional, got shape \(2, 2\)"),
        (([0, 1], [0.2, 0.8]), "y_pred must hold class labels .* got float64"),
        (([0, np.inf], [0, 1]), "y_true must hold class labels"),
        (([0, 1], [0, np.nan]), "y_pred has missing values"),
        ((["a", None], ["a", "a"]), "y_true has missing values"),
        ((np.array(["a", 1], dtype=object), ["a", "a"]), "y_true mixes strings with other types"),
        (([0, 1], ["0", "1"]), "y_true holds numbers, y_pred holds strings; convert"),
        ((pd.to_datetime(["2020-01-01"]), pd.to_datetime(["2020-01-01"])), "y_true must hold"),
    ],
)
def test_bad_labels(arguments, message):
    with pytest.raises(ValueError, match=message):
        per_class_report(*arguments)
    with pytest.raises(ValueError, match=message):
        disparity_score(*arguments)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"labels": [0, 0]}, "labels names a class twice"),
        ({"labels": []}, "labels is empty"),
        ({"labels": ["0"]}, "y_true holds numbers, labels holds strings"),
        ({"sample_weight": [1, 1]}, r"sample_weight has shape \(2,\), expected \(3,\)"),
        ({"sample_weight": [1, 1, -1]}, "sample_weight must be finite, not negative"),
        ({"sample_weight": [1, 1, np.nan]}, "sample_weight must be finite"),
        ({"sample_weight": [0, 0, 0]}, "not zero for all samples"),
        ({"difficulty": {0: "hard", 1: "easy"}}, r"no entry for the classes \[2\]"),
        ({"difficulty": {"0": "hard", "1": "easy", "2": "easy"}}, "of the same type as in y_true"),
        ({"difficulty": {0: "hard", 1: "easy", 2: "tough"}}, "'tough'; use \"hard\""),
    ],
)
def test_bad_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        per_class_report([0, 1, 2], [0, 1, 1], **keywords)


# difficulty_thirds


@pytest.mark.parametrize(
    ("n_classes", "sizes"),
    [
        (1, (1, 0, 0)),
        (2, (1, 0, 1)),
        (3, (1, 1, 1)),
        (4, (1, 2, 1)),
        (5, (2, 1, 2)),
        (10, (3, 4, 3)),
        (38, (13, 12, 13)),
        (1000, (333, 334, 333)),
    ],
)
def test_sizes_and_order_of_thirds(n_classes, sizes):
    rng = np.random.default_rng(n_classes)
    recall = pd.Series(rng.permutation(n_classes) / n_classes, index=rng.permutation(n_classes))
    thirds = difficulty_thirds(recall)
    assert thirds.index.equals(recall.index)
    ordered = thirds[recall.sort_values().index].tolist()
    hard, medium, easy = sizes
    assert ordered == ["hard"] * hard + ["medium"] * medium + ["easy"] * easy


def test_ties_keep_the_order_of_the_classes():
    recall = pd.Series(0.5, index=list("zyxwvu"))
    expected = ["hard"] * 2 + ["medium"] * 2 + ["easy"] * 2
    assert difficulty_thirds(recall).tolist() == expected
    assert difficulty_thirds(recall[::-1]).tolist() == expected


def test_thirds_skip_classes_without_recall():
    recall = pd.Series({"a": 0.1, "b": np.nan, "c": 0.2, "d": 0.3})
    thirds = difficulty_thirds(recall)
    assert thirds.isna().tolist() == [False, True, False, False]
    assert thirds.dropna().tolist() == ["hard", "medium", "easy"]
    assert difficulty_thirds(pd.Series({"a": np.nan})).isna().all()


def test_thirds_chosen_on_another_run():
    y_true = ["a", "b", "c"] * 2
    reference = per_class_report(y_true, ["a", "b", "a", "a", "a", "a"])
    assert reference["difficulty"].to_dict() == {"a": "easy", "b": "medium", "c": "hard"}
    y_pred = ["b", "b", "c", "b", "b", "c"]
    chosen = difficulty_thirds(reference["recall"])
    report = per_class_report(y_true, y_pred, difficulty=chosen)
    assert report["difficulty"].to_dict() == {"a": "easy", "b": "medium", "c": "hard"}
    assert report["difficulty"].dtype == chosen.dtype
    # A class in no third of the reference run stays in none; one without samples here, too.
    report = per_class_report(
        y_true, y_pred, labels=list("abcd"), difficulty={"a": None, "b": "hard", "c": "easy"}
    )
    assert report["difficulty"].isna().tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("recall", "error", "message"),
    [
        ([0.1, 0.2], TypeError, "recall must be a pandas Series indexed by class, got list"),
        (pd.Series(["a"]), ValueError, "recall must be numeric"),
        (pd.Series([0.1, 0.2], index=[1, 1]), ValueError, "recall holds a class twice; average"),
    ],
)
def test_bad_recalls(recall, error, message):
    with pytest.raises(error, match=message):
        difficulty_thirds(recall)


# disparity_score


@given(predictions(), st.sampled_from(list(METRICS)), st.sampled_from(SUMMARIES), st.booleans())
def test_score_equals_a_loop_over_classes(case, metric, summary, weighted):
    y_true, y_pred, weights = case
    used = weights if weighted else np.ones(len(y_true))
    column = 1 + list(METRICS).index(metric)
    per_class = [brute_force(y_true, y_pred, used, label) for label in sorted({*y_true})]
    values = [row[column] for row in per_class if row[0] > 0]
    score = disparity_score(
        y_true,
        y_pred,
        metric=metric,
        summary=summary,
        sample_weight=weights if weighted else None,
    )
    assert isinstance(score, float)
    assert_allclose(score, summarise(values, summary), rtol=1e-9, atol=1e-12)


@given(predictions(), st.sampled_from(SUMMARIES))
def test_no_summary_beats_perfect_predictions(case, summary):
    y_true, y_pred, weights = case
    perfect = disparity_score(y_true, y_true, summary=summary, sample_weight=weights)
    assert perfect == (1 if summary in ("worst", "hard") else 0)
    assert disparity_score(y_true, y_pred, summary=summary, sample_weight=weights) <= perfect


def test_hard_summary_agrees_with_the_report(blobs):
    _, y, _ = blobs
    y_pred = np.where(np.arange(len(y)) % 3 == 0, np.roll(y, 1), y)
    report = per_class_report(y, y_pred)
    hard = report.loc[report["difficulty"] == "hard"]
    assert disparity_score(y, y_pred, summary="hard") == hard["recall"].mean()
    assert disparity_score(y, y_pred, summary="hard", hard_classes=list(hard.index)) == (
        hard["recall"].mean()
    )


def test_absent_classes_are_excluded_and_never_predicted_ones_count_0():
    y_true, y_pred = [0, 0, 1, 1, 1], [0, 2, 1, 1, 2]
    # 2 is predicted only, 3 is nowhere: neither has a say.
    assert disparity_score(y_true, y_pred, summary="worst") == 0.5
    assert disparity_score(y_true, y_pred, summary="worst", labels=[1, 2, 3]) == 2 / 3
    assert disparity_score(y_true, y_pred, summary="hard", hard_classes=[1, 3]) == 2 / 3
    # Both classes are present here but only one is predicted.
    for metric in METRICS:
        assert disparity_score([0, 1], [0, 0], metric=metric, summary="worst") == 0
    # Weight 0 only is absence.
    weights = [1, 1, 0, 0, 0]
    assert disparity_score(y_true, y_pred, summary="gap", sample_weight=weights) == 0


def test_no_class_left_is_undefined():
    with pytest.warns(UndefinedMetricWarning, match="No class of hard_classes has samples"):
        score = disparity_score([0, 1], [0, 1], summary="hard", hard_classes=[7])
    assert np.isnan(score)
    with pytest.warns(UndefinedMetricWarning, match="No class of labels has samples"):
        assert np.isnan(disparity_score([0, 1], [0, 1], labels=[7]))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"metric": "accuracy"}, "metric must be one of 'recall', 'precision', 'f1', got 'acc"),
        ({"summary": "wrost"}, "summary must be one of 'gap', 'worst', 'hard', 'std', got 'wro"),
        ({"labels": [1, 1]}, "labels names a class twice"),
        ({"summary": "hard", "hard_classes": []}, "hard_classes is empty"),
        (
            {"hard_classes": [1]},
            "hard_classes has no effect on summary='gap'; use summary=\"hard\"",
        ),
        (
            {"summary": "hard", "hard_classes": [1], "labels": [0, 1]},
            "hard_classes and labels exclude each other",
        ),
    ],
)
def test_bad_parameters(keywords, message):
    with pytest.raises(ValueError, match=message):
        disparity_score([0, 1], [0, 1], **keywords)
    with pytest.raises(ValueError, match=message):
        PerClassDisparityScorer(**keywords)


# PerClassDisparityScorer


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("summary", SUMMARIES)
def test_scorer_equals_the_score(blobs, metric, summary):
    X, y, weights = blobs
    model = LogisticRegression().fit(X, y)
    scorer = PerClassDisparityScorer(metric, summary)
    for w in (None, weights):
        expected = disparity_score(
            y, model.predict(X), metric=metric, summary=summary, sample_weight=w
        )
        assert scorer(model, X, y, sample_weight=w) == expected


def test_scorer_passes_on_its_classes(blobs):
    X, y, _ = blobs
    model = LogisticRegression().fit(X, y)
    recall = per_class_report(y, model.predict(X))["recall"]
    scorer = PerClassDisparityScorer(summary="worst", labels=["dog", "ant"])
    assert scorer(model, X, y) == recall[["dog", "ant"]].min()
    scorer = PerClassDisparityScorer(summary="hard", hard_classes=["dog", "bee"])
    assert scorer(model, X, y) == recall[["dog", "bee"]].mean()


@pytest.mark.parametrize(
    "as_type", [list, pd.Series, pl.Series, lambda y: pd.Series(y, dtype="category")]
)
def test_kinds_of_y_in_cross_validation(blobs, as_type):
    X, y, _ = blobs
    scorer = PerClassDisparityScorer(summary="worst")
    cv = StratifiedKFold(3)
    expected = cross_val_score(
        LogisticRegression(), X, y, scoring=scorer, cv=cv, error_score="raise"
    )
    scores = cross_val_score(
        LogisticRegression(), X, as_type(y), scoring=scorer, cv=cv, error_score="raise"
    )
    assert_array_equal(scores, expected)
    assert len(set(expected)) > 1


def test_cross_validate_equals_a_loop_over_folds(blobs):
    X, y, _ = blobs
    cv = KFold(4, shuffle=True, random_state=0)
    scoring = {
        "accuracy": "accuracy",
        **{summary: PerClassDisparityScorer(summary=summary) for summary in SUMMARIES},
    }
    model = make_pipeline(StandardScaler(), LogisticRegression())
    result = cross_validate(model, X, y, scoring=scoring, cv=cv, error_score="raise")
    for fold, (train, test) in enumerate(cv.split(X)):
        y_pred = clone(model).fit(X[train], y[train]).predict(X[test])
        recalls = [np.mean(y_pred[y[test] == label] == label) for label in set(y[test])]
        for summary in SUMMARIES:
            assert_allclose(
                result[f"test_{summary}"][fold], summarise(recalls, summary), rtol=1e-12
            )
        assert result["test_accuracy"][fold] == np.mean(y_pred == y[test])


def test_class_absent_from_fold_or_from_training():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 5], 20)
    X = rng.normal(size=(60, 2)) * 0.1 + y[:, None]
    fold = np.tile([0, 1], 30)
    fold[y == 5] = 1  # class 5 is never in fold 0, and never in training for fold 1
    scores = cross_val_score(
        LogisticRegression(C=1e4),
        X,
        y,
        scoring=PerClassDisparityScorer(summary="worst"),
        cv=PredefinedSplit(fold),
        error_score="raise",
    )
    assert_array_equal(scores, [1, 0])


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_grid_search(blobs, n_jobs):
    X, y, _ = blobs
    grid = {"C": [1e-4, 1e-2, 1.0]}
    cv = StratifiedKFold(3)
    search = GridSearchCV(
        LogisticRegression(),
        grid,
        scoring=PerClassDisparityScorer(summary="worst"),
        cv=cv,
        n_jobs=n_jobs,
        error_score="raise",
    ).fit(X, y)
    expected = []
    for C in grid["C"]:
        folds = []
        for train, test in cv.split(X, y):
            y_pred = LogisticRegression(C=C).fit(X[train], y[train]).predict(X[test])
            folds.append(min(np.mean(y_pred[y[test] == k] == k) for k in set(y)))
        expected.append(np.mean(folds))
    assert_allclose(search.cv_results_["mean_test_score"], expected, rtol=1e-12)
    assert len(set(expected)) == 3
    assert search.best_index_ == np.argmax(expected)
    assert search.score(X, y) == PerClassDisparityScorer(summary="worst")(search, X, y)


def test_make_scorer_from_the_score_gives_the_same(blobs):
    X, y, _ = blobs
    scoring = {
        "own": PerClassDisparityScorer(summary="worst"),
        "made": make_scorer(disparity_score, summary="worst"),
    }
    result = cross_validate(LogisticRegression(), X, y, scoring=scoring, error_score="raise")
    assert_array_equal(result["test_own"], result["test_made"])


def weighted_worst_recall(y_true, y_pred, weights):
    return min(
        weights[(y_true == k) & (y_pred == k)].sum() / weights[y_true == k].sum()
        for k in set(y_true)
    )


def expected_worst(X, y, cv, fit_weights, score_weights):
    scores = []
    for train, test in cv.split(X, y):
        model = make_pipeline(StandardScaler(), LogisticRegression())
        model.fit(X[train], y[train], logisticregression__sample_weight=fit_weights[train])
        scores.append(weighted_worst_recall(y[test], model.predict(X[test]), score_weights[test]))
    return np.array(scores)


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("name", [True, "importance"])
def test_routed_weights_arrive(blobs, multi, name):
    X, y, weights = blobs
    cv = StratifiedKFold(3)
    ones = np.ones(len(y))
    expected = expected_worst(X, y, cv, ones, weights)
    assert not np.allclose(expected, expected_worst(X, y, cv, ones, ones), atol=1e-3)
    with config_context(enable_metadata_routing=True):
        scorer = PerClassDisparityScorer(summary="worst")
        assert scorer.set_score_request(sample_weight=name) is scorer
        accuracy = make_scorer(accuracy_score).set_score_request(sample_weight=False)
        model = make_pipeline(
            StandardScaler().set_fit_request(sample_weight=False),
            LogisticRegression().set_fit_request(sample_weight=False),
        )
        metadata = {"sample_weight" if name is True else name: weights}
        scoring = {"worst": scorer, "accuracy": accuracy} if multi else scorer
        result = cross_validate(
            model, X, y, scoring=scoring, cv=cv, params=metadata, error_score="raise"
        )
        assert_allclose(result["test_worst" if multi else "test_score"], expected, rtol=1e-12)
        search = GridSearchCV(
            model,
            {"logisticregression__C": [1.0]},
            scoring=scoring,
            refit="worst" if multi else True,
            cv=cv,
            n_jobs=2,
            error_score="raise",
        )
        # Searches are cloned by other meta-estimators: the request must survive it.
        search = pickle.loads(pickle.dumps(clone(search))).fit(X, y, **metadata)
        key = "worst" if multi else "score"
        scores = [search.cv_results_[f"split{fold}_test_{key}"][0] for fold in range(3)]
        assert_allclose(scores, expected, rtol=1e-12)


def test_weights_without_a_request(blobs):
    X, y, weights = blobs
    cv = StratifiedKFold(3)
    expected = expected_worst(X, y, cv, weights, np.ones(len(y)))
    with config_context(enable_metadata_routing=True):
        model = LogisticRegression().set_fit_request(sample_weight=True)
        scorer = PerClassDisparityScorer(summary="worst")
        arguments = {"cv": cv, "params": {"sample_weight": weights}, "error_score": "raise"}
        with pytest.raises(UnsetMetadataPassedError, match=r"PerClassDisparityScorer.*score"):
            cross_val_score(model, X, y, scoring=scorer, **arguments)
        scorer.set_score_request(sample_weight=False)
        model = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), model)
        scores = cross_val_score(model, X, y, scoring=scorer, **arguments)
        assert_allclose(scores, expected, rtol=1e-12)


def test_score_request_needs_routing_and_a_valid_value():
    scorer = PerClassDisparityScorer()
    with pytest.raises(RuntimeError, match="enable_metadata_routing=True"):
        scorer.set_score_request(sample_weight=True)
    with config_context(enable_metadata_routing=True):
        with pytest.raises(ValueError, match="sample_weight"):
            scorer.set_score_request(sample_weight=3)
        assert scorer.get_metadata_routing().score.requests == {"sample_weight": None}
        scorer.set_score_request(sample_weight=True)
        assert scorer.get_metadata_routing().score.requests == {"sample_weight": True}


@pytest.mark.parametrize("multi", [False, True])
def test_weights_of_a_search_without_routing(blobs, multi):
    X, y, weights = blobs
    cv = StratifiedKFold(3)
    scorer = PerClassDisparityScorer(summary="worst")
    search = GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression()),
        {"logisticregression__C": [1.0]},
        scoring={"worst": scorer, "accuracy": "accuracy"} if multi else scorer,
        refit="worst" if multi else True,
        cv=cv,
        error_score="raise",
    )
    if parse_version(sklearn.__version__) >= parse_version("1.7"):
        # A pipeline takes no bare sample_weight, which is what a search passes to scorers.
        search.set_params(estimator=LogisticRegression(), param_grid={"C": [1.0]})
        search.fit(X, y, sample_weight=weights)
        expected = []
        for train, test in cv.split(X, y):
            model = LogisticRegression().fit(X[train], y[train], weights[train])
            expected.append(weighted_worst_recall(y[test], model.predict(X[test]), weights[test]))
    else:
        search.fit(X, y, logisticregression__sample_weight=weights)
        expected = expected_worst(X, y, cv, weights, np.ones(len(y)))
    key = "worst" if multi else "score"
    scores = [search.cv_results_[f"split{fold}_test_{key}"][0] for fold in range(3)]
    assert_allclose(scores, expected, rtol=1e-12)


def test_scorer_repr_and_pickle(blobs):
    X, y, _ = blobs
    model = LogisticRegression().fit(X, y)
    assert (
        repr(PerClassDisparityScorer()) == "PerClassDisparityScorer(metric='recall', summary='gap')"
    )
    scorer = PerClassDisparityScorer("f1", "hard", hard_classes=np.array(["ant", "bee"]))
    assert repr(scorer) == (
        "PerClassDisparityScorer(metric='f1', summary='hard', hard_classes=['ant', 'bee'])"
    )
    assert len(repr(PerClassDisparityScorer(labels=range(1000)))) < 120
    for copy in (pickle.loads(pickle.dumps(scorer)), clone(scorer, safe=False)):
        assert repr(copy) == repr(scorer)
        assert copy(model, X, y) == scorer(model, X, y)


# BestWithinTolerance


def results(**scores):
    return {f"mean_test_{name}": np.array(values) for name, values in scores.items()}


@pytest.mark.parametrize(
    ("accuracy", "worst", "tolerance", "expected"),
    [
        ([0.90, 0.89, 0.88], [0.1, 0.2, 0.3], 0.0, 0),
        ([0.90, 0.89, 0.88], [0.1, 0.2, 0.3], 0.01, 1),  # .9 - .89 > .01 in floating point
        ([0.90, 0.89, 0.88], [0.1, 0.2, 0.3], 0.5, 2),
        ([0.88, 0.90, 0.90], [0.3, 0.3, 0.3], 0.5, 1),  # ties: more accurate, then first
        ([0.88, 0.90, 0.89], [0.3, 0.1 + 0.2, 0.3], 0.5, 1),  # .1 + .2 > .3 in floating point
        ([0.88, 0.90, 0.89], [0.1 + 0.2, 0.3, 0.3], 0.5, 1),
        ([np.nan, 0.90, 0.89], [0.9, np.nan, 0.1], 0.5, 2),  # a NaN is never chosen
        ([0.99, 0.90, 0.895], [np.nan, 0.1, 0.2], 0.005, 2),  # nor sets the standard
        ([0.90, 0.80], [-0.5, -0.2], 0.2, 1),  # negative scores, as for the gap
    ],
)
def test_choice_within_tolerance(accuracy, worst, tolerance, expected):
    index = BestWithinTolerance(tolerance=tolerance)(results(accuracy=accuracy, worst=worst))
    assert index == expected
    assert type(index) is int


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12),
    st.integers(0, 20),
)
def test_choice_equals_exact_arithmetic(pairs, tolerance):
    """Scores in twentieths: the choice by integers is free of rounding."""
    best = max(accuracy for accuracy, _ in pairs)
    allowed = [i for i, (accuracy, _) in enumerate(pairs) if accuracy >= best - tolerance]
    expected = max(allowed, key=lambda i: (pairs[i][1], pairs[i][0], -i))
    accuracy, worst = np.array(pairs).T / 20
    choose = BestWithinTolerance(tolerance=tolerance / 20)
    assert choose(results(accuracy=accuracy, worst=worst)) == expected


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_choice_in_a_search(blobs, n_jobs):
    X, y, _ = blobs
    search = GridSearchCV(
        LogisticRegression(),
        {"C": [1e-4, 1e-3, 1e-2, 1.0], "class_weight": [None, {"ant": 3.0}]},
        scoring={"acc": "accuracy", "gap": PerClassDisparityScorer()},
        refit=BestWithinTolerance("mean_test_gap", "mean_test_acc", tolerance=0.02),
        n_jobs=n_jobs,
        error_score="raise",
    )
    search = clone(pickle.loads(pickle.dumps(search))).fit(X, y)
    table = pd.DataFrame(search.cv_results_)
    near = table[table["mean_test_acc"] >= table["mean_test_acc"].max() - 0.02]
    assert 1 < len(near) < len(table)
    assert search.best_index_ == near["mean_test_gap"].idxmax()
    assert search.best_params_["C"] == search.best_estimator_.C


def test_errors_of_the_choice():
    choose = BestWithinTolerance("mean_test_wrost")
    with pytest.raises(
        ValueError,
        match="disparity='mean_test_wrost' is not in cv_results_, which "
        "has mean_test_accuracy, mean_test_worst",
    ):
        choose(results(worst=[0.5], accuracy=[0.5]))
    with pytest.raises(ValueError, match="accuracy='mean_test_accuracy' is not in"):
        BestWithinTolerance()(results(worst=[0.5], score=[0.5]))
    with pytest.raises(ValueError, match='error_score="raise"'):
        BestWithinTolerance()(results(worst=[0.5, np.nan], accuracy=[np.nan, 0.5]))
    for tolerance in (-0.1, np.inf, np.nan, "0.1"):
        with pytest.raises(ValueError, match="tolerance must be a finite number, not negative"):
            BestWithinTolerance(tolerance=tolerance)
    assert repr(BestWithinTolerance(tolerance=0.01)) == (
        "BestWithinTolerance(disparity='mean_test_worst', accuracy='mean_test_accuracy', "
        "tolerance=0.01)"
    )
