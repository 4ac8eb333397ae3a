"""Losses of other methods, each a small module called like the package's own criterion.

``loss(logits, features, y, sample_weight)`` returns the mean over the batch. Most of these methods
were made for classes of unequal size. On balanced classes they would be cross-entropy, so where
they ask for the frequency of a class they get its recall out of fold instead: a class that is
recognised half as often as another counts as half as frequent.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SampleLoss(nn.Module):
    """Base: subclasses give one loss for each sample."""

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(
        self, logits: Tensor, features: Tensor, y: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        losses = self.per_sample(logits, y)
        return (losses if sample_weight is None else losses * sample_weight).mean()


class CrossEntropy(SampleLoss):
    """Cross-entropy, with smoothed labels if asked for (Szegedy et al., 2016)."""

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="none", label_smoothing=self.smoothing)


class Focal(SampleLoss):
    """Focal loss (Lin et al., 2017): cross-entropy times a power of the probability missed."""

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        ce = F.cross_entropy(logits, y, reduction="none")
        # log1p and not a power of 1 - p: its gradient stays finite where p reaches 1.
        missed = (-torch.expm1(-ce)).clamp_min(1e-7)
        return missed**self.gamma * ce


class GeneralisedCrossEntropy(SampleLoss):
    """``(1 - p^q) / q`` (Zhang and Sabuncu, 2018): what LfF makes a biased model with."""

    def __init__(self, q: float = 0.7) -> None:
        super().__init__()
        self.q = q

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        ce = F.cross_entropy(logits, y, reduction="none")
        return -torch.expm1(-self.q * ce) / self.q


class AffineLogits(SampleLoss):
    """Cross-entropy of ``scale_k z_k + shift_k`` in training, raw logits in prediction.

    With shifts ``tau log(frequency)`` it is logit adjustment (Menon et al., 2021), with scales as
    well the vector-scaling loss (Kini et al., 2021).
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, shift: Tensor, scale: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("shift", shift.float())
        self.register_buffer("scale", torch.ones_like(self.shift) if scale is None else scale)

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits * self.scale + self.shift, y, reduction="none")


class LDAM(SampleLoss):
    """Label-distribution-aware margins (Cao et al., 2019), ``frequency_k^(-1/4)``, subtracted."""

    margins: Tensor

    def __init__(self, frequency: Tensor, largest: float) -> None:
        super().__init__()
        margins = frequency.float().pow(-0.25)
        self.register_buffer("margins", largest * margins / margins.max())

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        rows = y[:, None]
        return F.cross_entropy(
            logits.scatter_add(1, rows, -self.margins[rows].to(logits.dtype)), y, reduction="none"
        )


class Equalization(SampleLoss):
    """Equalization loss (Tan et al., 2020): samples push less on the logits of rare classes.

    The rare classes are given; in the softmax of a sample of another class their exponentials count
    by `share` (the expectation of the random switch of the paper).
    """

    log_share: Tensor

    def __init__(self, rare: Tensor, share: float) -> None:
        super().__init__()
        log_share = torch.log(torch.tensor(share)) * rare.float()
        self.register_buffer("log_share", log_share)

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        own = F.one_hot(y, logits.shape[1]).bool()
        shifted = torch.where(own, logits, logits + self.log_share.to(logits.dtype))
        return F.cross_entropy(shifted, y, reduction="none")


class CVaR(SampleLoss):
    """Mean of the largest `share` of the losses: distributionally robust over samples.

    (Levy et al., 2020.)
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(
        self, logits: Tensor, features: Tensor, y: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        losses = F.cross_entropy(logits, y, reduction="none")
        return losses.topk(max(1, round(self.share * len(losses)))).values.mean()


class ClassRobust(SampleLoss):
    """Base of losses over the mean loss of each class.

    In mini-batches weights follow a running mean of the class losses; `momentum` 0 makes it the
    exact function of the class losses, for a full batch.
    """

    running: Tensor
    seen: Tensor

    def __init__(self, n_classes: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("running", torch.zeros(n_classes))
        self.register_buffer("seen", torch.zeros(n_classes))

    def weights(self, losses: Tensor) -> Tensor:
        raise NotImplementedError

    def value(self, losses: Tensor) -> Tensor:
        """The exact objective, whose gradient in the class losses is `weights`."""
        raise NotImplementedError

    def forward(
        self, logits: Tensor, features: Tensor, y: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        per_sample = F.cross_entropy(logits, y, reduction="none")
        n_classes = len(self.running)
        count = torch.bincount(y, minlength=n_classes)
        total = per_sample.new_zeros(n_classes).index_add(0, y, per_sample)
        losses = total / count.clamp_min(1)
        if self.momentum == 0:
            return self.value(losses)
        with torch.no_grad():
            present = count > 0
            keep = torch.where(self.seen > 0, self.momentum, 0.0)
            mixed = keep * self.running + (1 - keep) * losses
            self.running.copy_(torch.where(present, mixed, self.running))
            self.seen.add_(present)
            weights = self.weights(self.running)
        # Relative to equal weights, so that the learning rate keeps its meaning.
        return (weights[y] * n_classes * per_sample).mean()


class GroupDRO(ClassRobust):
    """Group DRO (Sagawa et al., 2020) with classes as groups.

    The adversary's exponentiated weights are ``softmax(eta * class losses)``, the stationary form
    of its ascent: the objective is ``logsumexp(eta * losses) / eta``.
    """

    def __init__(self, n_classes: int, eta: float, momentum: float) -> None:
        super().__init__(n_classes, momentum)
        self.eta = eta

    def weights(self, losses: Tensor) -> Tensor:
        return (self.eta * losses).softmax(0)

    def value(self, losses: Tensor) -> Tensor:
        return torch.logsumexp(self.eta * losses, 0) / self.eta


class FairDRO(ClassRobust):
    """FairDRO (Jung et al., 2023) with classes as groups.

    Within each class the original reweights groups in a chi-square ball; here there is one ball
    with the classes as its groups. Its closed form is the mean of the class losses plus `radius`
    times their standard deviation.
    """

    def __init__(self, n_classes: int, radius: float, momentum: float) -> None:
        super().__init__(n_classes, momentum)
        self.radius = radius

    def weights(self, losses: Tensor) -> Tensor:
        deviation = losses - losses.mean()
        std = losses.std(correction=0).clamp_min(1e-6)
        return (1 + self.radius * deviation / std).clamp_min(0) / len(losses)

    def value(self, losses: Tensor) -> Tensor:
        return losses.mean() + self.radius * losses.var(correction=0).clamp_min(1e-12).sqrt()


class SupCon(SampleLoss):
    """Cross-entropy plus a supervised contrastive term (Khosla et al., 2020) on the features.

    One stage in place of two: the term trains the features together with the head.
    """

    def __init__(self, weight: float, temperature: float = 0.1) -> None:
        super().__init__()
        self.weight = weight
        self.temperature = temperature

    def forward(
        self, logits: Tensor, features: Tensor, y: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        unit = F.normalize(features, dim=1)
        itself = torch.eye(len(y), dtype=torch.bool, device=y.device)
        similarity = (unit @ unit.T / self.temperature).masked_fill(itself, -torch.inf)
        log_p = similarity - similarity.logsumexp(1, keepdim=True)
        positive = (y[:, None] == y) & ~itself
        n_positive = positive.sum(1)
        term = -torch.where(positive, log_p, 0).sum(1) / n_positive.clamp_min(1)
        term = (term * (n_positive > 0)).sum() / (n_positive > 0).sum().clamp_min(1)
        return F.cross_entropy(logits, y) + self.weight * term
