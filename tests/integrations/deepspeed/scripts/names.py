"""What names of DeepSpeed give, as JSON: under DeepSpeed itself and under this project it is the same."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.utils import move_to_device, partition_balanced, partition_uniform
from torch import nn

SCHEDULES: dict[str, tuple[dict[str, Any], str]] = {
    "WarmupLR": ({"warmup_max_lr": 0.1, "warmup_num_steps": 7}, "min_lrs max_lrs warmup_num_steps"),
    "WarmupDecayLR": (
        {"warmup_num_steps": 5, "total_num_steps": 15},
        "min_lrs max_lrs warmup_num_steps total_num_steps",
    ),
    "WarmupCosineLR": (
        {"warmup_num_steps": 6, "total_num_steps": 19, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2},
        "warmup_num_steps total_num_steps warmup_min_ratio cos_min_ratio get_lr_ratio",
    ),
    "OneCycle": (
        {"cycle_min_lr": 0.01, "cycle_max_lr": [0.1, 0.2], "cycle_first_step_size": 8, "decay_step_size": 3},
        "min_lrs max_lrs min_moms max_moms step_ratio total_size first_step_size second_step_size "
        "cycle_momentum decay_lr_rate decay_mom_rate decay_step_size get_mom",
    ),
    "LRRangeTest": ({"lr_range_test_step_size": 4}, "min_lr step_size step_rate staircase"),
}


def schedule_facts(name: str) -> list[Any]:
    """What a schedule's attributes are before every step."""
    params, attributes = SCHEDULES[name]
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.5, 0.25)]
    schedule = getattr(lr_schedules, name)(torch.optim.AdamW(groups), **params)
    found = []
    for _ in range(25):
        values = [getattr(schedule, each) for each in attributes.split()]
        found.append([value() if callable(value) else value for value in values])
        schedule.step()
    return found


def moved() -> list[Any]:
    """Where `move_to_device` leaves tensors."""
    item = [torch.zeros(1), (torch.ones(2), {"a": torch.zeros(3)})]
    everywhere = move_to_device(item, "meta")
    in_place = move_to_device(item[0], "cpu", lambda tensor: True)
    return [str(everywhere), in_place is item[0], str(item[0])]


def facts(constants: dict[str, list[str]], used: list[str]) -> dict[str, Any]:
    """Everything that is compared: ``constants`` by module, and whether ``used`` names are there."""
    weights = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    bounds = {count: list(map(int, partition_balanced(weights, count))) for count in range(1, 10)}
    return {
        "uniform": [partition_uniform(items, count) for items in range(12) for count in range(1, 7)],
        "balanced": {
            count: max(sum(weights[a:b]) for a, b in itertools.pairwise(cuts))
            for count, cuts in bounds.items()
        },
        "moved": moved(),
        "constants": {
            module: [getattr(importlib.import_module(module), name) for name in found]
            for module, found in constants.items()
        },
        "schedules": {name: schedule_facts(name) for name in SCHEDULES},
        "used": [name_or_module(path) for path in used],
    }


def name_or_module(path: str) -> bool:
    """Whether a name can be imported from its module, or is one."""
    module, _, name = path.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return hasattr(importlib.import_module(module.rpartition(".")[0]), module.rpartition(".")[2])


if __name__ == "__main__":
    print(json.dumps(facts(**json.loads(sys.argv[1]))))
