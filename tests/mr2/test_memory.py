"""Linear probes on data that are larger than memory: nothing may copy the features as a whole."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from sklearn_mr2 import MR2Classifier


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(6000) % 5
    X = (rng.normal(size=(5, 60))[y] + 2 * rng.normal(size=(6000, 60))).astype(np.float16)
    path = tmp_path / "X.npy"
    np.save(path, X)
    return path, X, y


@pytest.mark.parametrize("statistic", ["second_moment", None])
def test_float16_equals_float32(data, statistic):
    """Conversion a batch at a time is the conversion of the whole."""
    path, X, y = data
    model = MR2Classifier(margin_statistic=statistic, C=0.1)
    weight = np.random.default_rng(1).uniform(0.5, 2, len(y))
    mapped = np.load(path, mmap_mode="r")
    half = model.fit(mapped, y, weight)
    single = MR2Classifier(margin_statistic=statistic, C=0.1).fit(X.astype(np.float32), y, weight)
    assert half.coef_.dtype == np.float32
    np.testing.assert_array_equal(half.coef_, single.coef_)
    np.testing.assert_array_equal(half.margins_, single.margins_)
    np.testing.assert_array_equal(half.predict_proba(mapped), single.predict_proba(mapped))
    np.testing.assert_array_equal(half.predict(mapped), single.predict(X.astype(np.float32)))


def test_other_optimisers_and_parts_take_float16(data):
    _, X, y = data
    model = MR2Classifier(max_epochs=1, random_state=0).set_params(optimizer="auto")
    model.partial_fit(X, y, classes=range(5))
    assert model.coef_.dtype == np.float32
    assert model.score(X, y) > 0.3
    trained = MR2Classifier(optimizer=torch.optim.Adam, max_epochs=2, random_state=0).fit(X, y)
    assert trained.set_params(optimizer="auto").predict(X).shape == y.shape


def test_invalid_values_are_found(data):
    _, X, y = data
    X = X.copy()
    X[77, 3] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        MR2Classifier().fit(X, y)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_above_the_mapped_file(tmp_path):
    """Fitting and predicting take far less than the 256 MB of the features in float16."""
    script = f"""
import numpy as np, torch
from sklearn_mr2 import MR2Classifier
torch.set_num_threads(1)
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
n, d, K = 2**20, 128, 10
X = np.lib.format.open_memmap({str(tmp_path / "X.npy")!r}, "w+", np.float16, (n, d))
rng = np.random.default_rng(0)
y = rng.integers(K, size=n)
means = rng.normal(size=(K, d))
noise = rng.normal(size=(16384, d))
for i in range(0, n, 16384):
    X[i:i+16384] = means[y[i:i+16384]] + noise
X.flush(); del X
X = np.load({str(tmp_path / "X.npy")!r}, mmap_mode="r")
MR2Classifier(max_epochs=2).fit(X[:4096], y[:4096])
import threading, time
peak, done = [0.0], False
def watch():
    while not done:
        peak[0] = max(peak[0], anonymous()); time.sleep(.002)
before = anonymous()
thread = threading.Thread(target=watch); thread.start()
model = MR2Classifier(max_epochs=2).fit(X, y)
model.predict(X)
done = True; thread.join()
print(peak[0] - before)
"""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
    )
    assert float(run.stdout) < 100
