"""
Choosing C with an eye on the hard classes
==========================================

The penalty that is best for accuracy need not be best for the difficult classes.
:class:`~sklearn_mr2.mr2.cv.MR2ClassifierCV` goes through the values of ``C``, each fit starting
from the solution before, and scores both. This example compares the two curves, with and without
margins, and chooses by :class:`~sklearn_mr2.metrics.BestWithinTolerance`.
"""

# %%
# Two searches
# ------------
#
# One without margins, which is logistic regression, and one with margins from the out-of-fold
# errors of the classes. ``tol=1e-4`` is enough to compare accuracies, and faster.

import matplotlib.pyplot as plt
import numpy as np
from sklearn.model_selection import StratifiedKFold, cross_val_predict, train_test_split
from sklearn.preprocessing import StandardScaler

from sklearn_mr2 import MR2Classifier, MR2ClassifierCV, PerClassDisparityScorer
from sklearn_mr2.datasets import load_fashion_mnist_features
from sklearn_mr2.display import DisparityTradeoffDisplay, PerClassAccuracyDisplay
from sklearn_mr2.metrics import BestWithinTolerance, difficulty_thirds, per_class_report

X, y = load_fashion_mnist_features(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, stratify=y, random_state=0)
scaler = StandardScaler().fit(X_train)
X_train, X_test = scaler.transform(X_train), scaler.transform(X_test)

rules = {
    "no margins": MR2Classifier(margin_statistic=None, tol=1e-4),
    "margins from errors": MR2Classifier(
        margin_statistic="error",
        margin_exponent=1.0,
        margin_mode="subtract",
        margin="auto",
        error_cv=3,
        tol=1e-4,
        random_state=0,
    ),
}
folds = StratifiedKFold(3, shuffle=True, random_state=0)
tolerance = 0.005
searches = {
    name: MR2ClassifierCV(
        rule,
        Cs=[0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3],
        cv=folds,
        scoring={"accuracy": "accuracy", "hard": PerClassDisparityScorer(summary="hard")},
        refit=BestWithinTolerance("mean_test_hard", tolerance=tolerance),
    ).fit(X_train, y_train)
    for name, rule in rules.items()
}
for name, search in searches.items():
    by_accuracy = search.Cs_[search.cv_results_["mean_test_accuracy"].argmax()]
    print(f"{name}: C = {by_accuracy:g} by accuracy, {search.C_:g} within the tolerance")

# %%
# Along the path
# --------------
#
# ``cv_results_`` is laid out as that of a grid search. Rings are the chosen values: on the left at
# most half a point below the best accuracy of their curve, on the right as high as that allows.
# Without margins the hard classes want a weaker penalty than accuracy does, and gain next to
# nothing from it: ``C`` is no means against disparity. Margins lift them where the penalty is not
# too strong.

colors = {"no margins": "#0072B2", "margins from errors": "#D55E00"}
fig, axes = plt.subplots(1, 2, figsize=(9.4, 3.8), layout="constrained")
for ax, score in zip(axes, ["accuracy", "hard"], strict=True):
    for name, search in searches.items():
        mean = search.cv_results_[f"mean_test_{score}"]
        ax.plot(search.Cs_, mean, "o-", markersize=4, color=colors[name], label=name)
        ax.plot(
            search.C_, mean[search.best_index_], "o", markersize=12, mfc="none", color=colors[name]
        )
    ax.set(xscale="log", xlabel="C", title="Accuracy" if score == "accuracy" else "Hardest third")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("Mean recall in cross-validation")
axes[0].legend(frameon=False, loc="lower center")
plt.show()

# %%
# All candidates together
# -----------------------
#
# A display is made of arrays as well as of a search, so that candidates of several searches can
# share a picture. Without margins no value of ``C`` comes near the top of the front.

accuracy, hard, groups = [], [], []
for name, search in searches.items():
    accuracy.extend(search.cv_results_["mean_test_accuracy"])
    hard.extend(search.cv_results_["mean_test_hard"])
    groups.extend([name] * len(search.Cs_))
rule = BestWithinTolerance("hard", "accuracy", tolerance)
chosen = rule({"accuracy": np.array(accuracy), "hard": np.array(hard)})
DisparityTradeoffDisplay(
    accuracy,
    hard,
    chosen=chosen,
    chosen_name=f"{groups[chosen]}, C = {searches[groups[chosen]].Cs_[chosen % 7]:g}",
    tolerance=tolerance,
    groups=groups,
    accuracy_name="Accuracy in cross-validation",
    disparity_name="Recall of the hardest third",
).plot()
plt.show()

# %%
# On data that chose nothing
# --------------------------
#
# The scores of a choice flatter it; the test part does not. Which classes count as hard is settled
# on the training part, by a probe without margins. Margins find more shirts here, and pay for it
# with other clothes of the same kind: the intervals say how much of that one test set can show.

plain = MR2Classifier(margin_statistic=None, C=0.01)
out_of_fold = cross_val_predict(plain, X_train, y_train, cv=folds)
thirds = difficulty_thirds(per_class_report(y_train, out_of_fold)["recall"])
PerClassAccuracyDisplay.from_estimator(
    {"no margins, by accuracy": plain.fit(X_train, y_train), **searches},
    X_test,
    y_test,
    difficulty=thirds,
)
plt.show()
