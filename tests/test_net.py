"""The private net: random streams, batches, and training on tensors."""

import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from skorch.callbacks import Callback
from torch import nn

from sklearn_mr2.net import (
    Batch,
    IsolatedRNG,
    TensorDataset,
    TensorLoader,
    TensorNet,
    evaluation_mode,
)

CPU = torch.device("cpu")


def draw(rng, n=5):
    with rng.scope():
        return torch.rand(n)


# ---------------------------------------------------------------------------- random streams


def test_a_stream_is_that_of_its_seed():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = torch.rand(10)
    rng = IsolatedRNG(7, CPU)
    assert torch.equal(torch.cat([draw(rng), draw(rng)]), expected)
    assert not torch.equal(draw(IsolatedRNG(8, CPU), 10), expected)


def test_a_stream_neither_reads_nor_disturbs_the_global_one():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    rng = IsolatedRNG(7, CPU)
    first = draw(rng)
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(1)
    assert torch.equal(draw(IsolatedRNG(7, CPU)), first)


def test_streams_are_independent():
    a, b = IsolatedRNG(1, CPU), IsolatedRNG(2, CPU)
    mixed = [draw(a), draw(b), draw(a), draw(b)]
    a, b = IsolatedRNG(1, CPU), IsolatedRNG(2, CPU)
    assert torch.equal(torch.stack([draw(a), draw(a)]), torch.stack(mixed[::2]))
    assert torch.equal(torch.stack([draw(b), draw(b)]), torch.stack(mixed[1::2]))


def test_scopes_nest():
    inner_alone, outer_alone = draw(IsolatedRNG(2, CPU)), draw(IsolatedRNG(1, CPU), 10)
    outer, inner = IsolatedRNG(1, CPU), IsolatedRNG(2, CPU)
    with outer.scope():
        before = torch.rand(5)
        assert torch.equal(draw(inner), inner_alone)
        after = torch.rand(5)
    assert torch.equal(torch.cat([before, after]), outer_alone)


def test_an_error_inside_a_scope_leaves_the_global_state():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rng = IsolatedRNG(7, CPU)
    with pytest.raises(ZeroDivisionError), rng.scope():
        _ = 1 // int(0 * torch.rand(()))
    assert torch.equal(torch.get_rng_state(), before)
    draw(rng)  # and the lock is free


def test_threads_do_not_mix_their_streams():
    def run(seed, out):
        rng = IsolatedRNG(seed, CPU)
        for _ in range(20):
            with rng.scope():
                parts = [torch.rand(50) for _ in range(10)]
            out.append(torch.cat(parts))

    torch.manual_seed(0)
    before = torch.get_rng_state()
    outs = [[] for _ in range(4)]
    threads = [threading.Thread(target=run, args=item) for item in enumerate(outs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)
    for seed, out in enumerate(outs):
        alone = []
        run(seed, alone)
        assert torch.equal(torch.stack(out), torch.stack(alone))


def test_a_stream_goes_on_after_pickling():
    rng = IsolatedRNG(3, CPU)
    draw(rng)
    copy = pickle.loads(pickle.dumps(rng))
    assert torch.equal(draw(copy), draw(rng))


@pytest.mark.gpu
def test_a_stream_on_a_gpu():
    device = torch.device("cuda")
    before = torch.cuda.get_rng_state()
    rng = IsolatedRNG(3, device)
    with rng.scope():
        first = torch.rand(3, device=device)
    with rng.scope():
        second = torch.rand(3, device=device)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    with IsolatedRNG(3, device).scope():
        assert torch.equal(torch.rand(3, device=device), first)
        assert torch.equal(torch.rand(3, device=device), second)


# ---------------------------------------------------------------------------- batches


def test_a_batch_is_a_pair_with_weights():
    X, y, w = torch.ones(2, 3), torch.zeros(2), torch.ones(2)
    batch = Batch(X, y, w)
    assert len(batch) == 2
    unpacked_X, unpacked_y = batch
    assert unpacked_X is X
    assert unpacked_y is y
    assert batch.sample_weight is w
    assert Batch(X, y).sample_weight is None


def test_slices_of_a_data_set_share_its_memory():
    data = TensorDataset(torch.rand(6, 2), torch.arange(6), torch.rand(6))
    batch = data[1:4]
    assert len(data) == 6
    assert batch[0].data_ptr() == data.X[1].data_ptr()
    assert batch[1].tolist() == [1, 2, 3]
    assert torch.equal(batch.sample_weight, data.sample_weight[1:4])
    assert len(TensorDataset(data.X)[:2][0]) == 2  # without labels, for prediction
    assert TensorDataset(data.X)[:2].sample_weight is None


def rows(loader):
    return [batch[0][:, 0].tolist() for batch in loader]


@given(
    n=st.integers(1, 50),
    size=st.integers(1, 60),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 100),
)
def test_a_pass_visits_what_it_should(n, size, shuffle, drop_last, seed):
    data = TensorDataset(torch.arange(n, dtype=torch.float32)[:, None], torch.arange(n))
    generator = torch.Generator().manual_seed(seed)
    loader = TensorLoader(data, size, shuffle=shuffle, drop_last=drop_last, generator=generator)
    batches = rows(loader)
    visited = [row for batch in batches for row in batch]
    assert len(batches) == len(loader)
    assert len(set(visited)) == len(visited)
    full, rest = divmod(n, size)
    if drop_last and full:
        assert [len(b) for b in batches] == [size] * full
    else:
        assert [len(b) for b in batches] == [size] * full + [rest] * (rest > 0)
        assert sorted(visited) == list(range(n))
    if not shuffle:
        assert visited == sorted(visited)


def test_labels_and_weights_follow_the_rows():
    X = torch.arange(20.0)[:, None]
    data = TensorDataset(X, 2 * torch.arange(20), 3 * torch.arange(20.0))
    for batch in TensorLoader(data, 6, shuffle=True):
        X, y = batch
        assert_array_equal(2 * X[:, 0], y)
        assert_array_equal(3 * X[:, 0], batch.sample_weight)


def test_orders_come_from_the_generator_alone():
    data = TensorDataset(torch.arange(30.0)[:, None])

    def passes(seed):
        loader = TensorLoader(data, 7, shuffle=True, generator=torch.Generator().manual_seed(seed))
        return [rows(loader), rows(loader)]

    before = torch.get_rng_state()
    first, second = passes(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert first != second
    assert passes(0) == [first, second]
    assert passes(1) != [first, second]


def test_a_sampler_decides_alone():
    data = TensorDataset(torch.arange(10.0)[:, None])
    seen = []

    def sampler(dataset, batch_size, generator):
        seen.append((dataset, batch_size, generator))
        yield torch.tensor([7, 7, 1])
        yield torch.tensor([0])

    generator = torch.Generator()
    loader = TensorLoader(data, 4, shuffle=True, generator=generator, sampler=sampler)
    assert rows(loader) == [[7, 7, 1], [0]]
    assert seen == [(data, 4, generator)]
    with pytest.raises(TypeError, match=r"sampler function alone\. Give it a method n_batches"):
        len(loader)


# ---------------------------------------------------------------------------- the net


def test_each_part_comes_out_of_evaluation_in_the_mode_it_had():
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.ReLU()), nn.LazyLinear(2))
    module[1].eval()[1].train()
    before = [part.training for part in module.modules()]
    assert before == [True, True, False, False, True, True]
    with evaluation_mode(module):
        assert not any(part.training for part in module.modules())
        module(torch.zeros(1, 3))
    assert [part.training for part in module.modules()] == before
    with pytest.raises(RuntimeError), evaluation_mode(module):
        module(torch.zeros(1, 4))
    assert [part.training for part in module.modules()] == before


class Headed(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.dropout = nn.Dropout(rate)
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, X):
        features = self.dropout(X)
        return self.head(features), features


class CrossEntropy(nn.Module):
    def forward(self, logits, features, y, weight):
        loss = nn.functional.cross_entropy(logits, y, reduction="none")
        return (loss if weight is None else loss * weight).mean()


def make(rate=0.0, seed=0, **params):
    rng = IsolatedRNG(seed, CPU)
    with rng.scope():
        module = Headed(rate)
    params = {
        "optimizer": torch.optim.SGD, "lr": 0.1, "batch_size": 8, "verbose": 0, "rng": rng,
        "iterator_train__shuffle": True,
        "iterator_train__generator": torch.Generator().manual_seed(seed),
        **params,
    }  # fmt: skip
    return TensorNet(module, criterion=CrossEntropy(), **params).initialize()


DATA = TensorDataset(
    torch.from_numpy(np.random.default_rng(0).normal(size=(30, 3))),
    torch.arange(30) % 2,
    torch.arange(30, dtype=torch.float64) / 14.5,
)


def weights(net):
    return net.module_.head.weight.detach().numpy().copy()


def test_training_is_a_plain_loop():
    """A raw torch loop over the same batches is the oracle."""
    net, head_l2 = make(head_l2=0.3), 0.3
    module, generator = make().module_, torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        order, total = torch.randperm(30, generator=generator), 0.0
        for batch in order.split(8):
            logits = module.head(DATA.X[batch])
            log_p = logits.log_softmax(1)[torch.arange(len(batch)), DATA.y[batch]]
            loss = -(DATA.sample_weight[batch] * log_p).mean()
            loss = loss + head_l2 / 2 * module.head.weight.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += len(batch) * loss.item()
        expected.append(total / 30)
    net.train_on(DATA, epochs=3)
    assert_allclose(weights(net), module.head.weight.detach(), rtol=1e-12)
    assert_allclose([row["train_loss"] for row in net.history], expected, rtol=1e-12)


@pytest.mark.parametrize("size", [7, 30, 100])
def test_accumulated_steps_do_not_depend_on_the_size_of_batches(size):
    whole = make(accumulate=True, head_l2=0.3, batch_size=30).train_on(DATA, epochs=4)
    net = make(accumulate=True, head_l2=0.3, batch_size=size).train_on(DATA, epochs=4)
    assert_allclose(weights(net), weights(whole), rtol=1e-12)
    assert len(net.history) == 4
    logits = net.module_.head(DATA.X)
    log_p = logits.log_softmax(1)[torch.arange(30), DATA.y]
    objective = -(DATA.sample_weight * log_p).mean() + 0.15 * net.module_.head.weight.square().sum()
    net.train_on(DATA, epochs=1)
    assert_allclose(net.history[-1]["train_loss"], objective.item(), rtol=1e-12)


def test_optimisers_that_evaluate_the_loss_several_times():
    params = {"optimizer": torch.optim.LBFGS, "lr": 1.0, "batch_size": 30, "head_l2": 0.3}
    net = make(**params).train_on(DATA, epochs=20)
    net.optimizer_.zero_grad()
    (CrossEntropy()(*net.module_(DATA.X), DATA.y, DATA.sample_weight) + net.penalty()).backward()
    assert all(p.grad.abs().max() <= 1e-5 for p in net.module_.parameters())


@pytest.mark.parametrize("loads", [False, True], ids=["in place", "pickled"])
def test_training_in_two_calls_is_training_in_one(loads):
    one = make(rate=0.5).train_on(DATA, epochs=4)
    two = make(rate=0.5).train_on(DATA, epochs=2)
    two = pickle.loads(pickle.dumps(two)) if loads else two
    two.train_on(DATA, epochs=2)
    assert_array_equal(weights(one), weights(two))
    assert [r["train_loss"] for r in one.history] == [r["train_loss"] for r in two.history]
    assert [r["train_loss_best"] for r in one.history] == [
        r["train_loss_best"] for r in two.history
    ]


def test_dropout_is_drawn_from_the_stream_of_the_net():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = make(rate=0.5).train_on(DATA, epochs=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert_array_equal(weights(one), weights(make(rate=0.5).train_on(DATA, epochs=2)))
    # The same batches and another stream: what is left is dropout.
    other = make(rate=0.5)
    other.rng = IsolatedRNG(9, CPU)
    assert not np.array_equal(weights(one), weights(other.train_on(DATA, epochs=2)))


def test_validation_neither_trains_nor_draws():
    class Modes(Callback):
        def initialize(self):
            self.modes_ = set()
            return self

        def on_batch_end(self, net, training, **kwargs):
            self.modes_.add((training, net.module_.training, net.criterion_.training))

    plain = make(rate=0.5).train_on(DATA, epochs=3)
    net = make(rate=0.5, callbacks=[Modes()]).train_on(DATA, DATA, epochs=3)
    assert_array_equal(weights(net), weights(plain))
    assert dict(net.callbacks_)["Modes"].modes_ == {(True,) * 3, (False,) * 3}
    loss = CrossEntropy()(*net.module_.eval()(DATA.X), DATA.y, DATA.sample_weight)
    assert_allclose(net.history[-1]["valid_loss"], loss.item())


def test_outputs_are_those_of_the_module():
    net = make(rate=0.5, iterator_valid__batch_size=7).train_on(DATA, epochs=1)
    logits, features = zip(*net.outputs(DATA.X), strict=True)
    assert [len(z) for z in logits] == [7, 7, 7, 7, 2]
    assert not any(z.requires_grad for z in logits)
    with torch.no_grad():
        assert_allclose(torch.cat(logits), net.module_.eval().head(DATA.X))
    assert_array_equal(torch.cat(features), DATA.X)


def test_skorch_predicts_codes():
    net = make().train_on(DATA, epochs=1)
    proba = net.predict_proba(DATA)
    with torch.no_grad():
        assert_allclose(proba, net.module_.head(DATA.X).softmax(1), rtol=1e-6)
    assert_array_equal(net.predict(DATA), proba.argmax(1))
    assert_array_equal(net.predict(DATA.X), proba.argmax(1))


def test_an_optimiser_ends_training_when_it_has_converged():
    class Quick(torch.optim.SGD):
        steps, converged = 0, False

        def step(self, closure=None):
            self.steps += 1
            self.converged = self.steps == 3
            return super().step(closure)

    net = make(optimizer=Quick, accumulate=True).train_on(DATA, epochs=10)
    assert len(net.history) == 3


def test_instances_are_pickled_once():
    net = make().train_on(DATA, epochs=1)
    assert net.module is Headed
    assert net.criterion is CrossEntropy
    assert isinstance(net.module_, Headed)


def test_unknown_callback_parameters_are_refused():
    with pytest.raises(ValueError, match="callbacks__x__y refers to no callback"):
        make(callbacks__x__y=1)
    make(callbacks__print_log__sink=print)  # also where nothing is printed
