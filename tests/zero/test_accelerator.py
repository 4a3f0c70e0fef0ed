"""On an accelerator the engine trains bit for bit as on the CPU, and leaves the device's allocator alone."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, TinyModel, language_batch, language_loss
from tests.zero.training import (
    Plan,
    Run,
    adamw,
    check_equal,
    configuration,
    placed,
    prepared,
    sgd,
    train_prepared,
    units_gathered_once,
)
from zero_ext import ops
from zero_ext.plan import model_staging
from zero_ext.zero import engine_of
from zero_ext.zero.construction.build_units import device_of
from zero_ext.zero.construction.grouping import owned_parameters

TIERS = ("device", "host", "nvme")
KINDS = ("optimizer", "grads", "params")
PLANS = [
    Plan(steps=2, clip=0.1),
    Plan(steps=2, micro_batches=2, accumulation="declared", clip=0.1, dtype="bf16"),
    Plan(steps=2, micro_batches=3, accumulation="undeclared"),
    Plan(steps=2, micro_batches=2, accumulation="no_sync", dtype="bf16"),
    Plan(steps=2, dtype="fp16"),
]
SCHEDULES = ("random", "lazy", "random", "eager")


class Scale(nn.Module):
    """In the place of a layer norm, which torch computes in another order on devices that are no CPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight + self.bias


def tiny_model(device: str) -> TinyModel:
    model = TinyModel()
    for module in (model, *model.blocks):
        module.norm = Scale(WIDTH)
    return model.to(device)


def train(
    world: World, device: str, stage: int, plan: Plan, offload: dict[str, Any], make: Any = adamw, **more: Any
) -> Run:
    torch.manual_seed(world.seed)

    def batch(*position: int) -> torch.Tensor:
        return language_batch(*position).to(device)

    with placed(offload) as section:
        config = configuration(stage, plan, offload=section, units={"bucket_elements": 700}, **more)
        run = train_prepared(world, tiny_model(device), language_loss, batch, config, plan, make)
        return run._replace(parameters={name: value.cpu() for name, value in run.parameters.items()})


def on_accelerator(world: World, number: int, *arguments: Any, **more: Any) -> Run:
    """A run under the schedule of its number, alike for the same seed."""
    torch.get_device_module("stand_in").set_schedule(SCHEDULES[number % len(SCHEDULES)], world.seed)
    return train(world, "stand_in", *arguments, **more)


def check(
    world: World, number: int, plan: Plan, offload: dict[str, Any], make: Any = adamw, **more: Any
) -> None:
    """Stage 3 on the accelerator trains as on the CPU."""
    reference = train(world, "cpu", 3, plan, offload, make, **more)
    check_equal(on_accelerator(world, number, 3, plan, offload, make, **more), reference)


def combinations(stage: int) -> Iterator[dict[str, str]]:
    """Every choice of tiers that ``stage`` allows."""
    kinds = KINDS[:stage]
    for tiers in itertools.product(TIERS, repeat=len(kinds)):
        yield dict(zip(kinds, tiers, strict=True))


@on_ranks(1, stand_in=True)
def test_every_choice_of_tiers_trains_as_the_cpu(world: World) -> None:
    cases = [(stage, offload) for stage in range(4) for offload in combinations(stage)]
    references: dict[Any, Run] = {}
    for number, (stage, offload) in enumerate(cases):
        plan = PLANS[(number + world.seed) % len(PLANS)]
        if plan not in references:
            references[plan] = train(world, "cpu", stage, plan, {})
        check_equal(on_accelerator(world, number, stage, plan, offload), references[plan])


ALL_NVME = dict.fromkeys(KINDS, "nvme")


@on_ranks(1, stand_in=True)
@pytest.mark.parametrize("step", ["in_backward", "delayed"])
def test_updates_in_backward_and_delayed(world: World, step: str) -> None:
    host = {"optimizer": "host"}
    choices = [host, dict.fromkeys(KINDS, "host"), {"optimizer": "nvme"}, ALL_NVME]
    plans = [Plan(dtype="bf16"), Plan(clip=0.1), Plan(micro_batches=2)]
    for number, (offload, plan) in enumerate(itertools.product(choices, plans)):
        if number % 2 == world.seed % 2:
            check(world, number, plan, {**offload, "update_mode": step})


@on_ranks(1, stand_in=True)
def test_moments_in_8_bits(world: World) -> None:
    precision = {"dtype": "bf16", "moments_dtype": "8bit"}
    for number, tier in enumerate(TIERS):
        check(world, number, Plan(dtype="bf16", steps=2), {"optimizer": tier}, precision=precision)


@on_ranks(1, stand_in=True)
def test_lion(world: World) -> None:
    def lion(parameters: Any) -> torch.optim.Optimizer:
        return zero_ext.Lion(parameters, lr=1e-3, weight_decay=0.1)

    precision = {"dtype": "bf16", "moments_dtype": "bf16"}
    choices = [{}, {"optimizer": "host", "params": "host"}, {"optimizer": "nvme"}, ALL_NVME]
    for number, offload in enumerate(choices):
        check(world, number, Plan(dtype="bf16", steps=2), offload, lion, precision=precision)


@on_ranks(1, stand_in=True)
def test_torchs_own_optimizers(world: World) -> None:
    def amsgrad(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)

    choices = [{}, {"optimizer": "host"}, {"optimizer": "nvme"}, {"optimizer": "nvme", "params": "nvme"}]
    for number, (offload, make) in enumerate(itertools.product(choices, (sgd, amsgrad))):
        dtype = ("bf16", "fp32")[(number + number // 2 + world.seed) % 2]
        check(world, number, Plan(steps=2, dtype=dtype), offload, make)


@on_ranks(1, stand_in=True)
def test_sums_that_are_wider_than_planned_come_in_full_chunks(world: World) -> None:
    plan = PLANS[3]  # bf16 gradients that add up in fp32 under no_sync
    check_equal(on_accelerator(world, 0, 1, plan, {"optimizer": "nvme"}), train(world, "cpu", 1, plan, {}))


@on_ranks(1, stand_in=True)
def test_in_a_stream_of_the_users_own(world: World) -> None:
    everywhere = dict.fromkeys(KINDS, "host"), dict.fromkeys(KINDS, "nvme"), {"optimizer": "host"}
    for number, offload in enumerate(everywhere):
        with torch.Stream(device="stand_in"):
            check(world, number, PLANS[(number + world.seed) % len(PLANS)], offload)


@on_ranks(1, stand_in=True)
def test_delayed_updates_on_the_device_are_in_the_users_stream(world: World) -> None:
    """By ``ratio`` some state stays on the device; its updates come after the gradients' copies there."""
    offload = {"optimizer": "host", "ratio": 0.5, "update_mode": "delayed"}
    for number in (0, 1):
        with torch.Stream(device="stand_in"):
            check(world, number, Plan(), offload)


@on_ranks(1, stand_in=True)
def test_bytes_between_tiers(world: World) -> None:
    """Once a step gradients go down and parameters come up, in compute precision; units on the host or on
    NVMe come up for forward and backward; state on NVMe goes there and back."""
    plan = Plan(steps=2, dtype="bf16")
    for number, offload in enumerate(combinations(3)):
        if number % 2 != world.seed % 2:
            continue
        run = on_accelerator(world, 0, 3, plan, offload)
        assert run.engine is not None
        units, masters = run.engine.units, run.engine.masters
        tier = {"params": "device", "grads": "device", "optimizer": "device", **offload}
        wanted: Counter[tuple[str, str]] = Counter()
        near = "host" if tier["optimizer"] == "nvme" else tier["optimizer"]
        for unit, master in zip(units, masters, strict=True):
            shard = 2 * unit.layout.shard_numel
            stored = round_up(shard, 4096)
            state = round_up(12 * unit.layout.shard_numel, 4096)
            passes = 1 if unit in units_gathered_once(run.engine) else 2
            wanted[tier["params"], "device"] += passes * shard
            wanted["device", tier["grads"]] += stored if tier["grads"] == "nvme" else shard
            wanted[tier["grads"], near] += stored if tier["grads"] == "nvme" else shard
            # Of a unit that is stepped away from its state only the parameters themselves return.
            apart = tier["optimizer"] == "nvme" and tier["params"] == "device"
            own = 2 * sum(segment.numel for segment in master.owned.values())
            wanted[near, tier["params"]] += own if apart else shard
            if tier["optimizer"] == "nvme":
                wanted["nvme", "host"] += state
                wanted["host", "nvme"] += state
        for each in TIERS:
            del wanted[each, each]
        assert run.engine.tiers.transfers.last_moved == +wanted, offload


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@on_ranks(1, stand_in=True)
def test_memory_matches_the_breakdown_and_the_plan(world: World) -> None:
    accelerator = torch.get_device_module("stand_in")
    for number, offload in enumerate(combinations(3)):
        if number % 3 != world.seed % 3:
            continue
        with placed(offload) as tiers:
            config = configuration(3, offload=tiers, batch={"gradient_accumulation_steps": 2})
            before = accelerator.memory_allocated()
            model = tiny_model("stand_in")
            optimizer = adamw(model.parameters())
            planned = model_staging(model, optimizer, config, 1)
            pinned = accelerator.pinned_bytes()
            model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
            engine = engine_of(model)
            for step in range(2):
                held = engine.memory_by_tier()
                assert held["device"]["staging"] == planned.device
                assert held["host"]["staging"] == planned.host
                # The elements behind a unit's placeholders, and the granularity of allocations.
                small = 512 * (2 * len(engine.units) + 8)
                own = sum(held["device"].values())
                found = accelerator.memory_allocated() - before
                assert own <= found <= own + small * 4, (offload, step, own, found, small)
                ring = engine.config.offload.staging_buffer_bytes if offload.get("optimizer") == "nvme" else 0
                # Where the host looks at the placeholders' elements.
                looks = accelerator.pinned_bytes() - pinned - (sum(held["host"].values()) - ring)
                assert 0 <= looks <= 512 * len(engine.units), (offload, looks)
                for micro in range(2):
                    ids = language_batch(world.seed, step, micro, 0).to("stand_in")
                    model.backward(language_loss(model, ids))
                optimizer.step()
                optimizer.zero_grad()
            del optimizer, engine, model
        assert accelerator.pinned_bytes() == pinned


@on_ranks(1, stand_in=True)
def test_the_device_is_the_parameters(world: World) -> None:
    for device in ("cpu", "stand_in:0"):
        model = nn.Linear(2, 2).to(device)
        assert engine_of(prepared(world, model, 3, None)[0]).device == torch.device(device)
    with torch.device("meta"):
        unplaced = owned_parameters(nn.Linear(2, 2), "keep")
    assert device_of(unplaced) == torch.device("stand_in:0")


@on_ranks(1, stand_in=True)
def test_refused_pinned_memory_is_named(world: World) -> None:
    accelerator = torch.get_device_module("stand_in")
    model = nn.Linear(64, 64, bias=False).to("stand_in")
    accelerator.refuse_pinned()
    try:
        with pytest.raises(RuntimeError, match=r"host memory: 16384 bytes cannot be pinned.*ulimit -l"):
            prepared(world, model, offload={"params": "host"})
    finally:
        accelerator.refuse_pinned(-1)


@on_ranks(1, 2, stand_in=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_unit_is_packed_at_once(world: World, stage: int) -> None:
    """One kernel for the gradients of a unit and pass, whatever their number."""
    packed: Counter[int] = Counter()
    original = ops.pack_

    def pack(flat: torch.Tensor, tensors: list[torch.Tensor], offsets: list[int]) -> None:
        if len(tensors) > 1 or flat.numel() in single:
            packed[flat.numel()] += 1
        original(flat, tensors, offsets)

    torch.manual_seed(world.seed)
    model, optimizer = prepared(world, tiny_model("stand_in"), stage, sgd)
    units = engine_of(model).units
    single = {unit.layout.numel for unit in units if len(unit.parameters) == 1}
    with mock.patch.object(ops, "pack_", pack):
        language_loss(model, language_batch(world.seed, 0, 0, world.rank).to("stand_in")).backward()
    assert packed == Counter(unit.layout.numel for unit in units)
    optimizer.step()


DEEP_WIDTH, LAYERS = 200, 4  # weights of 78 KiB in bf16; activations of two rows stay far below 64 KiB
DEVICE = "stand_in"


def deep_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(DEEP_WIDTH, DEEP_WIDTH) for _ in range(LAYERS))).to(DEVICE)


def batch(world: World, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.seed + 100 * step + world.rank)
    return torch.randn(2, DEEP_WIDTH, generator=generator).to(DEVICE, dtype)


def large_allocations() -> int:
    return torch.accelerator.memory_stats()["allocation.large_pool.allocated"]


def torchs_own(world: World, dtype: torch.dtype, micro_batches: int) -> int:
    """Large allocations of a step that plain torch makes in forward and backward."""
    model = deep_model().to(dtype)
    before = large_allocations()
    for micro in range(micro_batches):
        model(batch(world, micro, dtype)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
    return large_allocations() - before


def check_steps(world: World, stage: int, offload: dict[str, Any], plan: Plan) -> None:
    dtype = torch.bfloat16 if plan.dtype == "bf16" else torch.float32
    wanted = torchs_own(world, dtype, plan.micro_batches)
    assert wanted >= LAYERS * plan.micro_batches  # the gradients of the weights
    with placed(offload) as section:
        config = configuration(stage, plan, offload=section)
        model = deep_model()
        model, optimizer = zero_ext.prepare(
            model, adamw(model.parameters()), config, process_group=world.group
        )
        allocated = []
        for step in range(6):
            made = large_allocations()
            for micro in range(plan.micro_batches):
                model(batch(world, 10 * step + micro, dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.accelerator.synchronize()
            gc.collect()
            made = large_allocations() - made
            allocated.append(torch.accelerator.memory_allocated())
            assert step < 2 or made == wanted, (stage, offload, plan, step, made, wanted)
        assert len(set(allocated[1:])) == 1, (stage, offload, plan, allocated)
        assert engine_of(model).pool.overflow.total_bytes == 0


@on_ranks(1, 2, stand_in=True, by_turns=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_allocate_nothing_large(world: World, stage: int) -> None:
    plans = [
        Plan(dtype="bf16"),
        Plan(clip=0.1),
        Plan(micro_batches=2, accumulation="declared", dtype="bf16", clip=0.1),
    ]
    for number, offload in enumerate(combinations(stage)):
        if stage < 3 or number % 3 == world.seed % 3:
            torch.get_device_module(DEVICE).set_schedule(SCHEDULES[number % 4], world.seed)
            check_steps(world, stage, offload, plans[(number + world.seed // 3) % len(plans)])


@on_ranks(1, 2, stand_in=True)
@pytest.mark.parametrize("how", ["in_backward", "delayed"])
def test_updates_beside_the_passes_allocate_nothing_large(world: World, how: str) -> None:
    for tiers in ({"optimizer": "host"}, dict.fromkeys(KINDS, "host"), {"optimizer": "nvme"}):
        check_steps(world, 3, {**tiers, "update_mode": how}, Plan(dtype="bf16"))
