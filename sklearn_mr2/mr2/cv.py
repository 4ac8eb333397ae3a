"""A search for the strength of the penalty that warm-starts along the path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, _fit_context, clone
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv
from sklearn.utils import _safe_indexing, indexable
from sklearn.utils._param_validation import Interval
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import (
    _check_feature_names,
    check_is_fitted,
    validate_data,
)

from ..base import _check_labels, _check_weight, _refuse_lazy
from .classifier import MR2Classifier, Path
from .notebook import MarginsInNotebooks


class MR2ClassifierCV(MarginsInNotebooks, MetaEstimatorMixin, ClassifierMixin, BaseEstimator):
    """MR2Classifier with `C` chosen by cross-validation, as LogisticRegressionCV does.

    On each fold a linear probe goes from the strongest penalty to the weakest, each time starting
    from where the last two solutions point to; a grid search starts every fit from zero. Scores are
    those of a grid search, up to the tolerance of the fits, in fewer iterations. Networks, for
    which the start matters, are trained from the beginning each time.

    Parameters
    ----------
    estimator : MR2Classifier, optional
        What to search `C` for; a default MR2Classifier if None. It is cloned, never changed. Its
        head must be linear: a cosine head has no `C`.
    Cs : int or array-like of float, default=10
        Values of `C`, or the number of values on a logarithmic scale from 1e-4 to 1e4.
    cv : int, splitter or iterable of splits, optional
        Folds; 5 stratified ones by default.
    scoring : str, callable, list or dict, optional
        One or several scorers, as for :class:`~sklearn.model_selection.GridSearchCV`; accuracy by
        default.
    refit : bool, str or callable, default=True
        How to choose: True or any name takes the best score of a single scorer; with several, the
        name of the one that counts; or a function of `cv_results_` that returns the index, such as
        :class:`~sklearn_mr2.metrics.BestWithinTolerance`. Of equal scores the strongest penalty
        is taken.
    n_jobs : int, optional
        Folds fitted at the same time.

    Attributes
    ----------
    C_ : float
        The chosen value: the `C` of `best_estimator_`, whose own `C_` is larger with
        ``margin="auto"``.
    Cs_ : ndarray of shape (n_Cs,)
        The values searched, in ascending order.
    cv_results_ : dict
        ``params``, ``param_C`` and, for each scorer, ``split*_test_*``, ``mean_test_*``,
        ``std_test_*`` and ``rank_test_*``, as those of GridSearchCV.
    best_index_ : int
        Where `C_` stands in `Cs_`.
    best_score_ : float
        Mean score of `C_` over the folds; not there if `refit` is a function.
    best_estimator_ : MR2Classifier
        Fitted to all the data with `C_`.
    scorer_ : callable
        What `scoring` stands for.
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    coef_ : ndarray of shape (n_classes, n_features) or (1, n_features)
        Weights of `best_estimator_`; one row for two classes.
    intercept_ : ndarray of shape (n_classes,) or (1,)
        Its intercepts.
    margins_ : ndarray of shape (n_classes,)
        Its margins.
    n_features_in_ : int
        Number of features seen in :meth:`fit`.
    feature_names_in_ : ndarray of shape (n_features,)
        Their names, if `X` has names that are all strings.

    See Also
    --------
    sklearn.linear_model.LogisticRegressionCV : The same without margins.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn_mr2 import MR2ClassifierCV
    >>> X, y = load_digits(return_X_y=True)
    >>> search = MR2ClassifierCV(Cs=[1e-4, 1e-2, 1.0], cv=3).fit(X / 16, y)
    >>> search.C_
    1.0
    """

    best_index_: int
    best_score_: float

    _parameter_constraints: dict = {
        "estimator": [MR2Classifier, None],
        "Cs": [Interval(Integral, 1, None, closed="left"), "array-like"],
        "cv": ["cv_object"],
        "scoring": [str, callable, list, tuple, dict, None],
        "refit": ["boolean", str, callable],
        "n_jobs": [Integral, None],
    }

    def __init__(
        self,
        estimator: MR2Classifier | None = None,
        *,
        Cs: int | ArrayLike = 10,
        cv: Any = None,
        scoring: Any = None,
        refit: bool | str | Callable[[Mapping[str, Any]], int] = True,
        n_jobs: int | None = None,
    ) -> None:
        self.estimator = estimator
        self.Cs = Cs
        self.cv = cv
        self.scoring = scoring
        self.refit = refit
        self.n_jobs = n_jobs

    @_fit_context(prefer_skip_nested_validation=False)
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Choose `C` and fit with it.

        Parameters
        ----------
        X : array-like, data frame or tensor of shape (n_samples, n_features)
            Training data.
        y : array-like of shape (n_samples,)
            Class labels.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative weights, for the fits and for the scores, whose scorers have to take them.

        Returns
        -------
        self
            The fitted estimator.

        Raises
        ------
        ValueError
            If `Cs` are not positive, `refit` does not fit `scoring`, the head is a cosine one, a
            class has no sample in the training part of a fold, the test part of one is empty or
            weighs nothing, or the data are not what MR2Classifier takes.
        TypeError
            If there is `sample_weight` and a scorer does not take it, or `refit` is a function
            that does not return an integer.
        IndexError
            If it returns one that is no index of `Cs_`.
        """
        template = MR2Classifier() if self.estimator is None else self.estimator
        if template.head == "cosine":
            raise ValueError(
                "C does not apply to head='cosine', whose weights are directions. Search "
                "head__scale with GridSearchCV, or set head='linear'."
            )
        self.Cs_ = self._check_Cs()
        _refuse_lazy(X)
        X, y = indexable(X, y)
        validate_data(self, X, reset=True, skip_check_array=True)
        if y is None:
            raise ValueError("MR2ClassifierCV requires y to be passed, but the target y is None.")
        check_classification_targets(y)
        weight = None if sample_weight is None else _check_weight(sample_weight, X)
        self.scorer_ = check_scoring(template, self.scoring)
        if weight is not None:
            self._check_scorers_take_weights(template)
        several = isinstance(self.scoring, list | tuple | dict)
        if self.refit is False or (
            several and not callable(self.refit) and self.refit not in self.scoring
        ):
            raise ValueError(
                "refit must name the score to choose C by, or be a function of cv_results_ such as "
                f"BestWithinTolerance, when scoring has several; got refit={self.refit!r} for the "
                f"scores {list(self.scoring)}."
                if several
                else "refit must be True or a function of cv_results_, for C has to be chosen; got "
                "refit=False."
            )
        folds = list(check_cv(self.cv, y, classifier=True).split(X, y))
        _check_folds(y, weight, folds)
        paths = Parallel(n_jobs=self.n_jobs)(
            delayed(_score_path)(clone(template), X, y, weight, train, test, self.Cs_, self.scorer_)
            for train, test in folds
        )
        self.cv_results_ = _results(self.Cs_, paths)
        self._choose()
        self.C_ = float(self.Cs_[self.best_index_])
        self.best_estimator_ = clone(template).set_params(C=self.C_).fit(X, y, weight)
        return self

    def _check_Cs(self) -> NDArray:
        if isinstance(self.Cs, Integral):
            return np.logspace(-4, 4, int(self.Cs))
        Cs = np.unique(np.asarray(self.Cs, dtype=float))
        if not len(Cs) or not (np.isfinite(Cs) & (Cs > 0)).all():
            raise ValueError(
                f"Cs must be positive finite numbers, or how many to try, got {self.Cs!r}."
            )
        return Cs

    def _check_scorers_take_weights(self, model: MR2Classifier) -> None:
        """Refuse scorers that would leave the weights out; scikit-learn does so in silence."""
        scoring = self.scoring
        if isinstance(scoring, dict):
            scorers = scoring
        else:
            names = scoring if isinstance(scoring, list | tuple) else [scoring]
            scorers = {str(name): name for name in names}
        for name, scorer in scorers.items():
            found: Any = check_scoring(model, scorer)
            # Those of make_scorer pass the parameters of their score function on.
            parameters = signature(getattr(found, "_score_func", found)).parameters
            if not any(
                p.name == "sample_weight" or p.kind == p.VAR_KEYWORD for p in parameters.values()
            ):
                raise TypeError(
                    f"The scorer {name} of scoring does not take sample_weight. Give it such a "
                    "parameter, or leave sample_weight out."
                )

    def _choose(self) -> None:
        """Set `best_index_` and, unless a function chooses, `best_score_`."""
        self._chosen_by: str | None = None
        if callable(self.refit):
            index = self.refit(self.cv_results_)
            if not isinstance(index, Integral):
                raise TypeError(f"refit must return an integer, the index in Cs_; got {index!r}.")
            if not 0 <= index < len(self.Cs_):
                raise IndexError(
                    f"refit returned the index {index}, but there are {len(self.Cs_)} Cs_."
                )
            self.best_index_ = int(index)
            if hasattr(self, "best_score_"):
                del self.best_score_
            return
        known = [k.removeprefix("rank_test_") for k in self.cv_results_ if k[:5] == "rank_"]
        name = "score" if known == ["score"] else self.refit
        if name not in known:  # a function may return several scores of any names
            raise ValueError(f"refit={name!r} is none of the scores, which are {known}.")
        ranks = self.cv_results_[f"rank_test_{name}"]
        self._chosen_by = name
        self.best_index_ = int(ranks.argmin())
        self.best_score_ = float(self.cv_results_[f"mean_test_{name}"][self.best_index_])

    # ------------------------------------------------------------------ the chosen model

    def _best(self, X: Any) -> MR2Classifier:
        check_is_fitted(self)
        _check_feature_names(self, X, reset=False)
        return self.best_estimator_

    def predict(self, X: Any) -> NDArray:
        """Predict the most probable class, shape (n_samples,)."""
        return self._best(X).predict(X)

    def predict_proba(self, X: Any) -> NDArray:
        """Compute class probabilities, shape (n_samples, n_classes)."""
        return self._best(X).predict_proba(X)

    def predict_log_proba(self, X: Any) -> NDArray:
        """Compute logarithms of class probabilities, shape (n_samples, n_classes)."""
        return self._best(X).predict_log_proba(X)

    def decision_function(self, X: Any) -> NDArray:
        """Compute the logits; with two classes the difference of the second and the first."""
        return self._best(X).decision_function(X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Score the chosen model.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Test data.
        y : array-like of shape (n_samples,)
            Class labels.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative weights.

        Returns
        -------
        float
            What C was chosen by: the score of `scoring`, of several the one that `refit` names.
            The accuracy where `refit` is a function and there are several.

        Raises
        ------
        TypeError
            If there is `sample_weight` and a scorer does not take it.
        """
        best = self._best(X)
        weight = {}
        if sample_weight is not None:
            weight["sample_weight"] = sample_weight
            self._check_scorers_take_weights(best)
        score = self.scorer_(best, X, y, **weight)
        if not isinstance(score, dict):
            return float(score)
        if self._chosen_by is None:
            return super().score(X, y, sample_weight)
        return float(score[self._chosen_by])

    @property
    def classes_(self) -> NDArray:
        """Class labels."""
        return self.best_estimator_.classes_

    @property
    def coef_(self) -> NDArray:
        """Weights of a linear head."""
        return self.best_estimator_.coef_

    @property
    def intercept_(self) -> NDArray:
        """Intercepts of a linear head."""
        return self.best_estimator_.intercept_

    @property
    def margins_(self) -> NDArray:
        """Margin of each class."""
        return self.best_estimator_.margins_

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "best_estimator_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        template = MR2Classifier() if self.estimator is None else self.estimator
        tags.input_tags = template.__sklearn_tags__().input_tags
        return tags


def _check_folds(y: Any, weight: NDArray | None, folds: list[tuple[NDArray, NDArray]]) -> None:
    """Refuse folds whose models would not know all classes, or that test nothing."""
    labels = np.asarray(_check_labels(y, "y"))
    counts = np.ones(len(labels), bool) if weight is None else weight > 0
    classes = np.unique(labels[counts])
    for i, (train, test) in enumerate(folds):
        if not len(test):
            raise ValueError(
                f"The test part of fold {i} is empty, so that there is nothing to score. Use other "
                "folds."
            )
        if not counts[test].any():
            raise ValueError(
                f"sample_weight is 0 for all samples in the test part of fold {i}, so that there "
                "is nothing to score. Leave samples without weight out, or use other folds."
            )
        missing = np.setdiff1d(classes, labels[train][counts[train]])
        if len(missing):
            raise ValueError(
                f"The training part of fold {i} has no sample of the classes {missing.tolist()}, "
                "so that no score there would tell how they are treated. Use stratified and fewer "
                "folds, as in cv=2 where a class has 2 samples, or leave out the samples of "
                "classes that have 1."
            )


def _score_path(
    model: MR2Classifier,
    X: Any,
    y: Any,
    weight: NDArray | None,
    train: NDArray,
    test: NDArray,
    Cs: NDArray,
    scorer: Callable[..., Any],
) -> list[dict[str, float]]:
    """Scores on the test part of one fold, for each of ascending `Cs`."""
    (X_train, y_train), (X_test, y_test) = (
        (_safe_indexing(X, rows), _safe_indexing(y, rows)) for rows in (train, test)
    )
    fit_weight = None if weight is None else weight[train]
    test_weight = {} if weight is None else {"sample_weight": weight[test]}
    # A network would go on training where it stopped; the optimum of a probe has no memory.
    if model._full_batch(by_parts=False):
        model._path = Path()
    model.set_params(warm_start=model._path is not None)
    scores = []
    for C in Cs:
        model.set_params(C=float(C)).fit(X_train, y_train, fit_weight)
        score = scorer(model, X_test, y_test, **test_weight)
        scores.append(score if isinstance(score, dict) else {"score": score})
    return scores


def _results(Cs: NDArray, paths: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Bring scores into the form of GridSearchCV's ``cv_results_``."""
    results: dict[str, Any] = {
        "param_C": np.ma.array(Cs, dtype=object),
        "params": [{"C": float(C)} for C in Cs],
    }
    for name in paths[0][0]:
        table = np.array([[scores[name] for scores in path] for path in paths], dtype=float)
        for i, row in enumerate(table):
            results[f"split{i}_test_{name}"] = row
        mean = table.mean(0)
        results[f"mean_test_{name}"], results[f"std_test_{name}"] = mean, table.std(0)
        # Means of equal numbers may differ in their last bits; NaN comes last.
        rounded = np.round(np.nan_to_num(mean, nan=-np.inf), 12)
        results[f"rank_test_{name}"] = rankdata(-rounded, method="min").astype(np.int32)
    return results
