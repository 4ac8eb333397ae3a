"""The ablation benchmark, on a few generated images."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "disparity" / "ablation.py"


@pytest.fixture(scope="module")
def ablation():
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("ablation", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ablation"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["ablation"]
    sys.path[:] = path


@pytest.fixture(scope="module")
def images(ablation):
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(10, 1, 28, 28))

    def part(n):
        y = np.arange(n, dtype=np.uint8) % 10
        X = prototypes[y] + 3 * rng.normal(size=(n, 1, 28, 28))
        return ablation.Part(X.astype(np.float32), y)

    return ablation.Images(part(200), part(60), part(100))


@pytest.fixture(scope="module")
def finished(ablation, images, tmp_path_factory):
    """A whole run, and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("ablation")
    setting = ablation.Setting(
        n_train=60,
        max_epochs=1,
        batch_size=20,
        tuning_seeds=(7,),
        reference_seeds=(7, 8),
        seeds=(0, 1),
    )
    results = ablation.Results(setting, folder / "ablation.csv")
    chosen = ablation.run_all(results, lambda: images)
    return setting, folder, chosen, ablation.summarise(results, chosen)


def test_the_best_on_validation_images_is_chosen(ablation, finished):
    setting, folder, chosen, _ = finished
    rows = pd.read_csv(folder / "ablation.csv", keep_default_na=False)
    best = dict.fromkeys(ablation.METHODS, (-1.0, None))
    for method in ablation.METHODS:
        for recipe in ablation.candidates(setting, method, chosen["cross-entropy"].weight_decay):
            for _, row in rows.iterrows():
                same = all(row[name] == value for name, value in recipe._asdict().items())
                if same and (row["images"], row["seed"]) == ("validation", 7):
                    best[method] = max(best[method], (row["accuracy"], recipe), key=lambda b: b[0])
    assert {method: recipe for method, (_, recipe) in best.items()} == chosen


def test_a_second_run_trains_nothing(ablation, finished):
    setting, folder, chosen, summary = finished

    def load():
        raise AssertionError("everything is there already")

    again = ablation.Results(setting, folder / "ablation.csv")
    assert ablation.run_all(again, load) == chosen
    pd.testing.assert_frame_equal(
        ablation.summarise(again, chosen).by_method["both"], summary.by_method["both"]
    )


def test_only_the_missing_run_is_made_and_comes_out_the_same(ablation, finished, images, tmp_path):
    setting, folder, *_ = finished
    rows = pd.read_csv(folder / "ablation.csv", keep_default_na=False)
    gone = rows.index[(rows["images"] == "test") & (rows["method"] == "both")][1]
    rows.drop(gone).to_csv(tmp_path / "ablation.csv", index=False)
    (tmp_path / "ablation.json").write_text((folder / "ablation.json").read_text())
    results = ablation.Results(setting, tmp_path / "ablation.csv")
    ablation.run_all(results, lambda: images)
    assert len(results.rows) == len(rows)
    recall = [name for name in rows if name.startswith("recall_")]
    assert results.rows.iloc[-1][recall].tolist() == pytest.approx(rows.loc[gone, recall].tolist())


def test_results_of_another_setting_are_not_mixed(ablation, finished, images):
    _, folder, *_ = finished
    other = ablation.Setting(n_train=60, max_epochs=3, seeds=(0, 1, 2))
    with pytest.raises(SystemExit, match="not those of now"):
        ablation.run_all(ablation.Results(other, folder / "ablation.csv"), lambda: images)


def test_methods_have_the_same_budget_and_differ_as_named(ablation):
    setting = ablation.Setting()
    by_method = {m: ablation.candidates(setting, m, 0.1) for m in ablation.METHODS}
    assert {len(c) for c in by_method.values()} == {4}
    assert all(len(set(c)) == 4 for c in by_method.values())
    for method, recipes in by_method.items():
        for recipe in recipes:
            assert (recipe.margin_statistic != "none") == (method in ("margins only", "both"))
            assert (recipe.representation_weight > 0) == (
                method in ("representation term only", "both")
            )
            assert recipe.weight_decay == 0.1 or method == "cross-entropy"
    assert not {*setting.tuning_seeds, *setting.reference_seeds} & set(setting.seeds)
    assert len(setting.reference_seeds) >= 2


def test_training_sets_are_balanced_and_drawn_anew(ablation, images):
    first, same, other = (ablation.draw(images.pool, 60, seed) for seed in (0, 0, 1))
    assert np.bincount(first.y).tolist() == [6] * 10
    assert np.array_equal(first.X, same.X)
    assert not np.array_equal(first.X, other.X)


def test_measures(ablation):
    recall = np.linspace(0.1, 1.0, 10)
    runs = pd.DataFrame([{"accuracy": 0.5, **{f"recall_{k}": r for k, r in enumerate(recall)}}])
    thirds = pd.Series(["hard"] * 3 + ["medium"] * 4 + ["easy"] * 3, [str(k) for k in range(10)])
    row = ablation.measures(runs, thirds).iloc[0]
    assert row.to_dict() == pytest.approx(
        {"overall": 50, "hard": 20, "medium": 55, "easy": 90, "worst": 10, "std": 28.722813}
    )


def test_paired_difference(ablation):
    a, b = pd.Series([3.0, 5.0, 4.5, 6.0]), pd.Series([2.0, 4.5, 4.0, 4.0])
    interval = ttest_rel(a, b).confidence_interval(0.95)
    assert ablation.paired_difference(a, b) == pytest.approx((1.0, interval.low, interval.high))


def test_tables_replace_themselves_and_leave_the_text(ablation, finished, tmp_path):
    _, _, chosen, summary = finished
    page = tmp_path / "benchmarks" / "ablation.md"
    page.parent.mkdir()
    page.write_text("# Before\n<!-- table: means -->\nold\n<!-- end of table -->\nAfter\n")
    ablation.write_page(page, summary)
    once = page.read_text()
    ablation.write_page(page, summary)
    assert page.read_text() == once
    assert once.startswith("# Before\n<!-- table: means -->\n\n| method |")
    assert "old" not in once
    assert "\nAfter\n" in once
    for method in ablation.METHODS:
        assert f"\n| {method} |" in once
    assert once.count("(chosen)") == len(chosen)


def test_plot(ablation, finished, tmp_path):
    ablation.plot(tmp_path / "images" / "ablation.png", finished[3])
    assert (tmp_path / "images" / "ablation.png").stat().st_size > 10_000
