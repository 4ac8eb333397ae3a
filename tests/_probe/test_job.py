from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import RepeatedStratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mr2._probe import InputError, Settings, job, n_fits, run_probe, text
from sklearn_mr2.metrics import difficulty_thirds, per_class_report

SETTINGS = Settings(Cs=(0.01, 0.1, 1.0), cv=3)


def make_data(n_per_class=40, n_classes=6, seed=0):
    """Classes of growing spread around random means, so that the last ones are hard."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(n_classes), n_per_class)
    means = rng.normal(size=(n_classes, 5))
    spread = np.linspace(0.4, 1.6, n_classes)
    X = means[y] + rng.normal(size=(len(y), 5)) * spread[y, None]
    return X.astype(np.float32), np.array([f"class {k}" for k in range(n_classes)])[y]


@pytest.fixture(scope="module")
def data():
    return make_data()


@pytest.fixture(scope="module")
def outcome(data):
    return run_probe(*data, SETTINGS)


def split(y, settings=SETTINGS):
    return job._split(*np.unique(y, return_inverse=True), settings)


def test_cross_entropy_is_logistic_regression_tuned_by_hand(data, outcome):
    X, y = data[0].astype(np.float64), data[1]
    train, test = split(y)
    folds = list(
        RepeatedStratifiedKFold(n_splits=3, n_repeats=1, random_state=0).split(train, y[train])
    )
    models = [
        make_pipeline(StandardScaler(), LogisticRegression(C=C, tol=1e-8, max_iter=5000))
        for C in SETTINGS.Cs
    ]
    predictions = [cross_val_predict(model, X[train], y[train], cv=folds) for model in models]
    accuracies = [np.mean(prediction == y[train]) for prediction in predictions]
    # Single precision may decide a sample on the boundary otherwise.
    one_sample = 1.01 / len(train)
    found = outcome.cross_entropy
    np.testing.assert_allclose(found.cv_accuracy, accuracies, rtol=0, atol=one_sample)
    best = int(np.argmax(found.cv_accuracy))
    assert SETTINGS.Cs[best] == found.C
    model = models[best].fit(X[train], y[train])
    right = model.predict(X[test]) == y[test]
    assert np.sum(found.correct != right) <= 1
    recall = per_class_report(y[train], predictions[best])["recall"]
    difference = outcome.table["cv_recall_cross_entropy"].to_numpy() - recall.to_numpy()
    assert np.abs(difference).max() <= 1.01 / outcome.table["train_samples"].min()


def test_the_test_part_decides_nothing(data, outcome, monkeypatch):
    X, y = data
    train, test = split(y)
    rng = np.random.default_rng(1)
    X, y = X.copy(), y.copy()
    X[test] = rng.normal(size=X[test].shape) * 10
    y[test] = rng.permutation(y[test])
    monkeypatch.setattr(job, "_split", lambda *args: (train, test))
    other = run_probe(X, y, SETTINGS)
    for name in ("cross_entropy", "mr2"):
        before, after = getattr(outcome, name), getattr(other, name)
        assert after.C == before.C
        np.testing.assert_array_equal(after.cv_accuracy, before.cv_accuracy)
        np.testing.assert_array_equal(after.model[-1].coef_, before.model[-1].coef_)
        np.testing.assert_array_equal(after.model[0].mean_, before.model[0].mean_)
        assert after.correct.mean() < before.correct.mean()
    chosen = ["class", "difficulty", "cv_recall_cross_entropy", "train_samples", "margin_mr2"]
    assert other.table[chosen].equals(outcome.table[chosen])
    assert other.worst_class == outcome.worst_class
    assert other.margin_error_correlation == outcome.margin_error_correlation


def test_thirds_are_those_of_cross_validation(outcome):
    table = outcome.table.set_index("class")
    expected = difficulty_thirds(table["cv_recall_cross_entropy"])
    assert table["difficulty"].tolist() == expected.tolist()
    assert outcome.worst_class == table["cv_recall_cross_entropy"].idxmin()


def test_comparisons_are_means_of_recalls(data, outcome):
    X, y = data
    _, test = split(y)
    hits = {
        "cross_entropy": outcome.cross_entropy.model.predict(X[test]) == y[test],
        "mr2": outcome.mr2.model.predict(X[test]) == y[test],
    }
    groups = {
        "hardest third": outcome.table["class"][outcome.table["difficulty"] == "hard"],
        "easiest third": outcome.table["class"][outcome.table["difficulty"] == "easy"],
        "worst class": [outcome.worst_class],
    }
    assert [row.label for row in outcome.comparisons] == ["overall accuracy", *groups]
    for row in outcome.comparisons:
        for name, hit in hits.items():
            expected = (
                np.mean([hit[y[test] == k].mean() for k in groups[row.label]])
                if row.label in groups
                else hit.mean()
            )
            assert getattr(row, name) == pytest.approx(expected)
        assert row.difference.value == pytest.approx(row.mr2 - row.cross_entropy)
    for _, row in outcome.table.iterrows():
        members = y[test] == row["class"]
        assert row["test_samples"] == members.sum()
        assert row["recall_mr2"] == pytest.approx(hits["mr2"][members].mean())
        assert row["difference"] == pytest.approx(row["recall_mr2"] - row["recall_cross_entropy"])
        assert row["difference_low"] <= row["difference"] <= row["difference_high"]


def test_intervals_of_single_classes_are_wider_than_of_one_class_chosen_beforehand(outcome):
    worst = outcome.comparisons[-1].difference
    row = outcome.table[outcome.table["class"] == outcome.worst_class].iloc[0]
    assert row["difference_low"] < worst.low
    assert row["difference_high"] > worst.high


@pytest.mark.parametrize("rule", ["paper", "error"])
def test_both_models_get_the_same_number_of_fits(rule, monkeypatch):
    calls = []
    tune = job._tune

    def spy(margins, *args):
        calls.append((margins["margin_statistic"], *args))
        return tune(margins, *args)

    monkeypatch.setattr(job, "_tune", spy)
    done = []
    chosen = Settings(Cs=(0.1, 1.0), cv=2, repeats=2, rule=rule)
    outcome = run_probe(*make_data(12, 3), chosen, lambda: done.append(1))
    assert len(done) == n_fits(chosen) == 2 * 2 * 2 * 2 + 2
    (first, *one), (second, *other) = calls
    assert first is None
    assert second == {"paper": "second_moment", "error": "error"}[rule]
    assert all(a is b for a, b in zip(one, other, strict=True))
    # Margins that are made from the errors rank the classes as the errors do.
    assert rule == "paper" or outcome.margin_error_correlation == pytest.approx(1)


def test_global_state_is_left_alone(data):
    def state():
        numpy_state = np.random.get_state()  # noqa: NPY002
        return numpy_state[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads()

    X, y = data
    before, kept = state(), X.copy()
    run_probe(X, y, Settings(Cs=(0.1,), cv=2))
    assert state() == before
    np.testing.assert_array_equal(X, kept)


def test_large_offsets_are_standardised_in_double_precision(data, outcome):
    X, y = data
    shifted = run_probe(X.astype(np.float64) + 1e7, y, SETTINGS)
    assert shifted.cross_entropy.C == outcome.cross_entropy.C
    np.testing.assert_allclose(
        shifted.cross_entropy.cv_accuracy, outcome.cross_entropy.cv_accuracy, atol=0.01
    )


class_counts = st.lists(st.integers(1, 30), min_size=2, max_size=8)


@settings(max_examples=200)
@given(
    class_counts,
    st.floats(0.05, 0.9),
    st.integers(2, 6),
    st.sampled_from(["paper", "error"]),
    st.integers(0, 99),
)
def test_split_leaves_enough_of_every_class_or_says_what_is_needed(
    counts, test_size, cv, rule, seed
):
    chosen = Settings(test_size=test_size, cv=cv, rule=rule, seed=seed)
    y = np.repeat(np.arange(len(counts)), counts)
    try:
        train, test = split(y, chosen)
    except InputError as error:
        smallest = int(np.argmin(counts))
        message = str(error)
        assert f"class '{smallest}' has {counts[smallest]} sample" in message
        needed = int(message.split("at least ")[1].split()[0])
        assert counts[smallest] < needed
        split(np.repeat(np.arange(len(counts)), np.maximum(counts, needed)), chosen)
        return
    assert sorted([*train, *test]) == list(range(len(y)))
    in_train = np.bincount(y[train], minlength=len(counts))
    assert np.abs(in_train - (1 - test_size) * np.array(counts)).max() < 1
    assert np.bincount(y[test], minlength=len(counts)).min() >= 1
    assert in_train.min() >= cv
    left = in_train.min() - int(np.ceil(in_train.min() / cv))
    assert rule == "paper" or left >= cv


def test_repeats_average_over_other_folds(data):
    once, twice = (run_probe(*data, Settings(Cs=(0.1,), repeats=n)) for n in (1, 2))
    recall = twice.cross_entropy.cv_recall
    n_train = twice.table["train_samples"].to_numpy()
    halves = recall * n_train * 2
    np.testing.assert_allclose(halves, np.round(halves))
    assert not np.array_equal(recall, once.cross_entropy.cv_recall)
    assert twice.cross_entropy.cv_accuracy == pytest.approx([np.average(recall, weights=n_train)])


def test_one_class_is_refused():
    with pytest.raises(InputError, match="all samples are of one class, 'a'"):
        run_probe(np.ones((8, 2)), np.array(["a"] * 8), SETTINGS)


def sentence(rho, n, rule="paper"):
    return text._fit_sentence(
        SimpleNamespace(
            margin_error_correlation=rho, classes=np.arange(n), settings=Settings(rule=rule)
        )
    )


@pytest.mark.parametrize(
    ("rho", "n", "start"),
    [
        (0.8, 10, "The paper's rule fits these data"),
        (-0.8, 10, "The paper's rule does not fit these data"),
        (0.5, 10, "Nothing shows that the paper's rule fits these data"),
        (-0.5, 10, "Nothing shows that the paper's rule fits these data"),
        (0.5, 100, "The paper's rule fits these data"),
        (1.0, 5, "5 classes are too few"),
        (np.nan, 10, "Margins or class errors are all equal"),
    ],
)
def test_sentence_on_the_fit_of_the_rule(rho, n, start):
    said = sentence(rho, n)
    assert said.startswith(start)
    assert ("--rule error" in said) == ("rule fits these data:" not in said)
    assert "by construction" in sentence(rho, n, rule="error")


def test_sentence_sees_a_pattern_in_one_of_twenty_random_orders():
    rho = np.round([spearmanr(range(7), order).statistic for order in permutations(range(7))], 12)
    values, counts = np.unique(rho, return_counts=True)
    sees = np.array([not sentence(value, 7).startswith("Nothing") for value in values])
    assert 0.03 < counts[sees].sum() / counts.sum() < 0.06
