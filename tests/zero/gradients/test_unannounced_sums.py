"""Gradients that add up over passes under ``no_sync``: in one precision, in every home, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel
from tests.zero.step.test_update_in_backward import backward, prepared, train
from tests.zero.training import Plan, check_equal


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums_of_passes_that_nobody_announced_are_not_rounded(world: World, dtype: str) -> None:
    """A sum in fp32, of passes under ``no_sync``, is the same in every home of gradients."""
    units = {"bucket_elements": 100}  # so that there are units of one parameter
    storages: tuple[dict[str, Any], ...] = (
        {"grads": "host"},
        {"grads": "nvme"},
        {"update_mode": "in_backward"},
        {"update_mode": "in_backward", "grads": "nvme", "optimizer": "nvme"},
    )
    for micro_batches in (2, 3):
        plan = Plan(micro_batches=micro_batches, accumulation="no_sync", dtype=dtype)
        reference = train(world, 3, plan, {}, units=units)
        for offload in storages:
            check_equal(train(world, 3, plan, offload, units=units), reference)


class Choosing(TinyModel):
    """Runs only some blocks."""

    chosen: tuple[int, ...] = (0, 1, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for number in self.chosen:
            hidden = self.blocks[number](hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


@on_ranks(2, 3)
def test_ranks_that_sum_gradients_of_other_parameters(world: World) -> None:
    """Passes under ``no_sync`` bring them on some ranks only; all send them in one precision."""
    for stage in (0, 1, 2):
        results = []
        for step in ("after_backward", "in_backward"):
            torch.manual_seed(world.seed)
            module = Choosing()
            precision = {"dtype": "bf16"}
            model, optimizer = prepared(
                world, module, stage=stage, precision=precision, offload={"update_mode": step}
            )
            for number in range(2):
                module.chosen = (world.rank % 3,)
                with model.no_sync():
                    backward(world, model, 2 * number)
                module.chosen = ((world.rank + 1) % 3,)
                backward(world, model, 2 * number + 1)
                optimizer.step()
                optimizer.zero_grad()
            results.append(zero_ext.full_state_dict(model))
        for name, value in results[0].items():
            assert torch.equal(value, results[1][name]), name
