"""DeepSpeed's five schedules: counted as DeepSpeed counts, also where the JSON names them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from zero_ext.integrations import deepspeed

SCHEDULES = {
    "WarmupLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 10},
    "WarmupDecayLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "total_num_steps": 20},
    "WarmupCosineLR": {"warmup_num_steps": 10, "total_num_steps": 20},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10},
    "LRRangeTest": {"lr_range_test_step_size": 5},
}


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
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": name, "params": SCHEDULES[name]},
    }
    engine, _, _, schedule = deepspeed.initialize(model=nn.Linear(2, 1), config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    argument = "last_batch_iteration" if name.startswith("Warmup") else "batch_iteration"
    engine.step(lr_kwargs={argument: 6})
    assert schedule is engine.lr_scheduler and schedule.last_batch_iteration == 6
    assert type(schedule) is getattr(deepspeed.runtime.lr_schedules, name)
