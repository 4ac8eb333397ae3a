"""A sweep of C by cross-validation: MR2ClassifierCV against searches with LogisticRegression.

    python benchmarks/speed/sweep.py

fits 10 values of C on 5 folds and writes ``results/sweep.csv``. Times are CPU times on one thread;
every search uses the same folds and values and refits with the value it chose.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
import warnings
from pathlib import Path

import numpy as np
import sklearn
import torch
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

import sklearn_mr2
from sklearn_mr2 import MR2Classifier, MR2ClassifierCV
from sklearn_mr2.datasets import load_fashion_mnist_features

RESULTS = Path(__file__).parent / "results" / "sweep.csv"


def load(name: str, samples: int, seed: int):
    """Standardised training and test data, float32."""
    if name == "fashion-bundled":
        X, y = load_fashion_mnist_features(return_X_y=True)
    else:
        with np.load(Path(os.environ["SKLEARN_MR2_CACHE"]) / f"{name}.npz") as file:
            X, y = file["X"], file["y"]
    rows = np.random.default_rng(seed).permutation(len(X))[:samples]
    split = train_test_split(
        X[rows].astype(np.float32), y[rows], stratify=y[rows], test_size=0.25, random_state=seed
    )
    scaler = StandardScaler().fit(split[0])
    return scaler.transform(split[0]), scaler.transform(split[1]), split[2], split[3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="fashion-bundled", help="or a file in SKLEARN_MR2_CACHE")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--values", type=int, default=10)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--max-iter", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    X, X_test, y, y_test = load(arguments.data, arguments.samples, arguments.seed)
    Cs = np.logspace(-4, 2, arguments.values)
    cv = StratifiedKFold(arguments.folds, shuffle=True, random_state=arguments.seed)
    plain = LogisticRegression(max_iter=arguments.max_iter)
    # The default tolerance ends far from the optimum where C is large.
    converged = LogisticRegression(max_iter=100_000, tol=1e-6)

    def probe(tol: float) -> MR2Classifier:
        return MR2Classifier(margin_statistic=None, tol=tol, device="cpu")

    searches = {
        "MR2ClassifierCV": MR2ClassifierCV(probe(1e-6), Cs=Cs, cv=cv),
        "MR2ClassifierCV, tol=1e-4": MR2ClassifierCV(probe(1e-4), Cs=Cs, cv=cv),
        "GridSearchCV(MR2Classifier)": GridSearchCV(probe(1e-6), {"C": Cs}, cv=cv),
        "LogisticRegressionCV": LogisticRegressionCV(Cs=Cs, cv=cv, max_iter=arguments.max_iter),
        "GridSearchCV(LogisticRegression, tol=1e-6)": GridSearchCV(converged, {"C": Cs}, cv=cv),
        "GridSearchCV(LogisticRegression)": GridSearchCV(plain, {"C": Cs}, cv=cv),
    }
    rows = []
    for name, search in searches.items():
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = time.process_time()
            search.fit(X, y)
            seconds = time.process_time() - start
        chosen = getattr(search, "C_", None)
        chosen = search.best_params_["C"] if chosen is None else np.ravel(chosen)[0]
        rows.append(
            {
                "data": arguments.data,
                "samples": len(X),
                "features": X.shape[1],
                "values": arguments.values,
                "folds": arguments.folds,
                "search": name,
                "seconds": round(seconds, 2),
                "C": float(chosen),
                "test_accuracy": round(search.score(X_test, y_test), 4),
                "max_iter": arguments.max_iter,
                "seed": arguments.seed,
                "scikit-learn": sklearn.__version__,
                "torch": torch.__version__,
                "sklearn_mr2": sklearn_mr2.__version__,
            }
        )
        print(rows[-1], flush=True)
    for row in rows:
        print(f"{row['search']}: {rows[-1]['seconds'] / row['seconds']:.1f} times as fast")
    RESULTS.parent.mkdir(exist_ok=True)
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
