"""A small model with mixtures of experts, its steps on a mesh, and the same steps in one process."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from zero_ext.parallel import make_mesh
from zero_ext.parallel.experts import MixtureOfExperts
from zero_ext.zero import engine_of

WIDTH, WORDS, LENGTH, BLOCKS, EXPERTS, SAMPLES = 8, 16, 5, 2, 4, 8


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


class StepRecords(NamedTuple):
    """What the steps of a course said."""

    losses: list[float]
    norms: list[float | None]
    dropped: list[int]


@functools.cache
def mesh_of(ep: int) -> DeviceMesh:
    """All ranks, experts spread over ``ep`` of them; made once in a process."""
    return make_mesh(ep=ep, device_type="cpu")


def batches(seed: int, steps: int) -> list[torch.Tensor]:
    """Words [2, SAMPLES, LENGTH], given and wanted, for each step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (2, SAMPLES, LENGTH), generator=generator) for _ in range(steps)]


def loss_of(
    model: nn.Module, words: torch.Tensor, wanted: torch.Tensor, balanced: bool
) -> tuple[torch.Tensor, int]:
    scores, aux_loss, dropped = model(words)
    loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), wanted.flatten())
    return (loss + 0.1 * aux_loss if balanced else loss), dropped


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


class Course:
    """A model on a mesh, and its steps."""

    def __init__(
        self, seed: int, mesh: DeviceMesh, config: dict[str, Any], capacity_factor: float | None = None
    ) -> None:
        torch.manual_seed(seed)
        model = Words(mesh, capacity_factor)
        self.model, self.optimizer = zero_ext.prepare(
            model,
            adamw(model),
            {"gradient_clipping": 0.5, "units": {"persistence_threshold": 20}, **config},
            process_group=mesh,
        )

    def steps(self, seed: int, first: int, last: int, balanced: bool = True) -> StepRecords:
        """Those of this rank's samples; ``balanced`` by the mixtures' losses."""
        engine = engine_of(self.model)
        share = SAMPLES // engine.world_size
        own = slice(share * engine.rank, share * (engine.rank + 1))
        records = StepRecords([], [], [])
        for words, wanted in batches(seed, last)[first:]:
            loss, dropped = loss_of(self.model, words[own], wanted[own], balanced)
            self.model.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            records.losses.append(float(loss.detach()))
            records.norms.append(engine.grad_norm)
            records.dropped.append(dropped)
        return records


def alone(
    seed: int, steps: int, chunks: int = 1, capacity_factor: float | None = None
) -> tuple[StepRecords, dict[str, torch.Tensor]]:
    """The same in one process without this project's engine, and the parameters then. In several ``parts``,
    one after the other, a step's samples know nothing of each other, and have no loss of the mixtures."""
    torch.manual_seed(seed)
    model = Words(capacity_factor=capacity_factor)
    optimizer = adamw(model)
    records = StepRecords([], [], [])
    for words, wanted in batches(seed, steps):
        losses = []
        records.dropped.append(0)
        for some in zip(words.chunk(chunks), wanted.chunk(chunks), strict=True):
            loss, dropped = loss_of(model, *some, chunks == 1)
            (loss / chunks).backward()
            losses.append(float(loss.detach()) / chunks)
            records.dropped[-1] += dropped
        records.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        records.losses.append(sum(losses))
    return records, dict(model.state_dict())
