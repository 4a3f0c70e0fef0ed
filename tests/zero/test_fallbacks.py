"""What runs where a faster way is missing: sockets for shared memory, resized for swapped storage."""

from __future__ import annotations

import copy
from unittest import mock

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import Plan, check_equal, configuration, train_prepared
from zero_ext.comm import ProcessGroupTransport


@on_ranks(2, 3)
def test_over_the_process_group_alone(world: World) -> None:
    model = TinyModel()
    for stage in (0, 1, 2, 3):
        for plan in (Plan(clip=0.1), Plan(micro_batches=2, dtype="bf16")):
            config = configuration(stage, plan)
            fast = train_prepared(world, copy.deepcopy(model), language_loss, language_batch, config, plan)
            fastest = "zero_ext.comm.process_group.fastest_host_transport"
            with mock.patch(fastest, lambda group, _: ProcessGroupTransport(group)):
                slow = train_prepared(
                    world, copy.deepcopy(model), language_loss, language_batch, config, plan
                )
            assert slow.engine is not None
            assert isinstance(slow.engine.collectives._gathers.unordered, ProcessGroupTransport)
            check_equal(slow, fast)


@on_ranks(2)
def test_storages_that_cannot_be_swapped_are_resized(world: World) -> None:
    model = TinyModel(tied=True)
    config = configuration(3)
    swapped = train_prepared(world, copy.deepcopy(model), language_loss, language_batch, config)
    with mock.patch("zero_ext.zero.memory.pool.hasattr", lambda *_: False, create=True):
        resized = train_prepared(world, copy.deepcopy(model), language_loss, language_batch, config)
    check_equal(resized, swapped)
