"""The exchange of signs: who gets which message, from whom, and what stays behind."""

from __future__ import annotations

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ops
from zero_ext.comm.compressed import SignExchange
from zero_ext.comm.process_group import make_collectives


@pytest.mark.parametrize("part", [1, 33, 9001])
@on_ranks(2, 3, 4)
def test_owners_get_their_part_of_all_and_all_get_every_owners_message(world: World, part: int) -> None:
    collectives = make_collectives(world.group, 30.0)
    numel = part * world.size
    generator = torch.Generator().manual_seed(world.seed + world.rank)
    values, errors = (torch.randn(numel, generator=generator) for _ in range(2))
    wanted_errors, own = errors.clone(), torch.empty(world.size * ops.sign_message_bytes(part)).byte()
    ops.compress_signs_(own, wanted_errors, values, 0.5, world.size)
    sent = world.everyone(own)
    exchange = SignExchange(collectives, numel, values.device, "a test")
    exchange.scatter(values, errors, 0.5)
    received = exchange.scattered()
    assert torch.equal(received, torch.cat([each.chunk(world.size)[world.rank] for each in sent]))
    assert torch.equal(errors, wanted_errors)
    exchange.own.fill_(world.rank + 1)
    exchange.gather()
    owners = torch.arange(1, world.size + 1).repeat_interleave(ops.sign_message_bytes(part))
    assert torch.equal(exchange.gathered(), owners.byte())
    message = ops.sign_message_bytes(part)
    for kind in ("signs_to_owners", "signs_to_all"):
        assert collectives.wire.bytes_sent[kind] == (world.size - 1) * message
        assert collectives.wire.elements[kind] == numel
