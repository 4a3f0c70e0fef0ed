"""A run that is saved and resumed on other numbers of ranks sees every sample exactly once an epoch."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.pool import RankPool
from tests.multi.rank import World
from zero_ext.data import ShardedLoader

SAMPLES = 101


class Rows:
    """Sample i is a row of i's."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def train(world: World, folder: str, resume: bool, micro_batch_size: int, steps: int) -> list[Any]:
    """Trains `steps` steps; returns the samples of all ranks, step by step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3}, process_group=world.group)
    loader = ShardedLoader(Rows(), micro_batch_size, rank=world.rank, world_size=world.size, seed=5)
    if resume:
        zero_ext.load_checkpoint(folder, model, loader=loader)
    seen = []
    batches = iter(loader)
    for _ in range(steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([int(value) for values in world.everyone(batch[:, 0].tolist()) for value in values])
    zero_ext.save_checkpoint(folder, model, loader=loader)
    return seen


def test_two_then_three_then_one_then_four_ranks(rank_pool: RankPool) -> None:
    consumed: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for resume, world_size, micro_batch_size, steps in (
            (False, 2, 5, 4),
            (True, 3, 4, 6),
            (True, 1, 7, 5),
            (True, 4, 3, 8),
        ):
            arguments = {
                "folder": folder,
                "resume": resume,
                "micro_batch_size": micro_batch_size,
                "steps": steps,
            }
            results = rank_pool.run(world_size, f"{__name__}:train", arguments)
            assert all(result == results[0] for result in results)
            consumed += [index for step in results[0] for index in step]
    assert len(consumed) == 2 * 5 * 4 + 3 * 4 * 6 + 7 * 5 + 4 * 3 * 8
    epochs = [consumed[begin : begin + SAMPLES] for begin in range(0, len(consumed), SAMPLES)]
    assert [sorted(epoch) for epoch in epochs[:2]] == [list(range(SAMPLES))] * 2
    assert len(set(epochs[2])) == len(epochs[2])


@on_ranks(2)
def test_all_ranks_leave_a_loop_after_equally_many_batches(world: World) -> None:
    loader = ShardedLoader(Rows(), 3, rank=world.rank, world_size=world.size)
    for _ in range(3):
        counts = world.everyone(sum(1 for _ in loader))
        assert counts[0] == counts[1]
