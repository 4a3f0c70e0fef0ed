"""Optimizer state that sleeps in host memory frees the device's, and comes back bit for bit."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import language_batch, language_loss
from tests.zero.test_accelerator import tiny_model
from tests.zero.training import adamw
from zero_ext.zero import engine_of

ASLEEP = "got state that sleeps in host memory"


def lion(parameters: Any) -> torch.optim.Optimizer:
    return zero_ext.Lion(parameters, lr=1e-2)


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)


CASES = [
    (3, adamw, {"dtype": "bf16"}, {}),
    (3, adamw, {}, {}),
    (2, lion, {"dtype": "bf16", "moments_dtype": "bf16"}, {}),
    (1, amsgrad, {"dtype": "bf16"}, {}),
    (1, adamw, {"dtype": "bf16", "moments_dtype": "8bit"}, {}),
    (0, adamw, {}, {}),
    (3, adamw, {"dtype": "fp16"}, {"optimizer": "host", "ratio": 0.5}),
]


def trained(world: World, stage: int, make: Any, precision: Any, offload: Any, sleeps: bool) -> Any:
    torch.manual_seed(world.seed)
    model = tiny_model("stand_in")
    config = {"stage": stage, "precision": precision, "offload": offload}
    model, optimizer = zero_ext.prepare(model, make(model.parameters()), config, process_group=world.group)
    engine = engine_of(model)

    def backward(step: int) -> None:
        batch = language_batch(world.seed, step, 0, world.rank).to("stand_in")
        model.backward(language_loss(model, batch))

    for step in range(3):
        if step == 2 and sleeps:
            before, allocated = engine.memory_by_tier(), torch.accelerator.memory_allocated()
            freed = zero_ext.sleep(model)
            after = engine.memory_by_tier()
            assert freed == before["device"]["optimizer"] > 0
            assert after["device"]["optimizer"] == 0
            assert after["host"]["optimizer"] == before["host"]["optimizer"] + freed
            assert allocated - torch.accelerator.memory_allocated() >= freed
            backward(step)
            for refused in (optimizer.step, lambda: zero_ext.sleep(model)):
                with pytest.raises(RuntimeError, match=ASLEEP):
                    refused()
            with (
                tempfile.TemporaryDirectory() as folder,
                pytest.raises(RuntimeError, match=ASLEEP),
            ):
                zero_ext.save_checkpoint(folder, model)
            zero_ext.wake(model)
            zero_ext.wake(model)
            assert engine.memory_by_tier() == before
        else:
            backward(step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in zero_ext.full_state_dict(model).items()}


@on_ranks(2, stand_in=True, by_turns=True)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_training_goes_on_bit_for_bit(world: World, case: int) -> None:
    reference, found = (trained(world, *CASES[case], sleeps) for sleeps in (False, True))
    for name, value in reference.items():
        assert torch.equal(found[name], value), name


@on_ranks(1, stand_in=True)
def test_what_cannot_sleep(world: World) -> None:
    model = tiny_model("stand_in")
    offload = {"optimizer": "host", "update_mode": "delayed"}
    delayed, _ = zero_ext.prepare(
        model, adamw(model.parameters()), {"offload": offload}, process_group=world.group
    )
    on_host = tiny_model("cpu")
    on_host, _ = zero_ext.prepare(
        on_host, adamw(on_host.parameters()), {}, process_group=world.group, device="cpu"
    )
    for refused, arguments, message in (
        (delayed, {}, "update_mode: expected 'after_backward', got 'delayed'"),
        (delayed, {"what": "gradients"}, "what: expected 'optimizer', got 'gradients'"),
        (delayed, {"tier": "nvme"}, "tier: expected 'host', got 'nvme'"),
        (on_host, {}, "expected a model on an accelerator, got one on the CPU"),
    ):
        with pytest.raises(ValueError, match=message):
            zero_ext.sleep(refused, **arguments)
