"""Displays look as they did: pictures against those in ``baseline``.

Versions of matplotlib place and shape letters differently, which moves all else in a picture, so
pictures are compared with those of the same version only. To draw the baselines anew, after a
change that is meant or with another version, run ``python tests/display/test_images.py``, look at
them, and set ``VERSION``.
"""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.testing.compare import compare_images

from sklearn_mr2.display import (
    DisparityTradeoffDisplay,
    MarginDisplay,
    MirrorTrajectoryDisplay,
    NeuronSpectrumDisplay,
    PerClassAccuracyDisplay,
    PruningCurveDisplay,
)

BASELINE = Path(__file__).parent / "baseline"
VERSION = "3.11"
#: Root mean square difference of colour values, of 255. Another marker or colour of a single model
#: makes 1 to 5 in these pictures.
TOLERANCE = 0.5


def predictions(n_classes, models):
    rng = np.random.default_rng(0)
    base, names = rng.beta(6, 2, n_classes), np.array([f"class {k}" for k in range(n_classes)])
    y = np.repeat(np.arange(n_classes), 20)
    y_pred = {
        model: names[np.where(rng.random(len(y)) < base[y], y, (y + 1) % n_classes)]
        for model in models
    }
    return names[y], y_pred, dict(zip(names.tolist(), 2 - base, strict=True))


def per_class_dots():
    y, y_pred, _ = predictions(9, ["plain", "MR2"])
    return PerClassAccuracyDisplay.from_predictions(y, y_pred)


def per_class_curve():
    y, y_pred, _ = predictions(1000, ["plain", "MR2"])
    return PerClassAccuracyDisplay.from_predictions(y, y_pred)


def per_class_given():
    y, y_pred, _ = predictions(9, ["plain", "MR2"])
    thirds = {f"class {k}": ("hard", "medium", "easy")[k % 3] for k in range(9)}
    return PerClassAccuracyDisplay.from_predictions(y, y_pred, difficulty=thirds)


def tradeoff():
    rng = np.random.default_rng(0)
    accuracy = 0.8 + 0.02 * rng.standard_normal(24)
    return DisparityTradeoffDisplay(
        accuracy,
        0.6 - (accuracy - 0.8) + 0.04 * rng.standard_normal(24),
        chosen=int(accuracy.argmax()),
        chosen_name="C=0.01, margin=2.0",
        tolerance=0.01,
        groups=[f"margin={k}" for k in rng.integers(0, 4, 24)],
    ).plot()


def margin():
    y, y_pred, margins = predictions(20, ["MR2"])
    return MarginDisplay.from_predictions(y, y_pred["MR2"], margins=margins)


def margin_many():
    y, y_pred, margins = predictions(1000, ["MR2"])
    return MarginDisplay.from_predictions(y, y_pred["MR2"], margins=margins)


def pruning():
    amount = np.linspace(0, 1, 21)
    curves = {
        name: pd.DataFrame({"amount": amount, "score": 1 - 0.5 * amount**power})
        for name, power in [("Power", 2), ("Euclidean", 6), ("HyperbolicEntropy", 20)]
    }
    return PruningCurveDisplay(curves).plot()


def spectrum():
    neuron = np.arange(1000)
    return NeuronSpectrumDisplay(
        {name: np.exp(-neuron / rate) for name, rate in [("Power", 1e3), ("Euclidean", 200)]}
        | {"HyperbolicEntropy": np.where(neuron < 300, np.exp(-neuron / 40), 0)}
    ).plot()


def trajectory():
    time = np.linspace(-5, 40, 46)
    rising = 1 - np.exp(-(time + 1) / 8)
    return MirrorTrajectoryDisplay(
        {
            name: pd.DataFrame(
                {
                    "log_time": time,
                    "log_loss": 4 - np.logaddexp(0, time + shift),
                    "q_margin": 0.01 * rising * shift,
                    "sparsity": 0.4 + sign * 0.3 / (1 + np.exp(-time)),
                }
            )
            for name, shift, sign in [("Power", 1, -1), ("Euclidean", 2, 0.5), ("Entropy", 3, 1)]
        }
    ).plot()


DISPLAYS = [
    per_class_dots,
    per_class_curve,
    per_class_given,
    tradeoff,
    margin,
    margin_many,
    pruning,
    spectrum,
    trajectory,
]


def draw(make, path):
    """Draw a display with matplotlib's own defaults, whatever the user's are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({"font.family": "DejaVu Sans", "text.hinting": "none"})
        display = make()
        # Without "Software", which names the version of matplotlib.
        display.figure_.savefig(
            path, format="png", dpi=50, metadata={"Software": None}, pil_kwargs={"optimize": True}
        )
    plt.close("all")


@pytest.mark.skipif(
    mpl.__version__.rpartition(".")[0] != VERSION, reason=f"baselines are of matplotlib {VERSION}"
)
@pytest.mark.parametrize("make", DISPLAYS, ids=lambda make: make.__name__)
def test_looks_as_before(make, tmp_path):
    draw(make, tmp_path / "drawn.png")
    expected = tmp_path / "expected.png"  # compare_images leaves files beside it
    expected.write_bytes((BASELINE / f"{make.__name__}.png").read_bytes())
    assert compare_images(expected, tmp_path / "drawn.png", TOLERANCE) is None


if __name__ == "__main__":
    mpl.use("Agg")
    for make in DISPLAYS:
        draw(make, BASELINE / f"{make.__name__}.png")
