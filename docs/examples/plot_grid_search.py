"""
Choosing by the worst class, at little cost
===========================================

The best model by accuracy is seldom the best for its worst class. Choosing by the worst class alone
may give away too much. :class:`~sklearn_mr2.metrics.BestWithinTolerance` makes the trade explicit:
of all candidates whose accuracy is within a tolerance of the best, it takes the one with the best
worst class.
"""

# %%
# Two scores, one search
# ----------------------
#
# :class:`~sklearn_mr2.metrics.PerClassDisparityScorer` goes wherever scikit-learn takes a scorer.

import pandas as pd
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mr2 import MR2Classifier, PerClassDisparityScorer
from sklearn_mr2.datasets import load_fashion_mnist_features
from sklearn_mr2.display import DisparityTradeoffDisplay
from sklearn_mr2.metrics import BestWithinTolerance, per_class_report

X, y = load_fashion_mnist_features(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, stratify=y, random_state=0)

model = make_pipeline(
    StandardScaler(),
    MR2Classifier(
        margin_mode="subtract", margin_exponent=1.0, error_cv=3, tol=1e-4, random_state=0
    ),
)
Cs = [0.003, 0.01, 0.03, 0.1]
grid = [
    {"mr2classifier__margin_statistic": [None], "mr2classifier__C": Cs},
    {
        "mr2classifier__margin_statistic": ["error"],
        "mr2classifier__margin": [0.5, 1.0, 2.0, 4.0],
        "mr2classifier__C": Cs,
    },
]
search = GridSearchCV(
    model,
    grid,
    scoring={"accuracy": "accuracy", "worst": PerClassDisparityScorer(summary="worst")},
    refit=BestWithinTolerance("mean_test_worst", "mean_test_accuracy", tolerance=0.005),
    cv=StratifiedKFold(3, shuffle=True, random_state=0),
)
search.fit(X_train, y_train)
print(search.best_params_)

# %%
# The trade
# ---------
#
# Every candidate is a point. The staircase joins those that no other beats in both scores, the band
# holds those within half a point of the best accuracy, and the ring is the choice. Without margins
# the worst class stays low whatever ``C`` is.

candidates = pd.DataFrame(search.cv_results_)
statistic = candidates["param_mr2classifier__margin_statistic"]
margin = candidates["param_mr2classifier__margin"]
groups = margin.map("margin {:g}".format).where(statistic.notna(), "no margins")
display = DisparityTradeoffDisplay(
    candidates["mean_test_accuracy"],
    candidates["mean_test_worst"],
    chosen=search.best_index_,
    tolerance=search.refit.tolerance,
    groups=groups,
    accuracy_name="Accuracy, mean over folds",
    disparity_name="Recall of the worst class, mean over folds",
).plot()

# %%
# What a tolerance costs
# ----------------------
#
# The rule is a function of ``cv_results_``, so other tolerances need no new search. The scores
# above chose the candidates and flatter them; here is what they do on the test part, which chose
# nothing. First comes the most accurate candidate without margins.

choices = {"no margins": candidates.loc[statistic.isna(), "mean_test_accuracy"].idxmax()}
for tolerance in (0.0, 0.0025, 0.005, 0.01):
    rule = BestWithinTolerance("mean_test_worst", "mean_test_accuracy", tolerance)
    choices[f"tolerance {tolerance:g}"] = rule(search.cv_results_)
rows = {}
for name, index in choices.items():
    params = candidates.loc[index, "params"]
    fitted = clone(model).set_params(**params).fit(X_train, y_train)
    recall = per_class_report(y_test, fitted.predict(X_test))["recall"]
    rows[name] = {
        "chosen": f"{groups[index]}, C = {params['mr2classifier__C']:g}",
        "accuracy": f"{recall.mean():.3f}",
        "worst class": f"{recall.min():.2f}",
        "hardest third": f"{recall.nsmallest(3).mean():.2f}",
    }
pd.DataFrame.from_dict(rows, orient="index")

# %%
# A line of the table is one fit, and with 150 test samples a class a recall is known to some 7
# points either way. Take the direction from it, not the digits.
