"""scikit-learn's own checks, over every configuration that differs in kind."""

import pytest
import torch
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from sklearn_mr2 import MirrorFlowClassifier, MR2Classifier, MR2ClassifierCV
from sklearn_mr2.mirror import HyperbolicEntropy

ESTIMATORS = [
    MR2Classifier(),
    MR2Classifier(margin_statistic=None),
    MR2Classifier(margin_statistic="dispersion", margin_mode="subtract"),
    MR2Classifier(margin_norm=3, class_weight="balanced", dtype="float64"),
    MR2Classifier(head="cosine", margin_norm=3, fit_intercept=True, max_epochs=300),
    # Steps that depend smoothly on the gradient, or rounding grows beyond the checks' tolerance.
    MR2Classifier("mlp", optimizer=torch.optim.SGD, batch_size=1000, lr=0.1, max_epochs=40),
    MR2Classifier(
        nn.Sequential(nn.LazyLinear(16), nn.Tanh()),
        head="cosine",
        fit_intercept=True,
        margin_norm=3,
        representation_weight=0.1,
        optimizer=torch.optim.SGD,
        batch_size=1000,
        lr=0.1,
        max_epochs=40,
    ),
    MR2Classifier(optimizer=torch.optim.LBFGS, max_epochs=50, lr=1.0, batch_size=10_000),
    # Few steps: most of the checks' data are not separable, and would take all that are allowed.
    MirrorFlowClassifier(max_epochs=40),
    MirrorFlowClassifier((), max_epochs=40),
    MirrorFlowClassifier((), loss="exponential", class_weight="balanced", max_epochs=40),
    MirrorFlowClassifier((16,), potential="euclidean", max_epochs=40),
    MirrorFlowClassifier((16,), batch_size=32, max_epochs=20, lr=1.0),
    MirrorFlowClassifier(
        (16, 8), potential=["euclidean", HyperbolicEntropy(0.3), "smoothed_power"], max_epochs=40
    ),
]


# What the checks do not wait for.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(ESTIMATORS)
def test_sklearn_compatible(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks([MR2ClassifierCV(Cs=[0.1, 1.0], cv=2)])
def test_search_is_sklearn_compatible(estimator, check):
    check(estimator)
