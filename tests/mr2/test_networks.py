"""MR2Classifier with learned features."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, make_blobs
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from skorch.callbacks import EarlyStopping, Freezer, GradientNormClipping, LRScheduler
from torch import nn

from sklearn_mr2 import MR2Classifier
from sklearn_mr2.mr2.modules import MLP, n_features_of
from sklearn_mr2.mr2.sampling import ClassBalancedSampler


class ConvNet(nn.Sequential):
    def __init__(self, channels=4):
        super().__init__(
            nn.Conv2d(1, channels, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten()
        )


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    return StandardScaler().fit_transform(X)[:600].astype(np.float32), y[:600]


def small(**kwargs):
    options = {"module__hidden_layer_sizes": (16,), "max_epochs": 8, "lr": 0.01, "random_state": 0}
    return MR2Classifier("mlp", **{**options, **kwargs})


class TestModules:
    def test_mlp_learns(self, digits):
        X, y = digits
        model = small(max_epochs=20).fit(X[:400], y[:400])
        reference = MLPClassifier((16,), learning_rate_init=0.01, max_iter=20, batch_size=128)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            reference.set_params(random_state=0).fit(X[:400], y[:400])
        assert model.score(X[400:], y[400:]) > reference.score(X[400:], y[400:]) - 0.02
        assert model.transform(X).shape == (600, 16)
        assert model.coef_.shape == (10, 16)
        logits = model.transform(X) @ model.coef_.T + model.intercept_
        np.testing.assert_allclose(model.decision_function(X), logits, atol=1e-4)

    def test_mlp_options(self):
        layers = MLP(3, (5, 4), dropout=0.5)
        assert [type(layer).__name__ for layer in layers] == ["Linear", "ReLU", "Dropout"] * 2
        with pytest.raises(ValueError, match="module__hidden_layer_sizes"):
            MLP(3, ())

    def test_images_of_a_module_class(self, digits):
        X, y = digits
        images = X.reshape(-1, 1, 8, 8)
        model = MR2Classifier(ConvNet, module__channels=6, max_epochs=10, lr=0.01, random_state=0)
        model.fit(images, y)
        assert model.transform(images).shape == (600, 54)
        assert model.score(images, y) > 0.6

    def test_sequences_of_a_recurrent_module(self):
        class LastState(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn = nn.GRU(3, 8, batch_first=True)

            def forward(self, X):
                return self.rnn(X)[1][0]

        rng = np.random.default_rng(0)
        X = rng.normal(size=(200, 7, 3)).astype(np.float32)
        y = (X[:, :, 0].sum(1) > 0).astype(int)
        model = MR2Classifier(LastState, max_epochs=30, lr=0.02, random_state=0).fit(X, y)
        assert model.score(X, y) > 0.9

    def test_an_instance_is_copied(self, digits):
        X, y = digits
        module = nn.Sequential(nn.Linear(64, 8), nn.Tanh())
        before = copy.deepcopy(module.state_dict())
        start = module(torch.as_tensor(X)).detach()
        model = MR2Classifier(module, max_epochs=1, lr=1e-12, random_state=0).fit(X, y)
        np.testing.assert_allclose(model.transform(X), start, atol=1e-5)
        small_steps = MR2Classifier(module, max_epochs=2, random_state=0).fit(X, y)
        assert np.abs(small_steps.transform(X) - start.numpy()).max() > 1e-3
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name])
            assert module.training

    def test_lazy_layers(self, digits):
        X, y = digits
        model = MR2Classifier(nn.Sequential(nn.LazyLinear(5)), max_epochs=1).fit(X, y)
        assert model.transform(X).shape == (600, 5)

    def test_module_must_make_rows_of_features(self, digits):
        X, y = digits
        unpooled = nn.Sequential(nn.Conv2d(1, 2, 3))
        with pytest.raises(ValueError, match="Flatten or pool"):
            MR2Classifier(unpooled).fit(X.reshape(-1, 1, 8, 8), y)
        with pytest.raises(ValueError, match="got tuple"):
            n_features_of(nn.GRU(3, 2), torch.zeros(2, 4, 3))

    def test_module_must_be_a_module(self, digits):
        with pytest.raises(TypeError, match="or a subclass or instance"):
            MR2Classifier(dict).fit(*digits)

    def test_parameters_of_what_takes_none(self, digits):
        X, y = digits
        with pytest.raises(ValueError, match="Pass the class as module"):
            MR2Classifier(nn.Linear(64, 3), module__bias=False).fit(X, y)
        with pytest.raises(ValueError, match="Pass the class as module"):
            MR2Classifier(module__hidden_layer_sizes=(3,)).fit(X, y)

    def test_features_of_ten_thousand_dimensions(self):
        X, y = make_blobs(60, 20, centers=3, random_state=0)
        wide = MR2Classifier("mlp", module__hidden_layer_sizes=(10_000,), max_epochs=2)
        model = wide.fit(X.astype(np.float32), y)
        assert np.isfinite(model.coef_).all()
        assert np.isfinite(model.history_["train_loss"]).all()


class TestFineTuning:
    def test_frozen_backbone(self, digits):
        X, y = digits
        backbone = nn.Sequential(nn.Linear(64, 8), nn.Tanh())
        before = backbone(torch.as_tensor(X)).detach().numpy()
        model = MR2Classifier(
            backbone, callbacks=[Freezer("backbone.*")], max_epochs=3, lr=0.1, random_state=0
        ).fit(X, y)
        np.testing.assert_allclose(model.transform(X), before, atol=1e-6)
        assert np.abs(model.coef_).max() > 0.01

    def test_frozen_prefix_of_an_instance(self, digits):
        X, y = digits
        backbone = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8))
        backbone[0].requires_grad_(False)
        model = MR2Classifier(backbone, max_epochs=3, lr=0.1, random_state=0).fit(X, y)
        trained = model.net_.module_.backbone
        assert torch.equal(trained[0].weight, backbone[0].weight)
        assert not torch.equal(trained[2].weight, backbone[2].weight)

    def test_learning_rates_of_backbone_and_head(self, digits):
        X, y = digits
        backbone = nn.Sequential(nn.Linear(64, 8), nn.Tanh())
        model = MR2Classifier(
            backbone,
            optimizer=torch.optim.SGD,
            optimizer__param_groups=[("backbone.*", {"lr": 0.0})],
            lr=0.1,
            max_epochs=2,
            random_state=0,
        ).fit(X, y)
        assert torch.equal(model.net_.module_.backbone[0].weight, backbone[0].weight)
        assert np.abs(model.coef_).max() > 1e-3

    @pytest.mark.parametrize(
        ("patterns", "message"),
        [
            (["backbone.*", "trunk.*"], r"'trunk.\*' matches no parameter\. The parameters are "),
            (
                ["backbone.*", "backbone.0.*"],
                r"'backbone.0.\*' .* but for those of earlier patterns\.",
            ),
            (
                ["Head.*"],
                r"'Head.\*' .* are backbone.0.weight, backbone.0.bias, head.w.*, head.bias\.$",
            ),
        ],
    )
    def test_patterns_that_match_nothing(self, digits, patterns, message):
        groups = [(pattern, {"lr": 1e-4}) for pattern in patterns]
        with pytest.raises(ValueError, match="optimizer__param_groups: the pattern " + message):
            small(optimizer__param_groups=groups).fit(*digits)

    def test_the_error_lists_only_so_many_parameters(self, digits):
        model = small(module__hidden_layer_sizes=(2,) * 12, optimizer__param_groups=[("x", {})])
        with pytest.raises(ValueError, match=r"backbone.0.weight, .* and 6 more\.$"):
            model.fit(*digits)

    @pytest.mark.parametrize("freeze", ["attribute", "callback"])
    def test_a_frozen_part_in_evaluation_mode_stays_in_it(self, digits, freeze):
        X, y = digits
        encoder = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
        encoder[1].running_mean.fill_(0.3)
        encoder.eval()
        callbacks = [Freezer("backbone.0.*")] if freeze == "callback" else None
        encoder.requires_grad_(freeze == "callback")
        modes = []

        class Tail(nn.Dropout):
            def forward(self, X):
                modes.append(self.training)
                return super().forward(X)

        backbone = nn.Sequential(encoder, nn.Linear(8, 8), nn.BatchNorm1d(8), Tail())
        model = MR2Classifier(
            backbone, callbacks=callbacks, max_epochs=2, lr=0.1, random_state=0
        ).fit(X, y)
        trained = model.net_.module_.backbone
        assert torch.equal(trained[0][1].running_mean, torch.full((8,), 0.3))
        assert torch.equal(trained[0](torch.as_tensor(X)), encoder(torch.as_tensor(X)))
        assert trained[2].running_mean.abs().max() > 1e-3
        assert set(modes) == {True, False}
        assert not encoder.training
        assert backbone.training

    @pytest.mark.parametrize(("frozen", "mode"), [(True, "train"), (False, "eval")])
    def test_other_parts_are_trained(self, digits, frozen, mode):
        """Freezing alone holds parameters; a whole network in evaluation mode is fine-tuned."""
        X, y = digits
        backbone = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8)).requires_grad_(not frozen)
        getattr(backbone, mode)()
        model = MR2Classifier(backbone, max_epochs=2, random_state=0).fit(X, y)
        assert model.net_.module_.backbone[1].running_mean.abs().max() > 1e-3


class TestCosineHead:
    def test_probe_on_normalised_embeddings(self, digits):
        X, y = digits
        X = X / np.linalg.norm(X, axis=1, keepdims=True)
        model = MR2Classifier(head="cosine", margin_norm=3, max_epochs=300).fit(X[:400], y[:400])
        assert model.score(X[400:], y[400:]) > 0.85
        assert not hasattr(model, "coef_")
        np.testing.assert_allclose(model.transform(X), X, atol=1e-6)
        assert np.ptp(model.margins_) > 0.01

    def test_norm_2_of_normalised_features_has_nothing_to_say(self, digits):
        X, y = digits
        model = MR2Classifier(head="cosine", margin=1.3, max_epochs=300).fit(X, y)
        np.testing.assert_allclose(model.margins_, 1.3, rtol=1e-5)

    def test_scale(self, digits):
        X, y = digits
        fixed = MR2Classifier(head="cosine", head__scale=5.0, max_epochs=300).fit(X, y)
        assert np.abs(fixed.decision_function(X)).max() <= 5.0 + 1e-4
        learned = small(head="cosine", head__scale=5.0, head__learn_scale=True).fit(X, y)
        assert float(learned.net_.module_.head.scale.detach()) > 5.1

    def test_network(self, digits):
        X, y = digits
        model = small(head="cosine", margin_norm=3, max_epochs=15).fit(X, y)
        assert model.score(X, y) > 0.9
        np.testing.assert_allclose(np.linalg.norm(model.transform(X), axis=1), 1, atol=1e-4)


class TestMargins:
    @pytest.mark.parametrize("statistic", ["second_moment", "dispersion"])
    def test_running_margins_follow_the_features(self, digits, statistic):
        X, y = digits
        model = small(max_epochs=30, lr=0.003, margin_statistic=statistic).fit(X, y)
        features = model.transform(X).astype(float)
        rows = [features[y == k] for k in range(10)]
        exact = np.array(
            [(r**2).sum(1).mean() if statistic == "second_moment" else r.var(0).sum() for r in rows]
        )
        expected = exact ** (1 / 3) / (exact ** (1 / 3)).mean()
        np.testing.assert_allclose(model.margins_, expected, rtol=0.1)
        assert np.ptp(model.margins_) > 0.05

    def test_statistics_are_not_touched_by_validation_or_prediction(self, digits):
        X, y = digits
        plain = small().fit(X[:300], y[:300])
        watched = small().fit(X[:300], y[:300], X_val=100 * X[300:], y_val=y[300:])
        np.testing.assert_array_equal(plain.margins_, watched.margins_)
        watched.predict(X)
        np.testing.assert_array_equal(plain.margins_, watched.net_.criterion_.margins.numpy())

    def test_folds_of_the_error_statistic_take_no_callbacks(self, digits):
        X, y = digits
        options = {"callbacks__stop__patience": 3, "validation_fraction": 0.2, "max_epochs": 2}
        stop = EarlyStopping()
        model = small(margin_statistic="error", callbacks=[("stop", stop)], **options).fit(X, y)
        assert len(model.history_) == 2

    def test_error_statistic(self, digits):
        X, y = digits
        model = small(margin_statistic="error", margin_mode="subtract", error_cv=3, max_epochs=3)
        model.fit(X, y)
        assert (model.class_spread_ >= 0).all()
        assert np.ptp(model.margins_) > 0

    def test_representation_term_pulls_classes_together(self, digits):
        X, y = digits

        def relative_spread(model):
            features = model.transform(X)
            within = np.mean([features[y == k].var(0).sum() for k in range(10)])
            return within / features.var(0).sum()

        free = small(representation_weight=0.0, max_epochs=20).fit(X, y)
        pulled = small(representation_weight=0.3, max_epochs=20).fit(X, y)
        assert relative_spread(pulled) < 0.8 * relative_spread(free)

    def test_frozen_features_say_that_the_representation_term_does_nothing(self, digits):
        with pytest.warns(UserWarning, match="representation_weight has no effect"):
            MR2Classifier(representation_weight=0.1).fit(*digits)


class TestTraining:
    def test_deterministic_with_dropout(self, digits):
        X, y = digits
        fits = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            fits.append(small(module__dropout=0.5).fit(X, y))
        np.testing.assert_array_equal(fits[0].predict_proba(X), fits[1].predict_proba(X))

    def test_early_stopping_restores_the_best(self, digits):
        X, y = digits
        stop = EarlyStopping("valid_loss", patience=2, load_best=True)
        model = small(max_epochs=100, lr=0.05, callbacks=[stop], validation_fraction=0.3)
        model.fit(X, y)
        assert model.n_iter_ < 100
        valid_loss = model.history_["valid_loss"]
        assert valid_loss.iloc[-1] > valid_loss.min()
        again = small(max_epochs=int(valid_loss.argmin()) + 1, lr=0.05, validation_fraction=0.3)
        np.testing.assert_allclose(
            model.predict_proba(X), again.fit(X, y).predict_proba(X), atol=1e-6
        )

    def test_early_stopping_in_a_grid_search_with_processes(self, digits):
        X, y = digits
        stop = EarlyStopping("valid_loss", patience=1, load_best=True)
        model = small(callbacks=[stop], validation_fraction=0.3, max_epochs=4)
        search = GridSearchCV(model, {"margin": [0.5, 1.0]}, cv=2, n_jobs=2).fit(X, y)
        assert search.best_score_ > 0.4

    def test_schedule_and_warm_up(self, digits):
        X, y = digits
        rates = []

        class Watch(LRScheduler):
            def on_epoch_end(self, net, **kwargs):
                rates.append(net.optimizer_.param_groups[0]["lr"])
                super().on_epoch_end(net, **kwargs)

        warm_up = Watch(torch.optim.lr_scheduler.LinearLR, start_factor=0.25, total_iters=3)
        small(callbacks=[warm_up], lr=0.04, max_epochs=5).fit(X, y)
        np.testing.assert_allclose(rates, [0.01, 0.02, 0.03, 0.04, 0.04])

    def test_gradient_clipping(self, digits):
        X, y = digits
        options = {"optimizer": torch.optim.SGD, "max_epochs": 1, "batch_size": 600}
        start = small(lr=1e-30, **options).fit(X, y)
        clipped = small(lr=1.0, callbacks=[GradientNormClipping(1e-3)], **options).fit(X, y)
        free = small(lr=1.0, **options).fit(X, y)

        def moved(model):
            pairs = zip(
                model.net_.module_.parameters(), start.net_.module_.parameters(), strict=True
            )
            return sum((a - b).detach().square().sum().item() for a, b in pairs) ** 0.5

        assert moved(clipped) == pytest.approx(1e-3, rel=0.01)
        assert moved(free) > 0.1

    def test_mixed_precision(self, digits):
        X, y = digits
        model = small(mixed_precision="bfloat16", max_epochs=15).fit(X, y)
        exact = small(max_epochs=15).fit(X, y)
        assert model.coef_.dtype == np.float32
        assert model.score(X, y) > exact.score(X, y) - 0.03
        assert (model.coef_ != exact.coef_).any()

    def test_compiled(self, digits):
        X, y = digits
        compiled = small(compile=True, compile__backend="eager").fit(X, y)
        np.testing.assert_allclose(
            compiled.predict_proba(X), small().fit(X, y).predict_proba(X), atol=1e-5
        )

    def test_compiling_keeps_the_names_of_parameters(self, digits):
        X, y = digits
        options = {"max_epochs": 2, "compile__backend": "eager"}
        start = small(max_epochs=1, lr=1e-30).fit(X, y).transform(X)
        for frozen in (
            {"callbacks": [Freezer("backbone*")]},
            {"optimizer__param_groups": [("backbone.*", {"lr": 0.0})]},
        ):
            model = small(compile=True, **options, **frozen).fit(X, y)
            np.testing.assert_allclose(model.transform(X), start, atol=1e-6)

    def test_compiling_can_change_between_warm_starts(self, digits):
        X, y = digits
        model = small(compile=True, compile__backend="eager", warm_start=True).fit(X, y)
        model = pickle.loads(pickle.dumps(model)).set_params(compile=False, max_epochs=1).fit(X, y)
        assert model.history_["train_loss"].iloc[0] < 0.5

    def test_mixed_precision_is_for_mini_batches(self, digits):
        with pytest.raises(ValueError, match="mixed_precision=None"):
            MR2Classifier(mixed_precision="bfloat16").fit(*digits)

    def test_diverging_training_keeps_finite_parameters(self, digits):
        X, y = digits
        wild = small(optimizer=torch.optim.SGD, lr=1e30, max_epochs=5)
        with pytest.warns(ConvergenceWarning, match="Lower lr"):
            model = wild.fit(X, y)
        assert np.isfinite(model.predict_proba(X)).all()

    def test_warm_start_continues(self, digits):
        X, y = digits
        model = small(warm_start=True, max_epochs=10).fit(X, y)
        first, margins = model.history_["train_loss"].iloc[0], model.margins_
        model.set_params(max_epochs=1).fit(X, y)
        assert model.history_["train_loss"].iloc[0] < first / 2
        np.testing.assert_allclose(model.margins_, margins, rtol=0.2)

    def test_partial_fit_learns(self, digits):
        X, y = digits
        model = small(lr=0.01)
        for _ in range(15):
            for part in np.array_split(np.arange(400), 4):
                model.partial_fit(X[part], y[part], classes=range(10))
        assert model.score(X[400:], y[400:]) > 0.75

    def test_pipeline_on_images(self, digits):
        X, y = digits
        pipeline = make_pipeline(
            FunctionTransformer(lambda X: X.reshape(-1, 1, 8, 8)),
            MR2Classifier(ConvNet, max_epochs=5, lr=0.01, random_state=0),
        )
        assert pipeline.fit(X, y).score(X, y) > 0.3


def test_backbone_learns_from_the_first_step(digits):
    X, y = digits
    backbone = nn.Sequential(nn.Linear(64, 8), nn.Tanh())
    one_step = {"representation_weight": 0.0, "max_epochs": 1, "batch_size": 600, "random_state": 0}
    model = MR2Classifier(backbone, **one_step).fit(X, y)
    assert not torch.equal(model.net_.module_.backbone[0].weight, backbone[0].weight)


class TestWeights:
    @pytest.mark.parametrize("representation_weight", [0.0, 0.1])
    def test_weights_are_repetition_in_a_full_batch(self, digits, representation_weight):
        X, y = digits[0][:100].astype(np.float64), digits[1][:100]
        count = np.random.default_rng(0).integers(0, 4, size=100)
        model = small(
            representation_weight=representation_weight, batch_size=1000, max_epochs=5, lr=0.003
        )
        weighted = copy.deepcopy(model).fit(X, y, sample_weight=count)
        repeated = copy.deepcopy(model).fit(np.repeat(X, count, 0), np.repeat(y, count))
        np.testing.assert_allclose(
            weighted.predict_proba(X), repeated.predict_proba(X), rtol=1e-6, atol=1e-9
        )

    def test_zero_weight_is_absence_in_mini_batches(self, digits):
        X, y = digits
        keep = np.arange(600) % 3 > 0
        weighted = small().fit(X, y, sample_weight=keep.astype(float))
        dropped = small().fit(X[keep], y[keep])
        np.testing.assert_array_equal(weighted.predict_proba(X), dropped.predict_proba(X))


class TestDegenerate:
    def test_class_with_one_sample(self, digits):
        X, y = digits
        keep = (y != 3) | (np.cumsum(y == 3) == 1)
        model = small(representation_weight=0.1, validation_fraction=0.2).fit(X[keep], y[keep])
        assert np.isfinite(model.predict_proba(X)).all()
        assert np.isfinite(model.margins_).all()

    def test_collapsed_class(self, digits):
        X, y = digits
        X = X.copy()
        X[y == 3] = 0
        for statistic in ("second_moment", "dispersion"):
            model = small(margin_statistic=statistic, representation_weight=0.1).fit(X, y)
            assert np.isfinite(model.predict_proba(X)).all()
            assert (model.margins_ > 0).all()

    def test_batches_of_one_class(self, digits):
        X, y = digits
        order = np.argsort(y, kind="stable")
        model = small(iterator_train__shuffle=False, batch_size=20, representation_weight=0.1)
        model.fit(X[order], y[order])
        assert np.isfinite(model.predict_proba(X)).all()

    def test_batches_of_one_sample(self, digits):
        X, y = digits
        model = small(batch_size=1, max_epochs=1, representation_weight=0.1).fit(X[:50], y[:50])
        assert np.isfinite(model.predict_proba(X)).all()


class TestBalancedSampler:
    def test_gives_every_anchor_a_positive(self, digits):
        X, y = digits
        model = small(
            iterator_train__sampler=ClassBalancedSampler(3),
            batch_size=12,
            representation_weight=0.1,
        ).fit(X, y)
        assert model.score(X, y) > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("mixed_precision", [None, "bfloat16"])
def test_cuda(digits, mixed_precision):
    X, y = digits
    model = small(device="cuda", max_epochs=20, mixed_precision=mixed_precision).fit(X, y)
    assert model.score(X, y) > 0.9
