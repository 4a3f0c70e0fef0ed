"""DeepSpeed's five schedules: their formulas, torch's scheduler protocol, resuming, and bad arguments."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.optim.schedulers import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

STEPS = 30
MAKERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "WarmupLR": lambda o: WarmupLR(o, 0.001, 0.1, 7),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 25, 0.001, 0.1, 7, "linear"),
    "WarmupCosineLR": lambda o: WarmupCosineLR(o, 25, 0.1, 7, 0.05),
    "OneCycle": lambda o: OneCycle(
        o,
        0.01,
        0.1,
        decay_lr_rate=0.5,
        cycle_first_step_size=5,
        cycle_second_step_size=8,
        decay_step_size=2,
        decay_mom_rate=0.01,
    ),
    "LRRangeTest": lambda o: LRRangeTest(o, 0.01, 4, 0.5, True),
}


def optimizer(groups: int = 1, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    return kind(
        [
            {"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.01 * (group + 1)}
            for group in range(groups)
        ]
    )


def rates(schedule: LRScheduler, steps: int = STEPS) -> list[list[float]]:
    """Learning rates after construction and after each of `steps` steps, from the live param_groups."""
    groups = schedule.optimizer.param_groups
    found = [[float(group["lr"]) for group in groups]]
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
        found.append([float(group["lr"]) for group in groups])
        assert schedule.get_last_lr() == found[-1]
    return found


def warmup(step: int, steps: int, kind: str) -> float:
    return math.log(step + 1) / math.log(steps) if kind == "log" else step / steps


def close(seen: list[list[float]], wanted: list[list[float]]) -> None:
    assert torch.tensor(seen, dtype=torch.float64).allclose(
        torch.tensor(wanted, dtype=torch.float64), rtol=1e-13, atol=1e-16
    ), (seen, wanted)


@pytest.fixture
def draw() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup(kind: str, draw: random.Random) -> None:
    for steps in (2, draw.randint(3, 12)):
        low, high = draw.uniform(0, 0.1), draw.uniform(0, 1)
        wanted = [[low]]
        for step in range(STEPS):
            wanted.append([low + (high - low) * (warmup(step, steps, kind) if step < steps else 1.0)])
        close(rates(WarmupLR(optimizer(), low, high, steps, kind)), wanted)


def test_warmup_of_one_step_counts_as_two() -> None:
    one, two = (rates(WarmupLR(optimizer(), 0.0, 0.1, steps)) for steps in (1, 2))
    assert one == two


def test_warmup_to_the_groups_own_rates() -> None:
    found = rates(WarmupLR(optimizer(2), warmup_num_steps=5))
    assert found[0] == [0.0, 0.0]
    assert found[-1] == [0.01, 0.02]


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_decay(kind: str, draw: random.Random) -> None:
    steps, total = draw.randint(2, 8), draw.randint(9, 25)
    lows, highs = [0.001, 0.002], [draw.uniform(0.1, 1), draw.uniform(0.1, 1)]
    wanted = [lows]
    for step in range(STEPS):
        share = warmup(step, steps, kind) if step < steps else max(0.0, (total - step) / (total - steps))
        wanted.append([low + (high - low) * share for low, high in zip(lows, highs, strict=True)])
    close(rates(WarmupDecayLR(optimizer(2), total, lows, highs, steps, kind)), wanted)
    assert wanted[-1] == lows


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_cosine(kind: str, draw: random.Random) -> None:
    steps, total, start, end = draw.randint(2, 8), draw.randint(9, 25), draw.random(), draw.random()
    wanted = [[0.0, 0.0]]
    for step in range(STEPS):
        if step < steps:
            ratio = start + (1 - start) * warmup(step, steps, kind)
        else:
            progress = min(1.0, (step - steps + 1) / (total - steps))
            ratio = end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress))
        wanted.append([0.01 * ratio, 0.02 * ratio])
    close(rates(WarmupCosineLR(optimizer(2), total, start, steps, end, kind)), wanted)


def test_total_below_warmup_warns_and_stays_defined() -> None:
    for make in (WarmupDecayLR, WarmupCosineLR):
        with pytest.warns(UserWarning, match="total_num_steps=3 is less than warmup_num_steps=10"):
            schedule = make(optimizer(), total_num_steps=3, warmup_num_steps=10)
        assert all(math.isfinite(rate) and rate >= 0 for row in rates(schedule) for rate in row)


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase: bool, draw: random.Random) -> None:
    low, size, growth = draw.uniform(0.001, 0.1), draw.randint(1, 7), draw.random()
    wanted = []
    for step in range(-1, STEPS):
        intervals = (step + 1) // size if staircase else (step + 1) / size
        wanted.append([low * (1 + growth * intervals)])
    close(rates(LRRangeTest(optimizer(), low, size, growth, staircase)), wanted)


@pytest.mark.parametrize(("first_stairs", "second_stairs"), [(0, None), (0, 0), (2, None), (3, 2)])
@pytest.mark.parametrize("second", [None, 6, 0])
def test_one_cycle(
    first_stairs: int, second_stairs: int | None, second: int | None, draw: random.Random
) -> None:
    low, high, first = draw.uniform(0, 0.1), draw.uniform(0.2, 1), draw.randint(1, 9)
    decay, interval, momentum_decay = draw.random(), draw.randint(1, 4), 0.01
    made = optimizer()
    schedule = OneCycle(
        made,
        low,
        high,
        decay_lr_rate=decay,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        cycle_first_stair_count=first_stairs,
        cycle_second_stair_count=second_stairs,
        decay_step_size=interval,
        cycle_min_mom=0.7,
        cycle_max_mom=0.9,
        decay_mom_rate=momentum_decay,
    )
    down = first if second is None else second
    total = first + down
    for step in range(-1, STEPS):
        position = (step + 1) % total
        if position <= first:
            height, stairs = position / first, first_stairs
        else:
            height = (total - position) / down
            stairs = first_stairs if second_stairs is None else second_stairs
        if stairs:
            # Stairs are counted in whole steps, so that rounding never takes one away.
            done, size = (position, first) if position <= first else (total - position, down)
            height = (done * stairs // size) / stairs
        if step < 0:
            rate, beta = low, 0.7
        elif step < total:
            rate, beta = low + (high - low) * height, 0.9 - 0.2 * height
        else:
            intervals = (step - total + 1) / interval
            rate, beta = low / (1 + decay * intervals), 0.9 * (1 + momentum_decay * intervals)
        group = made.param_groups[0]
        assert group["lr"] == pytest.approx(rate, rel=1e-12), step
        assert group["betas"] == pytest.approx((beta, 0.99), rel=1e-12), step
        group["params"][0].grad = None
        made.step()
        schedule.step()


def test_one_cycle_without_momentum() -> None:
    for made, options in (
        (optimizer(), {"cycle_momentum": False}),
        (optimizer(kind=torch.optim.SGD), {}),
    ):
        before = {key: value for key, value in made.param_groups[0].items() if key not in ("lr", "params")}
        if options:
            schedule = OneCycle(made, 0.1, 0.2, cycle_first_step_size=3, **options)
        else:
            with pytest.warns(UserWarning, match="SGD has no betas"):
                schedule = OneCycle(made, 0.1, 0.2, cycle_first_step_size=3)
        found = rates(schedule)
        assert max(found) == [0.2]
        after = {key: value for key, value in made.param_groups[0].items() if key in before}
        assert after == before


def test_no_decay_holds_the_low_rate() -> None:
    assert rates(OneCycle(optimizer(), 0.1, 0.2, cycle_first_step_size=3))[-1] == [0.1]


@pytest.mark.parametrize("name", MAKERS)
def test_torch_protocol_and_resume(name: str) -> None:
    make = MAKERS[name]
    full = rates(make(optimizer(2)))
    made = optimizer(2)
    schedule = make(made)
    assert isinstance(schedule, LRScheduler)
    assert schedule.last_batch_iteration == -1
    head = rates(schedule, 11)
    assert schedule.last_batch_iteration == 10
    state = json.loads(json.dumps(schedule.state_dict()))
    saved = made.state_dict()
    other = optimizer(2)
    other.load_state_dict(saved)
    resumed = make(optimizer(2))
    resumed.optimizer.load_state_dict(saved)
    resumed.load_state_dict(state)
    assert resumed.get_last_lr() == schedule.get_last_lr()
    assert resumed.last_batch_iteration == 10
    close(head + rates(resumed, STEPS - 11)[1:], full)


@pytest.mark.parametrize("name", MAKERS)
def test_deepspeeds_state_is_enough(name: str) -> None:
    full = rates(MAKERS[name](optimizer()))
    resumed = MAKERS[name](optimizer())
    resumed.load_state_dict({"last_batch_iteration": 10})
    resumed.optimizer.step()
    resumed.step()
    close([[group["lr"] for group in resumed.optimizer.param_groups]], [full[12]])


@pytest.mark.parametrize("name", MAKERS)
def test_continues_after_any_iteration(name: str) -> None:
    full = rates(MAKERS[name](optimizer()))
    arguments = {
        "WarmupLR": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.1, "warmup_num_steps": 7},
        "WarmupDecayLR": {
            "total_num_steps": 25,
            "warmup_min_lr": 0.001,
            "warmup_max_lr": 0.1,
            "warmup_num_steps": 7,
            "warmup_type": "linear",
        },
        "WarmupCosineLR": {
            "total_num_steps": 25,
            "warmup_min_ratio": 0.1,
            "warmup_num_steps": 7,
            "cos_min_ratio": 0.05,
        },
        "OneCycle": {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "decay_lr_rate": 0.5,
            "cycle_first_step_size": 5,
            "cycle_second_step_size": 8,
            "decay_step_size": 2,
            "decay_mom_rate": 0.01,
        },
        "LRRangeTest": {
            "lr_range_test_min_lr": 0.01,
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 0.5,
            "lr_range_test_staircase": True,
        },
    }[name]
    kind = {"WarmupLR": WarmupLR, "WarmupDecayLR": WarmupDecayLR, "WarmupCosineLR": WarmupCosineLR}.get(name)
    kind = kind or {"OneCycle": OneCycle, "LRRangeTest": LRRangeTest}[name]
    late = kind(optimizer(), **arguments, last_batch_iteration=9)
    assert late.last_batch_iteration == 9
    close(rates(late, STEPS - 11), full[10:-1])


@pytest.mark.parametrize("name", MAKERS)
def test_groups_added_later_and_tensor_rates(name: str) -> None:
    made = optimizer()
    schedule = MAKERS[name](made)
    made.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.01})
    found = rates(schedule)
    assert all(row[0] == row[1] for row in found[1:])
    tensor = torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.01, dtype=torch.float64)
    )
    live = tensor.param_groups[0]["lr"]
    close(rates(MAKERS[name](tensor)), [row[:1] for row in rates(MAKERS[name](optimizer()))])
    assert tensor.param_groups[0]["lr"] is live, "a tensor rate is filled, not replaced"


def test_a_list_of_rates_does_not_cover_groups_added_later() -> None:
    made = optimizer(2)
    schedule = LRRangeTest(made, [0.1, 0.2])
    made.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    made.step()
    with pytest.raises(ValueError, match=r"lr_range_test_min_lr: expected .*, got 2 values"):
        schedule.step()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda o: WarmupLR(o, warmup_num_steps=0), "warmup_num_steps: expected .*, got 0"),
        (lambda o: WarmupLR(o, warmup_num_steps=2.5), "warmup_num_steps: expected .*, got 2.5"),
        (lambda o: WarmupLR(o, warmup_num_steps=True), "warmup_num_steps: expected .*, got True"),
        (lambda o: WarmupLR(o, warmup_min_lr=-1), "warmup_min_lr: expected .*, got -1"),
        (lambda o: WarmupLR(o, warmup_max_lr=math.nan), "warmup_max_lr: expected .*, got nan"),
        (lambda o: WarmupLR(o, warmup_max_lr=[0.1]), "warmup_max_lr: expected .*, got 1 values"),
        (lambda o: WarmupLR(o, warmup_max_lr=[0.1, "x"]), r"warmup_max_lr\[1\]: expected .*, got 'x'"),
        (lambda o: WarmupLR(o, warmup_type="cubic"), "warmup_type: expected .*, got 'cubic'"),
        (lambda o: WarmupLR(o, last_batch_iteration=-2), "last_batch_iteration: expected .*, got -2"),
        (lambda o: WarmupDecayLR(o, 0), "total_num_steps: expected .*, got 0"),
        (lambda o: WarmupCosineLR(o, 2000, cos_min_ratio=-1), "cos_min_ratio: expected .*, got -1"),
        (lambda o: WarmupCosineLR(o, 2000, warmup_min_ratio="a"), "warmup_min_ratio: expected .*, got 'a'"),
        (
            lambda o: OneCycle(o, 0.1, 0.2, cycle_first_step_size=0),
            "cycle_first_step_size: expected .*, got 0",
        ),
        (
            lambda o: OneCycle(o, 0.1, 0.2, cycle_second_step_size=-1),
            "cycle_second_step_size: expected .*, got -1",
        ),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_max_mom=1.0), "cycle_max_mom: expected .*, got 1.0"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_momentum=1), "cycle_momentum: expected .*, got 1"),
        (lambda o: OneCycle(o, -0.1, 0.2), "cycle_min_lr: expected .*, got -0.1"),
        (lambda o: LRRangeTest(o, lr_range_test_step_size=0), "lr_range_test_step_size: expected .*, got 0"),
        (
            lambda o: LRRangeTest(o, lr_range_test_staircase="no"),
            "lr_range_test_staircase: expected .*, got 'no'",
        ),
    ],
)
def test_bad_arguments_change_nothing(make: Any, name: str) -> None:
    made = optimizer(2)
    with pytest.raises((ValueError, TypeError), match=name):
        make(made)
    assert [group["lr"] for group in made.param_groups] == [0.01, 0.02]
    assert all(group["betas"] == (0.9, 0.999) for group in made.param_groups)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"type": "OneCycle", "last_batch_iteration": 3},
            "state_dict: expected the state of a WarmupLR schedule, got one of OneCycle",
        ),
        ({}, "state_dict: expected last_batch_iteration"),
        ({"last_batch_iteration": -2}, "last_batch_iteration: expected .*, got -2"),
        ({"last_batch_iteration": "3"}, "last_batch_iteration: expected .*, got '3'"),
        ({"last_batch_iteration": 3, "last_lr": "x"}, "last_lr: expected .*, got 'x'"),
        ({"last_batch_iteration": 3, "last_lr": [math.nan]}, "last_lr"),
        ({"last_batch_iteration": 3, "last_lr": [None]}, "last_lr"),
    ],
)
def test_bad_state_changes_nothing(state: dict[str, Any], text: str) -> None:
    schedule = WarmupLR(optimizer(), 0.0, 0.1, 5)
    rates(schedule, 2)
    before = schedule.state_dict()
    with pytest.raises((ValueError, TypeError), match=text):
        schedule.load_state_dict(state)
    assert schedule.state_dict() == before


def test_only_optimizers() -> None:
    with pytest.raises(TypeError, match=r"optimizer: expected a torch\.optim\.Optimizer"):
        WarmupLR([1])  # type: ignore[arg-type]
