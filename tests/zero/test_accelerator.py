"""On an accelerator the engine trains bit for bit as on the CPU, whatever lies in which tier and however late
the device's streams run."""

from __future__ import annotations

import itertools
import tempfile
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
    with tempfile.TemporaryDirectory() as folder:
        paths = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
        offload = {"staging_buffer_bytes": 1 << 20, **paths, **offload}
        config = configuration(stage, plan, offload=offload, units={"bucket_elements": 700}, **more)

        def batch(*position: int) -> torch.Tensor:
            return language_batch(*position).to(device)

        run = train_prepared(world, tiny_model(device), language_loss, batch, config, plan, make)
        return run._replace(parameters={name: value.cpu() for name, value in run.parameters.items()})


def on_accelerator(world: World, number: int, *arguments: Any, **more: Any) -> Run:
    """A run under the schedule of its number, alike for the same seed."""
    torch.get_device_module("stand_in").set_schedule(SCHEDULES[number % len(SCHEDULES)], world.seed)
    return train(world, "stand_in", *arguments, **more)


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


@on_ranks(1, stand_in=True)
@pytest.mark.parametrize("step", ["in_backward", "delayed"])
def test_updates_in_backward_and_delayed(world: World, step: str) -> None:
    choices = [
        {"optimizer": "host"},
        {"optimizer": "host", "grads": "host", "params": "host"},
        {"optimizer": "nvme"},
        {"optimizer": "nvme", "params": "nvme", "grads": "nvme"},
    ]
    plans = [Plan(dtype="bf16"), Plan(clip=0.1), Plan(micro_batches=2)]
    for number, (offload, plan) in enumerate(itertools.product(choices, plans)):
        if number % 2 == world.seed % 2:
            reference = train(world, "cpu", 3, plan, {**offload, "update_mode": step})
            check_equal(on_accelerator(world, number, 3, plan, {**offload, "update_mode": step}), reference)


@on_ranks(1, stand_in=True)
def test_moments_in_8_bits(world: World) -> None:
    plan = Plan(dtype="bf16", steps=2)
    quantized = {"precision": {"dtype": "bf16", "moments_dtype": "8bit"}}
    for number, tier in enumerate(("device", "host", "nvme")):
        reference = train(world, "cpu", 3, plan, {"optimizer": tier}, **quantized)
        check_equal(on_accelerator(world, number, 3, plan, {"optimizer": tier}, **quantized), reference)


@on_ranks(1, stand_in=True)
def test_lion(world: World) -> None:
    def lion(parameters: Any) -> torch.optim.Optimizer:
        return zero_ext.Lion(parameters, lr=1e-3, weight_decay=0.1)

    plan = Plan(dtype="bf16", steps=2)
    precision = {"precision": {"dtype": "bf16", "moments_dtype": "bf16"}}
    reference = train(world, "cpu", 3, plan, {}, lion, **precision)
    choices = [{}, {"optimizer": "host", "params": "host"}, {"optimizer": "nvme"}]
    for number, offload in enumerate([*choices, {"optimizer": "nvme", "grads": "nvme", "params": "nvme"}]):
        check_equal(on_accelerator(world, number, 3, plan, offload, lion, **precision), reference)


@on_ranks(1, stand_in=True)
def test_torchs_own_optimizers(world: World) -> None:
    def amsgrad(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)

    choices = [{}, {"optimizer": "host"}, {"optimizer": "nvme"}, {"optimizer": "nvme", "params": "nvme"}]
    for number, (offload, make) in enumerate(itertools.product(choices, (sgd, amsgrad))):
        plan = Plan(steps=2, dtype=("bf16", "fp32")[(number + number // 2 + world.seed) % 2])
        reference = train(world, "cpu", 3, plan, offload, make)
        check_equal(on_accelerator(world, number, 3, plan, offload, make), reference)


@on_ranks(1, stand_in=True)
def test_sums_that_are_wider_than_planned_come_in_full_chunks(world: World) -> None:
    plan = PLANS[3]  # bf16 gradients that add up in fp32 under no_sync
    reference = train(world, "cpu", 1, plan, {})
    check_equal(on_accelerator(world, 0, 1, plan, {"optimizer": "nvme"}), reference)


@on_ranks(1, stand_in=True)
def test_in_a_stream_of_the_users_own(world: World) -> None:
    everywhere = dict.fromkeys(KINDS, "host"), dict.fromkeys(KINDS, "nvme"), {"optimizer": "host"}
    for number, offload in enumerate(everywhere):
        plan = PLANS[(number + world.seed) % len(PLANS)]
        with torch.Stream(device="stand_in"):
            run = on_accelerator(world, number, 3, plan, offload)
        check_equal(run, train(world, "cpu", 3, plan, {}))


@on_ranks(1, stand_in=True)
def test_delayed_updates_on_the_device_are_in_the_users_stream(world: World) -> None:
    """By ``ratio`` some state stays on the device; its updates come after the gradients' copies there."""
    offload = {"optimizer": "host", "ratio": 0.5, "update_mode": "delayed"}
    reference = train(world, "cpu", 3, Plan(), offload)
    for number in (0, 1):
        with torch.Stream(device="stand_in"):
            run = on_accelerator(world, number, 3, Plan(), offload)
        check_equal(run, reference)


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
        with tempfile.TemporaryDirectory() as folder:
            paths = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
            tiers = {**offload, **paths, "staging_buffer_bytes": 1 << 20}
            config = configuration(3, offload=tiers, batch={"gradient_accumulation_steps": 2})
            before = accelerator.memory_allocated()
            model = tiny_model("stand_in")
            optimizer = adamw(model.parameters())
            planned = model_staging(model, optimizer, config, 1)
            pinned = accelerator.pinned_bytes()
            prepared, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
            engine = zero_ext.zero.engine_of(prepared)
            for step in range(2):
                held = engine.memory_by_tier()
                assert held["device"]["staging"] == planned.device
                assert held["host"]["staging"] == planned.host
                # The elements behind a unit's placeholders, and the granularity of allocations.
                small = 512 * (2 * len(engine.units) + 8)
                own = sum(held["device"].values())
                found = accelerator.memory_allocated() - before
                assert own <= found <= own + small * 4, (offload, step, own, found, small)
                ring = engine.tiers.stream.staging_buffer_bytes if offload.get("optimizer") == "nvme" else 0
                # Where the host looks at the placeholders' elements.
                looks = accelerator.pinned_bytes() - pinned - (sum(held["host"].values()) - ring)
                assert 0 <= looks <= 512 * len(engine.units), (offload, looks)
                for micro in range(2):
                    ids = language_batch(world.seed, step, micro, 0).to("stand_in")
                    prepared.backward(language_loss(prepared, ids))
                optimizer.step()
                optimizer.zero_grad()
            del prepared, optimizer, engine, model
        assert accelerator.pinned_bytes() == pinned


@on_ranks(1, stand_in=True)
def test_the_device_is_the_parameters(world: World) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to("stand_in"))
    with pytest.raises(
        ValueError, match=r"expected one device, got '0.weight' on 'cpu', '1.weight' on 'stand_in:0'"
    ):
        zero_ext.prepare(model, None, {"stage": 3}, process_group=world.group)
    for device in ("cpu", "stand_in:0"):
        model = nn.Linear(2, 2).to(device)
        prepared, _ = zero_ext.prepare(model, None, {"stage": 3}, process_group=world.group)
        assert zero_ext.zero.engine_of(prepared).device == torch.device(device)
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
            config = {"stage": 3, "offload": {"params": "host"}}
            zero_ext.prepare(model, adamw(model.parameters()), config, process_group=world.group)
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
    model = tiny_model("stand_in")
    model, optimizer = zero_ext.prepare(
        model, sgd(model.parameters()), configuration(stage), process_group=world.group
    )
    units = engine_of(model).units
    single = {unit.layout.numel for unit in units if len(unit.parameters) == 1}
    with mock.patch.object(ops, "pack_", pack):
        language_loss(model, language_batch(world.seed, 0, 0, world.rank).to("stand_in")).backward()
    assert packed == Counter(unit.layout.numel for unit in units)
    optimizer.step()
