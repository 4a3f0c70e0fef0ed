"""Owners of matrices, and the operations that each has."""

from __future__ import annotations

import random

import pytest

from zero_ext.config.full_tensor_costs import (
    deal_owners,
    full_tensor_step_bytes,
    newton_schulz_cost,
    newton_schulz_flops,
)
from zero_ext.plan.models import PRESETS
from zero_ext.plan.simulation import Transformer
from zero_ext.plan.simulation.planned_units import hidden_matrices


def matrices(name: str) -> list[tuple[int, ...]]:
    """Shapes of the hidden matrices of a model."""
    if name == "odd":
        chance = random.Random(5)
        return [(chance.randrange(1, 900), chance.randrange(1, 900)) for _ in range(57)]
    if name == "one is large":
        return [(4096, 4096), *[(64, 64)] * 40]
    small = Transformer("34m", 512, 8, 8, 8192, 512, 1536, gated=True, tied=False)
    return list(hidden_matrices((PRESETS.get(name) or small).cost()))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64, 1024])
@pytest.mark.parametrize("name", ["llama-7b", "llama-34m", "odd", "one is large"])
def test_the_busiest_owner_is_near_the_mean(name: str, ranks: int) -> None:
    costs = [newton_schulz_flops(shape) for shape in matrices(name)]
    owners = deal_owners(costs, ranks)
    loads = [0] * ranks
    for owner, cost in zip(owners, costs, strict=True):
        loads[owner] += cost
    assert sum(loads) == sum(costs) and deal_owners(costs, ranks) == owners
    mean = sum(costs) / ranks
    assert max(loads) <= max(1.05 * mean, max(costs)), (max(loads) / mean, max(costs) / mean)


def test_few_tensors_go_to_the_first_ranks() -> None:
    assert deal_owners([5, 5], 4) == [0, 1]
    assert deal_owners([], 4) == []
    assert deal_owners([0, 7, 0], 2) == [1, 0, 1]


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 3, 5), (5, 3, 1, 1), (3, 1, 5, 1)])
def test_operations_of_an_iteration(shape: tuple[int, ...]) -> None:
    # m²n for the Gram matrix, m³ for its square and m²n for the last product, and two operations for each.
    stack = 4 if len(shape) == 3 else 1
    assert newton_schulz_cost(shape) == stack * (9 * 5 + 27 + 9 * 5)
    assert newton_schulz_flops(shape) == 5 * stack * (4 * 9 * 5 + 2 * 27)


def test_memory_is_bounded_by_waves() -> None:
    def planned(blocks: int, direction_bytes: int = 2) -> int:
        return full_tensor_step_bytes([25_000_000] * blocks, 8, (4096, 11008), direction_bytes)

    alone = full_tensor_step_bytes([25_000_000], 1, (4096, 11008), 2)
    assert planned(32) == planned(400) > planned(1) > alone
    assert planned(32, 4) == 2 * planned(32)
    assert full_tensor_step_bytes([], 8, (4096, 11008), 2) == full_tensor_step_bytes([64], 8, (0, 0), 2) == 0
