"""The comparison of methods against class disparity, on tiny data."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from sklearn_mr2 import MR2Classifier

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "disparity"))
import compare
import confirm
import dominance
from baselines import losses as L
from baselines.meta import offsets_for_hard_classes
from compare import REFERENCE_SEEDS, Results, TrainingRun, run_seed
from learners import ProbeLearner
from linear import LinearProbes
from methods import METHODS, mr2
from report import mean_interval, measures, write_report
from rules import choose_offsets, hardest, membership, temperature
from selection import BASELINE, choose, most_accurate
from tasks import Split, Task, as_images, equal_classes, standardise


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    X = ((X - X.mean(0)) / (X.std(0) + 1)).astype(np.float32)
    return Split(X[:500], y[:500], X[500:], y[500:])


def task(model, **options):
    return Task("tiny", "", model, 500, None, standardise, (0.1, 1.0), hidden=8, **options)


def test_probe_of_cross_entropy_is_logistic_regression(digits):
    probes = LinearProbes(digits.X_train, digits.y_train, 10, C=0.01)
    fitted = probes.fit(F.cross_entropy, tolerance=1e-12)
    expected = LogisticRegression(C=0.01, tol=1e-8, max_iter=5000)
    expected.fit(digits.X_train.astype(np.float64), digits.y_train)
    got = probes.logits(digits.X_test, fitted).softmax(1).numpy()
    np.testing.assert_allclose(got, expected.predict_proba(digits.X_test), atol=2e-3)


@pytest.mark.parametrize(
    ("statistic", "mode"), [("second_moment", "divide"), ("dispersion", "subtract")]
)
def test_mr2_of_the_comparison_is_that_of_the_package(digits, statistic, mode):
    learner = ProbeLearner(task("probe"), digits.X_train, digits.y_train, 10, 0, strength=0.05)
    logits = mr2(learner, 2.0, 1.0, statistic, mode)(digits.X_test)
    package = MR2Classifier(
        C=0.05,
        margin=2.0,
        margin_statistic=statistic,
        margin_mode=mode,
        margin_exponent=1 / 3 if mode == "divide" else 1.0,
    ).fit(digits.X_train, digits.y_train)
    assert np.mean(logits.argmax(1) == package.predict(digits.X_test)) > 0.998


def sample_losses():
    frequency = torch.tensor([0.9, 0.5, 0.7])
    return [
        (L.CrossEntropy(), True),
        (L.CrossEntropy(0.1), False),
        (L.Focal(0.0), True),
        (L.Focal(2.0), False),
        (L.GeneralisedCrossEntropy(1e-6), True),
        (L.AffineLogits(torch.zeros(3)), True),
        (L.AffineLogits(frequency.log()), False),
        (L.LDAM(frequency, 0.0), True),
        (L.LDAM(frequency, 1.0), False),
        (L.Equalization(torch.tensor([0, 1, 0]), 1.0), True),
        (L.Equalization(torch.tensor([0, 1, 0]), 0.5), False),
        (L.CVaR(1.0), True),
        (L.CVaR(0.5), False),
        (L.SupCon(0.0), True),
        (L.SupCon(1.0), False),
        (L.GroupDRO(3, 2.0, 0.0), False),
        (L.FairDRO(3, 1.0, 0.0), False),
    ]


@pytest.mark.parametrize(("loss", "plain"), sample_losses())
def test_losses_are_cross_entropy_in_their_limits_only(loss, plain):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 3, generator=generator, requires_grad=True)
    y = torch.arange(30) % 3
    value = loss(logits, logits, y, None)
    value.backward()
    assert torch.isfinite(logits.grad).all()
    expected = F.cross_entropy(logits, y)
    assert torch.isclose(value, expected, atol=1e-4) == plain


@pytest.mark.parametrize("make", [lambda m: L.GroupDRO(3, 2.0, m), lambda m: L.FairDRO(3, 0.3, m)])
def test_robust_losses_have_the_gradient_of_their_weights(make):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 3, generator=generator, requires_grad=True)
    y = torch.arange(30) % 3
    (exact,) = torch.autograd.grad(make(0.0)(logits, logits, y, None), logits)
    (batch,) = torch.autograd.grad(make(0.9)(logits, logits, y, None), logits)
    torch.testing.assert_close(exact, batch)


def test_membership_is_the_hardest_third_of_large_samples():
    error = np.array([0.1, 0.3, 0.2, 0.5, 0.05, 0.15])
    np.testing.assert_allclose(membership(error, np.full(6, 10**6)), hardest(error), atol=0.01)
    few = membership(error, np.full(6, 10))
    assert few.sum() == pytest.approx(2)
    assert 0.05 < few[2] < 0.95


def test_temperature_undoes_a_scale():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20_000, 4)).astype(np.float32) * 2
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = (p.cumsum(1) > rng.uniform(size=(len(p), 1))).argmax(1)
    assert temperature(3 * logits, y) == pytest.approx(3, rel=0.05)


def hard_problem():
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=3000)
    logits = rng.normal(size=(3000, 3)) + np.eye(3)[y] * np.array([3.0, 3.0, 1.0])
    return logits.astype(np.float32), y


@pytest.mark.parametrize(
    "choose_them",
    [
        lambda z, y, give_up: choose_offsets(z, z, y, "membership", give_up),
        lambda z, y, give_up: choose_offsets(z, z, y, "error", give_up),
        lambda z, y, give_up: offsets_for_hard_classes(z, z, y, give_up),
    ],
)
def test_offsets_lift_the_hard_class_within_what_may_be_given_up(choose_them):
    logits, y = hard_problem()

    def judge(offsets):
        right = (logits + offsets).argmax(1) == y
        return right.mean(), right[y == 2].mean()

    before = judge(0)
    gains = []
    for give_up in (0.0, 0.02):
        accuracy, hard = judge(choose_them(logits, y, give_up))
        assert accuracy >= before[0] - give_up - 1e-12
        gains.append(hard - before[1])
    assert gains[0] >= 0
    assert gains[1] > 0.02


def cell(method, *candidates, seed=0):
    """A cell of candidates with the given accuracies and recalls of the hard class."""
    judged = [{"accuracy": a, "recalls": [1.0, hard, 1.0]} for a, hard in candidates]
    return {
        "task": "t",
        "method": method,
        "group": "g",
        "seed": seed,
        "candidates": [{"validation": j, "test": j, "fit_seconds": 1.0} for j in judged],
    }


def test_choice_weighs_accuracy_four_times():
    baseline = cell("cross-entropy", (0.7, 0.9), (0.8, 0.5))
    row = cell("m", (0.80, 0.55), (0.70, 0.85), (0.79, 0.62))
    assert choose(row, baseline) is row["candidates"][2]
    assert choose(baseline, baseline) is baseline["candidates"][1]


def test_choice_stays_with_cross_entropy_where_nothing_helps():
    baseline = cell("cross-entropy", (0.8, 0.5))
    for row in (cell("m", (0.82, 0.4)), cell("m", (0.7, 0.9))):
        assert choose(row, baseline) is baseline["candidates"][0]
        assert choose(row, baseline, stay=False) is row["candidates"][0]


@pytest.mark.parametrize("model", ["probe", "mlp", "cnn"])
def test_every_method_runs_and_cells_are_kept(digits, model, tmp_path, monkeypatch):
    tiny = task(model, max_epochs=2, n_folds=2)
    few = Split(*(part[:100] for part in digits))
    if model == "cnn":
        images = (
            np.pad(X.reshape(-1, 1, 8, 8), [(0, 0), (0, 0), (10, 10), (10, 10)]) for X in few[::2]
        )
        few = few._replace(X_train=next(images), X_test=next(images))
    monkeypatch.setattr(Task, "split", lambda *_: few)
    results = Results(tmp_path / "results.jsonl")
    # Two candidates are enough to choose from.
    methods = [
        dataclasses.replace(method, settings=method.settings[:2])
        for method in METHODS
        if model in method.models
    ]
    monkeypatch.setattr(compare, "methods_for", lambda model: methods)
    for seed in (900, 0):
        run_seed(results, tiny, tmp_path, seed, None)
    n_cells = 1 + len(methods)
    assert len(results.rows) == n_cells
    again = Results(results.path)
    assert again.rows == results.rows
    run_seed(again, tiny, tmp_path, 0, None)
    assert len(again.rows) == n_cells
    write_report(again.rows, (900,), tmp_path)
    page = (tmp_path / "benchmarks" / "disparity.md").read_text()
    assert "MR2 (paper)" in page
    assert (tmp_path / "images" / "disparity_tiny.png").exists()


def test_baseline_choice_sees_no_test_data(digits):
    method = METHODS[0]
    spoilt = digits._replace(y_test=np.zeros_like(digits.y_test))
    first, second = (
        most_accurate(TrainingRun(task("probe"), split, 0).cell(method, None))
        for split in (digits, spoilt)
    )
    assert first["parameters"] == second["parameters"]
    assert first["test"] != second["test"]


def test_measures_use_thirds_of_the_reference_runs():
    reference, compared = cell("cross-entropy", (0.8, 0.1), seed=900), cell(BASELINE, (0.8, 0.7))
    compared["candidates"][0]["test"]["recalls"][0] = 0.4
    table = measures([reference, compared], (900,))
    assert table["hard"].tolist() == [70.0]
    assert table["worst"].tolist() == [40.0]


def test_interval_is_students():
    from scipy import stats

    values = pd.Series([1.0, 2.0, 4.0])
    mean, low, high = mean_interval(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (mean, low, high) == pytest.approx((7 / 3, expected.low, expected.high))


def test_images_are_scaled_by_the_training_set():
    rng = np.random.default_rng(0)
    train, test = rng.integers(256, size=(2, 5, 28, 28)).astype(np.float32)
    X_train, X_test = as_images(train, test)
    assert X_train.shape == X_test.shape == (5, 1, 28, 28)
    assert X_train.mean() == pytest.approx(0, abs=1e-5)
    assert X_train.std() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(
        X_test[:, 0] * train.std() + train.mean(), test, rtol=1e-4, atol=1e-3
    )


def test_equal_classes():
    y = np.repeat([0, 1, 2], [7, 4, 9])
    rows = equal_classes(y, 0)
    assert np.bincount(y[rows]).tolist() == [4, 4, 4]
    assert len(set(rows)) == 12
    assert set(rows) != set(equal_classes(y, 1))


def test_confirmation_fits_what_is_missing_and_pairs_by_seed(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(Task, "split", lambda *_: Split(*(part[:150] for part in digits)))
    monkeypatch.setattr(confirm, "TASKS", {"tiny": task("probe", n_folds=2)})
    results = Results(tmp_path / "confirmation.jsonl")
    confirm.run(results, tmp_path, ["tiny"], [20, 21])
    assert len(results.rows) == 2 * len(confirm.MODELS)
    confirm.run(results, tmp_path, ["tiny"], [20, 21])
    assert len(results.rows) == 2 * len(confirm.MODELS)
    by_model = {row["method"]: row for row in results.rows if row["seed"] == 20}
    plain, ruled = by_model[BASELINE], by_model["error rule, margin 2, 3 C"]
    assert ruled["C"] == 3 * plain["C"]
    assert by_model[confirm.RECOMMENDED]["C"] == plain["C"]
    reference = Results(tmp_path / "comparison.jsonl")
    for seed in REFERENCE_SEEDS:
        run_seed(reference, task("probe", n_folds=2), tmp_path, seed, None)
    monkeypatch.setattr(confirm, "SHOWN", {"tiny": "a tiny task"})
    measured = confirm.values(results, reference).sort_index()
    confirm.plot(measured, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    lines = confirm.table(measured).splitlines()
    assert len(lines) == 2 + len(confirm.MODELS)
    accuracy = {
        model: np.mean([r["accuracy"] for r in results.rows if r["method"] == model])
        for model in confirm.MODELS
    }
    difference = 100 * (accuracy["error rule, margin 2, 3 C"] - accuracy[BASELINE])
    assert f"{difference:+.2f} [" in next(line for line in lines if "margin 2" in line)


def test_dominance_compares_gains_over_cross_entropy(digits, tmp_path, monkeypatch):
    tiny = task("probe", n_folds=2)
    monkeypatch.setattr(Task, "split", lambda *_: Split(*(part[:150] for part in digits)))
    monkeypatch.setattr(dominance, "TASKS", {"tiny": tiny})
    monkeypatch.setattr(dominance, "SHOWN", {"tiny": "a tiny task"})
    few = [m for m in METHODS if m.name in (BASELINE, "focal", "group DRO", "membership offsets")]
    monkeypatch.setattr(dominance, "methods_for", lambda model: few)
    rivals = Results(tmp_path / "rivals.jsonl")
    for _ in range(2):
        dominance.run(rivals, tmp_path, ["tiny"], [30, 31])
    assert [r["method"] for r in rivals.rows] == 2 * [BASELINE, "focal", "group DRO"]
    reference = [{**rivals.rows[0], "seed": seed} for seed in REFERENCE_SEEDS]
    measured = measures([*reference, *rivals.rows], REFERENCE_SEEDS)

    def lead(own, *, of_baseline):
        """The table for a setting that gains `own` points over a cross-entropy of its own."""
        setting = measured[measured["method"] == BASELINE].set_index(["task", "method", "seed"])
        setting = setting[["overall", "hard"]] + of_baseline
        gains = measured[measured["method"] == "focal"].set_index("seed")[["overall", "hard"]]
        gains -= measured[measured["method"] == BASELINE].set_index("seed")[["overall", "hard"]]
        ruled = setting.rename({BASELINE: confirm.RECOMMENDED}, level="method")
        ruled += gains.reindex(ruled.index.get_level_values("seed")).to_numpy() + own
        return dominance.table(measured, pd.concat([setting, ruled]).sort_index()).splitlines()[2:]

    for of_baseline in (0, 5):  # another cross-entropy makes no difference
        assert lead(50, of_baseline=of_baseline) == [
            "| a tiny task, 2 methods | none |  |  |  |  |"
        ]
        focal = next(line for line in lead(-1, of_baseline=of_baseline) if "focal" in line)
        cells = [cell.strip() for cell in focal.strip("|").split("|")]
        assert cells[1:] == ["focal", "2", *2 * ["**+1.00 [+1.00, +1.00]**"], "yes"]
