"""Log-domain losses against torch's own losses, and far beyond where those underflow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from sklearn_mr2.mirror.losses import error_logits, log_losses, log_total_loss


def problem(seed, n=7, k=4, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    outputs = scale * torch.randn(n, k, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(max(k, 2), (n,), generator=generator)


@given(st.integers(0, 10**6), st.integers(2, 6), st.sampled_from([0.1, 3.0, 30.0]))
def test_multiclass_logistic_is_cross_entropy(seed, k, scale):
    outputs, targets = problem(seed, k=k, scale=scale)
    expected = F.cross_entropy(outputs, targets, reduction="none")
    # torch's cross-entropy of a well classified sample is only exact to eps in absolute terms.
    actual = log_losses(outputs, targets).exp()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@given(st.integers(0, 10**6), st.sampled_from([0.1, 3.0, 30.0]))
def test_binary_losses(seed, scale):
    outputs, targets = problem(seed, k=1, scale=scale)
    expected = F.binary_cross_entropy_with_logits(outputs[:, 0], targets.double(), reduction="none")
    for f in (outputs, outputs[:, 0]):
        torch.testing.assert_close(log_losses(f, targets).exp(), expected, rtol=1e-12, atol=1e-13)
        exponential = torch.exp(-(2.0 * targets - 1) * outputs[:, 0])
        torch.testing.assert_close(log_losses(f, targets, "exponential").exp(), exponential)
    two = torch.cat([torch.zeros_like(outputs), outputs], dim=1)
    torch.testing.assert_close(error_logits(two, targets), error_logits(outputs, targets))


def test_error_logit_is_the_logit_of_the_error_probability():
    outputs, targets = problem(0)
    error = 1 - torch.softmax(outputs, 1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(error_logits(outputs, targets), torch.logit(error))


@given(st.integers(0, 10**6), st.sampled_from(["logistic", "exponential"]))
def test_total_loss_and_its_gradient(seed, loss):
    outputs, targets = problem(seed)
    weight = torch.rand(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    outputs.requires_grad_()
    log_total = log_total_loss(outputs, targets, loss, weight)
    (gradient,) = torch.autograd.grad(log_total, outputs)
    if loss == "logistic":
        direct = (weight * F.cross_entropy(outputs, targets, reduction="none")).sum()
    else:
        x = outputs - outputs.gather(1, targets[:, None])
        direct = (weight * (x.exp().sum(1) - 1)).sum()
    torch.testing.assert_close(log_total.exp(), direct)
    (expected,) = torch.autograd.grad(direct.log(), outputs)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [20.0, 29.999, 30.001, 200.0, 1e6])
def test_tiny_losses_keep_their_logarithm_and_gradient(dtype, margin):
    f = torch.tensor([[margin, 0.0], [margin, 0.0]], dtype=dtype, requires_grad=True)
    value = log_total_loss(f, torch.tensor([0, 0]))
    (gradient,) = torch.autograd.grad(value, f)
    expected = -margin + torch.log(torch.tensor(2.0, dtype=dtype))
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=0)
    half = torch.tensor([[-0.5, 0.5]] * 2, dtype=dtype)
    torch.testing.assert_close(gradient, half, rtol=1e-6, atol=0)


def test_the_tail_joins_smoothly_in_float64():
    f = torch.tensor([30 - 1e-9, 30 + 1e-9], dtype=torch.float64, requires_grad=True)
    values = log_losses(f, torch.tensor([1, 1]))
    (slopes,) = torch.autograd.grad(values.sum(), f)
    values = values.detach()
    assert float((values[0] - values[1]) / 2e-9) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(slopes, torch.full_like(slopes, -1.0), rtol=0, atol=1e-12)


def test_badly_misclassified_samples():
    f = torch.tensor([1e4, -1e4], requires_grad=True)
    value = log_total_loss(f, torch.tensor([0, 1]))
    (gradient,) = torch.autograd.grad(value, f)
    assert value.item() == pytest.approx(9.9035, rel=1e-4)  # log(2e4)
    torch.testing.assert_close(gradient, torch.tensor([5e-5, -5e-5]))


@pytest.mark.parametrize("loss", ["logistic", "exponential"])
def test_weights_are_repetitions_and_zero_weight_is_absence(loss):
    outputs, targets = problem(3)
    weight = torch.tensor([0, 1, 2, 1, 3, 1, 0])
    repeated = torch.repeat_interleave(torch.arange(7), weight)
    a = outputs.clone().requires_grad_()
    b = outputs.clone().requires_grad_()
    weighted = log_total_loss(a, targets, loss, weight)
    plain = log_total_loss(b[repeated], targets[repeated], loss)
    torch.testing.assert_close(weighted, plain)
    torch.testing.assert_close(
        *(torch.autograd.grad(v, t)[0] for v, t in ((weighted, a), (plain, b)))
    )


def test_bad_input():
    with pytest.raises(ValueError, match="outputs must have shape"):
        error_logits(torch.zeros(3, 2), torch.zeros(2))
    with pytest.raises(ValueError, match="loss must be one of"):
        log_losses(torch.zeros(3, 2), torch.zeros(3), "hinge")
