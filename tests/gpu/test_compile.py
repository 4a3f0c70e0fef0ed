"""Compiled blocks in a prepared model on the device."""

from __future__ import annotations

import torch

from tests.gpu.helpers import assert_near, train
from tests.zero.models import TinyModel
from tests.zero.training import Plan


def test_compiled_blocks_train_like_plain_ones(device: torch.device) -> None:
    backend = "inductor" if device.type == "cuda" else "eager"

    def compiled() -> TinyModel:
        model = TinyModel()
        for block in model.blocks:
            block.compile(backend=backend)
        return model

    torch._dynamo.reset()
    plan = Plan(dtype="bf16")
    assert_near(train(device, 3, plan, 11, compiled), train(device, 3, plan, 11), 3e-2)
