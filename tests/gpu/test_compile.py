"""Compiled and captured blocks in a prepared model on the device."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import zero_ext
from tests.gpu.helpers import assert_near, train
from tests.zero.models import TIME, WIDTH, TinyModel, language_batch, language_loss
from tests.zero.training import Plan, adamw, configuration

SETTINGS: list[tuple[int, dict[str, Any]]] = [
    *((stage, {}) for stage in range(4)),
    (3, {"optimizer": "host", "grads": "host", "params": "host"}),
]
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


def compiled(device: torch.device, **options: Any) -> Callable[[], TinyModel]:
    """Makes a model with every block compiled: by inductor on a GPU, where it takes no C++ compiler."""
    options = options if device.type == "cuda" else {"backend": "aot_eager"}

    def make() -> TinyModel:
        model = TinyModel()
        for block in model.blocks:
            block.compile(fullgraph=True, **options)
        return model

    return make


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize(("stage", "offload"), SETTINGS)
def test_compiled_blocks_train_like_plain_ones(
    device: torch.device, stage: int, offload: dict[str, Any], dtype: str
) -> None:
    seed, plan = secrets.randbits(30), Plan(dtype=dtype, clip=0.1)
    print(f"seed {seed}")
    torch._dynamo.reset()
    counters.clear()
    found = train(device, stage, plan, seed, compiled(device), offload=offload)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert_near(found, train(device, stage, plan, seed, offload=offload), TOLERANCE[dtype])


@pytest.mark.parametrize("stage", [1, 2])
def test_blocks_in_graphs_of_inductors_own(device: torch.device, stage: int) -> None:
    seed, plan = secrets.randbits(30), Plan(steps=6)
    print(f"seed {seed}")
    torch._dynamo.reset()
    found = train(device, stage, plan, seed, compiled(device, mode="reduce-overhead"))
    assert_near(found, train(device, stage, plan, seed), TOLERANCE["fp32"])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_blocks_captured_after_prepare(device: torch.device, stage: int) -> None:
    """Capturing runs the blocks a few times and leaves no gradient; replays read the parameters that every
    step has updated in place."""
    seed = secrets.randbits(30)
    print(f"seed {seed}")
    results = []
    for captures in (False, True):
        torch.manual_seed(seed)
        model = TinyModel().to(device)
        prepared, optimizer = zero_ext.prepare(model, adamw(model.parameters()), configuration(stage))
        for block in model.blocks if captures else []:
            sample = torch.randn(2, TIME, WIDTH, device=device, requires_grad=True)
            if device.type == "cuda":
                torch.cuda.make_graphed_callables(block, (sample,))
            else:  # as it warms up
                torch.autograd.grad(block(sample).sum(), (sample, *block.parameters()))
        losses = []
        for step in range(4):
            loss = language_loss(prepared, language_batch(seed, step, 0, 0).to(device))
            prepared.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        state = {name: value.cpu() for name, value in zero_ext.full_state_dict(prepared).items()}
        results.append((losses, state))
    assert_near(results[1], results[0], TOLERANCE["fp32"])
