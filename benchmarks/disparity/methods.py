"""All methods of the comparison: how each is fitted and what it is tuned over.

Every method has six candidates. For a probe they are three settings of its own, each with the
penalty of cross-entropy and with a third of it; for a network they are six settings of its own at
the learning rate of cross-entropy. Cross-entropy itself has six penalties or learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from baselines import losses as L
from baselines.meta import just_train_twice, learning_from_failure, offsets_for_hard_classes
from learners import Learner, Predictor
from numpy.typing import NDArray
from rules import (
    FixedMargins,
    WithOffsets,
    choose_offsets,
    hardest,
    searched_margins,
    two_rounds,
    with_error_margins,
)
from torch import nn

from sklearn_mr2.mr2.losses import MR2Loss
from sklearn_mr2.mr2.statistics import class_margins, class_moments

Fit = Callable[..., Predictor]


@dataclass(frozen=True)
class Method:
    """A method: ``fit(learner, **candidate)`` for each of its candidates.

    `group` orders the tables; `models` says where the method applies.
    """

    name: str
    group: str
    fit: Fit
    settings: tuple[dict[str, Any], ...]
    models: tuple[str, ...] = ("probe", "mlp", "cnn")
    seed_offset: int = 0

    def candidates(self, model: str) -> list[dict[str, Any]]:
        """The six settings to choose from."""
        if model == "probe" and len(self.settings) == 6:
            return [{**s, "factor": f} for s in self.settings[::2] for f in (1.0, 3.0)]
        return [{"factor": 1.0, **s} for s in self.settings]


def grid(name: str, values: Sequence[float], **fixed: Any) -> tuple[dict[str, Any], ...]:
    """Settings that differ in one parameter."""
    return tuple({name: value, **fixed} for value in values)


def by_loss(make: Callable[..., nn.Module]) -> Fit:
    """Fit under the loss ``make(learner, **candidate)``."""

    def fit(learner: Learner, factor: float, **candidate: Any) -> Predictor:
        return learner.fit(make(learner, **candidate), factor)

    return fit


def pseudo_frequency(learner: Learner) -> torch.Tensor:
    """Recall of each class out of fold, which stands in for its frequency."""
    return torch.as_tensor(np.maximum(1 - learner.class_error, 0.05), dtype=torch.float32)


def momentum(learner: Learner) -> float:
    """0 for a full batch."""
    return 0.0 if learner.task.model == "probe" else 0.9


def error_weights(learner: Learner, power: float, factor: float) -> Predictor:
    """Cross-entropy with class weights that are a power of the class error."""
    weight = np.maximum(learner.class_error, 1e-3) ** power
    weight = weight[learner.y]
    return learner.fit(L.CrossEntropy(), factor, weight / weight.mean())


def margins_of(
    learner: Learner, statistic: str, mode: str, margin: float, exponent: float
) -> NDArray:
    """Margins of frozen features, as MR2Classifier computes them."""
    if statistic == "error":
        spread = torch.as_tensor(learner.class_error)
    else:
        X, y = torch.from_numpy(learner.X), torch.from_numpy(learner.y)
        moments = class_moments(X, y, learner.n_classes)
        spread = getattr(moments, statistic)
    floor = 0.1 if mode == "divide" else 0.0
    return class_margins(spread, margin, exponent=exponent, floor=floor).numpy()


def mr2(
    learner: Learner,
    margin: float,
    factor: float,
    statistic: str = "second_moment",
    mode: str = "divide",
    representation: float = 0.0,
    exponent: float | None = None,
) -> Predictor:
    """The package's MR2: exact statistics of frozen features, running ones of learned."""
    if exponent is None:
        exponent = 1 / 3 if mode == "divide" and statistic != "error" else 1.0
    if learner.task.model == "probe":
        margins = margins_of(learner, statistic, mode, margin, exponent)
        return learner.fit(FixedMargins(margins, mode), factor)
    if statistic == "none":
        statistic, exponent = "second_moment", 0.0
    loss = MR2Loss(
        learner.n_classes,
        learner.n_features,
        margin=margin,
        margin_statistic=statistic,  # type: ignore[arg-type]
        margin_exponent=exponent,
        margin_mode=mode,  # type: ignore[arg-type]
        representation_weight=representation,
        tau="auto",
    )
    if statistic == "error":
        loss.set_class_spread(torch.as_tensor(learner.class_error))
    return learner.fit(loss, factor)


def in_proportion(learner: Learner, scale: float, factor: float) -> Predictor:
    """Margins that are a multiple of the class error, as with ``margin="auto"``."""
    margin = scale * float(learner.class_error.mean())
    if learner.task.model == "probe":
        factor *= 1 + margin / 2
    return mr2(learner, margin, factor, statistic="error", mode="subtract")


def representation_only(learner: Learner, representation: float, factor: float) -> Predictor:
    """MR2 without margins."""
    return mr2(learner, 1.0, factor, statistic="none", representation=representation)


def searched_grid() -> tuple[dict[str, Any], ...]:
    return tuple(
        {"base": base, "step": step}
        for base, step in ((0, 1), (0, 2), (2, 1), (2, 2), (5, 1), (5, 2))
    )


TEMPERATURES = (0.25, 0.35, 0.5, 0.7, 2.0, 4.0)
SUBTRACTED = (0.5, 0.75, 1.0, 2.0, 3.0, 4.0)
BASES = (2.0, 1.0, 4.0, 3.0, 8.0, 6.0)
MIXED = tuple(
    {"base": b, "strength": s} for b, s in ((0, 2), (1, 1), (1, 3), (1, 2), (3, 3), (2, 2))
)
NETWORKS = ("mlp", "cnn")

_ce = by_loss(lambda learner: L.CrossEntropy())
METHODS = [
    Method("cross-entropy", "baseline", _ce, ()),
    Method("cross-entropy, other seeds", "baseline", _ce, (), seed_offset=10_000),
    Method(
        "uniform margin + membership offsets",
        "better rule",
        WithOffsets(choose_offsets),
        grid("base", BASES, kind="membership", give_up=0.0),
    ),
    Method(
        "uniform margin + error offsets",
        "better rule",
        WithOffsets(choose_offsets),
        grid("base", BASES, kind="error", give_up=0.0),
    ),
    Method(
        "error margin + membership offsets",
        "better rule",
        WithOffsets(choose_offsets),
        tuple({**s, "kind": "membership", "give_up": 0.0} for s in MIXED),
    ),
    Method("base + error margin", "better rule", with_error_margins, MIXED),
    Method(
        "error, in proportion",
        "better rule",
        in_proportion,
        grid("scale", (8.0, 6.0, 4.0, 12.0, 16.0, 24.0)),
    ),
    Method(
        "root of error, subtracted",
        "better rule",
        mr2,
        grid(
            "margin",
            (2.0, 1.0, 4.0, 3.0, 8.0, 6.0),
            statistic="error",
            mode="subtract",
            exponent=0.5,
        ),
    ),
    Method(
        "base + shrunk error margin",
        "better rule",
        with_error_margins,
        tuple({**s, "shrink": True} for s in MIXED),
    ),
    Method("base + error margin, two rounds", "better rule", two_rounds, MIXED),
    Method("searched margins", "better rule", searched_margins, searched_grid()),
    Method(
        "membership offsets",
        "better rule",
        WithOffsets(choose_offsets),
        grid("give_up", (0.0, 0.001, 0.002, 0.003, 0.005, 0.01), kind="membership"),
    ),
    Method("MR2 (paper)", "MR2", mr2, grid("margin", TEMPERATURES), ("probe",)),
    Method(
        "MR2 (paper)",
        "MR2",
        mr2,
        tuple({"margin": m, "representation": w} for m in (0.5, 1.0) for w in (1e-3, 3e-3, 1e-2)),
        NETWORKS,
    ),
    Method(
        "MR2 without margins",
        "MR2",
        representation_only,
        grid("representation", (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
        NETWORKS,
    ),
    Method(
        "MR2 with uniform margins",
        "MR2",
        by_loss(lambda learner, margin: FixedMargins(np.full(learner.n_classes, margin), "divide")),
        grid("margin", TEMPERATURES),
    ),
    Method("MR2 without representation term", "MR2", mr2, grid("margin", TEMPERATURES), NETWORKS),
    Method(
        "second moment, subtracted",
        "MR2",
        mr2,
        grid("margin", SUBTRACTED, statistic="second_moment", mode="subtract"),
    ),
    Method(
        "dispersion, divided",
        "MR2",
        mr2,
        grid("margin", TEMPERATURES, statistic="dispersion", mode="divide"),
    ),
    Method(
        "dispersion, subtracted",
        "MR2",
        mr2,
        grid("margin", SUBTRACTED, statistic="dispersion", mode="subtract"),
    ),
    Method(
        "error, divided",
        "MR2",
        mr2,
        grid("margin", TEMPERATURES, statistic="error", mode="divide"),
    ),
    Method(
        "error, subtracted",
        "MR2",
        mr2,
        grid("margin", SUBTRACTED, statistic="error", mode="subtract"),
    ),
    Method(
        "post-hoc offsets",
        "other methods",
        WithOffsets(offsets_for_hard_classes),
        grid("give_up", (0.0, 0.001, 0.002, 0.003, 0.005, 0.01)),
    ),
    Method(
        "uniform margin, subtracted",
        "other methods",
        by_loss(lambda learner, base: FixedMargins(np.full(learner.n_classes, base))),
        grid("base", BASES),
    ),
    Method(
        "label smoothing",
        "other methods",
        by_loss(lambda learner, smoothing: L.CrossEntropy(smoothing)),
        grid("smoothing", (0.02, 0.03, 0.05, 0.1, 0.2, 0.3)),
    ),
    Method(
        "focal",
        "other methods",
        by_loss(lambda learner, gamma: L.Focal(gamma)),
        grid("gamma", (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)),
    ),
    Method(
        "class weights by error",
        "other methods",
        error_weights,
        grid("power", (0.1, 0.15, 0.25, 0.35, 0.5, 1.0)),
    ),
    Method(
        "LDAM",
        "other methods",
        by_loss(lambda learner, largest: L.LDAM(pseudo_frequency(learner), largest)),
        grid("largest", (0.5, 0.75, 1.0, 2.0, 4.0, 6.0)),
    ),
    Method(
        "equalization",
        "other methods",
        by_loss(
            lambda learner, share: L.Equalization(
                torch.as_tensor(hardest(learner.class_error)), share
            )
        ),
        grid("share", (0.95, 0.9, 0.8, 0.7, 0.6, 0.4)),
    ),
    Method(
        "logit adjustment",
        "other methods",
        by_loss(lambda learner, tau: L.AffineLogits(tau * pseudo_frequency(learner).log())),
        grid("tau", (0.1, 0.2, 0.35, 0.5, 1.0, 2.0)),
    ),
    Method(
        "vector scaling",
        "other methods",
        by_loss(
            lambda learner, tau: L.AffineLogits(
                tau * pseudo_frequency(learner).log(),
                (pseudo_frequency(learner) / pseudo_frequency(learner).max()) ** 0.2,
            )
        ),
        grid("tau", (0.1, 0.2, 0.35, 0.5, 1.0, 2.0)),
    ),
    Method(
        "SupCon",
        "other methods",
        by_loss(lambda learner, weight: L.SupCon(weight)),
        grid("weight", (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
        NETWORKS,
    ),
    Method(
        "LfF", "other methods", learning_from_failure, grid("q", (0.1, 0.2, 0.3, 0.5, 0.7, 0.9))
    ),
    Method(
        "JTT", "other methods", just_train_twice, grid("times", (1.5, 2.0, 3.0, 4.0, 6.0, 10.0))
    ),
    Method(
        "group DRO",
        "other methods",
        by_loss(lambda learner, eta: L.GroupDRO(learner.n_classes, eta, momentum(learner))),
        grid("eta", (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)),
    ),
    Method(
        "CVaR DRO",
        "other methods",
        by_loss(lambda learner, share: L.CVaR(share)),
        grid("share", (0.9, 0.8, 0.7, 0.5, 0.4, 0.2)),
    ),
    Method(
        "FairDRO",
        "other methods",
        by_loss(lambda learner, radius: L.FairDRO(learner.n_classes, radius, momentum(learner))),
        grid("radius", (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)),
    ),
]


def methods_for(model: str) -> list[Method]:
    """Those that apply to a kind of model, cross-entropy first."""
    return [method for method in METHODS if model in method.models]


__all__ = ["METHODS", "Method", "methods_for"]
