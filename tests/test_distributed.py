"""One model trained by two processes, against the same fit in one.

Started by torchrun, this file is the program of each of the processes: it goes through all cases
and writes what came out of them. The tests compare that with the cases run here.
"""

import contextlib
import copy
import faulthandler
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.datasets import load_digits
from skorch.callbacks import Callback, EarlyStopping, EpochScoring
from torch import nn

from sklearn_mr2 import MirrorFlowClassifier, MR2Classifier
from sklearn_mr2.distributed import ALONE, Processes, join_processes, own_gpu
from sklearn_mr2.mr2.classifier import ProbeNet
from sklearn_mr2.mr2.sampling import ClassBalancedSampler

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

# ---------------------------------------------------------------------------- cases


def digits(n=601, dtype=np.float64, *, by_class=False):
    """An odd number of digits. Sorted by class, a half of them lacks half of the classes."""
    X, y = load_digits(return_X_y=True)
    X, y = (X[:n] / 16).astype(dtype), y[:n]
    order = np.argsort(y, kind="stable") if by_class else slice(None)
    return X[order], y[order]


def outcome(model, X):
    """What must not depend on the number of processes.

    Rounding decides when the full-batch optimiser stops, so of its path the end has to do.
    """
    losses = model.history_.filter(regex="_loss$").to_numpy()
    return {
        "coef": model.coef_,
        "intercept": model.intercept_,
        "margins": model.margins_,
        "spread": model.class_spread_,
        "losses": losses[-1] if isinstance(model.net_, ProbeNet) else losses,
        "proba": model.predict_proba(X),
    }


def probe(parallel, dtype=np.float64, *, weighted=False, **parameters):
    X, y = digits(dtype=dtype, by_class=True)
    weight = np.arange(len(y)) % 4 if weighted else None
    # batch_size: each process goes through its rows in several chunks.
    model = MR2Classifier(C=0.1, batch_size=64, data_parallel=parallel, **parameters)
    return outcome(model.fit(X, y, weight), X)


def network(parallel, *, n=601, dtype=np.float64, weighted=False, by_class=False, **parameters):
    X, y = digits(n, dtype, by_class=by_class)
    weight = np.arange(len(y)) % 4 if weighted else None
    settings = {
        "module": "mlp",
        "representation_weight": 0.05,
        "max_epochs": 4,
        "lr": 3e-3,
        "random_state": 0,
    }
    model = MR2Classifier(data_parallel=parallel, **{**settings, **parameters})
    return outcome(model.fit(X, y, weight), X)


def early_stopping(parallel):
    callbacks = [
        EpochScoring("accuracy", lower_is_better=False, name="valid_acc"),
        EarlyStopping(monitor="valid_acc", lower_is_better=False, patience=2, load_best=True),
    ]
    return network(parallel, max_epochs=40, lr=0.02, validation_fraction=0.2, callbacks=callbacks)


def parts(parallel, **parameters):
    X, y = digits()
    model = MR2Classifier(data_parallel=parallel, random_state=0, batch_size=50, **parameters)
    for rows in (slice(0, 301), slice(301, None)):
        model.partial_fit(X[rows], y[rows], classes=np.arange(10))
    return outcome(model, X)


CASES = {
    "probe": lambda parallel: probe(parallel, tol=1e-13),
    "probe, weighted": lambda parallel: probe(parallel, weighted=True, tol=1e-13),
    "probe, margins subtracted": lambda parallel: probe(
        parallel, tol=1e-13, margin_mode="subtract", margin_norm=3
    ),
    "probe, margins from errors": lambda parallel: probe(
        parallel, tol=1e-13, margin_statistic="error", random_state=0
    ),
    "probe, validated": lambda parallel: probe(
        parallel, tol=1e-13, validation_fraction=0.2, random_state=0
    ),
    "probe, by mini-batches": lambda parallel: probe(
        parallel, optimizer=torch.optim.Adam, max_epochs=3, random_state=0
    ),
    "network": network,
    "network, weighted and validated": lambda parallel: network(
        parallel, weighted=True, batch_size=77, validation_fraction=0.2
    ),
    "network, classes missing from shares": lambda parallel: network(
        parallel, by_class=True, iterator_train__shuffle=False, batch_size=601
    ),
    "network, last batch of one row": lambda parallel: network(parallel, n=201, batch_size=50),
    "network, balanced batches": lambda parallel: network(
        parallel, iterator_train__sampler=ClassBalancedSampler(3), batch_size=25
    ),
    "early stopping": early_stopping,
    "parts, frozen features": parts,
    "parts, learned features": lambda parallel: parts(parallel, module="mlp"),
}


def wide_probe(parallel):
    """Enough data for a probe to be fitted in their own precision, float32."""
    X, y = digits(1797)
    X = np.hstack([X, np.tanh(4 * X - 1), np.sin(5 * X)]).astype(np.float32)
    model = MR2Classifier(C=0.01, tol=1e-10, data_parallel=parallel).fit(X, y)
    assert model.net_.module_.head.weight.dtype == torch.float32
    return outcome(model, X)


SINGLE_PRECISION = {
    "probe in float32": wide_probe,
    # Not by Adam, which makes whole steps of gradients that are nothing but rounding errors.
    "network in float32": lambda parallel: network(
        parallel, dtype=np.float32, optimizer=torch.optim.SGD, lr=0.1
    ),
}


# ---------------------------------------------------------------------------- in each process


class Noise(nn.Module):
    """Adds noise and remembers some of it; has statistics of its batches, too."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 16), nn.BatchNorm1d(16)
        self.drawn = []

    def forward(self, X):
        features = self.norm(self.layer(X))
        if not self.training:
            return features
        noise = torch.rand(len(X), 1)
        self.drawn.append(noise[0, 0].item())
        return features + noise


class EndOfTheLast(Callback):
    """Ask for the end of training, but in the last process only."""

    def on_epoch_end(self, net, **kwargs):
        if len(net.history) == 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise KeyboardInterrupt


class PowerCut(Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_begin(self, net, **kwargs):
        if len(net.history) == self.epoch:
            raise OSError("power cut")


def reductions(rank):
    """What the methods of Processes return for made-up tensors."""
    processes = Processes(rank, 2)
    mixed = [torch.tensor([True, False]), torch.tensor(7), torch.full((2, 2), 0.5)]
    other = [torch.tensor([False, False]), torch.tensor(8), torch.zeros(2, 2)]
    sent = mixed if rank == 0 else other
    processes.broadcast(sent)
    summed = [torch.full((3,), 1.0 + rank), torch.tensor(10.0**rank, dtype=torch.float64)]
    processes.sum(summed)
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    X = torch.arange(6.0).reshape(3, 2)
    whole = processes.gather_rows(X[processes.own(slice(0, 3), 3)] * weight, 3)
    (whole.sum(dim=1).square().sum() + whole.prod()).backward()
    processes.sum([weight.grad])
    return {
        "broadcast": sent,
        "summed": summed,
        "whole": whole.detach(),
        "gradient": weight.grad,
        "any": [processes.any(rank == 1), processes.any(False)],
        "same": [processes.same(3), processes.same(rank)],
    }


def printed():
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        network(True, verbose=2, max_epochs=2)
    return text.getvalue()


def noisy():
    X, y = digits(600)  # batch normalisation wants no batch of one row
    settings = {"max_epochs": 2, "batch_size": 100, "data_parallel": True}
    model = MR2Classifier(Noise, **settings).fit(X, y)  # without random_state
    network = model.net_.module_
    return {
        "drawn": network.backbone.drawn,
        "state": {k: v.numpy() for k, v in network.state_dict().items()},
        "proba": model.predict_proba(X),
    }


def unequal_start(rank):
    """A module of each process's own to begin with."""
    backbone = nn.Linear(64, 8, dtype=torch.float64)
    nn.init.constant_(backbone.weight, 0.01 + rank)
    nn.init.constant_(backbone.bias, rank)
    return network(True, module=backbone)


def unequal_data(rank):
    X, y = digits(100 + rank)
    try:
        MR2Classifier(data_parallel=True).fit(X, y)
    except ValueError as error:
        return str(error)


def interrupted(path):
    """Cut off after four epochs and continued from the checkpoint, which is then removed."""
    with contextlib.suppress(OSError):
        network(True, max_epochs=6, checkpoint=path, callbacks=[PowerCut(4)])
    dist.barrier()
    found = path.exists()
    dist.barrier()
    # Callbacks of the same types, or the file would be refused.
    result = network(True, max_epochs=6, checkpoint=path, callbacks=[PowerCut(99)])
    dist.barrier()
    return result, found, path.exists()


def all_cases(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {name: case(True) for name, case in {**CASES, **SINGLE_PRECISION}.items()}
    results["reductions"] = reductions(rank)
    results["printed"] = printed()
    results["noisy"] = noisy()
    results["unequal start"] = unequal_start(rank)
    results["unequal data"] = unequal_data(rank)
    results["interrupted"] = interrupted(folder / "checkpoint.pt")
    results["ended"] = len(network(True, max_epochs=9, callbacks=[EndOfTheLast()])["losses"])
    results["model"] = MR2Classifier("mlp", max_epochs=1, data_parallel=True).fit(*digits())
    dist.destroy_process_group()
    return results


def under_accelerate(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    results = {name: CASES[name](True) for name in ("probe", "network")}
    accelerator.end_training()
    return results


# ---------------------------------------------------------------------------- tests


def launch(program, folder):
    """Run a program of this file in two processes; return what each has come to."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [sys.executable, "-m", *launcher, __file__, program.__name__, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    return launch(all_cases, tmp_path_factory.mktemp("torchrun"))


def assert_outcomes_close(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_allclose(actual[name], value, err_msg=name, **tolerance)


def assert_outcomes_equal(actual, expected):
    assert_outcomes_close(actual, expected, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(launched, case):
    expected = CASES[case](False)
    for results in launched:
        assert_outcomes_close(results[case], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", SINGLE_PRECISION)
def test_two_processes_are_one_in_single_precision(launched, case):
    expected = SINGLE_PRECISION[case](False)
    for results in launched:
        assert_allclose(results[case]["coef"], expected["coef"], rtol=1e-5, atol=1e-5)
        # Intercepts, the flattest direction of a probe, are known to some 1e-5 in one process, too.
        assert_outcomes_close(results[case], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [*CASES, *SINGLE_PRECISION, "unequal start"])
def test_all_processes_have_the_same_model(launched, case):
    first, second = launched
    assert_outcomes_equal(second[case], first[case])


def test_reductions(launched):
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    whole = torch.arange(6.0).reshape(3, 2) * weight
    (whole.sum(dim=1).square().sum() + whole.prod()).backward()
    for results in launched:
        result = results["reductions"]
        flags, number, table = result["broadcast"]
        assert flags.tolist() == [True, False]
        assert (number, table.tolist()) == (7, [[0.5, 0.5], [0.5, 0.5]])
        assert result["summed"][0].tolist() == [3, 3, 3]
        assert result["summed"][1].item() == 11
        assert torch.equal(result["whole"], whole)
        assert torch.equal(result["gradient"], weight.grad)
        assert result["any"] == [True, False]
        assert result["same"] == [True, False]


def test_the_first_process_alone_prints(launched):
    lines = [results["printed"].strip().splitlines() for results in launched]
    assert len(lines[0]) == 4  # names, rule, two epochs
    assert not lines[1]


def test_each_process_draws_its_own_random_numbers(launched):
    first, second = (results["noisy"] for results in launched)
    assert len(first["drawn"]) == len(second["drawn"]) == 2 * 6
    assert not set(first["drawn"]) & set(second["drawn"])
    # And yet they end with one model, with what was not given by the seed or the shares.
    for name, value in first["state"].items():
        assert_array_equal(second["state"][name], value, err_msg=name)
    assert_array_equal(second["proba"], first["proba"])


def test_the_module_of_the_first_process_is_trained(launched):
    backbone = nn.Linear(64, 8, dtype=torch.float64)
    nn.init.constant_(backbone.weight, 0.01)
    nn.init.zeros_(backbone.bias)
    expected = network(False, module=backbone)
    assert_outcomes_close(launched[1]["unequal start"], expected, rtol=1e-9, atol=1e-9)


def test_other_data_in_another_process_are_refused(launched):
    for results in launched:
        assert "needs the same X and y" in results["unequal data"]


def test_a_checkpoint_is_continued(launched):
    expected = network(False, max_epochs=6)
    for results in launched:
        outcome_, found, left_over = results["interrupted"]
        assert (found, left_over) == (True, False)
        assert_outcomes_close(outcome_, expected, rtol=1e-9, atol=1e-9)


def test_the_end_in_one_process_is_the_end_of_all(launched):
    assert [results["ended"] for results in launched] == [2, 2]


def test_a_model_is_of_use_without_the_processes(launched):
    X, y = digits()
    first, second = (copy.deepcopy(results["model"]) for results in launched)
    assert_array_equal(second.predict_proba(X), first.predict_proba(X))
    with pytest.raises(RuntimeError, match="needs a process group"):
        second.partial_fit(X, y)
    before = second.coef_
    second.set_params(data_parallel=False).partial_fit(X, y)
    assert np.abs(second.coef_ - before).max() > 0


def test_the_process_group_of_accelerate(tmp_path, launched):
    pytest.importorskip("accelerate")
    for results in launch(under_accelerate, tmp_path):
        for name, result in results.items():
            assert_outcomes_equal(result, launched[0][name])


# ---------------------------------------------------------------------------- without a launcher


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"init_process_group\(\).*accelerate\.Accelerator\(\)"):
        MR2Classifier(data_parallel=True).fit(*digits(50))


def test_a_backend_without_the_device(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ValueError, match="cannot exchange data on device='cpu'"):
        join_processes("cpu")


def test_mirror_flow_does_not_offer_it():
    with pytest.raises(TypeError, match="has no parameter 'data_parallel'"):
        MirrorFlowClassifier(data_parallel=True)


def test_the_gpu_of_a_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_gpu() == "cuda:2"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_gpu() == "cuda:3"
    # A launcher that shows each process its own GPU only.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert own_gpu() == "cuda:0"


@given(n=st.integers(0, 40), size=st.integers(1, 9))
def test_shares_are_a_partition(n, size):
    rows = [list(range(n))[Processes(rank, size).share(n)] for rank in range(size)]
    assert [row for share in rows for row in share] == list(range(n))
    lengths = [len(share) for share in rows]
    assert max(lengths) - min(lengths) <= 1


@given(
    n=st.integers(1, 40), size=st.integers(1, 9), start=st.integers(0, 39), stop=st.integers(1, 45)
)
def test_own_rows_of_a_slice_and_of_indices_are_the_same(n, size, start, stop):
    expected = torch.arange(n)[start:stop]
    if not len(expected):
        return
    for rank in range(size):
        processes = Processes(rank, size)
        own = torch.arange(n)[processes.own(slice(start, stop), n)]
        assert torch.equal(own, processes.own(expected, n))
        share = expected[processes.share(len(expected))]
        assert torch.equal(own, share if len(share) else expected[:1])


def test_one_process_communicates_nothing():
    tensor = torch.tensor([1.0, 2.0])
    ALONE.sum([tensor])
    ALONE.broadcast([tensor])
    assert tensor.tolist() == [1, 2]
    assert ALONE.gather_rows(tensor, 2) is tensor
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert ALONE.same(5)
    assert ALONE.follow_first(lambda closure: closure() + 1, lambda: tensor[0], []) == 2


if __name__ == "__main__":
    faulthandler.dump_traceback_later(120, exit=True)  # where one process waits for the other
    torch.set_num_threads(1)
    name, folder = sys.argv[1], Path(sys.argv[2])
    results = {program.__name__: program for program in (all_cases, under_accelerate)}[name](folder)
    (folder / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(results))
