"""Nets that train by mirror descent: mini-batches, or the full-batch flow to a large margin."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from sklearn.exceptions import ConvergenceWarning
from skorch.utils import TeeGenerator
from torch import Tensor, nn

from ..net import TensorDataset, TensorLoader, TensorNet, evaluation_mode
from .losses import log_losses, log_total_loss, margins
from .networks import layer_groups
from .neurons import hidden_layers
from .optimizer import MirrorDescent
from .potentials import Potential
from .theory import horizon_margin, layer_balance, layer_duals, participation_ratio, q_margin

Potentials = str | Potential | Sequence[str | Potential] | Mapping[str, str | Potential]

#: A full-batch step may raise the loss, but not above that of this many steps before.
_MEMORY = 20
#: The full-batch search gives up where not even a step that should lower the loss by this fraction
#: is good enough.
_SMALLEST_DECREASE = 1e-5
#: Margin from which on directions are compared: before, they are still turning.
_FIRST_COMPARISON = 10.0

# Set by a hook on the last layer. A context variable, since one model may predict in many threads.
_last_layer_input: ContextVar[Tensor | None] = ContextVar("_last_layer_input", default=None)


def _remember_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    _last_layer_input.set(inputs[0])


class MirrorModule(nn.Module):
    """A network as the net wants it: maps a batch to ``(logits, features)``.

    Logits have a column for each class, with a single output f they are (0, f); features are the
    input of the last layer.

    Parameters
    ----------
    network : nn.Module
        The network, which is not copied.
    X : Tensor of shape (n_samples, ...)
        A few samples, to see which layer comes last.

    Attributes
    ----------
    n_features_out : int
        Number of features.
    """

    def __init__(self, network: nn.Module, X: Tensor) -> None:
        super().__init__()
        self.network = network
        called: list[nn.Module] = []
        handles = [
            layer.register_forward_pre_hook(lambda layer, _: called.append(layer))
            for layer in network.modules()
            if any(p.requires_grad for p in layer.parameters(recurse=False))
        ]
        with torch.no_grad(), evaluation_mode(self):
            network(X)
            for handle in handles:
                handle.remove()
            called[-1].register_forward_pre_hook(_remember_input)
            self.n_features_out = self(X)[1].shape[1]

    def forward(self, X: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.network(X)
        features = _last_layer_input.get()
        _last_layer_input.set(None)
        if outputs.ndim == 1 or outputs.shape[1] == 1:
            outputs = outputs.reshape(-1)
            outputs = torch.stack((torch.zeros_like(outputs), outputs), dim=1)
        assert features is not None
        return outputs, features.flatten(1)


class MeanLoss(nn.Module):
    """Mean of the weighted losses of a batch.

    Parameters
    ----------
    loss : {"logistic", "exponential"}
        Which loss.
    """

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = loss

    def forward(
        self, logits: Tensor, features: Tensor, y: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        losses = log_losses(logits, y, self.loss).exp()
        return (losses if sample_weight is None else losses * sample_weight).mean()


class MirrorNet(TensorNet):
    """A net that trains by mini-batch mirror descent and records the theory's quantities.

    Parameters
    ----------
    module : MirrorModule
        The network.
    potential : str, Potential, sequence or mapping
        One potential, or one for each layer.
    degree : float
        The network's degree of homogeneity, NaN if it has none.
    target_margin : float
        Training ends once the smallest margin reaches it.
    **kwargs
        Those of :class:`~sklearn_mr2.net.TensorNet`.
    """

    step_rule = "constant"
    _margin: Tensor

    def __init__(
        self,
        module: nn.Module,
        *,
        potential: Potentials = "hyperbolic_entropy",
        degree: float = math.nan,
        target_margin: float = math.inf,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, **kwargs)
        self.potential, self.degree, self.target_margin = potential, degree, target_margin
        self.outcome: str | None = None
        self.next_record = 1

    def initialize_optimizer(self, *args: Any, **kwargs: Any) -> MirrorNet:
        groups = layer_groups(self.module_.network, self.potential)
        self.optimizer_ = MirrorDescent(groups, lr=self.lr, step_size=self.step_rule)
        self.first_balance = layer_balance(self.groups(), self.degree)
        return self

    def continue_from(self, previous: MirrorNet) -> None:
        """Continue the flow of a net whose parameters have been loaded."""
        self.first_balance = previous.first_balance
        if previous.step_rule == self.step_rule:
            self._set(log_time=previous.optimizer_.log_time)

    def replace_network(self, network: nn.Sequential) -> None:
        """Take another network of the same kind, such as one with fewer neurons."""
        log_time, first_balance = self.optimizer_.log_time, self.first_balance
        self.module_.network = network
        self.module_.n_features_out = network[-1].in_features
        self.initialize_optimizer()
        self.first_balance = first_balance
        self._set(log_time=log_time)

    def groups(self) -> list[dict[str, Any]]:
        """Parameters and potentials of the layers, on the CPU, where float64 always exists."""
        return [
            {**group, "params": [p.detach().cpu() for p in group["params"]]}
            for group in self.optimizer_.param_groups
        ]

    def balance(self) -> Tensor:
        """Change of what the flow conserves since the start, relative to Q for each degree."""
        groups = self.groups()
        change = layer_balance(groups, self.degree) - self.first_balance
        return change * self.degree / layer_duals(groups).sum()

    def _set(self, **options: float) -> None:
        for group in self.optimizer_.param_groups:
            group.update(options)

    def participation_ratio(self) -> tuple[float, int]:
        """Participation ratio of the hidden neurons and their number, summed over the layers."""
        hidden = hidden_layers(self.module_.network)
        ratio = sum(participation_ratio(layer.effective_weights()) for layer in hidden)
        return ratio, sum(layer.width for layer in hidden)

    def get_loss(
        self, y_pred: Any, y_true: Tensor, X: Any = None, training: bool = False, *, weight: Any
    ) -> Tensor:
        if training:
            smallest = margins(y_pred[0].detach(), y_true).min()
            self._margin = torch.minimum(self._margin, smallest)
        return super().get_loss(y_pred, y_true, X, training, weight=weight)

    def has_converged(self) -> bool:
        return self.outcome is not None

    def _train_epoch(self, batches: TensorLoader) -> Tensor:
        self._margin = torch.full((), math.inf, device=self.device)
        try:
            loss = super()._train_epoch(batches)
        except FloatingPointError:  # The epoch counts as one whose loss is not finite.
            return torch.full((), math.nan)
        self._record_margin(self._margin.item())
        return loss

    def _record_margin(self, margin: float) -> None:
        """Record the smallest margin and, on a logarithmic schedule, what is made of it."""
        self.history.record("margin", margin)
        if margin >= self.target_margin:
            self.outcome = "target"
        n_epochs = len(self.history)
        if n_epochs < self.next_record and self.outcome is None:
            return
        self.next_record = max(n_epochs + 1, math.ceil(1.1 * n_epochs))
        groups = self.groups()
        self.history.record("Q", float(layer_duals(groups).sum()))
        if not math.isnan(self.degree):
            self.history.record("q_margin", q_margin(margin, groups, self.degree))
            self.history.record("horizon_margin", horizon_margin(margin, groups, self.degree))
        try:
            ratio, width = self.participation_ratio()
        except ValueError:  # Not a chain of layers: there is no such number.
            return
        if width:
            self.history.record("sparsity", 1 - ratio / width)


@dataclasses.dataclass
class _Point:
    """A place on the path of the flow, complete enough to go back to."""

    log_loss: float  # of the total loss
    margin: float
    n_wrong: int
    parameters: list[Tensor]
    gradients: list[Tensor | None]
    log_time: float


class FlowNet(MirrorNet):
    """A net that follows the mirror flow itself: full batch, log domain, normalised time.

    An epoch is a step. The search is a non-monotone one (Grippo, Lampariello and Lucidi 1986): a
    step which raises the loss above the largest of the last steps is taken back, and the next one
    is half as long. On separable data that is rare, and the step is the flow's own. Where the loss
    has a minimum the normalised step would jump about it without end; the search finds it.

    Parameters
    ----------
    module : MirrorModule
        The network.
    loss : {"logistic", "exponential"}
        Which loss.
    total_weight : float
        Number of samples that the weighted samples stand for.
    tol : float
        Training ends where the direction moves less than this while the margin doubles.
    lr : float
        The first-order decrease of the log-loss in a step.
    **kwargs
        Those of :class:`MirrorNet`.
    """

    step_rule = "normalised"

    def __init__(
        self,
        module: nn.Module,
        *,
        loss: str = "logistic",
        total_weight: float = 1.0,
        tol: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, **kwargs)
        self.loss, self.total_weight, self.tol = loss, total_weight, tol

    def train_on(
        self, train: TensorDataset, valid: TensorDataset | None = None, *, epochs: int
    ) -> FlowNet:
        self._point: _Point | None = None
        self._next_comparison = _FIRST_COMPARISON
        self._direction: list[list[Tensor]] | None = None
        super().train_on(train, valid, epochs=epochs)
        message = self._complaint(len(train))
        if message:
            warnings.warn(message, ConvergenceWarning, stacklevel=4)
        del self._point, self._lowest, self._direction
        return self

    def _train_epoch(self, batches: TensorLoader) -> Tensor:
        if self._point is None:
            self._point = self._lowest = self._evaluate(batches)
            self._recent = deque([self._point.log_loss], maxlen=_MEMORY)
        before = self._point
        try:
            self.optimizer_.step(lambda: torch.tensor(before.log_loss, dtype=torch.float64))
        except FloatingPointError:
            self.outcome = "overflow"
            after = before
        else:
            after = self._evaluate(batches)
        step_size = self.optimizer_.param_groups[0]["lr"]
        if after.log_loss < max(self._recent):
            self._recent.append(after.log_loss)
            self._set(lr=min(1.1 * step_size, self.lr))
        else:
            self._go_back(before)
            after = before
            self._set(lr=step_size / 2)
            if step_size / 2 < _SMALLEST_DECREASE and self.outcome is None:
                self.outcome = "minimum"
        if after.log_loss < self._lowest.log_loss:
            self._lowest = after
        if self._direction_has_converged(after):
            self.outcome = "direction"
        elif self.outcome is None and len(self.history) >= self.n_epochs_asked:
            self.outcome = "exhausted"
        if self.outcome in ("overflow", "minimum", "exhausted") and after is not self._lowest:
            self._go_back(self._lowest)
            after = self._lowest
        self._point = after
        self.history.record("log_loss", after.log_loss)
        self.history.record("log_time", self.optimizer_.log_time)
        self._record_margin(after.margin)
        return torch.tensor(self._mean(after), dtype=torch.float64)

    def _mean(self, point: _Point) -> float:
        """The mean loss, within the range of a float."""
        return math.exp(min(point.log_loss - math.log(self.total_weight), 700.0))

    def _evaluate(self, batches: TensorLoader) -> _Point:
        """Compute the log-loss and its gradients, one batch at a time."""
        if not self.module_.training:
            self._set_training(True)
        self.optimizer_.zero_grad()
        parameters = self._parameters()
        total, margin, n_wrong = None, math.inf, 0
        for batch in batches:
            X, y = batch
            y, weight = y.to(self.device), batch.sample_weight
            # The bare network: losses and margins of a single output are cheaper than those of two.
            outputs = self.module_.network(X.to(self.device))
            part = log_total_loss(outputs, y, self.loss, weight)
            value, share = part.detach(), None
            if total is not None:
                # Gradients of log-losses add up in proportion to the losses.
                total, previous = torch.logaddexp(total, value), total
                gradients = [p.grad for p in parameters if p.grad is not None]
                torch._foreach_mul_(gradients, (previous - total).exp())
                share = (value - total).exp()
            else:
                total = value
            part.backward(share)
            q = margins(outputs.detach(), y)
            margin = min(margin, q.min().item())
            n_wrong += int((q <= 0).sum())
        if self._watches_batches():
            named = TeeGenerator(self.get_all_learnable_params())
            self.notify("on_grad_computed", named_parameters=named, training=True)
        assert total is not None
        return _Point(
            # Weights have mean 1 here; the loss is that of as many samples as they stand for.
            log_loss=total.item() + math.log(self.total_weight / len(batches.dataset)),
            margin=margin,
            n_wrong=n_wrong,
            parameters=[p.detach().clone() for p in parameters],
            gradients=[p.grad for p in parameters],
            log_time=self.optimizer_.log_time,
        )

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer_.param_groups for p in group["params"]]

    @torch.no_grad()
    def _go_back(self, point: _Point) -> None:
        parameters = self._parameters()
        torch._foreach_copy_(parameters, point.parameters)
        for p, gradient in zip(parameters, point.gradients, strict=True):
            p.grad = gradient
        self._set(log_time=point.log_time)

    def _direction_has_converged(self, point: _Point) -> bool:
        """Whether the direction of each layer has moved less than tol while the margin doubled.

        The direction's distance from its limit falls like 1 / margin, so what it moves while the
        margin doubles is about what is left.
        """
        if not self.tol or point.margin < self._next_comparison:
            return False
        self._next_comparison = 2 * point.margin
        groups = self.groups()
        sizes = [group["potential"].horizon(group["params"]) for group in groups]
        direction = [
            [p / size for p in group["params"]] for group, size in zip(groups, sizes, strict=True)
        ]
        previous, self._direction = self._direction, direction
        if previous is None:
            return False
        moved = [
            float(group["potential"].horizon([a - b for a, b in zip(new, old, strict=True)]))
            for group, new, old in zip(groups, direction, previous, strict=True)
        ]
        return max(moved) <= self.tol

    def _complaint(self, n: int) -> str | None:
        """What to warn of at the end of training, unless a callback has ended it."""
        point, n_steps = self._point, len(self.history)
        if point is None or self.outcome in (None, "target", "direction"):
            return None
        if not point.margin > 0:
            end = {
                "minimum": "their loss does not get any lower",
                "exhausted": "their loss was still falling, so a higher max_epochs may help",
                "overflow": "the parameters have reached the end of their range",
            }[self.outcome]
            return (
                f"The data are not separated after {n_steps} steps: {point.n_wrong} of {n} samples "
                f"are not on their side, the smallest margin is {point.margin:.3g} and the mean "
                f"loss {self._mean(point):.3g}. The parameters of the lowest loss are kept; {end}. "
                "Mirror flow maximises a margin on separable data only; wider hidden layers or "
                "more features separate more."
            )
        cure = {
            "minimum": "no step lowers the loss any more. Lower target_margin.",
            "exhausted": "max_epochs is reached. Raise max_epochs or tol, or lower target_margin.",
            "overflow": "the parameters have reached the end of their range. Lower target_margin, "
            "or use dtype='float64'.",
        }[self.outcome]
        return (
            f"The margin is {point.margin:.3g} after {n_steps} steps, not yet "
            f"target_margin={self.target_margin}, and {cure}"
        )
