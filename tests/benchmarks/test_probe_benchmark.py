"""The benchmark of the probe's speed, on a few samples."""

import importlib.util
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression

pytest.importorskip("benchopt")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speed" / "probe" / "table.py"


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("probe_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["probe_table"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["probe_table"]


@pytest.fixture(scope="module")
def benchmark_classes(table):
    benchmark = table.Benchmark(SCRIPT.parent)
    datasets = {dataset.name: dataset for dataset in benchmark.get_datasets()}
    return benchmark.get_benchmark_objective(), datasets["Synthetic"], benchmark.get_solvers()


@pytest.fixture(scope="module")
def objective(benchmark_classes):
    objective_class, synthetic, _ = benchmark_classes
    objective = objective_class.get_instance(C=0.1)
    data = synthetic.get_instance(n_samples=200, n_features=6, n_classes=3).get_data()
    objective.set_data(**data)
    return objective


@pytest.fixture(scope="module")
def solvers(table, benchmark_classes):
    made = [s for solver in benchmark_classes[2] for s in table.instances(solver)]
    return {solver.label: solver for solver in made}


def test_the_objective_is_that_of_scikit_learn_divided_by_c_times_n(objective):
    rng = np.random.default_rng(0)
    W, b = rng.normal(size=(3, 6)), rng.normal(size=3)
    losses = []
    for x, k in zip(objective.X.astype(np.float64), objective.y, strict=True):
        z = W @ x + b
        losses.append(np.log(np.exp(z).sum()) - z[k])
    expected = (objective.C * np.sum(losses) + 0.5 * (W**2).sum()) / (objective.C * 200)
    assert objective.evaluate_result(W, b)["value"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "label",
    [
        "MR2Classifier",
        "LogisticRegression lbfgs",
        "LogisticRegression newton-cg",
        "LogisticRegression newton-cholesky",
        "torch LBFGS",
    ],
)
def test_solvers_of_the_same_problem_reach_its_optimum(table, objective, solvers, label):
    exact = LogisticRegression(C=objective.C, tol=1e-10, max_iter=10_000)
    exact.fit(objective.X.astype(np.float64), objective.y)
    optimum = objective.evaluate_result(exact.coef_, exact.intercept_)["value"]
    problem, evaluate = objective.get_objective(), objective.evaluate_result
    run = table.measure(solvers[label], problem, evaluate, 30.0, optimum * (1 + 1e-6))
    assert run["value"][-1] == pytest.approx(optimum, rel=2e-6)
    assert run["value"] == sorted(run["value"], reverse=True)
    assert run["passes"][-1] > 1


@pytest.mark.parametrize("features", ["standardised", "whitened"])
def test_coefficients_of_transformed_features_are_mapped_back(table, objective, solvers, features):
    solver = solvers[f"LogisticRegression lbfgs, {features}"]
    table.measure(solver, objective.get_objective(), objective.evaluate_result, 0.3)
    found = solver.get_result()
    coef, intercept = solver._iterate
    expected = solver.transformer.transform(objective.X) @ coef.T + intercept
    logits = objective.X @ found["coef"].T + found["intercept"]
    np.testing.assert_allclose(logits, expected, atol=1e-3)


@pytest.mark.parametrize("label", ["skorch Adam", "skorch SGD", "SGDClassifier, one-vs-rest"])
def test_stochastic_solvers_get_better_and_end_at_the_limit(table, objective, solvers, label):
    run = table.measure(solvers[label], objective.get_objective(), objective.evaluate_result, 0.2)
    assert run["status"] in ("limit", "stalled")
    assert run["spent"] < 0.5
    assert len(run["value"]) == len(run["seconds"]) == len(run["passes"])


def test_evaluations_are_off_the_clock(table):
    class Solver:
        passes = 0

        def run(self, callback):
            while callback():
                self.passes += 1

        def get_result(self):
            return {"value": 1.0 / (self.passes + 1), "training_accuracy": 1.0}

    def evaluate(**result):
        time.sleep(0.002)
        return result

    clock = table.Clock(Solver(), evaluate, limit=10.0, goal=1 / 500)
    clock.run()
    assert clock.status == "reached"
    assert clock.elapsed < 0.1 < 0.002 * len(clock.value)
    # All of the first, then every 3 %.
    assert clock.passes[:60] == list(range(60))
    assert max(b / a for a, b in itertools.pairwise(clock.passes[60:])) < 1.031


def test_times_to_levels_are_those_of_the_first_point_within(table):
    curve = {"seconds": [0, 1, 2, 3], "passes": [0, 5, 6, 7], "value": [2, 1.005, 1.00005, 1]}
    found = table.times_to_levels(curve, 1.0)
    assert [found[table.seconds_to(level)] for level in table.LEVELS] == [1, 2, 2, 3]
    assert found["passes"] == 6


def test_growth_finds_the_exponents_of_a_power_law(table):
    rows = [
        {"kind": "synthetic", "solver": "one", "reached": True, "n": n, "d": d, "K": K, "C": C}
        | {"time": C * n**1.1 * d**0.5 * K**0.9}
        for n, d, K, C in itertools.product((10, 100), (3, 9), (2, 5, 7), (0.1, 1.0))
    ]
    found = table.growth(pd.DataFrame(rows)).iloc[0]
    assert list(found[["n", "d", "K"]]) == pytest.approx([1.1, 0.5, 0.9])


def test_a_bound_counts_as_one(table):
    common = {"cell": "c", "kind": "k", "n": 1, "d": 1, "K": 3, "C": 1.0, "passes": 1.0}
    common |= {"accuracy": 0.8}
    rows = [
        common | {"solver": table.OURS, "time": 2.0, "reached": True, "status": "reached"},
        common | {"solver": table.BASELINE, "time": 60.0, "reached": False, "status": "limit"},
        common | {"solver": "third", "time": 1.0, "reached": False, "status": "stalled"},
    ]
    row = table.compare(pd.DataFrame(rows)).iloc[0]
    # What gave up after a second was not the best.
    assert row["best solver"] == table.BASELINE
    assert table.ratio_text(row, "best") == table.ratio_text(row, "baseline") == "> 30"


def test_results_survive_an_interruption(table, tmp_path):
    run = {"cell": "c", "solver": "s", "repetition": 0, "seconds": [1], "passes": [1], "value": [1]}
    results = table.Results(tmp_path / "probe.jsonl")
    results.add(run)
    with results.path.open("a") as file:
        file.write(json.dumps(run)[:20])
    again = table.Results(results.path)
    assert again.runs == [run]
    again.add(run)
    assert len(table.Results(results.path).runs) == 2
