"""The training loop of DeepSpeed's engine on one rank: what it counts, returns and refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from zero_ext.integrations import deepspeed


def engine_of(stage: int, **more: Any) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def loss_of(engine: nn.Module, number: int = 0) -> torch.Tensor:
    inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
    return engine(inputs).float().square().mean()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norm_of_a_step_that_overflows(stage: int) -> None:
    """None before any step, as in DeepSpeed, infinite after an overflow and a number after a step."""
    engine = engine_of(stage, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    for factor, before in ((math.nan, None), (1.0, math.inf)):
        assert engine.get_global_grad_norm() == before
        engine.backward(loss_of(engine) * factor)
        assert engine.get_global_grad_norm() == before
        engine.step()
    norm = engine.get_global_grad_norm()
    assert engine.skipped_steps == 1 and norm is not None and 0 < norm < math.inf
