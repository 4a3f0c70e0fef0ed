"""DeepSpeed's engine on one rank: its loop, schedules and misuse, and what others ask of its parameters."""

from __future__ import annotations

import logging
import math
import pickle
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_ext.integrations import deepspeed
from zero_ext.integrations.deepspeed.optimizer_types import (
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
)

SCHEDULES = {
    "WarmupLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 10},
    "WarmupDecayLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "total_num_steps": 20},
    "WarmupCosineLR": {"warmup_num_steps": 10, "total_num_steps": 20},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10},
    "LRRangeTest": {"lr_range_test_step_size": 5},
}


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    return {**config, "zero_optimization": {"stage": stage}, **more}


def engine_of(stage: int, **more: Any) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return deepspeed.initialize(model=model, config=config_of(stage, **more))[0]


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


@pytest.fixture
def no_process_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def assert_marked(model: nn.Module) -> None:
    unavailable = deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
    parameters = list(model.parameters())
    assert len({parameter.ds_id for parameter in parameters}) == len(parameters)
    for parameter in parameters:
        assert parameter.ds_status is unavailable and parameter.ds_shape == parameter.shape
        assert parameter.partition_numel() == parameter.ds_numel == parameter.numel()
        assert pickle.loads(pickle.dumps(parameter.partition_numel))() == parameter.numel()
    with deepspeed.zero.GatheredParameters(parameters):
        assert all(p.ds_status is deepspeed.zero.ZeroParamStatus.AVAILABLE for p in parameters)
    assert all(p.ds_status is unavailable for p in parameters)


def test_one_rank_under_zero_init(no_process_group: None) -> None:
    with deepspeed.zero.Init(config_dict_or_path=config_of(3)):
        model = nn.Linear(5, 3)
    assert dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert_marked(model)
    engine, *_ = deepspeed.initialize(model=model, config=config_of(3))
    assert_marked(engine.module)
    engine.backward(engine(torch.ones(1, 5)).sum())
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_optimizers_by_class(stage: int) -> None:
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(5, 3), config=config_of(stage))
    assert engine.optimizer is optimizer and isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, DeepSpeedZeroOptimizer) == (stage in (1, 2))
    assert isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) == (stage == 3)
    assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
    assert isinstance(optimizer, deepspeed.runtime.base_optimizer.ZeROOptimizer) == (stage > 0)
    assert not isinstance(torch.optim.SGD(nn.Linear(1, 1).parameters()), DeepSpeedZeroOptimizer)
    with pytest.raises(deepspeed.DeepSpeedFeatureError, match=r"expected one from deepspeed\.initialize"):
        DeepSpeedZeroOptimizer(optimizer)


def test_an_engine_without_an_optimizer_has_the_side_of_the_parameters_in_stage_3() -> None:
    for stage in (2, 3):
        config = config_of(stage, optimizer=None)
        engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(5, 3), config=config)
        assert engine.optimizer is optimizer and (optimizer is None) == (stage == 2)
        with pytest.raises(RuntimeError, match=r"engine\.step: this engine has no optimizer"):
            engine.step()
    assert optimizer.module is engine.module and optimizer.forward_hooks == []
    assert all(parameter.ds_active_sub_modules == set() for parameter in engine.parameters())
    assert pickle.loads(pickle.dumps(engine.module.ds_external_parameters))() == ()


def test_local_size_counts_devices_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = deepspeed.accelerator.DeepSpeedAccelerator("cpu")
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert accelerator.device_count() == 3
    monkeypatch.setenv("LOCAL_SIZE", "5")
    assert accelerator.device_count() == 5


def schedule_of(name: str, rate: Any) -> Any:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=rate)
    return getattr(deepspeed.runtime.lr_schedules, name)(optimizer, **SCHEDULES[name])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
def test_a_step_sets_the_iteration_passed(name: str, rate: Any) -> None:
    """A learning rate that is a tensor is written to, since compiled optimizers hold it."""
    optimizer_rates = []
    for jumps in (True, False):
        own = rate.clone() if isinstance(rate, torch.Tensor) else rate
        schedule = schedule_of(name, own)
        group = schedule.optimizer.param_groups[0]
        for argument in [7] if jumps else [None] * 8:
            schedule.step(argument)
        assert schedule.last_batch_iteration == 7
        found = [(float(group["lr"]), group["betas"])]
        schedule.step()
        assert schedule.last_batch_iteration == 8
        optimizer_rates.append([*found, (float(group["lr"]), group["betas"])])
        assert group["lr"] is own or not isinstance(own, torch.Tensor)
    assert optimizer_rates[0] == optimizer_rates[1]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_known_rates() -> None:
    schedule = schedule_of("WarmupLR", 0.5)
    schedule.step(last_batch_iteration=4)
    assert schedule.get_last_lr() == pytest.approx([0.1 * math.log(5) / math.log(10)])
    schedule = schedule_of("LRRangeTest", 0.5)
    schedule.step(batch_iteration=4)
    assert schedule.get_last_lr() == pytest.approx([2e-3])
    with pytest.raises(ValueError, match="last_batch_iteration"):
        schedule.step(-1)
    assert schedule.last_batch_iteration == 4


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_of_the_json(name: str) -> None:
    config = config_of(0, scheduler={"type": name, "params": SCHEDULES[name]})
    engine, _, _, schedule = deepspeed.initialize(model=nn.Linear(2, 1), config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    argument = "last_batch_iteration" if name.startswith("Warmup") else "batch_iteration"
    engine.step(lr_kwargs={argument: 6})
    assert schedule is engine.lr_scheduler and schedule.last_batch_iteration == 6
    assert type(schedule) is getattr(deepspeed.runtime.lr_schedules, name)
