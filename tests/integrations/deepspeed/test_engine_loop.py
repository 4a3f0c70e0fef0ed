"""The training loop of DeepSpeed's engine on one rank: what it counts, returns, logs and refuses."""

from __future__ import annotations

import logging
import math
import secrets
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_misuse_that_deepspeed_refuses(stage: int) -> None:
    engine = engine_of(stage)
    before = engine.module_state_dict()
    with engine.no_sync():
        engine.backward(loss_of(engine, 0))
        with pytest.raises(
            RuntimeError, match=r"engine\.step: expected a call outside no_sync, got one inside"
        ):
            engine.step()
        for context in (engine.no_sync, engine.coalesce_grad_reduction):
            with pytest.raises(RuntimeError, match="got one inside another"), context():
                pass
    assert engine.micro_steps == engine.global_steps == 0
    assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
    engine.step()
    assert engine.micro_steps == engine.global_steps == 1 and engine.was_step_applied()
    outputs = engine(torch.ones(2, 4))
    for wrong, found in (
        (outputs, r"shape \(2, 1\)"),
        (outputs.sum().detach(), r"shape \(\) without a graph"),
        (0.5, "float"),
    ):
        for call in (engine.backward, engine.scale):
            with pytest.raises(ValueError, match=f"expected a loss of one element .* got {found}"):
                call(wrong)


def test_a_scheduler_over_another_optimizer() -> None:
    model = nn.Linear(2, 1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(ValueError, match=r"lr_scheduler: expected one over optimizer=, got .*StepLR"):
        deepspeed.initialize(model=model, lr_scheduler=scheduler, config=config)
    engine, *_ = deepspeed.initialize(model=model, optimizer=other, lr_scheduler=scheduler, config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert engine.get_lr() == pytest.approx([0.01])


def test_keys_without_effect_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    key = f"zero_optimization.{secrets.token_hex(8)}"
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, key: 1}
    with caplog.at_level(logging.INFO, logger="zero_ext"):
        for _ in range(2):
            deepspeed.initialize(model=nn.Linear(2, 1), config=config)
    found = [record for record in caplog.records if key in record.getMessage()]
    assert [record.levelno for record in found] == [logging.INFO]
    assert f"{key}: no effect" in found[0].getMessage()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
