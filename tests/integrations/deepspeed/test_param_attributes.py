"""What code outside reads from parameters of stage 3 and asks about the optimizer, on one rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_ext.integrations import deepspeed


@pytest.fixture
def no_process_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def config_of(stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }


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
    from zero_ext.integrations.deepspeed.optimizer_types import (
        DeepSpeedZeroOptimizer,
        DeepSpeedZeroOptimizer_Stage3,
    )

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
        config = {**config_of(stage), "optimizer": None}
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
