"""
What a search could choose from
===============================

A search over hyperparameters has two aims here: overall accuracy, and accuracy on the hardest
classes. There is no single best candidate then, but a front of candidates of which none beats
another in both. This example draws the front, lets
:class:`~sklearn_mr2.metrics.BestWithinTolerance` choose from it, and asks whether the margins of
the chosen model are where they should be: at the difficult classes.
"""

# %%
# A search with two scores
# ------------------------
#
# A linear probe on the features of Fashion-MNIST, whose difficult classes (shirts, pullovers,
# coats) look alike. Margins from the out-of-fold errors of the classes are subtracted from the
# logits: a difficult class then must win by more. The first part of the grid does without margins,
# which is plain logistic regression.

from sklearn.model_selection import (
    GridSearchCV,
    StratifiedKFold,
    cross_val_predict,
    train_test_split,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mr2 import MR2Classifier, PerClassDisparityScorer
from sklearn_mr2.datasets import load_fashion_mnist_features
from sklearn_mr2.display import DisparityTradeoffDisplay, MarginDisplay, PerClassAccuracyDisplay
from sklearn_mr2.metrics import BestWithinTolerance, difficulty_thirds, per_class_report

X, y = load_fashion_mnist_features(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, stratify=y, random_state=0)

model = make_pipeline(
    StandardScaler(),
    MR2Classifier(
        margin_statistic="error",
        margin_mode="subtract",
        margin_exponent=1.0,
        error_cv=3,
        random_state=0,
    ),
)
Cs = [0.003, 0.01, 0.03, 0.1]
search = GridSearchCV(
    model,
    [
        {"mr2classifier__margin_statistic": [None], "mr2classifier__C": Cs},
        {"mr2classifier__margin": [1.0, 2.0, 4.0], "mr2classifier__C": Cs},
    ],
    scoring={"accuracy": "accuracy", "hard": PerClassDisparityScorer(summary="hard")},
    refit=BestWithinTolerance("mean_test_hard", tolerance=0.005),
    cv=StratifiedKFold(3, shuffle=True, random_state=0),
)
search.fit(X_train, y_train)
print(search.best_params_)

# %%
# The trade-off
# -------------
#
# Each point is a candidate, and ``group_by`` gives the values of a parameter colours and markers of
# their own. Below the staircase a candidate gives away accuracy, or the hardest third, for nothing.
# The band holds what is within half a point of the best accuracy, and the ring is the choice: the
# highest point in the band.
#
# Look at how the groups lie. Without margins no value of ``C`` gets the hardest third as high as
# margins do, and the best candidates with margins give up little accuracy for it. All of these are
# means of three folds and differ by points of a percent, so a front is rough guidance, not a law.

DisparityTradeoffDisplay.from_estimator(search, group_by="mr2classifier__margin")

# %%
# Are the margins where the errors are?
# -------------------------------------
#
# Margins are set from the training data. Whether they went to the right classes shows on others:
# here, on the test part. If the rank correlation is near 1, the classes that the model gets wrong
# are those that it was told to take care of. If it is near 0 or below, margins are spent on classes
# that do not need them, and another ``margin_statistic`` is worth a try.

MarginDisplay.from_estimator(search, X_test, y_test)

# %%
# The rule of the paper takes margins from the spread of the features instead, which needs no folds.
# On these data the spread says less about difficulty than the errors do: bags come in all shapes,
# which gives them the largest margin, but they are easy to tell from clothes.

spread = make_pipeline(StandardScaler(), MR2Classifier(C=0.03)).fit(X_train, y_train)
MarginDisplay.from_estimator(spread, X_test, y_test)

# %%
# Class by class
# --------------
#
# The scores of the search flatter the candidate that they chose. The test part chose nothing. It
# shows that the choice has moved errors between classes more than it has removed any: shirts gain
# what other clothes lose. That is what a margin can do for a linear probe, and whether it is wanted
# is for the user of the model to say.
#
# The classes that count as hard are chosen elsewhere too: by errors in cross-validation of the
# candidate that is best by accuracy alone, which has no margins. Otherwise bad luck of one model in
# the test part would pass for progress of the other.

plain = make_pipeline(StandardScaler(), MR2Classifier(margin_statistic=None, C=0.01))
out_of_fold = cross_val_predict(plain, X_train, y_train, cv=search.cv)
difficulty = difficulty_thirds(per_class_report(y_train, out_of_fold)["recall"])

PerClassAccuracyDisplay.from_estimator(
    {"no margins": plain.fit(X_train, y_train), "chosen": search},
    X_test,
    y_test,
    difficulty=difficulty,
)
