"""Volumes of an exchange of signs: as the engine counts them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.plan.test_zeropp_traffic import Decoder, counted
from zero_ext.ops import sign_payload_bytes
from zero_ext.plan import onebit_state_bytes, onebit_step_bytes
from zero_ext.zero import engine_of


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("stage", [0, 1])
def test_volumes_are_those_counted(world: World, stage: int) -> None:
    for per_node in (1, 2, 4)[: world.size // 2 + 1]:
        model = Decoder()
        config = {
            "stage": stage,
            "communication": {"ranks_per_node": per_node},
            "units": {"bucket_elements": 40_000},
            "timeout_seconds": 120.0,
        }
        optimizer = zero_ext.OneBitAdam(model.parameters(), freeze_step=1)
        model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
        for _ in range(2):
            model(torch.randint(0, 96, (2, 5))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine = engine_of(model)
        units = Counter(unit.layout.numel for unit in engine.units)
        assert len(engine.units) > 1
        found = {kind: sent for kind, sent in counted(engine).items() if sent.all}
        assert found == onebit_step_bytes(world.size, units, ranks_per_node=per_node)
        messages = sum(2 * world.size * sign_payload_bytes(numel // world.size) for numel in units.elements())
        allocated = engine.updates.allocated_bytes()["device"]
        wanted = allocated + messages if world.size > 1 else allocated
        assert onebit_state_bytes(stage, world.size, units) == wanted


def test_ranks_that_do_not_fill_their_nodes() -> None:
    with pytest.raises(ValueError, match=r"ranks_per_node: expected a divisor of the 4 ranks.*, got 3"):
        onebit_step_bytes(4, {64: 1}, ranks_per_node=3)
    with pytest.raises(ValueError, match="world_size"):
        onebit_step_bytes(0, {64: 1})
