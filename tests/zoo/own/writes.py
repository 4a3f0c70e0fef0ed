"""Parameters that are written in the loop or in forward, the way plain torch lets one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.zoo.case import WITHOUT_CHECKPOINT, Case, TrainingState
from tests.zoo.inputs import classification, labeled, tokens
from tests.zoo.own.penalties import Classifier, log_step


def after(write: Any, documented: bool = False) -> Any:
    """Return a step that writes to parameters after the update."""

    def step(state: TrainingState, inputs: Any) -> torch.Tensor:
        loss = log_step(state, inputs)
        if documented:
            with state.gathered(state.model, modifier_rank=0), torch.no_grad():
                write(state.model)
        else:
            write(state.model)
        return loss

    return step


def normalize(model: Any) -> None:
    """Put the rows of a weight on the sphere through ``data``."""
    model.head.weight.data = F.normalize(model.head.weight.data, dim=1)


def normalize_in_place(model: Any) -> None:
    """Put the rows of a weight on the sphere, in place through ``data``."""
    model.head.weight.data.div_(model.head.weight.data.norm(dim=1, keepdim=True))


def copy_in(model: Any) -> None:
    """Copy a constant into a bias through ``data``."""
    model.head.bias.data.copy_(torch.full((3,), 0.25))


def fill_slice(model: Any) -> None:
    """Zero a row by assignment to a slice of ``data``."""
    model.head.weight.data[0] = 0.0


def clamp(model: Any) -> None:
    """Clamp all parameters through ``data``."""
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def reinitialize(model: Any) -> None:
    """Draw a layer anew by ``init``."""
    nn.init.normal_(model.head.weight, std=0.1)
    nn.init.zeros_(model.head.bias)


def shrink(model: Any) -> None:
    """Decay parameters by hand under no_grad."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)


def perturb(model: Any) -> None:
    """Add a constant to parameters by ``p += ...``."""
    with torch.no_grad():
        for p in model.parameters():
            p += 0.001


def set_item(model: Any) -> None:
    """Set elements under no_grad."""
    with torch.no_grad():
        model.scale[2:4] = 0.5


def detached(model: Any) -> None:
    """Write through ``detach()``."""
    model.scale.detach().mul_(0.9)


def prune(model: Any) -> None:
    """Zero the small elements of each weight through ``data.mul_``."""
    for m in model.modules():
        if isinstance(m, nn.Linear):
            m.weight.data.mul_((m.weight.data.abs() > 0.05).float())


def swap(model: Any) -> None:
    """Load a changed state dict."""
    state = {n: v * 0.99 for n, v in model.state_dict().items()}
    model.load_state_dict(state)


WRITES = {
    "data-assigned": normalize,
    "data-div": normalize_in_place,
    "data-copy": copy_in,
    "data-slice": fill_slice,
    "data-clamp": clamp,
    "init": reinitialize,
    "mul": shrink,
    "iadd": perturb,
    "setitem": set_item,
    "detach": detached,
    "prune": prune,
    "state-dict": swap,
}


class MaxNorm(nn.Module):
    """``F.embedding`` renormalizes the rows that it looks up, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, max_norm=0.5)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


class ConstrainedInForward(nn.Module):
    """Clamps its own parameter in forward under no_grad."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.alpha = nn.Linear(8, 3), nn.Parameter(torch.ones(3))
        self.how = how

    def forward(self, x):
        if self.how == "data":
            self.alpha.data.clamp_(0, 1)
        else:
            with torch.no_grad():
                self.alpha.clamp_(0, 1)
        return self.linear(x) * self.alpha


class Noisy(nn.Module):
    """Perturbs a weight in forward and restores it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        if self.training:
            noise = torch.randn_like(self.fc1.weight) * 0.1
            self.fc1.weight.data.add_(noise)
            out = self.fc2(torch.tanh(self.fc1(x)))
            self.fc1.weight.data.sub_(noise)
            return out
        return self.fc2(torch.tanh(self.fc1(x)))


def average(state: TrainingState) -> None:
    """Wrap the model in torch's averaged model."""
    state.memory["average"] = AveragedModel(state.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def averaged(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Update torch's averaged model and record its parameters."""
    loss = log_step(state, inputs)
    state.memory["average"].update_parameters(state.model)
    for name, p in state.memory["average"].module.named_parameters():
        state.record(name.removeprefix("module."), p)
    return loss


def average_plain_twin(state: TrainingState) -> None:
    """Average into a plain copy that is updated from gathered parameters."""
    torch.manual_seed(3)
    state.memory["average"] = AveragedModel(Classifier(), multi_avg_fn=get_ema_multi_avg_fn(0.9))


def averaged_gathered(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Update torch's averaged model inside ``gathered``."""
    loss = log_step(state, inputs)
    with state.gathered(state.model):
        state.memory["average"].update_parameters(state.model)
    for name, p in state.memory["average"].module.named_parameters():
        state.record(name, p)
    return loss


def evaluated_with_average(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Swap averaged weights in for an evaluation and back, inside ``gathered``."""
    loss = log_step(state, inputs)
    with state.gathered(state.model, modifier_rank=0), torch.no_grad():
        before = copy.deepcopy([p.detach() for p in state.model.parameters()])
        for p in state.model.parameters():
            p.mul_(0.5)
    with torch.no_grad():
        state.record("halved", classification(state.model, inputs))
    with state.gathered(state.model, modifier_rank=0), torch.no_grad():
        for p, old in zip(state.model.parameters(), before, strict=True):
            p.copy_(old)
    return loss


def two_classes(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of labels that follow from the first token."""
    return F.cross_entropy(model(ids), ids[:, 0] % 3)


def written(name: str, build: Any = Classifier, **more: Any) -> Case:
    """Return a case of a classifier."""
    return Case(f"own/writes/{name}", build, labeled(8, 3), **({"loss": classification} | more))


CASES = [
    *(written(n, step=after(w)) for n, w in WRITES.items()),
    *(
        written(f"{n}-gathered", step=after(w, True))
        for n, w in WRITES.items()
        if n not in ("data-assigned", "state-dict")
    ),
    Case(
        "own/writes/max-norm",
        MaxNorm,
        tokens(11, 4),
        two_classes,
        expected=r"max_norm",
        reason="lookups write to the table, on each rank to other rows",
    ),
    *(
        written(
            f"clamped-in-forward-{h}", lambda h=h: nn.Sequential(nn.Linear(8, 8), ConstrainedInForward(h))
        )
        for h in ("data", "no-grad")
    ),
    written("noise-in-forward", Noisy),
    written("averaged-model", setup=average, step=averaged, variants=WITHOUT_CHECKPOINT),
    written(
        "averaged-model-gathered",
        setup=average_plain_twin,
        step=averaged_gathered,
        variants=WITHOUT_CHECKPOINT,
    ),
    written("swapped-for-evaluation", step=evaluated_with_average),
]
