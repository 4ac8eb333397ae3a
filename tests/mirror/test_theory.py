"""The theory's quantities against closed forms and brute force."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize, nnls
from torch import nn

from sklearn_mr2.mirror.networks import HomogeneousCNN, HomogeneousMLP, layer_groups
from sklearn_mr2.mirror.potentials import Euclidean, HyperbolicEntropy, Power, SmoothedPower
from sklearn_mr2.mirror.theory import (
    active_count,
    alignment,
    effective_exponent,
    effective_norm,
    effective_weights,
    fit_rates,
    horizon_margin,
    kkt_ratio,
    layer_balance,
    layer_duals,
    margins,
    neuron_balance,
    participation_ratio,
    q_margin,
    smoothed_q_margin,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def group(values, potential, **keys):
    params = [torch.tensor(values, dtype=torch.float64)]
    return {"params": params, "potential": potential, **keys}


class TestMargins:
    @given(st.integers(0, 10**6), st.integers(2, 5))
    def test_multiclass(self, seed, k):
        f = torch.randn(6, k, generator=seeded(seed))
        y = torch.randint(k, (6,), generator=seeded(seed))
        expected = [min(f[n, y[n]] - f[n, j] for j in range(k) if j != y[n]) for n in range(6)]
        torch.testing.assert_close(margins(f, y), torch.stack(expected))

    def test_binary(self):
        f, y = torch.tensor([2.0, -3.0, 0.5]), torch.tensor([1, 0, 0])
        expected = torch.tensor([2.0, 3.0, -0.5])
        assert torch.equal(margins(f, y), expected)
        assert torch.equal(margins(f[:, None], y), expected)


class TestSize:
    groups = (group([3.0, -4.0], Euclidean()), group([[1.0], [2.0]], Euclidean()))

    def test_one_alpha_is_measured_jointly(self):
        # alpha Q = ||theta||^2 = 30, L = 2
        assert layer_duals(self.groups).tolist() == [12.5, 2.5]
        assert q_margin(6.0, self.groups, 2) == pytest.approx(6 / 30)
        assert horizon_margin(6.0, self.groups, 2) == pytest.approx(6 / 30)
        assert horizon_margin(6.0, self.groups, 3) == pytest.approx(6 / 30**1.5)
        assert alignment(self.groups, 2) == pytest.approx(1)

    def test_several_alphas_layer_by_layer(self):
        lam = 0.5
        groups = (group([3.0, -4.0], Power(3)), group([1.0, -2.0], HyperbolicEntropy(lam)))
        cubes, roots = 27 + 64, math.sqrt(1 + lam**2) + math.sqrt(4 + lam**2)
        assert q_margin(6.0, groups, 2) == pytest.approx(6 / ((2 * cubes) ** (1 / 3) * roots))
        assert horizon_margin(6.0, groups, 2) == pytest.approx(6 / ((2 * cubes) ** (1 / 3) * 3))
        assert alignment(groups, 2) == pytest.approx((roots / 3) ** 0.5)

    def test_degrees_of_groups(self):
        groups = (
            group([3.0, -4.0], Euclidean(), degree=2),
            group([1.0, -2.0], HyperbolicEntropy(), degree=1),
        )
        assert horizon_margin(6.0, groups, 3) == pytest.approx(6 / (5**2 * 3))
        assert layer_balance(groups).item() == pytest.approx(
            float(HyperbolicEntropy().total_dual(groups[1]["params"])) - 12.5 / 2
        )

    def test_hyperbolic_alignment_is_q_over_the_l1_norm(self):
        theta = torch.randn(20, generator=seeded(), dtype=torch.float64)
        groups = [{"params": [theta], "potential": HyperbolicEntropy(3.0)}]
        expected = torch.sqrt(theta**2 + 9).sum() / theta.abs().sum()
        assert alignment(groups) == pytest.approx(float(expected))

    @pytest.mark.parametrize(
        "potential", [Power(3), SmoothedPower(3, 0.1), HyperbolicEntropy(0.1), Euclidean()]
    )
    def test_q_margin_tends_to_the_scale_free_horizon_margin(self, potential):
        theta = torch.randn(10, generator=seeded(), dtype=torch.float64)
        ratios, horizons = [], []
        for scale in (1.0, 1e3, 1e6):
            groups = [{"params": [scale * theta], "potential": potential}]
            horizons.append(horizon_margin(scale**2, groups, 2))
            ratios.append(q_margin(scale**2, groups, 2) / horizons[-1])
        assert horizons == pytest.approx([horizons[0]] * 3)
        assert abs(ratios[2] - 1) < 1e-6
        assert abs(ratios[2] - 1) <= abs(ratios[1] - 1) + 1e-12

    def test_smoothed_margin(self):
        f, y = torch.tensor([[5.0, 1.0, 0.0], [0.0, 0.0, 7.0]]), torch.tensor([0, 2])
        total = sum(math.exp(-m) for m in (4, 5, 7, 7))
        assert smoothed_q_margin(f, y, self.groups, 2) == pytest.approx(-math.log(total) / 30)
        assert smoothed_q_margin(f, y, self.groups, 2) < q_margin(4.0, self.groups, 2)

    def test_large_parameters_do_not_overflow(self):
        groups = [{"params": [torch.full((4,), 1e30)], "potential": Euclidean()}] * 8
        assert horizon_margin(1e240, groups, 8) > 0


class TestBalance:
    def test_layers(self):
        network = HomogeneousMLP(3, (4, 5), 2, generator=seeded())
        groups = layer_groups(network, [Euclidean(), Power(3), HyperbolicEntropy(0.2)])
        a, b, c = (torch.cat([p.detach().double().flatten() for p in g["params"]]) for g in groups)
        hyperbolic = (c**2 + 0.2**2).sqrt().sum()
        duals = torch.stack([a.square().sum() / 2, 2 / 3 * b.abs().pow(3).sum(), hyperbolic])
        torch.testing.assert_close(layer_balance(groups), duals.diff())
        torch.testing.assert_close(layer_balance(groups, degree=6), duals.diff() / 2)

    def test_neurons(self):
        network = HomogeneousMLP(3, (4, 5), 2, generator=seeded()).double()
        groups = layer_groups(network, [Euclidean(), Power(3), Euclidean()])
        first, second = neuron_balance(network, groups)
        W, b, V, U = (p.detach() for p in network.parameters())
        for j in range(4):
            incoming = (W[j].square().sum() + b[j].square()) / 2
            expected = 2 / 3 * V[:, j].abs().pow(3).sum() - incoming
            assert first[j].item() == pytest.approx(expected.item())
        for j in range(5):
            expected = U[:, j].square().sum() / 2 - 2 / 3 * V[j].abs().pow(3).sum()
            assert second[j].item() == pytest.approx(expected.item())

    def test_channels(self):
        network = HomogeneousCNN(
            1, 2, block_channels=(3,), convolutions_per_block=2, generator=seeded()
        ).double()
        groups = layer_groups(network, "euclidean")
        first, second = neuron_balance(network, groups)
        w, b, v, u = (p.detach() for p in network.parameters())
        expected = (v[:, 1].square().sum() - w[1].square().sum() - b[1] ** 2) / 2
        assert first[1].item() == pytest.approx(expected.item())
        expected = (u[:, 2].square().sum() - v[2].square().sum()) / 2
        assert second[2].item() == pytest.approx(expected.item())

    def test_flattened_channels(self):
        network = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2, False)
        )
        (balance,) = neuron_balance(network, layer_groups(network, "euclidean"))
        outgoing = network[3].weight.detach().double()[:, 4:8].square().sum()
        incoming = network[0].weight[1].square().sum() + network[0].bias[1] ** 2
        assert balance[1].item() == pytest.approx(float((outgoing - incoming.detach()) / 2))

    def test_unconnected_layers(self):
        network = nn.ModuleList([nn.Linear(3, 4), nn.Linear(5, 2)])
        with pytest.raises(ValueError, match="'1' does not follow '0'"):
            neuron_balance(network, layer_groups(network, "euclidean"))


class TestFeatures:
    def test_effective_weights(self):
        W, A = torch.randn(4, 3, generator=seeded()), torch.randn(2, 4, generator=seeded(1))
        b = torch.randn(4, generator=seeded(2))
        for order, bias in ((2.0, None), (1.0, b), (3.0, b)):
            c = effective_weights(W, A, bias, order=order)
            for j in range(4):
                row = W[j].tolist() + ([] if bias is None else [b[j].item()])
                expected = np.linalg.norm(row, order) * np.linalg.norm(A[:, j], order)
                assert c[j].item() == pytest.approx(expected, rel=1e-6)

    def test_effective_exponent(self):
        assert effective_exponent([1, 1]) == 0.5
        assert effective_exponent([2, 2]) == 1
        assert effective_exponent([4, 4]) == 2
        assert effective_exponent([2, 2, 2]) == pytest.approx(2 / 3)
        assert effective_exponent([1, 2]) == pytest.approx(2 / 3)

    @pytest.mark.parametrize("alpha", [1.0, 2.0, 3.0])
    def test_the_norms_of_two_layers_at_a_given_product(self, alpha):
        # min |u|_alpha^alpha + |v|_alpha^alpha over u v = c is 2 |c|_{alpha/2}^{alpha/2}
        c = np.array([0.3, 1.7, 2.2])
        result = minimize(
            lambda s: np.sum(np.exp(alpha * s) + (c * np.exp(-s)) ** alpha), np.zeros(3), tol=1e-12
        )
        exponent = effective_exponent([alpha, alpha])
        norm = effective_norm(torch.tensor(c), exponent)
        assert result.fun == pytest.approx(2 * norm**exponent)

    @given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(1e-3, 1e3))
    def test_participation_ratio(self, values, scale):
        c = torch.tensor(values, dtype=torch.float64)
        ratio = participation_ratio(c)
        if c.max() == 0:
            assert ratio == 0
        else:
            assert 1 - 1e-9 <= ratio <= len(values) * (1 + 1e-9)
            assert participation_ratio(scale * c) == pytest.approx(ratio)

    def test_counts(self):
        assert participation_ratio(torch.tensor([3.0] * 5 + [0.0] * 4)) == pytest.approx(5)
        assert active_count(torch.tensor([1.0, 0.02, 0.005])) == 2
        assert active_count(torch.tensor([1.0, 0.02, 0.005]), threshold=0.5) == 1


def linear(w):
    network = HomogeneousMLP(len(w), (), 1, fit_intercept=False).double()
    with torch.no_grad():
        network.output.weight.copy_(torch.as_tensor(w))
    return network


def best_linear_margin(Z, order):
    """Largest min(Z w) over ||w||_order <= 1, certified by the dual."""
    n, d = Z.shape
    if order == 1:
        return -linprog(
            np.r_[np.zeros(2 * d), -1],
            A_ub=np.hstack([-Z, Z, np.ones((n, 1))]),
            b_ub=np.zeros(n),
            A_eq=np.r_[np.ones(2 * d), 0][None],
            b_eq=[1],
        ).fun
    conjugate = order / (order - 1)
    primal = minimize(
        lambda w: (np.sum(np.abs(w) ** order) / order, np.sign(w) * np.abs(w) ** (order - 1)),
        np.linalg.lstsq(Z, np.ones(n), rcond=None)[0],
        jac=True,
        constraints={"type": "ineq", "fun": lambda w: Z @ w - 1, "jac": lambda w: Z},
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-13},
    ).x
    margin = (Z @ primal).min() / np.linalg.norm(primal, order)
    # Stationarity gives the multipliers of the active constraints, and they a bound from above.
    active = Z[Z @ primal < 1 + 1e-6]
    mu = nnls(active.T, np.sign(primal) * np.abs(primal) ** (order - 1))[0]
    bound = np.linalg.norm(active.T @ (mu / mu.sum()), conjugate)
    assert margin <= bound * (1 + 1e-9)
    assert bound <= margin * (1 + 1e-5)
    return bound


def separable(seed=0, n=25, d=8):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    w = rng.normal(size=d)
    y = (X @ w > 0).astype(int)
    return X, y, X * (2 * y - 1)[:, None], w


class TestKKT:
    @pytest.mark.parametrize("seed", [0, 1])
    @pytest.mark.parametrize(
        "potential", [Euclidean(), Power(3), SmoothedPower(4, 0.1), Power(1.5), HyperbolicEntropy()]
    )
    def test_linear_models_get_the_exact_margin_ratio(self, potential, seed):
        X, y, Z, w = separable(seed)
        network = linear(w)
        ratio = kkt_ratio(
            network, torch.tensor(X), torch.tensor(y), layer_groups(network, potential), 1
        )
        alpha = potential.alpha
        expected = (Z @ w).min() / np.linalg.norm(w, alpha) / best_linear_margin(Z, alpha)
        assert ratio == pytest.approx(expected, rel=2e-4)
        assert ratio <= expected * (1 + 1e-6)

    def test_multiclass_linear_model(self):
        rng = np.random.default_rng(0)
        X, W = rng.normal(size=(20, 6)), rng.normal(size=(3, 6))
        y = (X @ W.T).argmax(1)
        network = HomogeneousMLP(6, (), 3, fit_intercept=False).double()
        with torch.no_grad():
            network.output.weight.copy_(torch.tensor(W))
        # All constraints (w_y - w_k) x as rows over the flattened W.
        rows = []
        for x, label in zip(X, y, strict=True):
            for k in set(range(3)) - {label}:
                row = np.zeros((3, 6))
                row[label], row[k] = x, -x
                rows.append(row.ravel())
        Z = np.array(rows)
        for potential in (Euclidean(), HyperbolicEntropy()):
            alpha = potential.alpha
            ratio = kkt_ratio(
                network, torch.tensor(X), torch.tensor(y), layer_groups(network, potential), 1
            )
            expected = (Z @ W.ravel()).min() / np.linalg.norm(W.ravel(), alpha)
            expected /= best_linear_margin(Z, alpha)
            assert ratio == pytest.approx(expected, rel=2e-4)

    @pytest.mark.parametrize(
        "potentials",
        [Euclidean(), Power(3), HyperbolicEntropy(), [Euclidean(), HyperbolicEntropy()],
         [Power(3), Euclidean()]],
    )  # fmt: skip
    def test_one_neuron_along_the_only_feature_is_optimal(self, potentials):
        network = HomogeneousMLP(2, (2,), 1, fit_intercept=False).double()
        X, y = torch.tensor([[1.0, 0.0]]), torch.tensor([1])

        def ratio(w, a):
            with torch.no_grad():
                network.hidden1.weight.copy_(torch.tensor([[w, 0.0], [0.0, 0.0]]))
                network.output.weight.copy_(torch.tensor([[a, 0.0]]))
            return kkt_ratio(network, X, y, layer_groups(network, potentials), 2)

        assert ratio(3.0, 3.0) == pytest.approx(1, abs=2e-4)
        # Unbalanced layers: the joint norm of one alpha sees it, layer-by-layer norms do not.
        if isinstance(potentials, list):
            assert ratio(6.0, 1.5) == pytest.approx(1, abs=2e-4)
        else:
            assert ratio(6.0, 1.5) < 0.9

    def test_two_neurons_for_one_feature(self):
        # L1 is indifferent between effective weights' neurons only where one does everything.
        network = HomogeneousMLP(1, (2,), 1, fit_intercept=False).double()
        X, y = torch.tensor([[1.0]]), torch.tensor([1])
        with torch.no_grad():
            network.hidden1.weight.fill_(1.0)
            network.output.weight.fill_(1.0)
        ratios = [
            kkt_ratio(network, X, y, layer_groups(network, potential), 2)
            for potential in (Euclidean(), HyperbolicEntropy(), Power(3))
        ]
        # Both are stationary, as the symmetric point is for any potential.
        assert ratios == pytest.approx([1, 1, 1], abs=2e-4)

    @pytest.mark.parametrize("potential", [Euclidean(), Power(3), HyperbolicEntropy()])
    def test_kinks_against_an_explicit_programme(self, potential):
        # Two neurons of which the second is exactly at its kink for the first sample.
        X = torch.tensor([[0.9, 0.0], [-0.6, 0.8]], dtype=torch.float64)
        W = torch.tensor([[1.0, 0.7], [0.0, 1.2]], dtype=torch.float64)
        a = torch.tensor([1.1, 0.9], dtype=torch.float64)
        network = HomogeneousMLP(2, (2,), 1, fit_intercept=False).double()
        with torch.no_grad():
            network.hidden1.weight.copy_(W)
            network.output.weight.copy_(a[None])
        y, groups = torch.tensor([1, 1]), layer_groups(network, potential)
        q = network(X)[:, 0].detach().numpy()

        def gradient(n, second_on):
            on = np.array([float(W[0] @ X[n] > 0), second_on])
            inner = (a.numpy() * on)[:, None] * X[n].numpy()
            return np.r_[inner.ravel(), on * (W @ X[n]).numpy()]

        columns = np.stack([gradient(0, 0), gradient(0, 1), gradient(1, 1)], axis=1)
        alpha = potential.alpha
        order = np.inf if alpha == 1 else alpha / (alpha - 1)
        # A grid over the simplex of both one-sided gradients and the other sample's.
        grid = np.linspace(0, 1, 401)
        s, t = np.meshgrid(grid, grid)
        mixed = columns @ np.stack(
            [s.ravel() * (1 - t.ravel()), s.ravel() * t.ravel(), 1 - s.ravel()]
        )
        smallest = np.linalg.norm(mixed, order, axis=0).min()
        theta = np.r_[W.numpy().ravel(), a.numpy()]
        expected = 2 * q.min() / np.linalg.norm(theta, alpha) / smallest
        assert kkt_ratio(network, X, y, groups, 2) == pytest.approx(expected, rel=1e-3)
        without = kkt_ratio(network, X, y, groups, 2, kink_tolerance=-1.0)
        if alpha > 1:  # L-infinity has slack there
            assert without < expected * 0.99

    def test_fewer_constraints_lower_the_ratio(self):
        X, y, _, w = separable(2)
        network = linear(w)
        groups = layer_groups(network, "euclidean")
        ratios = [
            kkt_ratio(network, torch.tensor(X), torch.tensor(y), groups, 1, max_constraints=m)
            for m in (1, 5, 25)
        ]
        assert ratios[0] <= ratios[1] <= ratios[2]

    def test_the_network_is_left_alone(self):
        X, y, _, w = separable()
        network = linear(w).float()
        before = copy.deepcopy(network.state_dict())
        kkt_ratio(network, torch.tensor(X), torch.tensor(y), layer_groups(network, "euclidean"), 1)
        assert torch.equal(network.output.weight, before["output.weight"])
        assert network.output.weight.grad is None
        assert not network.output._forward_hooks

    def test_convolutions(self):
        network = HomogeneousCNN(1, 2, block_channels=(2,), generator=seeded())
        X = torch.randn(3, 1, 4, 4, generator=seeded(1))
        y = network(X).argmax(1)
        assert 0 < kkt_ratio(network, X, y, layer_groups(network, "euclidean"), 3) < 1

    def test_a_margin_is_needed(self):
        X, y, _, w = separable()
        network = linear(-w)
        groups = layer_groups(network, "euclidean")
        with pytest.raises(ValueError, match="smallest margin must be positive"):
            kkt_ratio(network, torch.tensor(X), torch.tensor(y), groups, 1)


class TestRates:
    @pytest.mark.parametrize(("alpha", "degree"), [(2, 1), (1, 1), (3, 2)])
    def test_exact_laws(self, alpha, degree):
        log_time = np.geomspace(1, 1e4, 200)
        theory = alpha / degree
        log_loss = -log_time - (2 - theory) * np.log(log_time) + 0.7
        rates = fit_rates(log_time, log_loss, 3 * log_time**theory, alpha=alpha, degree=degree)
        assert rates.dual_exponent == pytest.approx(rates.dual_exponent_theory)
        assert rates.loss_exponent == pytest.approx(rates.loss_exponent_theory, abs=1e-9)
        assert rates.dual_exponent_theory == theory
        assert rates.loss_exponent_theory == 2 - theory

    def test_early_records_do_not_take_part(self):
        log_time = np.r_[-5.0, 0.0, 1.0, np.geomspace(300, 1000, 9)]
        dual = np.r_[9.0, 9.0, 9.0, log_time[3:] ** 2]
        assert fit_rates(log_time, -log_time, dual, alpha=2, degree=1).dual_exponent == (
            pytest.approx(2)
        )
        with pytest.raises(ValueError, match="at least 3 are needed"):
            fit_rates(log_time, -log_time, dual, alpha=2, degree=1, after=900)
