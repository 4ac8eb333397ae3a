"""The mirror-flow benchmarks, on tiny settings."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "mirror"
NAMES = ("common", "student_teacher", "rates", "alignment", "fashion_mnist")


@pytest.fixture(scope="module")
def scripts():
    """The scripts by name, imported as they import each other."""
    path, before = list(sys.path), {name: sys.modules.pop(name, None) for name in NAMES}
    modules = {}
    for name in NAMES:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        modules[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    yield modules
    sys.path[:] = path
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


def must_not_run(*args, **kwargs):
    raise AssertionError("a finished cell was run again")


def test_student_teacher(scripts, tmp_path, monkeypatch):
    script = scripts["student_teacher"]
    setting = script.Setting(
        n_samples=20, width=10, margins=(1, 10), seeds=(0,), step_size=0.3, max_steps=5_000
    )
    results = scripts["common"].Results(tmp_path / "a.csv", setting)
    script.run_all(results)
    last = results.of(margin=10).set_index("potential")
    assert set(last.index) == set(script.POTENTIALS)
    ratio = last["participation_ratio"]
    assert ratio["HyperbolicEntropy(0.1)"] < ratio["Euclidean"] < ratio["SmoothedPower(3, 0.01)"]
    assert (last["balance_drift"] < 0.1).all()
    assert last["kkt_ratio"].between(0, 1 + 1e-3).all()

    # What is read back is complete and equal, and makes the page.
    monkeypatch.setattr(script, "run", must_not_run)
    again = scripts["common"].Results(tmp_path / "a.csv", setting)
    script.run_all(again)
    tables = script.tables(again.rows)
    assert tables == script.tables(results.rows)
    for _ in range(2):
        scripts["common"].write_tables(tmp_path, tables)
    page = (tmp_path / "benchmarks" / "mirror.md").read_text()
    assert page.count("| HyperbolicEntropy(10) |") == 2
    script.plot(again.rows, setting, tmp_path)
    assert (tmp_path / "images" / "mirror_student_teacher.png").exists()


def test_student_teacher_largest_fall(scripts):
    fall = scripts["student_teacher"].largest_fall
    assert fall([1.0, 3.0, 2.0, 4.0]) == pytest.approx(0.25)
    assert fall([1.0, 2.0]) == 0


def test_results_of_another_setting_are_refused(scripts, tmp_path):
    common, setting = scripts["common"], scripts["rates"].Setting()
    results = common.Results(tmp_path / "a.csv", setting)
    results.add({"seed": 0}, lambda: [{"x": 1.5}])
    other = common.Results(tmp_path / "a.csv", replace(setting, width=3))
    with pytest.raises(SystemExit, match="setting"):
        other.add({"seed": 1}, lambda: [{"x": 1.0}])
    other.add({"seed": 0}, must_not_run)


def test_rates(scripts, tmp_path):
    script = scripts["rates"]
    setting = script.Setting(n_samples=15, n_features_linear=10, target_margin=60, seeds=(0,))
    path = list(script.run(setting, "linear", "Euclidean", 0))
    assert path[0]["margin"] >= 1
    assert path[-1]["margin"] >= 60 * np.exp(-1 / setting.records_per_e)
    results = scripts["common"].Results(tmp_path / "a.csv", setting)
    # One path stands for all; the linear model has the theorem's Q ~ (log t)^2 here.
    for model in script.MODELS:
        for name in script.POTENTIALS:
            results.add({"model": model, "potential": name, "seed": 0}, lambda: path)
    fitted = script.fits(results.rows)
    assert np.allclose(fitted["dual_exponent"], 2, atol=0.1)
    assert script.tables(results.rows)["rates"].count("\n") == 9
    script.plot(results.rows, tmp_path)


def test_alignment(scripts, tmp_path):
    script = scripts["alignment"]
    setting = script.Setting(
        n_samples=10,
        linear_lams=(15, 30),
        linear_lam=5,
        linear_widths=(5, 10),
        two_layer_lams=(0.5, 1),
        two_layer_lam=1,
        two_layer_widths=(5, 10),
        seeds=(0,),
    )
    results = scripts["common"].Results(tmp_path / "a.csv", setting)
    script.run_all(results)
    assert len(results.rows) == 8
    runs = results.of(model="linear", varied="lam")
    # From zero, all is proportional to lam but for the early time in which samples compete.
    assert script.slope(runs, "lam") == pytest.approx(1, abs=0.1)
    tables = script.tables(results.rows)
    assert tables["alignment slopes"].count("\n") == 5
    script.plot(results.rows, tmp_path)


@pytest.fixture(scope="module")
def images(scripts):
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(10, 1, 28, 28))

    def part(n):
        y = np.arange(n, dtype=np.uint8) % 10
        return scripts["fashion_mnist"].Part(
            (prototypes[y] + rng.normal(size=(n, 1, 28, 28))).astype(np.float32), y
        )

    return scripts["fashion_mnist"].Images(part(200), part(50), part(50))


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_fashion_mnist(scripts, images, tmp_path, monkeypatch, model):
    script = scripts["fashion_mnist"]
    setting = replace(
        script.SETTINGS[model],
        max_epochs=2,
        n_train=100,
        batch_size=20,
        hidden_layer_sizes=(8, 6),
        block_channels=(2, 4),
        lrs={name: lrs[:2] for name, lrs in script.SETTINGS[model].lrs.items()},
        seeds=(0, 1),
    )
    results = scripts["common"].Results(tmp_path / "a.csv", setting)
    chosen = script.run_all(results, lambda: images)
    for name, lr in chosen.items():
        tuned = results.of(stage="tune", potential=name)
        assert tuned.set_index("lr")["accuracy"].idxmax() == lr
    tested = results.of(stage="test")
    assert len(tested) == 2 * len(setting.lrs)
    for by in script.PRUNED:
        assert (tested[f"{by}_0"] == tested["accuracy"]).all()
    levels = tested[[f"all@{q:g}" for q in script.QUANTILES]].to_numpy()
    assert (np.diff(levels) >= 0).all()

    monkeypatch.setattr(script, "train_and_measure", must_not_run)
    again = scripts["common"].Results(tmp_path / "a.csv", setting)
    assert script.run_all(again, must_not_run) == chosen
    assert set(script.tables(again, chosen)) >= {f"{model} means", f"{model} pruning"}
    script.plot(again, chosen, tmp_path)
    assert (tmp_path / "images" / f"mirror_fashion_mnist_{model}.png").exists()
