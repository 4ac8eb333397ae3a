"""MirrorDescent against hand-written loops, and what it promises about state and overflow."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

from sklearn_mr2.mirror.losses import log_total_loss
from sklearn_mr2.mirror.optimizer import MirrorDescent
from sklearn_mr2.mirror.potentials import (
    Euclidean,
    HyperbolicEntropy,
    Power,
    SmoothedPower,
)

POTENTIALS = [
    Euclidean(),
    Power(3),
    Power(4.5),
    SmoothedPower(3, 0.05),
    SmoothedPower(4, 0.05),
    HyperbolicEntropy(0.2),
]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def network(dtype=torch.float64, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1, bias=False)).to(dtype)


def data(dtype=torch.float64, n=20, seed=1):
    X = randn(n, 3, seed=seed, dtype=dtype)
    return X, (X[:, 0] + X[:, 1].abs() > 0.5).long()


def make_closure(model, optimizer, X, y):
    def closure():
        optimizer.zero_grad()
        log_loss = log_total_loss(model(X), y)
        log_loss.backward()
        return log_loss

    return closure


def set_grads(params, seed):
    for i, p in enumerate(params):
        p.grad = randn(*p.shape, seed=seed + i, dtype=p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("potential", POTENTIALS, ids=repr)
def test_constant_step_is_the_hand_written_loop(potential, dtype):
    # Small tensors are mapped back together, the large one in pieces, the strided one as it is.
    shapes = [(4,), (3, 5), (70_000,), ()]
    params = [nn.Parameter(randn(*s, seed=i, dtype=dtype)) for i, s in enumerate(shapes)]
    strided = randn(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)
    params.append(nn.Parameter(strided))
    expected = [p.detach().clone() for p in params]
    duals = [potential.gradient(t) for t in expected]
    optimizer = MirrorDescent(params, lr=0.02, potential=potential)
    for step in range(5):
        set_grads(params, seed=10 * step)
        assert optimizer.step() is None
        for t, z, p in zip(expected, duals, params, strict=True):
            z.add_(p.grad, alpha=-0.02)
            t.copy_(potential.inverse(z))
    for p, t in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), t, rtol=8 * torch.finfo(dtype).eps, atol=0)
    assert params[-1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("potential", POTENTIALS[1:], ids=repr)
def test_thousands_of_steps_in_float32_stay_on_the_exact_dual(potential):
    # Above the size up to which tensors are mapped back together, and through zero.
    n, steps, lr = 9_000, 2_000, 2.0**-7
    eps = torch.finfo(torch.float32).eps
    p = nn.Parameter(randn(n, dtype=torch.float32))
    exact = potential.gradient(p.detach()).double()
    start, largest = exact.clone(), exact.abs()
    trend = 0.2 * randn(n, seed=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    optimizer = MirrorDescent([p], lr=lr, potential=potential)
    for _ in range(steps):
        p.grad = trend + 0.2 * torch.randn(n, generator=generator)
        optimizer.step()
        exact.add_(p.grad.double(), alpha=-lr)
        largest = torch.maximum(largest, exact.abs())
    dual = optimizer.state[p]["dual"]
    # The parameter is the image of its dual, whatever number of steps it took to get there.
    image = potential.inverse(dual.double())
    torch.testing.assert_close(p.detach().double(), image, rtol=4 * eps, atol=0)
    # The dual itself has been rounded once a step, at random.
    error = (dual.double() - exact) / (eps / 2 * largest)
    assert error.square().mean().sqrt() < math.sqrt(steps)
    assert ((exact > 0) != (start > 0)).sum() > 0.2 * n


def test_the_euclidean_potential_is_sgd():
    ours, theirs = network(), network()
    optimizers = [
        MirrorDescent(ours.parameters(), lr=0.3, potential="euclidean"),
        torch.optim.SGD(theirs.parameters(), lr=0.3),
    ]
    X, y = data()
    for _ in range(20):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.step(make_closure(model, optimizer, X, y))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not optimizers[0].state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("potential", POTENTIALS, ids=repr)
def test_normalised_step_is_the_hand_written_loop(potential, dtype):
    model = network(dtype)
    X, y = data(dtype)
    optimizer = MirrorDescent(model.parameters(), potential=potential, step_size="normalised")
    other = copy.deepcopy(model)
    duals = [potential.gradient(p.detach()) for p in other.parameters()]
    log_time, time = -math.inf, 0.0
    for _ in range(10):
        returned = optimizer.step(make_closure(model, optimizer, X, y))

        other.zero_grad()
        log_loss = log_total_loss(other(X), y)
        log_loss.backward()
        with torch.no_grad():
            params = list(other.parameters())
            slope = sum(
                (p.grad**2 / potential.hessian_diagonal(p))[p.grad != 0].sum() for p in params
            )
            h = 0.1 / float(slope)
            if isinstance(potential, HyperbolicEntropy):
                h = min(h, 0.3 / max(float(p.grad.abs().max()) for p in params))
            for p, z in zip(params, duals, strict=True):
                z -= h * p.grad
                p.copy_(potential.inverse(z))
        time += h / math.exp(log_loss.item())
        log_time = math.log(time)
        assert returned.item() == pytest.approx(log_loss.item(), rel=1e-4)
    rtol = 1e-3 if dtype == torch.float32 else 1e-9
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)
    assert optimizer.log_time == pytest.approx(log_time, rel=rtol)


def test_first_order_decrease_is_lr():
    model = network()
    X, y = data()
    optimizer = MirrorDescent(
        model.parameters(), lr=1e-5, potential=SmoothedPower(), step_size="normalised"
    )
    closure = make_closure(model, optimizer, X, y)
    before = optimizer.step(closure).item()
    assert before - closure().item() == pytest.approx(1e-5, rel=1e-3)


def test_float32_follows_float64():
    X, y = data()
    distances = []
    for potential in (Euclidean(), HyperbolicEntropy(0.1)):
        losses = []
        for dtype in (torch.float32, torch.float64):
            model = network().to(dtype)
            optimizer = MirrorDescent(
                model.parameters(), potential=potential, step_size="normalised"
            )
            closure = make_closure(model, optimizer, X.to(dtype), y)
            for _ in range(400):
                log_loss = optimizer.step(closure)
            losses.append((log_loss.item(), optimizer.log_time))
        (a, s), (b, t) = losses
        distances += [abs(a - b) / abs(b), abs(s - t) / abs(t)]
    assert max(distances) < 1e-5


class TestPotentialPerGroup:
    def test_each_group_moves_in_its_own_geometry(self):
        a, b, c = (nn.Parameter(randn(3, seed=i)) for i in range(3))
        start = [p.detach().clone() for p in (a, b, c)]
        optimizer = MirrorDescent(
            [
                {"params": [a], "potential": "euclidean"},
                {"params": [b], "potential": Power(3), "lr": 0.02},
            ],
            lr=0.01,
        )
        optimizer.add_param_group({"params": [c]})
        potentials = [Euclidean(), Power(3), HyperbolicEntropy(0.1)]
        assert [g["potential"] for g in optimizer.param_groups] == potentials
        set_grads([a, b, c], seed=7)
        optimizer.step()
        for p, t, potential, lr in zip(
            (a, b, c), start, potentials, (0.01, 0.02, 0.01), strict=True
        ):
            expected = potential.inverse(potential.gradient(t) - lr * p.grad)
            torch.testing.assert_close(p.detach(), expected)

    def test_normalised_step_is_common_to_all(self):
        model = network()
        X, y = data()
        groups = [
            {"params": model[0].parameters(), "potential": SmoothedPower(3, 0.1)},
            {"params": model[2].parameters(), "potential": HyperbolicEntropy(0.1)},
        ]
        optimizer = MirrorDescent(groups, step_size="normalised")
        start = [p.detach().clone() for p in model.parameters()]
        optimizer.step(make_closure(model, optimizer, X, y))
        moved = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient, before = group["potential"].gradient, start.pop(0)
                moved.append(
                    (gradient(before) - gradient(p.detach()))[p.grad != 0] / p.grad[p.grad != 0]
                )
        h = torch.cat(moved)
        torch.testing.assert_close(h, h[:1].expand_as(h))

    def test_one_flow_has_one_rate(self):
        model = network()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1.0}]
        optimizer = MirrorDescent(groups, step_size="normalised")
        with pytest.raises(ValueError, match="same lr in all parameter groups"):
            optimizer.step(make_closure(model, optimizer, *data()))


def run(model, optimizer, steps):
    closure = make_closure(model, optimizer, *data())
    for _ in range(steps):
        optimizer.step(closure)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("step_size", ["constant", "normalised"])
@pytest.mark.parametrize("potential", POTENTIALS, ids=repr)
class TestResuming:
    @pytest.mark.parametrize("order", ["model first", "optimizer first", "different start"])
    def test_state_dict_resumes_bit_for_bit(self, potential, step_size, order):
        def make(seed):
            model = network(seed=seed)
            return model, MirrorDescent(
                model.parameters(), potential=potential, step_size=step_size
            )

        model, optimizer = make(0)
        run(model, optimizer, 7)
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        expected = run(model, optimizer, 7)

        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        other, resumed = make(5)
        if order == "different start":
            run(other, resumed, 3)
        if order == "optimizer first":
            resumed.load_state_dict(saved["optimizer"])
            other.load_state_dict(saved["model"])
        else:
            other.load_state_dict(saved["model"])
            resumed.load_state_dict(saved["optimizer"])
        assert torch.equal(run(other, resumed, 7), expected)
        assert resumed.log_time == optimizer.log_time

    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
    def test_copies_continue_alike(self, potential, step_size, copier):
        model = network()
        optimizer = MirrorDescent(model.parameters(), potential=potential, step_size=step_size)
        run(model, optimizer, 5)
        other, resumed = copier((model, optimizer))
        assert torch.equal(run(other, resumed, 5), run(model, optimizer, 5))


class TestAlteredParameters:
    """The dual always belongs to the parameter as it is now."""

    potential = HyperbolicEntropy(0.2)

    def stepped(self):
        p = nn.Parameter(randn(6))
        optimizer = MirrorDescent([p], lr=0.01, potential=self.potential)
        set_grads([p], 1)
        optimizer.step()
        return p, optimizer

    def check(self, p, optimizer):
        before = p.detach().clone()
        set_grads([p], 2)
        optimizer.step()
        expected = self.potential.inverse(self.potential.gradient(before) - 0.01 * p.grad)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)

    def test_initialised_after_construction(self):
        p = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        optimizer = MirrorDescent([p], lr=0.01, potential=self.potential)
        nn.init.constant_(p, 2.0)
        self.check(p, optimizer)

    def test_initialised_again_between_steps(self):
        p, optimizer = self.stepped()
        nn.init.constant_(p, 2.0)
        self.check(p, optimizer)

    def test_loaded_between_steps(self):
        layer = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        optimizer = MirrorDescent(layer.parameters(), lr=0.01, potential=self.potential)
        set_grads([layer.weight], 1)
        optimizer.step()
        layer.load_state_dict({"weight": randn(2, 3, seed=9)})
        self.check(layer.weight, optimizer)

    def test_replaced_storage(self):
        p, optimizer = self.stepped()
        nn.utils.vector_to_parameters(randn(6, seed=9), [p])
        self.check(p, optimizer)

    def test_changed_dtype(self):
        p, optimizer = self.stepped()
        p.data = p.data.float()
        p.grad = torch.zeros(6)
        before = p.detach().clone()
        optimizer.step()
        torch.testing.assert_close(p.detach(), before)
        assert optimizer.state[p]["dual"].dtype == torch.float32

    def test_pruning_some_entries_leaves_the_others_dual_alone(self):
        p, optimizer = self.stepped()
        dual = optimizer.state[p]["dual"].clone()
        with torch.no_grad():
            p[:2] = 0
        p.grad = torch.zeros_like(p)
        optimizer.step()
        after = optimizer.state[p]["dual"]
        assert torch.equal(after[2:], dual[2:])
        assert (after[:2] == 0).all()
        assert (p[:2] == 0).all()

    def test_writes_through_data_need_refresh(self):
        p, optimizer = self.stepped()
        p.data.fill_(2.0)
        optimizer.refresh()
        self.check(p, optimizer)

    def test_changed_potential(self):
        p, optimizer = self.stepped()
        before = p.detach().clone()
        optimizer.param_groups[0]["potential"] = Power(3)
        set_grads([p], 2)
        optimizer.step()
        expected = Power(3).inverse(Power(3).gradient(before) - 0.01 * p.grad)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)

    def test_the_users_start_is_not_rounded(self):
        p = nn.Parameter(randn(1000, dtype=torch.float32))
        optimizer = MirrorDescent([p], potential=Power(4.5))
        dual = Power(4.5).gradient(p.detach())
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert torch.equal(optimizer.state[p]["dual"], dual)


class TestOverflow:
    @pytest.mark.parametrize("step_size", ["constant", "normalised"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("potential", POTENTIALS, ids=repr)
    def test_bad_gradient_changes_nothing(self, potential, step_size, bad):
        model = network()
        optimizer = MirrorDescent(model.parameters(), potential=potential, step_size=step_size)
        run(model, optimizer, 2)
        before = [p.detach().clone() for p in model.parameters()]
        state = copy.deepcopy(optimizer.state_dict())
        good = make_closure(model, optimizer, *data())

        def closure():
            loss = good()
            model[2].weight.grad[0, 3] = bad
            return loss

        with pytest.raises(FloatingPointError, match="gradient is not finite"):
            optimizer.step(closure)
        for p, t in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, t)
        for index, entry in optimizer.state_dict()["state"].items():
            assert torch.equal(entry["dual"], state["state"][index]["dual"])
        optimizer.step(good)
        assert all(p.isfinite().all() for p in model.parameters())

    def test_bad_loss(self):
        model = network()
        optimizer = MirrorDescent(model.parameters(), step_size="normalised")
        good = make_closure(model, optimizer, *data())
        with pytest.raises(FloatingPointError, match="closure returned nan"):
            optimizer.step(lambda: good() * math.nan)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_hyperbolic_growth_is_bounded_and_stops_before_infinity(self, dtype):
        # A gradient that never lets up, under a rate that would overflow in the first step.
        p = nn.Parameter(torch.tensor([0.5, -0.2], dtype=dtype))
        optimizer = MirrorDescent([p], lr=1e6, potential="hyperbolic_entropy")
        p.grad = torch.tensor([-1.0, 0.3], dtype=dtype)
        for _ in range(10):
            before = HyperbolicEntropy().dual(p.detach())
            optimizer.step()
            growth = HyperbolicEntropy().dual(p.detach()) / before
            assert growth.max() <= math.exp(0.3) * (1 + 1e-5)

        def climb():
            for _ in range(3000):
                last.copy_(p.detach())
                optimizer.step()

        last = torch.empty_like(p.detach())
        with pytest.raises(FloatingPointError, match="would exceed the square root"):
            climb()
        assert torch.equal(p, last)
        assert 1e-2 < float(last[0]) / math.sqrt(torch.finfo(dtype).max) <= 1

    def test_the_range_is_measured_again_before_giving_up(self):
        # The bound adds up the lengths of the steps, here far more than the dual ever reaches.
        p = nn.Parameter(torch.tensor([0.5]))
        optimizer = MirrorDescent([p], lr=0.25, potential="hyperbolic_entropy")
        for step in range(500):
            p.grad = torch.tensor([(-1.0) ** step])
            optimizer.step()
        assert 0.1 < p.item() < 1

    @pytest.mark.parametrize("potential", [Power(3), Power(5), Power(1.5)], ids=repr)
    def test_no_curvature_at_zero(self, potential):
        w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        X = randn(12, 3)
        y = (X @ torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64) > 0).long()
        optimizer = MirrorDescent([w], potential=potential, step_size="normalised")

        def closure():
            optimizer.zero_grad()
            log_loss = log_total_loss(X @ w, y)
            log_loss.backward()
            return log_loss

        first = optimizer.step(closure)
        # The gradient's inner product with the step is the promised decrease.
        linear = float((-w.grad * w.detach()).sum())
        assert linear == pytest.approx(0.1, rel=1e-6)
        for _ in range(300):
            last = optimizer.step(closure)
        assert w.isfinite().all()
        assert last < first - 2

    def test_an_entry_without_gradient_or_curvature_stays(self):
        # A feature that is always zero has neither.
        w = torch.tensor([0.0, 0.5], requires_grad=True)
        optimizer = MirrorDescent([w], potential=Power(3), step_size="normalised")

        def closure():
            optimizer.zero_grad()
            log_loss = log_total_loss(w[1:] * torch.ones(2), torch.tensor([1, 1]))
            log_loss.backward()
            return log_loss

        for _ in range(5):
            optimizer.step(closure)
        assert w[0] == 0
        assert w[1] > 0.5

    def test_a_stationary_point_is_left_in_peace(self):
        w = torch.zeros(2, requires_grad=True)
        optimizer = MirrorDescent([w], potential=Power(3), step_size="normalised")
        X = torch.tensor([[1.0, 2.0], [1.0, 2.0]])

        def closure():
            optimizer.zero_grad()
            log_loss = log_total_loss(X @ w, torch.tensor([0, 1]))
            log_loss.backward()
            return log_loss

        optimizer.step(closure)
        assert (w == 0).all()
        assert optimizer.log_time == -math.inf


class TestRefusals:
    def test_weight_decay(self):
        p = nn.Parameter(torch.zeros(2))
        with pytest.raises(ValueError, match="bounds the parameters"):
            MirrorDescent([p], weight_decay=1e-4)
        with pytest.raises(ValueError, match="weight_decay must be 0"):
            MirrorDescent([{"params": [p], "weight_decay": 1e-4}])
        MirrorDescent([{"params": [p], "weight_decay": 0.0}], weight_decay=0)

    @pytest.mark.parametrize(
        ("kwargs", "error", "words"),
        [
            ({"lr": -1.0}, ValueError, "lr must be finite"),
            ({"lr": math.nan}, ValueError, "lr must be finite"),
            ({"potential": "entropy"}, ValueError, "unknown potential"),
            ({"step_size": "normalized"}, ValueError, "step_size must be one of"),
        ],
    )
    def test_bad_arguments(self, kwargs, error, words):
        with pytest.raises(error, match=words):
            MirrorDescent([nn.Parameter(torch.zeros(2))], **kwargs)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
    def test_dtypes_without_the_precision(self, dtype):
        with pytest.raises(TypeError, match="must be float32 or float64"):
            MirrorDescent([nn.Parameter(torch.zeros(2, dtype=dtype))])

    def test_normalised_step_needs_a_closure(self):
        optimizer = MirrorDescent([nn.Parameter(torch.zeros(2))], step_size="normalised")
        with pytest.raises(ValueError, match="needs a closure"):
            optimizer.step()

    def test_sparse_gradients(self):
        embedding = nn.Embedding(4, 2, sparse=True)
        optimizer = MirrorDescent(embedding.parameters())
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(TypeError, match="sparse"):
            optimizer.step()


def test_parameters_without_gradient_are_skipped():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = MirrorDescent([{"params": [a]}, {"params": [b]}], lr=0.1)
    optimizer.step()
    a.grad = torch.ones(2)
    optimizer.step()
    assert (a < 1).all()
    assert (b == 1).all()
    assert b not in optimizer.state


def test_learning_rate_schedules():
    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = MirrorDescent([p], lr=0.1, potential=SmoothedPower())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    dual = SmoothedPower().gradient(torch.ones(2, dtype=torch.float64))
    for lr in (0.1, 0.05, 0.025):
        p.grad = torch.ones_like(p)
        optimizer.step()
        schedule.step()
        dual = dual - lr
    torch.testing.assert_close(optimizer.state[p]["dual"], dual)


@pytest.mark.gpu
@pytest.mark.parametrize("step_size", ["constant", "normalised"])
@pytest.mark.parametrize("potential", POTENTIALS, ids=repr)
def test_cuda_follows_cpu(potential, step_size):
    results = []
    for device in ("cpu", "cuda"):
        model = network().to(device)
        optimizer = MirrorDescent(
            model.parameters(), lr=0.05, potential=potential, step_size=step_size
        )
        X, y = (t.to(device) for t in data())
        closure = make_closure(model, optimizer, X, y)
        for _ in range(50):
            log_loss = optimizer.step(closure)
        results.append((log_loss.item(), [p.detach().cpu() for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-8)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
