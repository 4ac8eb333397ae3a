"""The losses against loops, closed forms and scikit-learn's solver."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sklearn_mr2.mr2.heads import CosineHead, LinearHead
from sklearn_mr2.mr2.losses import LogitMarginLoss, MR2Loss, RepresentationMarginLoss
from sklearn_mr2.mr2.statistics import class_margins, class_moments

MODES = ["divide", "subtract"]


def make_batch(seed=0, n=12, n_features=3, n_classes=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    features = torch.randn(n, n_features, generator=generator, dtype=torch.float64)
    y = torch.randint(n_classes, (n,), generator=generator)
    weight = torch.randint(0, 4, (n,), generator=generator)
    return logits.to(dtype), (features * (1 + y[:, None])).to(dtype), y, weight.to(dtype)


# ---------------------------------------------------------------- logit margins


def loop_logit_loss(logits, y, margins, mode):
    """Independent: scalar arithmetic, one sample at a time."""
    losses = []
    for row, k in zip(logits.tolist(), y.tolist(), strict=True):
        if mode == "divide":
            row = [value / float(margins[k]) for value in row]
        else:
            row[k] -= float(margins[k])
        losses.append(math.log(sum(math.exp(value) for value in row)) - row[k])
    return losses


@given(st.integers(0, 1000), st.sampled_from(MODES))
def test_logit_loss_equals_a_loop(seed, mode):
    logits, _, y, weight = make_batch(seed)
    margins = torch.tensor([0.3, 1.0, 2.0, 0.7])
    expected = loop_logit_loss(logits, y, margins, mode)
    weighted = [w * value for w, value in zip(weight.tolist(), expected, strict=True)]
    for w, losses in ((None, expected), (weight, weighted)):
        none = LogitMarginLoss(mode, reduction="none")(logits, y, margins, w)
        assert none.tolist() == pytest.approx(losses, rel=1e-6)
        total = LogitMarginLoss(mode, reduction="sum")(logits, y, margins, w)
        assert float(total) == pytest.approx(sum(losses), rel=1e-6)
        mean = LogitMarginLoss(mode)(logits, y, margins, w)
        assert float(mean) == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.parametrize(("mode", "neutral"), [("divide", 1.0), ("subtract", 0.0)])
def test_neutral_margins_give_cross_entropy(mode, neutral):
    logits, _, y, _ = make_batch()
    logits.requires_grad_()
    loss = LogitMarginLoss(mode)(logits, y, torch.full((4,), neutral))
    expected = F.cross_entropy(logits, y)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_a_uniform_margin_is_a_temperature():
    logits, _, y, _ = make_batch()
    loss = LogitMarginLoss()(logits, y, torch.full((4,), 0.5))
    torch.testing.assert_close(loss, F.cross_entropy(2 * logits, y))


@pytest.mark.parametrize("mode", MODES)
def test_only_the_margin_of_the_own_class_acts(mode):
    """Neither vector scaling (a margin for each column) nor a margin of another class."""
    logits, _, y, _ = make_batch()
    loss = LogitMarginLoss(mode, reduction="none")
    base = loss(logits, y, torch.ones(4))
    changed = loss(logits, y, torch.tensor([1.0, 1.0, 2.0, 1.0]))
    assert torch.equal(base != changed, y == 2)


def test_gradient_is_largest_where_the_margin_meets_the_logits():
    """sigmoid(-m / g) / g, the pull on a logit difference m, peaks at m / g = 1.278 over g."""
    difference = 2.0
    logits = torch.tensor([[difference, 0.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0])
    ratios = torch.linspace(1.0, 1.6, 601, dtype=torch.float64)
    pulls = []
    for ratio in ratios:
        loss = LogitMarginLoss()(logits, y, torch.full((2,), difference / float(ratio)).double())
        pulls.append(-float(torch.autograd.grad(loss, logits)[0][0, 0]))
    assert float(ratios[int(np.argmax(pulls))]) == pytest.approx(1.278, abs=0.002)


def test_batches_are_unbiased_under_weights_of_mean_1():
    logits, _, y, weight = make_batch()
    weight, loss, margins = weight / weight.mean(), LogitMarginLoss(), torch.ones(4)
    whole = loss(logits, y, margins, weight)
    parts = [loss(logits[i], y[i], margins, weight[i]) for i in torch.arange(12).split(3)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)


def test_weight_is_repetition_of_the_logit_loss():
    logits, _, y, weight = make_batch()
    repeats, margins = weight.long(), torch.tensor([0.5, 1.0, 2.0, 1.5])
    loss = LogitMarginLoss(reduction="sum")
    repeated = loss(logits.repeat_interleave(repeats, 0), y.repeat_interleave(repeats), margins)
    torch.testing.assert_close(loss(logits, y, margins, weight), repeated)


@pytest.mark.parametrize("mode", MODES)
def test_logit_loss_gradcheck(mode):
    logits, _, y, weight = make_batch(n=5)
    margins = torch.tensor([0.5, 1.0, 2.0, 1.5], dtype=torch.float64, requires_grad=True)
    loss = LogitMarginLoss(mode)
    assert torch.autograd.gradcheck(
        lambda z: loss(z, y, margins.detach(), weight), logits.requires_grad_()
    )
    assert not loss(logits.detach(), y, margins).requires_grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logit_loss_dtypes(mode, dtype):
    logits, _, y, _ = make_batch(dtype=dtype)
    margins = torch.tensor([0.5, 1.0, 2.0, 1.5], dtype=torch.float64)
    loss = LogitMarginLoss(mode)(logits, y, margins)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    expected = LogitMarginLoss(mode)(logits.double(), y, margins)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e6, -1e6]], requires_grad=True)
    loss = LogitMarginLoss()(logits, torch.tensor([1]), torch.tensor([1.0, 0.01]))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2e8)
    assert logits.grad.isfinite().all()


def test_logit_loss_of_no_samples():
    empty = torch.zeros(0, 3, requires_grad=True)
    loss = LogitMarginLoss()(empty, torch.zeros(0, dtype=torch.int64), torch.ones(3))
    loss.backward()
    assert float(loss.detach()) == 0


def test_logit_loss_rejects():
    logits, _, y, _ = make_batch()
    with pytest.raises(ValueError, match=r"mode='ldam' must be one of \['divide', 'subtract'\]"):
        LogitMarginLoss("ldam")
    with pytest.raises(ValueError, match="reduction='average'"):
        LogitMarginLoss(reduction="average")
    with pytest.raises(ValueError, match="margins must have one entry for each of the 4"):
        LogitMarginLoss()(logits, y, torch.ones(5))
    with pytest.raises(ValueError, match="y must hold class codes as int64"):
        LogitMarginLoss()(logits, y.to(torch.uint8), torch.ones(4))
    with pytest.raises(ValueError, match="rows of logits"):
        LogitMarginLoss()(logits, y[:3], torch.ones(4))
    with pytest.raises(ValueError, match="logits must have one row"):
        LogitMarginLoss()(logits[0], y, torch.ones(4))


# ---------------------------------------------------------------- representation margin


def loop_representation(features, y, spread, tau=1.0, weight=None):
    """Independent: numpy, one pair at a time. Returns each anchor's weight, exponents and loss.

    A weight is that many literal copies, which see each other at distance 0.
    """
    features, y = np.asarray(features, dtype=float), y.tolist()
    weight = [1.0] * len(y) if weight is None else weight.tolist()
    anchors = []
    for i in range(len(y)):
        terms = []
        for j in range(len(y)):
            count = weight[j] if j != i else weight[i] - 1
            if y[i] == y[j] and count > 0:
                distance = ((features[i] - features[j]) ** 2).sum()
                terms.append(((distance - 2 * spread) / tau, count))
        if terms and weight[i] > 0:
            loss = tau * math.log(1 + sum(count * math.exp(u) for u, count in terms))
            anchors.append((weight[i], [u for u, _ in terms], loss))
    return anchors


def weighted_mean(anchors):
    total = sum(w for w, _, _ in anchors)
    return sum(w * loss for w, _, loss in anchors) / total if total else 0.0


@given(
    seed=st.integers(0, 1000),
    n_classes=st.integers(1, 6),
    spread=st.floats(0, 5),
    tau=st.sampled_from([0.5, 1.0, 3.0]),
    weighted=st.booleans(),
)
def test_representation_loss_equals_a_loop(seed, n_classes, spread, tau, weighted):
    _, features, y, weight = make_batch(seed, n_classes=n_classes)
    features, weight = features / 4, weight if weighted else None
    actual = RepresentationMarginLoss(tau)(features, y, spread, weight)
    expected = weighted_mean(loop_representation(features, y, spread, tau, weight))
    assert float(actual) == pytest.approx(expected, rel=1e-9)


@given(seed=st.integers(0, 1000), spread=st.floats(0, 5))
def test_representation_loss_is_bounded_by_the_hinge(seed, spread):
    """max(0, max u) <= l <= max(0, max u) + log(1 + #positives) for each anchor."""
    _, features, y, _ = make_batch(seed)
    anchors = loop_representation(features / 4, y, spread)
    hinges = [max(0.0, *exponents) for _, exponents, _ in anchors]
    slack = [math.log(1 + len(exponents)) for _, exponents, _ in anchors]
    loss = float(RepresentationMarginLoss()(features / 4, y, spread))
    assert np.mean(hinges) - 1e-9 <= loss <= np.mean(hinges) + np.mean(slack) + 1e-9


@pytest.mark.parametrize("offset", [0.0, 1e4, 0.1])
def test_a_collapsed_class(offset):
    """log(1 + #positives) at spread 0, with zero gradient."""
    features = torch.full((5, 7), offset, requires_grad=True)
    loss = RepresentationMarginLoss()(features, torch.zeros(5, dtype=torch.int64), 0.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(5))
    assert not features.grad.any()


@pytest.mark.parametrize("weight", [None, torch.ones(3), torch.zeros(3)])
def test_no_positive_gives_zero_and_no_gradient(weight):
    features = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = RepresentationMarginLoss()(features, torch.tensor([2, 0, 1]), 0.1, weight)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(features.grad, torch.zeros(3, 2))


def test_no_gradient_from_pairs_without_weight():
    features = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y, weight = torch.zeros(3, dtype=torch.int64), torch.tensor([1.0, 0.0, 0.0])
    loss = RepresentationMarginLoss()(features, y, 0.1, weight)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(features.grad, torch.zeros(3, 2))


def test_empty_batch():
    features = torch.zeros(0, 2, requires_grad=True)
    loss = RepresentationMarginLoss()(features, torch.zeros(0, dtype=torch.int64), 0.1)
    loss.backward()
    assert float(loss.detach()) == 0


@given(seed=st.integers(0, 1000), extra=st.integers(1, 20))
def test_samples_without_a_positive_do_not_count(seed, extra):
    _, features, y, _ = make_batch(seed)
    loss = RepresentationMarginLoss()
    more = torch.cat([features, torch.ones(extra, 3)])
    lone = torch.cat([y, 100 + torch.arange(extra)])
    order = torch.randperm(len(lone), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(loss(more[order], lone[order], 0.5), loss(features, y, 0.5))


def test_twice_the_mean_spread_is_the_mean_squared_distance():
    """Why the margin is 2 s_bar: over distinct pairs it is 2 n / (n - 1) ||s||^2."""
    _, features, _, _ = make_batch(n=9)
    squares = [float((a - b).square().sum()) for a, b in itertools.combinations(features, 2)]
    spread = class_moments(features, torch.zeros(9, dtype=torch.int64), 1).mean_spread
    assert np.mean(squares) == pytest.approx(2 * 9 / 8 * float(spread))


def test_mean_spread_matters():
    """With the spread at 0 there would be no margin."""
    _, features, y, _ = make_batch()
    losses = [float(RepresentationMarginLoss()(features, y, spread)) for spread in (0, 1, 5)]
    assert losses[0] > losses[1] + 0.5 > losses[2] + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_dimensions_and_distances_of_a_million(dtype):
    """At these distances the loss is the hinge itself."""
    generator = torch.Generator().manual_seed(0)
    features = (7 * torch.randn(16, 10_000, generator=generator, dtype=dtype)).requires_grad_()
    y = torch.arange(16) % 4
    loss = RepresentationMarginLoss()(features, y, 4.5e5)
    loss.backward()
    exact = torch.cdist(features.detach().double(), features.detach().double()).square()
    exponent = exact - 9e5
    hinge = [
        max(0.0, *(float(exponent[i, j]) for j in range(16) if j % 4 == i % 4 and j != i))
        for i in range(16)
    ]
    assert 1e4 < np.mean(hinge) < 1e6
    assert float(loss.detach()) == pytest.approx(np.mean(hinge), rel=1e-5)
    assert features.grad.isfinite().all()
    assert features.grad.any()


def test_large_common_offset_in_float32():
    """Squared norms are 1e9 here, distances about 1: the Gram matrix alone would lose them."""
    _, features, y, _ = make_batch(dtype=torch.float32)
    features = features / 4
    loss = RepresentationMarginLoss()
    moved = features + 1e4
    # What float32 keeps of the features after adding 1e4, taken in float64.
    expected = loss(moved.double() - 1e4, y, 0.1)
    assert float(loss(moved, y, 0.1)) == pytest.approx(float(expected), rel=1e-5)


@given(seed=st.integers(0, 1000))
def test_invariant_to_rigid_motion_and_order(seed):
    _, features, y, weight = make_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
    order = torch.randperm(12, generator=generator)
    loss = RepresentationMarginLoss()
    base = loss(features, y, 0.7, weight)
    torch.testing.assert_close(loss(features @ rotation + 5, y, 0.7, weight), base)
    torch.testing.assert_close(loss(features[order], y[order], 0.7, weight[order]), base)


@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 100))
def test_auto_tau_scales_with_the_features(seed, scale):
    _, features, y, _ = make_batch(seed)
    loss = RepresentationMarginLoss("auto")
    base = loss(features, y, 1.5)
    torch.testing.assert_close(loss(scale * features, y, scale**2 * 1.5), scale**2 * base)
    torch.testing.assert_close(base, RepresentationMarginLoss(1.5)(features, y, 1.5))


def test_auto_tau_of_no_spread_is_the_hinge():
    features = torch.tensor([[0.0], [3.0]], requires_grad=True)
    loss = RepresentationMarginLoss("auto")(features, torch.tensor([0, 0]), 0.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(9)
    assert features.grad.isfinite().all()


@pytest.mark.parametrize("tau", [1.0, "auto"])
@pytest.mark.parametrize("weighted", [False, True])
def test_representation_gradcheck(tau, weighted):
    _, features, y, weight = make_batch(n=8)
    features[1], y[1] = features[0], y[0]  # two copies: a distance of exactly 0
    y[2] = 3  # and one without another of its class
    y[y == 3] = torch.where(torch.arange(8)[y == 3] == 2, 3, 2)
    spread = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    loss = RepresentationMarginLoss(tau)
    assert torch.autograd.gradcheck(
        lambda x: loss(x, y, spread, weight if weighted else None), (features / 3).requires_grad_()
    )
    assert torch.autograd.gradgradcheck(
        lambda x: loss(x, y, spread, weight if weighted else None), (features / 3).requires_grad_()
    )
    assert not loss(features, y, spread).requires_grad


def test_weights_of_1_and_0():
    _, features, y, weight = make_batch()
    loss = RepresentationMarginLoss()
    torch.testing.assert_close(loss(features, y, 0.5, torch.ones(12)), loss(features, y, 0.5))
    keep = weight > 0
    torch.testing.assert_close(
        loss(features, y, 0.5, weight), loss(features[keep], y[keep], 0.5, weight[keep])
    )


@pytest.mark.parametrize("tau", [1.0, "auto"])
def test_weight_is_repetition_of_the_representation_loss(tau):
    _, features, y, _ = make_batch(3)
    count = torch.randint(0, 4, y.shape, generator=torch.Generator().manual_seed(0))
    loss = RepresentationMarginLoss(tau)
    weighted = loss(features / 4, y, 0.7, count.to(features.dtype))
    rows = torch.arange(len(y)).repeat_interleave(count)
    repeated = loss(features[rows] / 4, y[rows], 0.7)
    assert float(weighted) == pytest.approx(float(repeated), rel=1e-10)


def test_weight_scale_turns_weights_into_copies():
    logits, features, y, weight = make_batch(3)
    loss = MR2Loss(
        int(y.max()) + 1, features.shape[1], representation_weight=0.5, tau="auto"
    ).double()
    loss.running.update(features, y)
    loss.eval()
    loss.weight_scale = 2.5
    by_hand = loss.logit_loss(logits[:, : int(y.max()) + 1], y, loss.margins, weight)
    by_hand += 0.5 * loss.representation_loss(features, y, loss.moments.mean_spread, 2.5 * weight)
    actual = loss(logits[:, : int(y.max()) + 1], features, y, weight)
    assert float(actual) == pytest.approx(float(by_hand), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_representation_loss_in_half_precision(dtype):
    _, features, y, weight = make_batch()
    features = (100 * features).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = RepresentationMarginLoss()(features, y, 1e3, weight)
    loss.backward()
    expected = RepresentationMarginLoss()(features.detach().double(), y, 1e3, weight)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    assert features.grad.isfinite().all()


def test_representation_loss_rejects():
    _, features, y, _ = make_batch()
    for tau in (0, -1, math.inf, math.nan, "automatic", None):
        with pytest.raises(ValueError, match="tau="):
            RepresentationMarginLoss(tau)
    with pytest.raises(ValueError, match="features must have one row"):
        RepresentationMarginLoss()(features[0], y, 1.0)
    with pytest.raises(ValueError, match="sample_weight must have"):
        RepresentationMarginLoss()(features, y, 1.0, torch.ones(3))


# ---------------------------------------------------------------- both together


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [2, 3])
@pytest.mark.parametrize("statistic", ["second_moment", "dispersion"])
def test_first_batch_by_its_parts(mode, norm, statistic):
    logits, features, y, weight = make_batch(n=40)
    weight = weight + 1
    criterion = MR2Loss(
        4, 3, margin=0.7, margin_statistic=statistic, margin_mode=mode, margin_norm=norm,
        representation_weight=0.3, tau=2.0,
    ).double()  # fmt: skip
    loss = criterion(logits, features, y, weight)
    moments = class_moments(features, y, 4, weight, norm=norm)
    margins = class_margins(getattr(moments, statistic), 0.7)
    torch.testing.assert_close(criterion.margins, margins)
    expected = LogitMarginLoss(mode)(logits, y, margins, weight)
    expected += 0.3 * RepresentationMarginLoss(2.0)(features, y, moments.mean_spread, weight)
    torch.testing.assert_close(loss, expected)


def test_norm_is_not_fixed():
    _, features, y, _ = make_batch(n=40)
    margins = []
    for norm in (2, 3, 5):
        criterion = MR2Loss(4, 3, margin_norm=norm)
        criterion(torch.zeros(40, 4), features.float(), y)
        margins.append(criterion.margins)
    assert not any(torch.allclose(a, b) for a, b in itertools.combinations(margins, 2))


@pytest.mark.parametrize("n_classes", [2, 3, 1500])
def test_any_number_of_classes(n_classes):
    _, features, _, _ = make_batch()
    y = torch.arange(12) % n_classes
    criterion = MR2Loss(n_classes, 3, representation_weight=0.1)
    loss = criterion(torch.zeros(12, n_classes), features.float(), y)
    assert loss.isfinite()
    assert criterion.margins.shape == (n_classes,)


def test_without_margins_and_representation_it_is_cross_entropy():
    logits, features, y, _ = make_batch()
    loss = MR2Loss(4, 3, margin_exponent=0.0)(logits, features, y)
    torch.testing.assert_close(loss, F.cross_entropy(logits, y))


def test_classes_not_seen_do_not_inflate_margins():
    _, features, _, _ = make_batch()
    y = torch.arange(12) % 2
    criterion = MR2Loss(1000, 3, margin=0.5)
    criterion(torch.zeros(12, 1000), features.float(), y)
    assert float(criterion.margins[:2].mean()) == pytest.approx(0.5)
    assert (criterion.margins[2:] == 0.5).all()


def test_mean_spread_is_not_reset():
    criterion = MR2Loss(4, 3, representation_weight=1.0)
    for seed in range(5):
        logits, features, y, _ = make_batch(seed, n=40, dtype=torch.float32)
        criterion(logits, features, y)
        expected = class_moments(features, y, 4).mean_spread
        assert float(criterion.moments.mean_spread) == pytest.approx(float(expected), rel=0.5)


def test_evaluation_uses_the_statistics_and_leaves_them():
    logits, features, y, _ = make_batch()
    criterion = MR2Loss(4, 3, representation_weight=0.1).double()
    criterion(logits, features, y)
    before = copy.deepcopy(criterion.state_dict())
    criterion.eval()
    loss = criterion(logits, 10 * features, y)
    moments = criterion.moments
    expected = LogitMarginLoss()(logits, y, class_margins(moments.second_moment))
    expected += 0.1 * RepresentationMarginLoss()(10 * features, y, moments.mean_spread)
    torch.testing.assert_close(loss, expected)
    after = criterion.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before if key != "given_spread")


def test_evaluation_before_training_is_cross_entropy():
    logits, features, y, _ = make_batch()
    torch.testing.assert_close(
        MR2Loss(4, 3).eval()(logits, features, y), F.cross_entropy(logits, y)
    )


def test_statistics_are_constants_for_the_gradient():
    logits, features, y, _ = make_batch()
    features.requires_grad_()
    criterion = MR2Loss(4, 3, representation_weight=0.1, momentum=0.0).double()
    (gradient,) = torch.autograd.grad(criterion(logits, features, y), features)
    spread = float(class_moments(features.detach(), y, 4).mean_spread)
    loss = 0.1 * RepresentationMarginLoss()(features, y, spread)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, features)[0])


def test_margins_without_representation_give_the_features_no_other_gradient():
    _, features, y, _ = make_batch()
    features.requires_grad_()
    head = LinearHead(3, 4).double()
    nn.init.ones_(head.weight)
    criterion = MR2Loss(4, 3).double()
    loss = criterion(head(features), features, y)
    margins = criterion.margins
    (gradient,) = torch.autograd.grad(loss, features)
    expected = torch.autograd.grad(LogitMarginLoss()(head(features), y, margins), features)[0]
    torch.testing.assert_close(gradient, expected)


def test_class_errors_as_the_statistic():
    logits, features, y, _ = make_batch()
    criterion = MR2Loss(4, 3, margin_statistic="error", margin_exponent=1.0, margin=2.0)
    criterion(logits, features, y)
    assert criterion.margins.tolist() == [2.0] * 4  # equal as long as no errors are known
    criterion.set_class_spread(torch.tensor([0.1, 0.2, 0.3, torch.nan]))
    loss = criterion(logits, features, y)
    assert criterion.margins.tolist() == pytest.approx([1.0, 2.0, 3.0, 2.0])
    expected = LogitMarginLoss()(logits, y, torch.tensor([1.0, 2.0, 3.0, 2.0]))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_given_spread_replaces_the_running_one_until_taken_back():
    logits, features, y, _ = make_batch()
    criterion = MR2Loss(4, 3)
    criterion(logits, features, y)
    running = criterion.margins
    criterion.set_class_spread(torch.tensor([1.0, 8.0, 1.0, 8.0]))
    criterion(logits, features, y)
    assert criterion.margins.tolist() == pytest.approx([2 / 3, 4 / 3] * 2)
    criterion.set_class_spread(None)
    torch.testing.assert_close(criterion.margins, running)


@pytest.mark.parametrize("mode", MODES)
def test_a_class_without_error(mode):
    """With "divide" its margin must not be 0; with "subtract" 0 is what was asked for."""
    criterion = MR2Loss(3, 1, margin_statistic="error", margin_exponent=1.0, margin_mode=mode)
    criterion.set_class_spread(torch.tensor([0.0, 0.2, 0.2]))
    assert float(criterion.margins.mean()) == pytest.approx(1)
    assert (float(criterion.margins[0]) > 0.09) == (mode == "divide")
    assert (float(criterion.margins[0]) == 0) == (mode == "subtract")


@pytest.mark.parametrize("offset", [0.0, 0.1, 1e3])
def test_one_sample_has_no_dispersion_to_judge_by(offset):
    features = torch.tensor([[0.0], [1.0], [0.0], [3.0], [5.0]]) + offset
    y = torch.tensor([0, 0, 1, 1, 2])
    criterion = MR2Loss(3, 1, margin_statistic="dispersion", margin_exponent=1.0)
    criterion(torch.zeros(5, 3), features, y)
    assert criterion.margins.tolist() == pytest.approx([0.2, 1.8, 1.0], rel=1e-3)


def test_cosine_features_need_another_norm():
    features = F.normalize(make_batch(n=40, dtype=torch.float32)[1])
    y = make_batch(n=40)[2]
    for norm in (2, 3):
        criterion = MR2Loss(4, 3, margin=0.8, margin_norm=norm)
        criterion(torch.zeros(40, 4), features, y)
        assert torch.allclose(criterion.margins, torch.tensor(0.8)) == (norm == 2)


def train(criterion, head, steps=60, autocast=False, compiled=False, n_classes=5):
    """A bare torch loop on overlapping clusters; accuracy before and after, and the last loss."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(300) % n_classes
    centres = 2 * torch.randn(n_classes, 6, generator=generator)
    X = centres[y] + (0.3 + 0.3 * y[:, None]) * torch.randn(300, 6, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16))
    transform = getattr(head, "normalise", nn.Identity())
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=0.01)
    call = torch.compile(criterion, backend="eager", fullgraph=True) if compiled else criterion

    def accuracy():
        with torch.no_grad():
            return float((head(backbone(X)).argmax(1) == y).float().mean())

    before = accuracy()
    for _ in range(steps):
        rows = torch.randint(300, (50,), generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            features = transform(backbone(X[rows]))
            loss = call(head(features), features, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.isfinite()
    return before, accuracy(), loss.detach()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tau", [1.0, "auto"])
def test_a_bare_training_loop(mode, autocast, tau):
    criterion = MR2Loss(5, 16, margin_mode=mode, representation_weight=0.01, tau=tau)
    before, after, loss = train(criterion, LinearHead(16, 5), autocast=autocast)
    assert loss.dtype == torch.float32
    assert before < 0.3
    assert after > 0.9
    assert float(criterion.margins.mean()) == pytest.approx(1, rel=1e-6)
    assert criterion.running.mean.dtype == torch.float32


def test_a_bare_training_loop_with_a_cosine_head():
    criterion = MR2Loss(5, 16, margin_norm=3, representation_weight=0.01, tau="auto")
    _, after, _ = train(criterion, CosineHead(16, 5, learn_scale=True))
    assert after > 0.9
    assert float(criterion.margins.std()) > 1e-3


@pytest.mark.parametrize("tau", [0.02, "auto"])
def test_the_representation_loss_brings_pairs_within_the_margin(tau):
    """Samples moved freely end within about 2 s_bar of each other; a sharp loss then lets go."""
    _, features, y, _ = make_batch(n=40)
    features, spread = features.requires_grad_(), 0.5
    optimizer = torch.optim.SGD([features], lr=0.2)
    same = (y[:, None] == y) & ~torch.eye(40, dtype=torch.bool)

    def distances():
        points = features.detach()
        return torch.cdist(points, points).square()[same]

    assert float(distances().max()) > 20
    for _ in range(300):
        optimizer.zero_grad()
        RepresentationMarginLoss(tau)(features, y, spread).backward()
        optimizer.step()
    assert float(distances().max()) < 1.2 * 2 * spread
    if tau != "auto":
        assert float(distances().mean()) > 0.3 * 2 * spread


def test_compiled_without_a_graph_break_trains_the_same():
    results = []
    for compiled in (False, True):
        criterion = MR2Loss(5, 16, representation_weight=0.1, tau="auto")
        results.append(train(criterion, LinearHead(16, 5), steps=5, compiled=compiled)[2])
    torch.testing.assert_close(*results)


def test_training_is_deterministic_and_uses_no_global_random_state():
    state = torch.get_rng_state()
    first, second = (
        train(MR2Loss(5, 16, representation_weight=0.1), LinearHead(16, 5), steps=10)[2]
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "copy_of",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["deepcopy", "pickle"],
)
def test_copies_continue_the_same(copy_of):
    logits, features, y, _ = make_batch()
    criterion = MR2Loss(4, 3, margin_mode="subtract", representation_weight=0.1)
    criterion(logits, features, y)
    other = copy_of(criterion)
    assert torch.equal(criterion(logits, 2 * features, y), other(logits, 2 * features, y))
    assert torch.equal(criterion.margins, other.margins)


def test_state_dict_round_trip():
    logits, features, y, _ = make_batch()
    criterion = MR2Loss(4, 3, representation_weight=0.1)
    criterion(logits, features, y)
    criterion.set_class_spread(torch.tensor([1.0, torch.nan, 2.0, torch.nan]))
    other = MR2Loss(4, 3, representation_weight=0.1)
    other.load_state_dict(criterion.state_dict())
    assert torch.equal(criterion.margins, other.margins)
    assert torch.equal(criterion(logits, 2 * features, y), other(logits, 2 * features, y))
    assert not list(criterion.parameters())


def test_one_broken_batch_does_not_spoil_the_statistics():
    logits, features, y, _ = make_batch(dtype=torch.float32)
    criterion = MR2Loss(4, 3, representation_weight=0.1)
    criterion(logits, features, y)
    assert not criterion(logits, features * torch.nan, y).isfinite()
    assert criterion.margins.isfinite().all()
    assert criterion(logits, features, y).isfinite()


def test_half_casts_keep_the_statistics():
    logits, features, y, _ = make_batch(dtype=torch.float32)
    criterion = MR2Loss(4, 3)
    criterion(logits, features, y)
    criterion.set_class_spread(torch.tensor([1.0, 2.0, 3.0, 4.0]) / 3)
    margins = criterion.margins
    assert torch.equal(criterion.half().margins, margins)


def test_hard_cases_stay_finite():
    """One class in the batch; one sample; collapsed features; all zero; 10,000 dimensions."""
    zero, one = torch.zeros(4, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for statistic, mode in itertools.product(["second_moment", "dispersion"], MODES):
        criterion = MR2Loss(
            3, 10_000, margin_statistic=statistic, margin_mode=mode, representation_weight=1.0,
            tau="auto",
        )  # fmt: skip
        for features, y in (
            (torch.zeros(4, 10_000), zero),
            (torch.ones(1, 10_000), one),
            (torch.ones(4, 10_000), zero),
            (10 * torch.randn(4, 10_000, generator=generator), zero),
        ):
            features.requires_grad_()
            loss = criterion(features[:, :3].clone(), features, y)
            loss.backward()
            assert loss.isfinite()
            assert features.grad.isfinite().all()
            assert criterion.margins.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"margin": 0.0}, "mean_margin"),
        ({"margin_exponent": -1.0}, "exponent"),
        ({"margin_statistic": "variance"}, "margin_statistic='variance' must be one of"),
        ({"margin_mode": "add"}, "margin_mode='add'"),
        ({"margin_norm": 0.5}, "norm"),
        ({"representation_weight": -1.0}, "representation_weight"),
        ({"representation_weight": math.nan}, "representation_weight"),
        ({"tau": 0.0}, "tau"),
        ({"momentum": 1.0}, "momentum"),
    ],
)
def test_mr2_loss_rejects(arguments, message):
    with pytest.raises(ValueError, match=message):
        MR2Loss(3, 2, **arguments)


def test_class_spread_is_checked():
    criterion = MR2Loss(3, 2)
    with pytest.raises(ValueError, match="each of the 3 classes"):
        criterion.set_class_spread(torch.ones(2))
    with pytest.raises(ValueError, match="negative"):
        criterion.set_class_spread(torch.tensor([1.0, -1.0, 1.0]))


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu(autocast):
    logits, features, y, weight = make_batch(n=40, dtype=torch.float32)
    losses = []
    for device in ("cpu", "cuda"):
        criterion = MR2Loss(4, 3, representation_weight=0.1, tau="auto").to(device)
        batch = [tensor.to(device) for tensor in (logits, features, y, weight)]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            losses.append(criterion(*batch).cpu())
    torch.testing.assert_close(*losses)


@given(
    share=st.floats(0.2, 0.8),
    first=st.floats(0, 5),
    second=st.floats(0, 5),
)
def test_subtracted_margins_favour_a_class_by_less_than_two_to_one(share, first, second):
    """Of two classes the first wins where its share times sigmoid(margin) is the larger one."""
    margins = torch.tensor([first, second], dtype=torch.float64)
    weight = torch.tensor([share, 1 - share], dtype=torch.float64)
    loss = LogitMarginLoss("subtract", reduction="sum")
    logit = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    logits = torch.cat((logit, torch.zeros_like(logit)), 1)
    loss(logits, torch.tensor([0, 1]), margins, weight).backward()
    # Convex in the common logit of the first class: the sign of the slope at 0 is the decision.
    slope = logit.grad.sum().item()
    advantage = weight * margins.sigmoid()
    assert slope == pytest.approx((advantage[1] - advantage[0]).item(), abs=1e-12)
    assert 0.5 < (margins[0].sigmoid() / margins[1].sigmoid()).item() < 2
