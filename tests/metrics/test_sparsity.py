"""Sparsity of neurons and pruning, against loops over single weights."""

import copy
import pickle
import warnings
from itertools import pairwise

import numpy as np
import pytest
import sklearn
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import BaseEstimator
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, TunedThresholdClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from torch import nn

from sklearn_mr2 import MirrorFlowClassifier, MR2Classifier, NeuronSparsity
from sklearn_mr2.metrics import find_module, pruning_curve
from sklearn_mr2.mirror.networks import HomogeneousCNN, HomogeneousMLP


def two_classes():
    X, y = load_iris(return_X_y=True)
    return X[:100], y[:100]


def quiet(model, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(*args, **kwargs)


@pytest.fixture(scope="module")
def fitted():
    model = MirrorFlowClassifier((20,), random_state=0, max_epochs=60)
    return quiet(model, *two_classes())


def brute_force(layers, positions=1):
    """Effective weights of the first of two layers, one weight at a time.

    Each of its channels feeds `positions` consecutive inputs of the second.
    """
    inner, outer = (layer.weight.detach().double().numpy() for layer in layers)
    bias = None if layers[0].bias is None else layers[0].bias.detach().double().numpy()
    groups = getattr(layers[1], "groups", 1)
    per_group = outer.shape[1]
    found = []
    for j in range(len(inner)):
        incoming = sum(v**2 for v in inner[j].ravel()) + (0 if bias is None else bias[j] ** 2)
        outgoing = 0.0
        for o in range(len(outer)):
            group = o // (len(outer) // groups)
            for i in range(per_group):
                if (group * per_group + i) // positions == j:
                    outgoing += sum(v**2 for v in outer[o, i].ravel())
        found.append(np.sqrt(incoming * outgoing))
    return np.array(found)


def participation(c):
    return sum(c) ** 2 / sum(v**2 for v in c)


def check(module, expected, threshold=0.01):
    """Compare a scorer's table and scores with lists of effective weights."""
    sparsity = NeuronSparsity(threshold=threshold)
    table = sparsity.per_layer(module)
    ratios = [participation(c) for c in expected]
    active = [sum(v > threshold * max(c) for v in c) for c in expected]
    width = sum(map(len, expected))
    assert table["width"].tolist() == [len(c) for c in expected]
    assert table["active"].tolist() == active
    np.testing.assert_allclose(table["PR"], ratios)
    assert sparsity(module) == pytest.approx(1 - sum(ratios) / width)
    fraction = NeuronSparsity("active_fraction", threshold)
    assert fraction(module) == pytest.approx(1 - sum(active) / width)


class TestEffectiveWeights:
    @given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.booleans(), st.integers(0, 9))
    def test_dense(self, widths, bias, seed):
        network = HomogeneousMLP(
            3, widths, 2, fit_intercept=bias, generator=torch.Generator().manual_seed(seed)
        )
        layers = [layer for layer in network if isinstance(layer, nn.Linear)]
        with torch.no_grad():
            if bias:
                layers[0].bias.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
        check(network, [brute_force(pair) for pair in pairwise(layers)], 0.4)

    def test_channels(self):
        network = HomogeneousCNN(2, 3, block_channels=(4, 5), convolutions_per_block=2)
        layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        check(network, [brute_force(pair) for pair in pairwise(layers)], 0.5)

    @pytest.mark.parametrize("groups", [1, 2, 4])
    def test_groups(self, groups):
        layers = nn.Conv1d(2, 4, 3), nn.Conv1d(4, 8, 3, groups=groups), nn.Linear(8, 2)
        network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.Flatten(), layers[2])
        check(network, [brute_force(layers[:2]), brute_force(layers[1:])], 0.5)

    def test_flattened_channels(self):
        layers = nn.Conv2d(1, 3, 3), nn.Linear(3 * 4, 2)
        network = nn.Sequential(layers[0], nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(), layers[1])
        assert network(torch.zeros(1, 1, 8, 8)).shape == (1, 2)
        check(network, [brute_force(layers, positions=4)], 0.5)

    def test_names(self):
        table = NeuronSparsity().per_layer(HomogeneousMLP(3, (4, 2)))
        assert table.index.tolist() == ["hidden1", "hidden2"]
        assert table.index.name == "layer"

    def test_extremes(self):
        network = HomogeneousMLP(3, (8,), 1, fit_intercept=False)
        with torch.no_grad():
            for p in network.parameters():
                p.fill_(1)
        assert NeuronSparsity()(network) == pytest.approx(0)
        assert NeuronSparsity("active_fraction")(network) == 0
        with torch.no_grad():
            network.output.weight[:, 1:] = 0
        assert NeuronSparsity()(network) == pytest.approx(7 / 8)
        assert NeuronSparsity("active_fraction")(network) == 7 / 8
        with torch.no_grad():
            network.output.weight.zero_()
        assert NeuronSparsity()(network) == NeuronSparsity("active_fraction")(network) == 1

    @pytest.mark.parametrize(
        ("network", "message"),
        [
            (nn.Linear(4, 2), "no hidden neurons"),
            (nn.Sequential(nn.Linear(4, 3), nn.Linear(5, 2)), "does not follow layer '0'"),
            (nn.Sequential(nn.LSTM(4, 3), nn.Linear(3, 2)), "LSTM"),
            (nn.Sequential(nn.ConvTranspose2d(1, 3, 3), nn.Linear(3, 2)), "ConvTranspose2d"),
        ],
    )
    def test_other_networks(self, network, message):
        with pytest.raises(ValueError, match=message):
            NeuronSparsity()(network)


class TestFindModule:
    def test_finds_the_fitted_network(self, fitted):
        X, y = two_classes()
        own = find_module(fitted)
        assert own is fitted.net_.module_
        assert find_module(own) is own
        assert find_module(fitted.net_) is own
        pipeline = make_pipeline(StandardScaler(), fitted)
        pipeline[0].fit(X)
        assert find_module(pipeline) is own
        assert find_module(FrozenEstimator(fitted)) is own
        assert find_module(FrozenEstimator(pipeline)) is own
        tuned = TunedThresholdClassifierCV(FrozenEstimator(fitted), cv="prefit", refit=False).fit(
            X, y
        )
        assert find_module(tuned) is own

    def test_search(self):
        X, y = two_classes()
        pipeline = make_pipeline(StandardScaler(), MirrorFlowClassifier((4,), max_epochs=5))
        search = GridSearchCV(pipeline, {"mirrorflowclassifier__hidden_layer_sizes": [(3,)]}, cv=2)
        with pytest.raises(NotFittedError):
            find_module(search)
        quiet(search, X, y)
        assert find_module(search) is search.best_estimator_[-1].net_.module_

    def test_skorch(self):
        X, y = two_classes()
        network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        net = NeuralNetClassifier(
            network, criterion=nn.CrossEntropyLoss, max_epochs=1, verbose=0, train_split=None
        )
        net.fit(X.astype(np.float32), y)
        assert NeuronSparsity().per_layer(net)["width"].tolist() == [6]

    def test_nothing_to_find(self, fitted):
        X, y = two_classes()
        with pytest.raises(NotFittedError):
            find_module(MirrorFlowClassifier())
        with pytest.raises(TypeError, match="found LogisticRegression at the end of Pipeline"):
            find_module(make_pipeline(PCA(2), LogisticRegression()).fit(X, y))
        with pytest.raises(TypeError, match="no torch network"):
            find_module(3)


class TestScorer:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"criterion": "l0"}, "criterion must be one of 'participation_ratio'"),
            ({"threshold": 1.0}, "threshold"),
            ({"threshold": -0.1}, "threshold"),
            ({"threshold": "small"}, "threshold"),
        ],
    )
    def test_bad_parameters(self, options, message):
        with pytest.raises(ValueError, match=message):
            NeuronSparsity(**options)

    def test_is_a_value(self):
        scorer = NeuronSparsity("active_fraction", 0.1)
        assert repr(scorer) == "NeuronSparsity(criterion='active_fraction', threshold=0.1)"
        assert pickle.loads(pickle.dumps(scorer)) == scorer == copy.deepcopy(scorer)

    @pytest.mark.parametrize("scoring", ["alone", "several"])
    @pytest.mark.parametrize("routing", [False, True])
    def test_search(self, scoring, routing):
        X, y = two_classes()
        sparsity = NeuronSparsity()
        scorers = sparsity if scoring == "alone" else {"acc": "accuracy", "sparse": sparsity}
        refit = scoring == "alone" or "sparse"
        with sklearn.config_context(enable_metadata_routing=routing):
            model = MirrorFlowClassifier((10,), random_state=0, init_scale=0.3, target_margin=15)
            if routing:
                model.set_fit_request(sample_weight=True)
                if scoring == "several":
                    accuracy = sklearn.metrics.get_scorer("accuracy")
                    scorers["acc"] = accuracy.set_score_request(sample_weight=True)
            search = GridSearchCV(
                model,
                {"potential": ["smoothed_power", "hyperbolic_entropy"]},
                scoring=scorers,
                refit=refit,
                cv=2,
                error_score="raise",
            )
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", ConvergenceWarning)
                search.fit(X, y, sample_weight=np.ones(len(y)))
        assert search.best_params_ == {"potential": "hyperbolic_entropy"}
        assert 0 < search.best_score_ < 1
        assert sparsity(search, X, y) == sparsity(search.best_estimator_)


class TestPruningCurve:
    def test_magnitude_against_sorting(self, fitted):
        X, y = two_classes()
        amounts = [0.0, 0.3, 0.6, 0.9, 0.95, 1.0]
        curve = pruning_curve(fitted, X, y, amounts)
        assert curve.columns.tolist() == ["amount", "score"]
        assert curve["amount"].tolist() == amounts
        coefs = [w.copy() for w in fitted.coefs_]
        sizes = np.sort(np.abs(np.concatenate([w.ravel() for w in coefs])))
        for amount, score in zip(amounts, curve["score"], strict=True):
            n = round(amount * len(sizes))
            limit = sizes[n] if n < len(sizes) else np.inf
            W, a = (np.where(np.abs(w) < limit, 0, w) for w in coefs)
            f = np.maximum(X @ W + fitted.intercepts_[0], 0) @ a
            assert score == pytest.approx(((f[:, 0] > 0) == y).mean())

    def test_neurons_against_removal(self, fitted):
        X, y = two_classes()
        amounts = [0.0, 0.5, 0.8, 0.9, 1.0]
        curve = pruning_curve(fitted, X, y, amounts, by="neuron", scoring="neg_log_loss")
        W, b, a = fitted.coefs_[0], fitted.intercepts_[0], fitted.coefs_[1][:, 0]
        c = np.linalg.norm(np.vstack([W, b]), axis=0) * np.abs(a)
        for amount, score in zip(amounts, curve["score"], strict=True):
            kept = np.argsort(c)[round(amount * 20) :]
            f = np.maximum(X @ W[:, kept] + b[kept], 0) @ a[kept]
            loss = np.logaddexp(0, np.where(y == 1, -f, f)).mean()
            # scikit-learn clips probabilities at the dtype's precision
            assert score == pytest.approx(-min(loss, 36), rel=1e-6, abs=1e-12)

    def test_neurons_of_several_layers_are_comparable(self):
        network = HomogeneousMLP(3, (4, 4), 2, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            network.hidden1.weight[:2] = 0
            network.output.weight[:, :2] = 0
            network.output.weight.mul_(1e-6)  # a layer of small weights is not a dead one

        class Probe(BaseEstimator):
            def fit(self): ...
            def score(self, X, y):
                hidden = [self.net_.hidden1.weight, self.net_.hidden2.weight]
                return float(sum((w.abs().sum(1) > 0).sum() for w in hidden))

            def __sklearn_is_fitted__(self):
                return True

        probe = Probe()
        probe.net_ = network
        counts = pruning_curve(probe, None, None, [0.5, 0.75, 1.0], by="neuron")["score"]
        assert counts.tolist() == [4, 2, 0]

    @pytest.mark.parametrize("by", ["magnitude", "neuron"])
    def test_channels(self, by):
        network = HomogeneousCNN(
            1, 2, block_channels=(4, 6), convolutions_per_block=1,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        rng = np.random.default_rng(0)
        X, y = rng.normal(size=(40, 1, 4, 4)), np.arange(40) % 2
        X[y == 1, :, :2] += 1.5
        model = quiet(MirrorFlowClassifier(module=network, max_epochs=60), X, y)
        scores = pruning_curve(model, X, y, [0, 0.5, 1.0], by=by)["score"]
        assert scores[0] == model.score(X, y) > 0.8
        assert scores[2] == 0.5

    @pytest.mark.parametrize("by", ["magnitude", "neuron"])
    def test_leaves_the_estimator_alone(self, fitted, by):
        X, y = two_classes()
        before = copy.deepcopy(find_module(fitted).state_dict())
        pruning_curve(fitted, X, y, [0.5, 1.0], by=by)
        after = find_module(fitted).state_dict()
        assert list(after) == list(before)
        for name, value in before.items():
            assert torch.equal(after[name], value)

    def test_wrapped(self, fitted):
        X, y = two_classes()
        plain = pruning_curve(fitted, X, y, [0.5, 0.95])
        np.testing.assert_array_equal(
            pruning_curve(FrozenEstimator(fitted), X, y, [0.5, 0.95]), plain
        )
        pipeline = make_pipeline(StandardScaler(with_mean=False, with_std=False), fitted)
        pipeline[0].fit(X)
        np.testing.assert_array_equal(pruning_curve(pipeline, X, y, [0.5, 0.95]), plain)

    def test_linear_probe(self):
        X, y = load_iris(return_X_y=True)
        probe = MR2Classifier().fit(X, y)
        curve = pruning_curve(probe, X, y, [0, 1])
        assert curve["score"][0] == probe.score(X, y)
        with pytest.raises(ValueError, match="no hidden neurons"):
            pruning_curve(probe, X, y, [0.5], by="neuron")

    @pytest.mark.parametrize(
        ("amounts", "by", "message"),
        [
            ([0.5, 1.5], "magnitude", "amounts must be numbers from 0 to 1, got 1.5"),
            ([-0.1], "neuron", "amounts"),
            (["half"], "neuron", "amounts"),
            ([0.5], "weight", "by must be one of"),
        ],
    )
    def test_bad_input(self, fitted, amounts, by, message):
        with pytest.raises(ValueError, match=message):
            pruning_curve(fitted, *two_classes(), amounts, by=by)
