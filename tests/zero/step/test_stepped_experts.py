"""Steps that leave out experts without tokens: as a loop of torch, bit for bit where nothing changes."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.step.lazy_loop import (
    STEPS,
    Course,
    LazyLoop,
    batches_of,
    check_untouched,
    own_shards,
    reached_in,
    same_bits,
)
from tests.zero.training import placed
from tests.zero.unshard.stacked_mixtures import EXPERTS, ROUTED, MixtureModel, batch_of
from zero_ext.config import ConfigError, load_config
from zero_ext.zero import engine_of

UNITS = {**ROUTED, "update_experts": "routed"}
EVERYWHERE = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}
RUNS: dict[str, tuple[Course, dict[str, Any], dict[str, Any]]] = {
    "device": (Course(), {}, {}),
    "Adam": (Course("Adam"), {}, {}),
    "Lion": (Course("Lion"), {}, {}),
    "host": (Course(), {"params": "host", "grads": "host", "optimizer": "host"}, {}),
    "host, params on nvme": (Course(), {"optimizer": "host", "params": "nvme"}, {}),
    "nvme": (Course(), EVERYWHERE, {}),
    "optimizer on nvme": (Course(), {"optimizer": "nvme"}, {}),
    "Lion on nvme": (Course("Lion"), EVERYWHERE, {}),
    "in backward": (Course(), {"optimizer": "host", "update_mode": "in_backward"}, {}),
    "on trial": (Course(clip=0.05), {**EVERYWHERE, "update_mode": "in_backward"}, {}),
    "Lion on trial": (Course("Lion", clip=0.05), {**EVERYWHERE, "update_mode": "in_backward"}, {}),
    "delayed": (Course(), {"optimizer": "host", "update_mode": "delayed"}, {}),
    "delayed, nvme": (Course(), {"optimizer": "nvme", "params": "nvme", "update_mode": "delayed"}, {}),
    "clipped": (Course(clip=0.05), {}, {}),
    "checkpointed": (Course(), {}, {"checkpoints": True}),
    "always gathered": (Course(), {}, {"persistence_threshold": 1 << 20}),
    "biases always gathered": (Course(), {}, {"persistence_threshold": 1 + EXPERTS * 32}),
}


def prepared(
    world: World, model: nn.Module, course: Course, offload: dict[str, Any], threshold: int = -1, **more: Any
) -> tuple[Any, Any]:
    units = UNITS if threshold < 0 else {**UNITS, "persistence_threshold": threshold}
    config = {
        "stage": 3,
        "units": units,
        "offload": offload,
        "gradient_clipping": course.clip,
        "batch": {"gradient_accumulation_steps": len(STEPS[0])},
        "timeout_seconds": 60.0,
        **more,
    }
    return zero_ext.prepare(model, course.make(model), config, process_group=world.group)


def train_step(world: World, model: Any, optimizer: Any, step: int) -> frozenset[int]:
    """A step; the experts that it has reached."""
    batches = batches_of(world, step)
    for batch in batches:
        model.backward(batch.loss_on(model, world.rank) / len(batches))
    optimizer.step()
    optimizer.zero_grad()
    return reached_in(batches)


@on_ranks(1, 2)
@pytest.mark.parametrize("case", RUNS)
def test_steps_are_those_of_a_loop_that_restores_other_experts(world: World, case: str) -> None:
    course, offload, more = RUNS[case]
    plain = MixtureModel(world.seed, more.get("checkpoints", False))
    shapes = {name: each.shape for name, each in plain.named_parameters()}
    lazy = LazyLoop(copy.deepcopy(plain), course)
    with placed(offload) as section:
        model, optimizer = prepared(world, plain, course, section, more.get("persistence_threshold", -1))
        before, checked = own_shards(optimizer), 0
        for step in range(2 * len(STEPS)):
            reached = train_step(world, model, optimizer, step)
            lazy.step(world, batches_of(world, step))
            if "update_mode" in offload:
                model.finish_update()
            after, where = own_shards(optimizer), f"step {step}, seed {world.seed}"
            checked += check_untouched(before, after, shapes, reached)
            before = after
            expected = lazy.values()
            for (kind, name, start), value in after.items():
                right = expected.get((kind, name), torch.zeros(shapes[name])).flatten()
                right = right[start : start + value.numel()]
                torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}, {where}")
            full = zero_ext.full_state_dict(model, rank0_only=False)
            for name, value in lazy.model.state_dict().items():
                torch.testing.assert_close(full[name], value, rtol=1e-4, atol=1e-5, msg=f"{name}, {where}")
        assert checked > 0
        steps = optimizer.state_dict()["scalars"].get("step", {})
        alone = {
            name: int(lazy.optimizer.state[each]["step"])
            for name, each in lazy.model.named_parameters()
            if "step" in lazy.optimizer.state[each]
        }
        assert steps == alone
