"""Results that are saved: of named ops, or the best under a budget. Random numbers are never skipped."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.activation.blocks import WIDTH, Counting, Stack, fresh_seed, gradients, same
from zero_ext.activation import ActivationCheckpointing
from zero_ext.activation.selective_policy import MeasuredOp, MeasuringMode, choose
from zero_ext.config import ActivationCheckpointingConfig


def recomputed(
    policy: ActivationCheckpointingConfig, function: Callable[..., Any], passes: int = 1
) -> Counter[str]:
    """The ops of the last backward."""
    checkpointing = ActivationCheckpointing(policy)
    for _ in range(passes):
        inputs = torch.randn(32, WIDTH, requires_grad=True)
        out = checkpointing(function, inputs * 1).sum()
        with Counting() as mode:
            out.backward()
    return mode.count


def two_products(x: torch.Tensor) -> torch.Tensor:
    return ((x @ x.t()).tanh() @ x).sin().cos()


def test_named_ops_do_not_run_again() -> None:
    plain = recomputed(ActivationCheckpointingConfig(), two_products)
    saved = recomputed(ActivationCheckpointingConfig(save_ops=("aten.mm", "aten.sin.default")), two_products)
    assert plain["aten.mm.default"] - saved["aten.mm.default"] == 2
    assert plain["aten.sin.default"] - saved["aten.sin.default"] == 1
    assert plain["aten.tanh.default"] == saved["aten.tanh.default"] == 1


@pytest.mark.parametrize("results", [0, 1, 2, 4])
def test_a_budget_is_the_bytes_that_are_saved(results: int) -> None:
    """Seen by what lives after forward, not by what the plan says."""
    inputs = torch.randn(64, WIDTH, requires_grad=True) * 1
    checkpointing = ActivationCheckpointing(
        ActivationCheckpointingConfig(save_budget_bytes=results * inputs.nbytes + 100)
    )
    made: list[StorageWeakRef] = []

    def chain(x: torch.Tensor) -> torch.Tensor:
        for function in (torch.sin, torch.cos, torch.tanh, torch.exp):
            x = function(x)
            made.append(StorageWeakRef(x.untyped_storage()))
        return x.sum()

    alive = []
    for _ in range(3):
        del made[:]
        out = checkpointing(chain, inputs)
        alive.append(sum(not each.expired() for each in made))
        out.backward(retain_graph=True)
    assert alive == [0, results, results]  # the first run is measured


@pytest.mark.parametrize("name", ["aten.nothing", "mm", "aten", "no.such.op", "aten.mm.nothing"])
def test_names_that_torch_does_not_know(name: str) -> None:
    with pytest.raises(ValueError, match=rf"save_ops: expected names of torch ops, got '{name}'"):
        ActivationCheckpointing(ActivationCheckpointingConfig(save_ops=(name,)))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("c10d.allreduce_", "changes its input tensors"),
        ("_c10d_functional.all_reduce", "other ranks wait for"),
        ("_c10d_functional.wait_tensor.default", "other ranks wait for"),
    ],
)
def test_collectives_are_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"save_ops: expected .*, got '{name}.*', which {why}"):
        ActivationCheckpointing(ActivationCheckpointingConfig(save_ops=("aten.mm", name)))


def test_an_op_that_draws_random_numbers_is_refused() -> None:
    checkpointing = ActivationCheckpointing(
        ActivationCheckpointingConfig(save_ops=("aten.native_dropout", "aten.bernoulli"))
    )
    with pytest.raises(ValueError, match=r"save_ops: .* draws random numbers"):
        checkpointing(lambda x: x * torch.bernoulli(x.sigmoid()), torch.randn(4, 4, requires_grad=True))
    attention = ActivationCheckpointingConfig(save_ops=("aten._scaled_dot_product_flash_attention_for_cpu",))
    query = torch.randn(1, 2, 8, 16, requires_grad=True)
    out = ActivationCheckpointing(attention)(
        torch.nn.functional.scaled_dot_product_attention, query, query, query
    )
    with Counting() as mode:
        out.sum().backward()
    assert not any("scaled_dot_product_flash_attention_for_cpu.default" in name for name in mode.count)


class Clock:
    """Stands still but for the products, which take a second each; other ops take a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(TorchDispatchMode):
    """Moves the clock with every op that runs below it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._clock.now += 1.0 if func is torch.ops.aten.mm.default else 0.001
        return func(*args, **(kwargs or {}))


def test_a_budget_saves_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(
        "zero_ext.activation.activation_checkpoint.MeasuringMode", lambda device: MeasuringMode(device, clock)
    )

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t()).tanh().sin()  # [32, 32]

    def slowly(policy: ActivationCheckpointingConfig) -> Counter[str]:
        with Slow(clock):
            return recomputed(policy, function, passes=2)

    plain, saved = (
        slowly(ActivationCheckpointingConfig()),
        slowly(ActivationCheckpointingConfig(save_budget_bytes=32 * 32 * 4)),
    )
    assert plain["aten.mm.default"] - saved["aten.mm.default"] == 1
    assert plain["aten.tanh.default"] == saved["aten.tanh.default"]
    assert slowly(ActivationCheckpointingConfig(save_budget_bytes=64)) == plain


def test_a_plan_is_of_one_module_in_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another module of the same class does, or the same one in evaluation or autocast, is measured by
    itself; only so many plans are remembered."""

    class Either(nn.Module):
        def __init__(self, squares: bool) -> None:
            super().__init__()
            self.squares = squares

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.t()).sin() if self.squares == self.training else x.sin().exp()

    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(save_budget_bytes=2**20))
    inputs = torch.randn(32, WIDTH, requires_grad=True)
    modules = [Either(True), Either(False)]

    def plans() -> int:
        for module in modules:
            checkpointing(module, inputs * 1).sum().backward()
        return len(checkpointing._plans)

    assert plans() == plans() == 2
    for module in modules:
        module.eval()
    assert plans() == plans() == 4
    with torch.autocast("cpu", torch.bfloat16):
        assert plans() == plans() == 6
    assert len({frozenset(plan) for plan in checkpointing._plans.values()}) >= 2
    monkeypatch.setattr("zero_ext.activation.activation_checkpoint._MAX_PLANS", 6)
    modules.append(Either(True))
    assert plans() == 6


def test_calls_that_share_a_plan_never_keep_more_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a small call: functions with one code, and arguments that are no tensors."""
    draw, clock = random.Random(fresh_seed()), Clock()
    monkeypatch.setattr(
        "zero_ext.activation.activation_checkpoint.MeasuringMode", lambda device: MeasuringMode(device, clock)
    )
    inputs, budget = torch.randn(16, 16, requires_grad=True), 3 * 16 * 16 * 4 + 10
    made: list[StorageWeakRef] = []

    def used_bytes(*widths: int, held: bool) -> int:
        def run(x: torch.Tensor, *widths: int) -> torch.Tensor:
            for width in own if held else widths:
                x = x @ torch.ones(x.shape[1], width)
                made.append(StorageWeakRef(x.untyped_storage()))
                weights.append(x.nbytes)
            return x.sin().sum()

        own, weights = widths, list[int]()
        del made[:]
        with Slow(clock):
            out = checkpointing(run, inputs, *(() if held else widths))
        found = sum(n for n, each in zip(weights, made, strict=True) if not each.expired())
        out.backward()
        return found

    for held in (True, False):
        checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(save_budget_bytes=budget))
        assert used_bytes(16, 16, held=held) == 0  # measured
        assert used_bytes(16, 16, held=held) == 2 * 16 * 16 * 4
        assert used_bytes(16, 16000, held=held) == 16 * 16 * 4
        assert used_bytes(16000, 16, held=held) == 16 * 16 * 4
        for _ in range(10):
            assert used_bytes(draw.randrange(1, 60), draw.randrange(1, 60), held=held) <= budget
        assert len(checkpointing._plans) == 1


def test_functions_that_hold_modules_have_plans_of_their_own() -> None:
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(save_budget_bytes=2**20))
    inputs, modules = torch.randn(32, WIDTH, requires_grad=True), [nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 9)]
    for _ in range(2):
        for module in modules:
            checkpointing(lambda x, module=module: module(x), inputs)
            checkpointing(lambda x: module(x), inputs)  # noqa: B023 - called at once
            checkpointing(partial(lambda layer, x: layer(x), module), inputs)
            checkpointing(module.forward, inputs)
    assert len(checkpointing._plans) == 8


def test_gradients_under_random_budgets() -> None:
    seed = fresh_seed()
    draw, model = random.Random(seed), Stack(3)
    wanted = gradients(model, None, seed)
    for _ in range(6):
        policy = ActivationCheckpointingConfig(save_budget_bytes=draw.randrange(1, 24 * WIDTH * 4 * 8))
        checkpointing = ActivationCheckpointing(policy)
        assert all(same(gradients(model, checkpointing, seed), wanted) for _ in range(3))


def test_the_choice_fits_and_saves_at_least_half_of_the_best_one() -> None:
    draw = random.Random(fresh_seed())
    for _ in range(60):
        steps = [
            MeasuredOp((f"op {n}", 0), draw.randrange(0, 50), draw.random() * draw.choice([0, 1, 10]))
            for n in range(8)
        ]
        budget = draw.randrange(1, 120)
        by_step = {each.step: each for each in steps}
        chosen = [by_step[step] for step in choose(steps, budget)]
        assert sum(each.nbytes for each in chosen) <= budget
        best = max(
            sum(each.seconds for each in group)
            for size in range(9)
            for group in combinations([each for each in steps if each.nbytes], size)
            if sum(each.nbytes for each in group) <= budget
        )
        assert sum(each.seconds for each in chosen) >= best / 2
