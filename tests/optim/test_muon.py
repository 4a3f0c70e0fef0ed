"""Muon over shards: in every stage, tier and number of ranks torch's own in one process, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import configuration, placed
from zero_ext.optim import muon
from zero_ext.zero import engine_of
from zero_ext.zero.step.owner_exchange import deal_owners

STEPS = 5
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
PLACES: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {}),
    (1, {"optimizer": "host"}),
    (2, {}),
    (2, {"grads": "host", "optimizer": "nvme"}),
    (3, {}),
    (3, HOST),
    (3, dict.fromkeys(HOST, "nvme")),
    (3, {"update_mode": "in_backward"}),
]
MIXED = {"units": {"persistence_threshold": 100, "bucket_elements": 600}}


class Matrices(nn.Module):
    """Wide, tall and flat ones, one stored by columns, and one that no loss uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = (12, 40, 24, 33)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes))
        self.columns = nn.Parameter(torch.randn(33, 5).T.mul(0.2))
        self.last = nn.Linear(5, 1, bias=False)
        self.idle = nn.Linear(3, 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Values [n, 1] for inputs [n, 12]."""
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return self.last((inputs @ self.columns.T).tanh())


def batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 100 * step + rank)
    return torch.randn(6, 12, generator=generator), torch.randn(6, 1, generator=generator)


def loss_of(model: nn.Module, seed: int, step: int, rank: int) -> torch.Tensor:
    inputs, targets = batch(seed, step, rank)
    return nn.functional.mse_loss(model(inputs), targets)


def make(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(model.parameters(), **{"lr": 0.02, **settings})


def plain(world: World, **settings: Any) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses by step and rank, and the parameters after it, of torch's Muon: gradients are added up in the
    order of ranks, as the engine does."""
    model = Matrices(world.seed)
    optimizer, losses = make(model, **settings), []
    for step in range(STEPS):
        losses.append([])
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for rank in range(world.size):
            loss = loss_of(model, world.seed, step, rank)
            used = [each for each in model.parameters() if each is not model.idle.weight]
            for parameter, gradient in zip(used, torch.autograd.grad(loss, used), strict=True):
                sums[parameter] = sums[parameter].add_(gradient) if parameter in sums else gradient.clone()
            losses[-1].append(loss.item())
        for parameter, total in sums.items():
            parameter.grad = total * (1.0 / world.size)
        optimizer.step()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def sharded(
    world: World, stage: int, offload: dict[str, Any], **settings: Any
) -> tuple[Any, Any, list[float]]:
    model = Matrices(world.seed)
    with placed(offload) as section:
        config = configuration(stage, offload=section, **MIXED)
        model, optimizer = zero_ext.prepare(model, make(model, **settings), config, process_group=world.group)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, world.seed, step, world.rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return model, zero_ext.full_state_dict(model, rank0_only=False), losses


@on_ranks(1, 2, 3, 4)
def test_equals_torchs_own(world: World) -> None:
    losses, parameters = plain(world)
    for stage, offload in PLACES:
        _, found, own = sharded(world, stage, offload)
        assert own == [each[world.rank] for each in losses], (stage, offload)
        for name, value in parameters.items():
            assert torch.equal(found[name], value), (stage, offload, name)


@on_ranks(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"nesterov": False, "momentum": 0.5, "ns_steps": 2},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "lr": 0.1},
    ],
)
def test_settings(world: World, settings: dict[str, Any]) -> None:
    _, parameters = plain(world, **settings)
    _, found, _ = sharded(world, 3, {}, **settings)
    for name, value in parameters.items():
        assert torch.equal(found[name], value), name


@on_ranks(2, 3)
def test_each_matrix_is_orthogonalized_once_and_travels_twice(world: World) -> None:
    shapes: list[tuple[int, ...]] = []
    original = muon.newton_schulz

    def counting(matrix: torch.Tensor, group: Any) -> torch.Tensor:
        shapes.append(tuple(matrix.shape))
        return original(matrix, group)

    with mock.patch.object(muon, "newton_schulz", counting):
        model, _, _ = sharded(world, 2, {})
    engine = engine_of(model)
    used = [value for name, value in Matrices(0).named_parameters() if "idle" not in name]
    counts = torch.tensor([shapes.count(tuple(value.shape)) for value in used])
    assert engine.collectives.sum_(counts, "counts").tolist() == [STEPS] * len(used)
    sent = torch.tensor([engine.collectives.traffic.last_bytes_sent["matrices"]])
    matrix_bytes = 2 * sum(map(torch.numel, used))
    assert 0 < engine.collectives.sum_(sent, "bytes").item() <= 2 * matrix_bytes


def test_owners_are_balanced() -> None:
    generator = torch.Generator().manual_seed(3)
    for ranks in (1, 2, 3, 8):
        costs = torch.randint(1, 1000, (57,), generator=generator).tolist()
        owners = deal_owners(costs, ranks)
        loads = [
            sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
            for rank in range(ranks)
        ]
        assert max(loads) <= sum(costs) / ranks + max(costs) and deal_owners(costs, ranks) == owners
    assert deal_owners([5, 5], 4) == [0, 1]
