"""Muon's momentum and the state of owners, saved by some ranks and loaded by others, in another stage and
tier: training goes on as if it had never stopped.

Gradients are integers, as in ``tests/parallel/test_muon.py``: the order of sums does not matter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.optim.full_tensors.full_tensor_optimizers import Shampoo
from tests.parallel.test_muon import MIXED, SETTINGS, Blocks, assert_equal
from tests.zero.training import configuration, placed

MICRO_BATCHES = 12  # divide by all numbers of ranks
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
Layout = tuple[int, int, dict[str, str]]  # ranks, stage, tiers
# Optimizer, and the layouts that save and load.
CASES: list[tuple[str, Layout, Layout]] = [
    ("muon", (2, 3, {}), (3, 1, {"optimizer": "nvme"})),
    ("muon", (3, 2, {"grads": "host", "optimizer": "nvme"}), (1, 0, {})),
    ("muon", (1, 1, {"optimizer": "host"}), (4, 3, HOST)),
    ("shampoo", (2, 3, {}), (3, 1, {"optimizer": "host"})),
    ("shampoo", (3, 2, {"grads": "host", "optimizer": "host"}), (1, 0, {})),
    ("shampoo", (1, 1, {}), (4, 3, HOST)),
]


def made(name: str, model: Any) -> torch.optim.Optimizer:
    if name == "muon":
        return zero_ext.Muon(model.parameters(), **SETTINGS)
    return Shampoo(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, rank: int, ranks: int, steps: range) -> None:
    """Steps by the sums of gradients, which the engine averages."""
    for step in steps:
        own = range(rank * MICRO_BATCHES // ranks, (rank + 1) * MICRO_BATCHES // ranks)
        (sum(model(step, each) for each in own) * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(("name", "saving", "loading"), CASES)
def test_goes_on_as_if_it_had_never_stopped(world: World, name: str, saving: Layout, loading: Layout) -> None:
    def course(layout: Layout, section: dict[str, Any]) -> tuple[Any, Any]:
        ranks, stage, _ = layout
        model = Blocks(world.seed)
        config = configuration(stage, offload=section, **MIXED)
        return zero_ext.prepare(
            model, made(name, model), config, process_group=groups[ranks], whole_tensors=name == "shampoo"
        )

    # All ranks make all groups, as torch asks of them.
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (saving[0], loading[0])}
    wanted = Blocks(world.seed)
    train(wanted, made(name, wanted), 0, 1, range(4))
    folder = world.shared_folder()
    if world.rank < saving[0]:
        with placed(saving[2]) as section:
            model, optimizer = course(saving, section)
            train(model, optimizer, world.rank, saving[0], range(2))
            zero_ext.save_checkpoint(folder, model).wait()
    world.barrier()
    if world.rank < loading[0]:
        with placed(loading[2]) as section:
            model, optimizer = course(loading, section)
            zero_ext.load_checkpoint(folder, model)
            train(model, optimizer, world.rank, loading[0], range(2, 4))
            found = zero_ext.full_state_dict(model, rank0_only=False)
        assert_equal(found, {key: value.detach() for key, value in wanted.named_parameters()})
