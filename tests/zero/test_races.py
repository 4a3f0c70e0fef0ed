"""The matrix under random delays and poisoned results: nothing is read before it was waited for."""

from __future__ import annotations

import copy

import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.step.delayed_transport import DelayedTransport, delays
from tests.zero.test_equivalence import PLANS
from tests.zero.training import check_equal, configuration, train_prepared
from zero_ext.comm import CrossProcessTransport, ProcessGroupTransport
from zero_ext.comm.process_group import make_collectives


@on_ranks(2, 3)
def test_matrix_under_delays(world: World) -> None:
    model = TinyModel(layers=2, tied=True)
    for number, plan in enumerate([PLANS[1], PLANS[3], PLANS[4], PLANS[0]._replace(dtype="bf16")]):
        for stage in range(4):
            units = {"bucket_elements": 700, "persistence_threshold": 20 if number == 0 else 0}
            config = configuration(stage, plan, units=units)
            quiet = train_prepared(world, copy.deepcopy(model), language_loss, language_batch, config, plan)
            with delays(world.seed + world.rank):
                late = train_prepared(
                    world, copy.deepcopy(model), language_loss, language_batch, config, plan
                )
            check_equal(late, quiet)


@on_ranks(2)
def test_the_shim_shows_a_read_before_wait_and_a_write_to_what_is_being_sent(world: World) -> None:
    with delays(world.seed):
        collectives = make_collectives(world.group, 20.0)
    assert isinstance(collectives._gathers.unordered, DelayedTransport)
    assert isinstance(collectives._gathers.unordered._inner, ProcessGroupTransport | CrossProcessTransport)
    flat = torch.zeros(4)
    pending = collectives.gather(flat, torch.full((2,), 1.0 + world.rank), "gather", "test")
    assert flat.isnan().sum() == 2
    pending.wait()
    assert flat.tolist() == [1.0, 1.0, 2.0, 2.0]
    collectives._gathers.unordered._longest = 0.5
    pending = collectives.gather(flat, torch.full((2,), 1.0 + world.rank), "gather", "test")
    flat[2 * world.rank : 2 * world.rank + 2] = 7.0
    pending.wait()
    assert flat.tolist() == [7.0] * 4
