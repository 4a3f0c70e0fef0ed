"""Losses and logs that read parameters: in forward, in the loss, in the loop, before and after the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from tests.zoo.case import WITHOUT_CHECKPOINT, Case, TrainingState, plain_step
from tests.zoo.inputs import classification, labeled, own_loss


class Classifier(nn.Module):
    """Blocks in a Sequential, a root parameter and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x * self.scale))


def square_sum(model: nn.Module) -> torch.Tensor:
    """Sum the squares of all parameters."""
    return sum(p.square().sum() for p in model.parameters())


def norms(model: nn.Module) -> torch.Tensor:
    """Sum the norms of the weights by name."""
    total = torch.tensor(0.0)
    for name, p in model.named_parameters():
        if "weight" in name:
            total = total + p.norm(2)
    return total


def absolute(model: nn.Module) -> torch.Tensor:
    """Return the mean absolute value of all parameters in one vector."""
    return torch.cat([p.view(-1) for p in model.parameters()]).abs().mean()


def vector(model: nn.Module) -> torch.Tensor:
    """Return the square of ``parameters_to_vector``."""
    return parameters_to_vector(model.parameters()).pow(2).mean()


def orthogonality(model: nn.Module) -> torch.Tensor:
    """Return the distance of each linear layer's weight from orthogonality, by modules."""
    total = 0
    for m in model.modules():
        if isinstance(m, nn.Linear):
            w = m.weight
            total = total + (w @ w.t() - torch.eye(w.shape[0])).pow(2).sum()
    return total


def one_weight(model: nn.Module) -> torch.Tensor:
    """Penalize the weight of one layer, read through indices and attributes."""
    return model.body[0][0].weight.abs().sum() + model.head.weight.pow(2).sum()


def root_parameter(model: nn.Module) -> torch.Tensor:
    """Penalize a parameter of the root."""
    return (model.scale - 1).abs().sum() + model.scale.std()


def group_lasso(model: nn.Module) -> torch.Tensor:
    """Penalize rows, with torch functions of a list of parameters."""
    weights = [p for p in model.parameters() if p.dim() == 2]
    return torch.stack([w.norm(dim=1).sum() for w in weights]).sum() + sum(torch._foreach_norm(weights))


PENALTIES = {
    "square-sum": square_sum,
    "norms": norms,
    "absolute-cat": absolute,
    "parameters-to-vector": vector,
    "orthogonality": orthogonality,
    "one-weight": one_weight,
    "root-parameter": root_parameter,
    "group-lasso": group_lasso,
}


class PenalizedInside(nn.Module):
    """The model computes its own loss with a penalty in forward."""

    def __init__(self, penalty: Any) -> None:
        super().__init__()
        self.net = Classifier()
        self.penalty = penalty

    def forward(self, inputs):
        return F.cross_entropy(self.net(inputs[0]), inputs[1]) + 1e-2 * self.penalty(self.net)


def penalized_in_loop(penalty: Any) -> Any:
    """Return a loss that adds a penalty outside the model."""

    def loss(model: nn.Module, inputs: Any) -> torch.Tensor:
        return F.cross_entropy(model(inputs[0]), inputs[1]) + 1e-2 * penalty(model)

    return loss


def penalized_gathered(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Log the penalty inside ``gathered`` and train without it."""
    with state.gathered(state.model), torch.no_grad():
        state.record("penalty", square_sum(state.model))
    return log_step(state, inputs)


def log_step(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Make an ordinary step."""
    return plain_step(state, classification, inputs)


def logged(what: Any) -> Any:
    """Return a step that records what it reads of the parameters after the update."""

    def step(state: TrainingState, inputs: Any) -> torch.Tensor:
        loss = log_step(state, inputs)
        state.record("log", torch.as_tensor(what(state.model)))
        return loss

    return step


def record_gradients(state: TrainingState) -> None:
    """Record norms of gradients and clip them in torch's way."""
    for name, p in state.model.named_parameters():
        if p.grad is not None:
            state.record(name, p.grad.norm())
    state.record("total", nn.utils.clip_grad_norm_(state.model.parameters(), 0.5))


def add_noise(state: TrainingState) -> None:
    """Add noise to ``p.grad``."""
    for p in state.model.parameters():
        p.grad.add_(0.01 * torch.randn_like(p.grad))


GRADIENTS = {
    "norms": record_gradients,
    "clipped-by-value": lambda state: nn.utils.clip_grad_value_(state.model.parameters(), 0.05),
    "noise": add_noise,
}


def popped_gradients(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Take gradients with respect to parameters by ``autograd.grad`` and assign them."""
    state.optimizer.zero_grad()
    loss = F.cross_entropy(state.model(inputs[0]), inputs[1])
    parameters = list(state.model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g
    state.optimizer.step()
    return loss


def accumulated(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Add up two micro-batches before the step."""
    state.optimizer.zero_grad()
    total = torch.tensor(0.0)
    for rows in (slice(0, 2), slice(2, 4)):
        loss = F.cross_entropy(state.model(inputs[0][rows]), inputs[1][rows]) / 2
        loss.backward()
        total = total + loss.detach()
    state.optimizer.step()
    return total


def sharpness_aware(state: TrainingState, inputs: Any, documented: bool) -> torch.Tensor:
    """Climb to the neighbor of largest loss, take the gradient there, and step from the old weights."""

    def write() -> Any:
        return state.gathered(state.model, modifier_rank=0) if documented else torch.no_grad()

    log = F.cross_entropy(state.model(inputs[0]), inputs[1])
    state.optimizer.zero_grad()
    log.backward()
    with write(), torch.no_grad():
        moved = [0.01 * p.sign() for p in state.model.parameters()]
        for p, e in zip(state.model.parameters(), moved, strict=True):
            p.add_(e)
    state.optimizer.zero_grad()
    F.cross_entropy(state.model(inputs[0]), inputs[1]).backward()
    with write(), torch.no_grad():
        for p, e in zip(state.model.parameters(), moved, strict=True):
            p.sub_(e)
    state.optimizer.step()
    return log


def consolidate(state: TrainingState) -> None:
    """Keep the first weights and an importance of each, as elastic weight consolidation does."""
    with state.gathered(state.model):
        state.memory["means"] = {n: p.detach().clone() for n, p in state.model.named_parameters()}


def elastic(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Pull every parameter towards its kept value, naively."""

    def loss(model: nn.Module, inputs: Any) -> torch.Tensor:
        means = state.memory["means"]
        pull = sum((p - means[n]).pow(2).sum() for n, p in model.named_parameters())
        return classification(model, inputs) + 0.1 * pull

    return plain_step(state, loss, inputs)


def penalty_case(name: str, build: Any = Classifier, **more: Any) -> Case:
    """Return a case of a classifier."""
    defaults = {"loss": penalized_in_loop(lambda m: 0.0)}
    return Case(f"own/penalties/{name}", build, labeled(8, 3), **(defaults | more))


CASES = [
    *(penalty_case(f"in-loss-{n}", loss=penalized_in_loop(p)) for n, p in PENALTIES.items()),
    *(
        penalty_case(f"in-forward-{n}", lambda p=p: PenalizedInside(p), loss=own_loss)
        for n, p in PENALTIES.items()
    ),
    penalty_case("logged-norm", step=logged(lambda m: m.head.weight.norm())),
    penalty_case("logged-histogram", step=logged(lambda m: torch.histc(m.body[1][0].weight.detach(), 5))),
    penalty_case("logged-item", step=logged(lambda m: sum(p.abs().sum().item() for p in m.parameters()))),
    penalty_case("logged-numpy", step=logged(lambda m: float(m.head.bias.detach().numpy().mean()))),
    penalty_case(
        "logged-state-dict", step=logged(lambda m: sum(v.float().sum() for v in m.state_dict().values()))
    ),
    penalty_case("logged-gathered", step=penalized_gathered),
    *(
        penalty_case(f"gradient-{n}", step=lambda s, i, c=c: plain_step(s, classification, i, c))
        for n, c in GRADIENTS.items()
    ),
    penalty_case("gradient-taken", step=popped_gradients),
    penalty_case("accumulated", step=accumulated),
    penalty_case("sharpness-aware", step=lambda s, i: sharpness_aware(s, i, False)),
    penalty_case("sharpness-aware-gathered", step=lambda s, i: sharpness_aware(s, i, True)),
    penalty_case("elastic-consolidation", setup=consolidate, step=elastic, variants=WITHOUT_CHECKPOINT),
]
