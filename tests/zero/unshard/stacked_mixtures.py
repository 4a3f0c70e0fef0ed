"""A model of mixtures with stacked experts, routed as its caller says, and runs of it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_ext
from tests.multi.rank import World
from zero_ext.comm import Collectives
from zero_ext.zero import engine_of

EXPERTS, WIDTH, INNER, LAYERS, WORDS, LENGTH = 8, 16, 32, 2, 7, 5
OF_AN_EXPERT = 2 * WIDTH * INNER + INNER  # elements of both weights and of the bias
# Parameters below are always gathered, so that gathers are of experts alone.
ROUTED = {"experts": "routed", "persistence_threshold": EXPERTS * INNER}


class StackedExperts(nn.Module):
    """Two layers per expert. A forward reads the weights of those in ``top_k_index``."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.up_proj_bias = nn.Parameter(torch.randn(EXPERTS, INNER) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        mixed = torch.zeros_like(hidden)
        for number in top_k_index[top_k_index < EXPERTS].unique().tolist():
            token, choice = torch.where(top_k_index == number)
            inner = torch.tanh(hidden[token] @ self.up_proj[number] + self.up_proj_bias[number])
            mixed = mixed.index_add(
                0, token, inner @ self.down_proj[number] * top_k_weights[token, choice, None]
            )
        return mixed


class StackedMixture(nn.Module):
    """Experts that the caller chooses, weighed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS + 1)
        self.experts: nn.Module = StackedExperts()

    def forward(self, hidden: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        weights = self.gate(hidden).softmax(-1).gather(1, routes)
        mixed: torch.Tensor = hidden + self.experts(hidden, routes, top_k_weights=weights)
        return mixed


class MixtureModel(nn.Module):
    """Words, mixtures, a head; each layer optionally checkpointed."""

    def __init__(self, seed: int, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(StackedMixture() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)
        self.checkpoints = checkpoints

    def forward(self, words: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            if self.checkpoints and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, routes, use_reentrant=False)
            else:
                hidden = layer(hidden, routes)
        return nn.functional.cross_entropy(self.head(hidden), words.roll(1))


class Batch(NamedTuple):
    """Words of each rank, and the experts that their tokens are routed to."""

    words: Sequence[torch.Tensor]
    routes: Sequence[torch.Tensor]

    def loss_on(self, model: Any, rank: int) -> torch.Tensor:
        loss: torch.Tensor = model(self.words[rank], self.routes[rank])
        return loss

    def mean_loss(self, model: Any) -> torch.Tensor:
        losses = [self.loss_on(model, rank) for rank in range(len(self.words))]
        return torch.stack(losses).mean()

    def to(self, device: str) -> Batch:
        return Batch([each.to(device) for each in self.words], [each.to(device) for each in self.routes])

    def reached(self) -> set[int]:
        return {each for routes in self.routes for each in routes.flatten().tolist() if each < EXPERTS}


def batch_of(seed: int, reach: Sequence[Sequence[int]]) -> Batch:
    """A batch with the tokens of each rank on the experts that ``reach`` lists for it, two for each."""
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(WORDS, (LENGTH,), generator=generator) for _ in reach]
    routes = []
    for experts in reach:
        chosen = torch.arange(2 * LENGTH) % len(experts)
        routes.append(torch.tensor(experts)[chosen].view(LENGTH, 2))
    return Batch(words, routes)


def prepared_mixture(world: World, model: nn.Module, train: bool = True, **more: Any) -> tuple[Any, Any]:
    """``model`` with routed experts, in stage 3; with the optimizer of :func:`optimizer_of`."""
    config = {"stage": 3, "units": ROUTED, "timeout_seconds": 60.0, **more}
    return zero_ext.prepare(model, optimizer_of(model) if train else None, config, process_group=world.group)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon that does not make rounding large where gradients are nothing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def gathered_elements(model: Any) -> int:
    """Elements of gathers since the last call, none of them of other parameters than experts'."""
    traffic = engine_of(model).traffic
    found = traffic.elements["gather"]
    traffic.begin_step()
    return found


def sent_bytes(world: World, model: Any) -> int:
    """Bytes of gathers that all ranks have sent since :func:`gathered_elements`."""
    return sum(world.everyone(engine_of(model).traffic.bytes_sent["gather"]))


class Routings:
    """How often ranks have agreed on the experts that are reached."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        original = Collectives.gather

        def gather(ranks: Collectives, *args: Any, **named: Any) -> Any:
            self.count += str(args[3]).startswith("experts that tokens are routed to")
            return original(ranks, *args, **named)

        with mock.patch.object(Collectives, "gather", gather):
            yield


def twin_of(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy to train in one process, and its optimizer."""
    twin = copy.deepcopy(model)
    return twin, optimizer_of(twin)
