"""Homogeneous networks and the check that finds what is not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sklearn_mr2.mirror.networks import (
    HomogeneityError,
    HomogeneousCNN,
    HomogeneousMLP,
    homogeneity_degree,
    layer_groups,
)
from sklearn_mr2.mirror.optimizer import MirrorDescent
from sklearn_mr2.mirror.potentials import Euclidean, HyperbolicEntropy, Power


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(n=4, channels=1, size=12):
    return torch.randn(n, channels, size, size, generator=seeded())


X = torch.randn(6, 4, generator=seeded())


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("hidden", [(), (7,), (7, 5), (8, 8, 8, 8)])
def test_mlp(hidden, fit_intercept):
    network = HomogeneousMLP(4, hidden, 3, fit_intercept=fit_intercept, generator=seeded())
    assert network(X).shape == (6, 3)
    assert homogeneity_degree(network, X) == len(hidden) + 1
    biases = [name for name, _ in network.named_parameters() if name.endswith("bias")]
    first = "hidden1.bias" if hidden else "output.bias"
    assert biases == ([first] if fit_intercept else [])


def test_mlp_is_the_formula():
    network = HomogeneousMLP(4, (5,), 2, generator=seeded()).double()
    with torch.no_grad():
        network.hidden1.bias.uniform_(-1, 1, generator=seeded())
    W, b, A = (p.detach() for p in network.parameters())
    x = X.double()
    torch.testing.assert_close(network(x), (x @ W.T + b).relu() @ A.T)


@pytest.mark.parametrize(
    ("options", "degree"),
    [
        ({}, 7),
        ({"pooling": "average"}, 7),
        ({"block_channels": (4,), "convolutions_per_block": 1, "fit_intercept": False}, 2),
        ({"block_channels": (4, 4), "hidden_layer_sizes": (6,)}, 6),
    ],
)
def test_cnn(options, degree):
    options = {"block_channels": (4, 6, 8), **options}
    network = HomogeneousCNN(1, 5, **options, generator=seeded())
    assert network(images()).shape == (4, 5)
    assert homogeneity_degree(network, images()) == degree
    biases = [name for name, _ in network.named_parameters() if name.endswith("bias")]
    assert biases == (["conv1_1.bias"] if options.get("fit_intercept", True) else [])


def test_he_initialisation_keeps_activations_of_wide_and_deep_networks():
    network = HomogeneousMLP(256, (4096, 1024, 512), 256, generator=seeded())
    x = torch.randn(64, 256, generator=seeded(1))
    sizes = []
    for layer in network:
        x = layer(x)
        if isinstance(layer, nn.ReLU):
            sizes.append(x.square().mean().item())
    assert all(0.8 < size < 1.2 for size in sizes)
    assert 0.8 < x.square().mean() < 1.2


def test_other_initialisations():
    assert not any(p.any() for p in HomogeneousMLP(4, (), weight_init="zeros").parameters())
    network = HomogeneousMLP(100, (100,), 50, weight_init=0.3, generator=seeded())
    for p in (network.hidden1.weight, network.output.weight):
        assert p.std().item() == pytest.approx(0.3, rel=0.05)


def test_randomness_comes_from_the_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    a = HomogeneousMLP(4, (5,), generator=seeded(3))
    HomogeneousCNN(1, 2, generator=seeded(3))
    homogeneity_degree(a, X)
    assert torch.equal(torch.get_rng_state(), before)
    b = HomogeneousMLP(4, (5,), generator=seeded(3))
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: HomogeneousMLP(4, (5,), weight_init="zeros"), "is for the linear model"),
        (lambda: HomogeneousMLP(4, (5,), weight_init="xavier"), "weight_init must be"),
        (lambda: HomogeneousCNN(1, 2, pooling="min"), "pooling must be one of"),
        (lambda: HomogeneousCNN(1, 2, block_channels=()), "at least one block"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()


class Residual(nn.Module):
    """Adds an input of degree 0 to one of degree 2."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.c = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.c(x + self.b(self.a(x).relu()))


class Parallel(Residual):
    """Adds two inputs of degree 1."""

    def forward(self, x):
        return self.c(self.a(x) + self.b(x).abs())


class SoftmaxAtTheEnd(Residual):
    def forward(self, x):
        return F.softmax(self.c(self.a(x)), dim=1)


def relu(*layers):
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("network", "layer", "words"),
    [
        (relu(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), "2", "bias=False"),
        (
            relu(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2, False)),
            "2",
            "first layer only",
        ),
        (relu(nn.Linear(4, 5, False), nn.BatchNorm1d(5), nn.Linear(5, 2, False)), "1", "Normalis"),
        (
            relu(nn.Linear(4, 5, False), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 2, False)),
            "1",
            "Normalis",
        ),
        (relu(nn.Linear(4, 5, False), nn.LayerNorm(5), nn.Linear(5, 2, False)), "1", "Normalis"),
        (relu(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2, False)), "1", "positively homogeneous"),
        (relu(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2, False)), "1", "positively homogeneous"),
        (Residual(), "c", "between layers 'b' and 'c' adds terms"),
        (SoftmaxAtTheEnd(), "c", "after layer 'c'"),
    ],
)
def test_the_layer_that_breaks_homogeneity_is_named(network, layer, words):
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name.endswith("bias"):
                p.zero_()  # homogeneous here, but nowhere near
    with pytest.raises(HomogeneityError, match=words) as caught:
        homogeneity_degree(network, X)
    assert caught.value.layer == layer


def test_named_inside_nested_modules():
    network = nn.Sequential()
    network.add_module("body", nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5)))
    network.add_module("head", nn.Linear(5, 2, bias=False))
    with pytest.raises(HomogeneityError, match=r"layer 'body\.2' \(Linear\)"):
        homogeneity_degree(network, X)


@pytest.mark.parametrize(
    ("network", "degree"),
    [
        (Parallel(), 2),
        (relu(nn.Linear(4, 5), nn.LeakyReLU(0.1), nn.Dropout(0.5), nn.Linear(5, 2, False)), 2),
        (relu(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2, False)), 2),
        (nn.Linear(4, 1), 1),
    ],
)
def test_other_homogeneous_networks(network, degree):
    assert homogeneity_degree(network, X) == degree


def test_frozen_layers_are_features():
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    network[0].requires_grad_(False)
    assert homogeneity_degree(network, X) == 1
    network.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        homogeneity_degree(network, X)


def test_fractional_degree():
    class Root(nn.Linear):
        def forward(self, x):
            return super().forward(x).abs().sqrt()

    assert homogeneity_degree(Root(4, 2), X) == pytest.approx(0.5)


def test_no_growth():
    with pytest.raises(HomogeneityError, match="do not grow"):
        homogeneity_degree(nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(-1e-9, 1e-9)), X)


def test_all_outputs_zero():
    with pytest.raises(ValueError, match="all outputs of the module are zero"):
        homogeneity_degree(HomogeneousMLP(4, (3,), fit_intercept=False), torch.zeros(2, 4))


def test_the_users_module_is_left_alone():
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    state = copy.deepcopy(network.state_dict())
    with pytest.raises(HomogeneityError):
        homogeneity_degree(network, X)
    assert network.training
    assert network[0].weight.dtype == torch.float32
    assert not network[0]._forward_hooks
    for name, value in network.state_dict().items():
        assert torch.equal(value, state[name])


class TestLayerGroups:
    network = HomogeneousMLP(4, (5, 6), 2, generator=seeded())

    def test_one_potential_for_all(self):
        groups = layer_groups(self.network, "euclidean")
        assert [g["name"] for g in groups] == ["hidden1", "hidden2", "output"]
        assert all(g["potential"] == Euclidean() for g in groups)
        assert [len(g["params"]) for g in groups] == [2, 1, 1]

    def test_one_potential_per_layer(self):
        chosen = ["euclidean", Power(4), HyperbolicEntropy(1.0)]
        by_order = layer_groups(self.network, chosen)
        names = ["output", "hidden1", "hidden2"]
        by_name = layer_groups(self.network, dict(zip(names, chosen[2:] + chosen[:2], strict=True)))
        for groups in (by_order, by_name):
            assert [g["potential"] for g in groups] == [Euclidean(), Power(4), HyperbolicEntropy(1)]
        optimizer = MirrorDescent(by_order)
        assert optimizer.param_groups[1]["potential"] == Power(4)

    def test_tied_and_frozen_parameters(self):
        network = HomogeneousMLP(4, (4,), 4)
        network.output.weight = network.hidden1.weight
        assert [g["name"] for g in layer_groups(network, "power")] == ["hidden1"]
        network = HomogeneousMLP(4, (4,), 4)
        network.hidden1.requires_grad_(False)
        assert [g["name"] for g in layer_groups(network, "power")] == ["output"]

    @pytest.mark.parametrize(
        ("potential", "words"),
        [
            (["power"], "1 entries for 3 layers"),
            ({"hidden1": "power"}, "must name the layers"),
            ("entropy", "unknown potential"),
        ],
    )
    def test_mismatch(self, potential, words):
        with pytest.raises(ValueError, match=words):
            layer_groups(self.network, potential)
