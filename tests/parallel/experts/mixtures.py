"""A small model with mixtures of experts, its steps on a mesh, and the same steps in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.parallel import training
from tests.parallel.training import WORDS, batches, mean_loss
from zero_ext.parallel.experts import MixtureOfExperts

WIDTH, BLOCKS, EXPERTS = 8, 2, 4


def mesh_of(ep: int) -> DeviceMesh:
    """All ranks, experts spread over ``ep`` of them."""
    return training.mesh_of(ep=ep)


def expert(number: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Block(nn.Module):
    """A residual block whose hidden layer is a mixture."""

    def __init__(self, mesh: DeviceMesh | None, capacity_factor: float | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = MixtureOfExperts(WIDTH, expert, EXPERTS, mesh=mesh, capacity_factor=capacity_factor)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed = self.mixture(self.norm(hidden))
        return hidden + mixed.hidden, mixed.aux_loss, mixed.dropped_tokens


class Words(nn.Module):
    """Embedding, blocks, scores; the mixtures' losses and what they dropped."""

    def __init__(self, mesh: DeviceMesh | None = None, capacity_factor: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(mesh, capacity_factor) for _ in range(BLOCKS))
        self.scores = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        hidden, aux_loss, dropped = self.embedding(words), torch.zeros((), device="cpu"), 0
        for block in self.blocks:
            hidden, own, lost = block(hidden)
            aux_loss, dropped = aux_loss + own, dropped + int(lost)
        return self.scores(hidden), aux_loss, dropped


def loss_of(
    model: nn.Module, words: torch.Tensor, wanted: torch.Tensor, balanced: bool
) -> tuple[torch.Tensor, int]:
    """With the mixtures' own losses where it is ``balanced``; and how many choices were dropped."""
    scores, aux_loss, dropped = model(words)
    loss = mean_loss(scores, wanted)
    return (loss + 0.1 * aux_loss if balanced else loss), dropped


def counting(dropped: list[int], balanced: bool = True) -> training.Loss:
    """The loss, which appends to ``dropped``."""

    def loss(model: nn.Module, words: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        value, lost = loss_of(model, words, wanted, balanced)
        dropped.append(lost)
        return value

    return loss


def course_of(
    seed: int, mesh: DeviceMesh, config: dict[str, Any], loss: training.Loss | None = None, **arguments: Any
) -> training.Course:
    """The model on ``mesh``, of small units too."""
    torch.manual_seed(seed)
    config = {"units": {"persistence_threshold": 20}, **config}
    return training.Course(Words(mesh, **arguments), mesh, config, loss or counting([]))


def alone(seed: int, steps: int) -> tuple[training.StepRecords, dict[str, torch.Tensor]]:
    """The steps of balanced mixtures in one process, and the parameters then."""
    torch.manual_seed(seed)
    model = Words()
    records = training.alone(model, batches(seed, steps), counting([]))
    return records, dict(model.state_dict())
