"""The heads against scikit-learn's solver, loops and closed forms."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F

from sklearn_mr2.mr2.heads import CosineHead, LinearHead
from sklearn_mr2.mr2.losses import LogitMarginLoss


def make_data(n=90, n_features=4, n_classes=3):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % n_classes
    features = torch.randn(n, n_features, generator=generator, dtype=torch.float64)
    weight = torch.randint(0, 4, (n,), generator=generator).double()
    return features + 0.5 * y[:, None], y, weight


# ---------------------------------------------------------------- linear


@pytest.mark.parametrize("n_classes", [3, 7])
def test_linear_head_is_a_linear_layer(n_classes):
    features, _, _ = make_data()
    head, layer = LinearHead(4, n_classes).double(), nn.Linear(4, n_classes).double()
    head.load_state_dict(layer.state_dict())
    assert torch.equal(head(features), layer(features))


@pytest.mark.parametrize("bias", [True, False])
def test_two_classes_share_one_row(bias):
    features, _, _ = make_data()
    head = LinearHead(4, 2, bias=bias, dtype=torch.float64)
    assert head.weight.shape == (1, 4)
    nn.init.uniform_(head.weight, generator=torch.Generator().manual_seed(0))
    if bias:
        nn.init.constant_(head.bias, 0.3)
    logits = head(features)
    assert not logits[:, 0].any()
    expected = features @ head.weight[0] + (0.3 if bias else 0)
    torch.testing.assert_close(logits[:, 1], expected)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_margin_1_is_logistic_regression(n_classes, weighted, bias):
    """(1 / sum w) [sum_i w_i l_i + ||W||^2 / (2 C)], the intercept not penalised."""
    features, y, weight = make_data(n_classes=n_classes)
    weight = weight if weighted else torch.ones_like(weight)
    C = 0.5
    reference = LogisticRegression(C=C, tol=1e-12, max_iter=10_000, fit_intercept=bias)
    reference.fit(features.numpy(), y.numpy(), sample_weight=weight.numpy())

    head = LinearHead(4, n_classes, bias=bias, dtype=torch.float64)
    loss, margins = LogitMarginLoss(reduction="sum"), torch.ones(n_classes)
    optimizer = torch.optim.LBFGS(
        head.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        penalty = head.weight.square().sum() / (2 * C)
        objective = (loss(head(features), y, margins, weight) + penalty) / weight.sum()
        objective.backward()
        return objective

    optimizer.step(closure)
    np.testing.assert_allclose(head.weight.detach(), reference.coef_, atol=1e-6)
    with torch.no_grad():
        probability = head(features).softmax(dim=1)
    np.testing.assert_allclose(probability, reference.predict_proba(features.numpy()), atol=1e-6)


def test_linear_head_starts_at_zero_and_is_reset():
    head = LinearHead(3, 4)
    assert not any(parameter.any() for parameter in head.parameters())
    nn.init.ones_(head.weight)
    nn.init.ones_(head.bias)
    head.reset_parameters()
    assert not any(parameter.any() for parameter in head.parameters())


def test_linear_head_gets_a_gradient_from_zero():
    features, y, _ = make_data()
    head = LinearHead(4, 3, dtype=torch.float64)
    F.cross_entropy(head(features), y).backward()
    assert head.weight.grad.abs().sum() > 0.01


@pytest.mark.parametrize("n_classes", [2, 5])
def test_linear_head_of_any_rank_dtype_and_device(n_classes):
    assert LinearHead(3, n_classes)(torch.zeros(2, 6, 3)).shape == (2, 6, n_classes)
    assert LinearHead(3, n_classes, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert LinearHead(3, n_classes, device="meta").bias.is_meta
    assert LinearHead(3, n_classes, bias=False).bias is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert LinearHead(3, n_classes)(torch.zeros(2, 3)).dtype == torch.bfloat16


@pytest.mark.parametrize("n_classes", [2, 3])
def test_linear_head_gradcheck(n_classes):
    head = LinearHead(2, n_classes, dtype=torch.float64)
    features = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    shapes = [parameter.shape for parameter in head.parameters()]

    def call(features, *parameters):
        named = dict(zip(["weight", "bias"], parameters, strict=True))
        return torch.func.functional_call(head, named, (features,))

    parameters = [torch.full(shape, 0.3, dtype=torch.float64).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(call, (features, *parameters))


@pytest.mark.parametrize("head", [LinearHead, CosineHead])
def test_sizes_are_checked(head):
    with pytest.raises(ValueError, match="n_classes=1"):
        head(3, 1)
    with pytest.raises(ValueError, match="in_features=0"):
        head(0, 2)


# ---------------------------------------------------------------- cosine


def loop_cosines(features, weight):
    """Independent: scalar arithmetic."""
    cosines = []
    for phi in features.tolist():
        row = []
        for w in weight.tolist():
            product = sum(a * b for a, b in zip(phi, w, strict=True))
            row.append(product / math.hypot(*phi) / math.hypot(*w))
        cosines.append(row)
    return cosines


@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("n_classes", [2, 5])
def test_cosine_head_equals_a_loop(learn_scale, n_classes):
    features, _, _ = make_data()
    head = CosineHead(4, n_classes, scale=7.0, learn_scale=learn_scale, dtype=torch.float64)
    with torch.no_grad():
        head.weight *= torch.linspace(0.5, 3, n_classes)[:, None]
        logits = head(features)
    np.testing.assert_allclose(logits, 7 * np.array(loop_cosines(features, head.weight)))


@given(st.floats(1e-6, 1e6), st.integers(0, 89))
def test_cosine_logits_ignore_norms_and_are_bounded(scale, row):
    features, _, _ = make_data()
    head = CosineHead(4, 3, dtype=torch.float64)
    with torch.no_grad():
        base = head(features[row])
        head.weight *= scale
        torch.testing.assert_close(head(scale * features[row]), base)
    assert (base.abs() <= 20 + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_norms_have_a_modest_gradient(dtype):
    head = CosineHead(3, 2, dtype=dtype)
    with torch.no_grad():
        head.weight[1] = 0
    features = torch.tensor([[0.0, 0, 0], [1, 2, 3]], dtype=dtype, requires_grad=True)
    logits = head(features)
    assert not logits[0].any()
    assert not logits[:, 1].any()
    logits.sum().backward()
    for gradient in (features.grad, head.weight.grad):
        assert gradient.isfinite().all()
        assert gradient.abs().max() <= 2 * 20


def test_cosine_gradcheck():
    head = CosineHead(3, 4, scale=2.0, learn_scale=True, dtype=torch.float64)
    features = torch.arange(1.0, 7, dtype=torch.float64).reshape(2, 3).requires_grad_()

    def call(features, weight, log_scale):
        named = {"weight": weight, "log_scale": log_scale}
        return torch.func.functional_call(head, named, (features,))

    parameters = (head.weight.detach().requires_grad_(), head.log_scale.detach().requires_grad_())
    assert torch.autograd.gradcheck(call, (features, *parameters))


def test_normalise():
    features = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e18, 0.0], [0.0, 1e-18]])
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(CosineHead(2, 2).normalise(features), expected)
    assert CosineHead(2, 2).normalise(features.reshape(2, 2, 2)).shape == (2, 2, 2)


def test_normalised_features_are_left_as_they_are():
    features = F.normalize(make_data()[0])
    torch.testing.assert_close(CosineHead(4, 3).double().normalise(features), features)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cosine_head_in_half_precision(dtype):
    """A norm of 300 has a square that float16 cannot hold."""
    features = (200 * make_data()[0]).to(dtype)
    head = CosineHead(4, 3)
    with torch.no_grad():
        expected = head(features.float())
        assert head.normalise(features).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(head(features).float(), expected, atol=0.5, rtol=0.05)
        half = head.to(dtype)(features)
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), expected, atol=0.5, rtol=0.05)


def test_initial_directions():
    state = torch.get_rng_state()
    head, same = CosineHead(16, 5), CosineHead(16, 5)
    seeded = CosineHead(16, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(head.weight, same.weight)
    assert not torch.equal(head.weight, seeded.weight)
    torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(5))
    assert torch.linalg.matrix_rank(head.weight) == 5
    head.reset_parameters(torch.Generator().manual_seed(1))
    assert torch.equal(head.weight, seeded.weight)


def test_scale_is_learned_only_if_asked():
    features, y, _ = make_data()
    features = features + 5 * F.one_hot(y, 4)  # separable: the larger the scale the better
    fixed = CosineHead(4, 3, scale=5.0)
    assert [name for name, _ in fixed.named_parameters()] == ["weight"]
    assert "log_scale" in fixed.state_dict()
    head = CosineHead(4, 3, scale=0.5, learn_scale=True, dtype=torch.float64)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(head(features), y).backward()
        optimizer.step()
    assert float(head.scale.detach()) > 1
    with torch.no_grad():
        head.log_scale -= 50
    assert float(head.scale.detach()) > 0


def test_default_scale_leaves_room():
    """With directions as far apart as they can be, p = 0.99 needs the documented scale."""
    for n_classes, needed in ((10, 6.1), (1000, 11.5)):
        scale = (n_classes - 1) / n_classes * math.log((n_classes - 1) * 0.99 / 0.01)
        assert scale == pytest.approx(needed, abs=0.05)
        # Simplex: cosines 1 and -1 / (K - 1).
        other = (n_classes - 1) * math.exp(-scale / (n_classes - 1))
        assert math.exp(scale) / (math.exp(scale) + other) == pytest.approx(0.99)
        assert float(CosineHead(2, 2).scale) > 1.7 * scale


def test_state_dict_and_deepcopy():
    features, _, _ = make_data()
    head = CosineHead(4, 3, scale=3.0, generator=torch.Generator().manual_seed(3)).double()
    other = CosineHead(4, 3).double()
    other.load_state_dict(head.state_dict())
    with torch.no_grad():
        assert torch.equal(head(features), other(features))
        assert torch.equal(head(features), copy.deepcopy(head)(features))
    assert CosineHead(4, 3, device="meta").weight.is_meta


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scale_is_checked(scale):
    with pytest.raises(ValueError, match="scale="):
        CosineHead(2, 2, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("head", [LinearHead, CosineHead])
def test_on_a_gpu(head):
    features, _, _ = make_data()
    on_cpu, on_gpu = head(4, 3, dtype=torch.float64), head(4, 3, dtype=torch.float64, device="cuda")
    assert torch.equal(on_cpu.weight, on_gpu.weight.cpu())
    torch.testing.assert_close(on_cpu(features), on_gpu(features.cuda()).cpu())


def test_cosine_head_with_bias():
    head = CosineHead(3, 4, scale=2.0, bias=True, dtype=torch.float64)
    assert not head.bias.any()
    features = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    without = head(features)
    with torch.no_grad():
        head.bias.copy_(torch.arange(4.0))
    torch.testing.assert_close(head(features), without + torch.arange(4.0))
    head.reset_parameters()
    assert not head.bias.any()


def test_linear_head_starts_random_with_a_generator():
    def draw(seed):
        return LinearHead(400, 3, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(0).weight, draw(0).weight)
    assert not torch.equal(draw(0).weight, draw(1).weight)
    assert draw(0).weight.abs().max() <= 1 / 20
    assert draw(0).weight.std().item() == pytest.approx(1 / 20 / 3**0.5, rel=0.05)
    assert not draw(0).bias.any()
    assert not LinearHead(400, 3).weight.any()
