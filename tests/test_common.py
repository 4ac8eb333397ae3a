"""scikit-learn's own checks, over every configuration that differs in kind."""

import torch
from sklearn.utils.estimator_checks import parametrize_with_checks

from sklearn_mr2 import MR2Classifier

ESTIMATORS = [
    MR2Classifier(),
    MR2Classifier(margin_statistic=None),
    MR2Classifier(margin_statistic="dispersion", margin_mode="subtract"),
    MR2Classifier(margin_norm=3, class_weight="balanced", dtype="float64"),
    MR2Classifier(optimizer=torch.optim.LBFGS, max_epochs=50, lr=1.0, batch_size=10_000),
]


@parametrize_with_checks(ESTIMATORS)
def test_sklearn_compatible(estimator, check):
    check(estimator)
