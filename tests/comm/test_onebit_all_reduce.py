"""The 1-bit all-reduce: which rank receives which payload, and what remains as error feedback."""

from __future__ import annotations

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ops
from zero_ext.comm.onebit_all_reduce import OneBitAllReduce
from zero_ext.comm.process_group import make_collectives


@pytest.mark.parametrize("slice_numel", [1, 33, 9001])
@on_ranks(2, 3, 4)
def test_owners_receive_their_slices_and_all_ranks_receive_every_result(
    world: World, slice_numel: int
) -> None:
    collectives = make_collectives(world.group, 30.0)
    numel = slice_numel * world.size
    generator = torch.Generator().manual_seed(world.seed + world.rank)
    values, errors = (torch.randn(numel, generator=generator) for _ in range(2))
    wanted_errors, own = errors.clone(), torch.empty(world.size * ops.sign_payload_bytes(slice_numel)).byte()
    ops.compress_1bit_(own, wanted_errors, values, 0.5, world.size)
    sent = world.everyone(own)
    all_reduce = OneBitAllReduce(collectives, numel, values.device, "a test")
    all_reduce.scatter(values, errors, 0.5)
    received = all_reduce.scattered()
    assert torch.equal(received, torch.cat([each.chunk(world.size)[world.rank] for each in sent]))
    assert torch.equal(errors, wanted_errors)
    all_reduce.own.fill_(world.rank + 1)
    all_reduce.gather()
    owners = torch.arange(1, world.size + 1).repeat_interleave(ops.sign_payload_bytes(slice_numel))
    assert torch.equal(all_reduce.gathered(), owners.byte())
    payload_bytes = ops.sign_payload_bytes(slice_numel)
    for kind in ("onebit_reduce_scatter", "onebit_all_gather"):
        assert collectives.traffic.bytes_sent[kind] == (world.size - 1) * payload_bytes
        assert collectives.traffic.elements[kind] == numel
