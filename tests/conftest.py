"""Settings every test shares."""

import os

# scikit-learn reads this when it is imported; without it the array API checks are skipped.
os.environ["SCIPY_ARRAY_API"] = "1"

import matplotlib
import pytest
import torch
from hypothesis import settings

matplotlib.use("Agg")
# One thread: the checks compare results bit for bit, and small products gain nothing from more.
torch.set_num_threads(1)
# Deadlines make property tests depend on the machine's load; derandomised runs are repeatable.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("suite")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
