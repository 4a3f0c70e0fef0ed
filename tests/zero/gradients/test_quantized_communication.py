"""Quantized weights and gradients, secondary shards and sharding groups (ZeRO++, MiCS), bit for bit."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.simulated_communication import CommunicationSetup, Simulation
from tests.zero.training import adamw, check_same, configuration
from zero_ext.zero import Engine, engine_of
from zero_ext.zero.api.full_parameters import full_state

STEPS = 3


def sgd(parameters: Sequence[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def seeded(seed: int) -> TinyModel:
    torch.manual_seed(seed % 1000)
    return TinyModel(layers=2)


def prepared(
    world: World, model: TinyModel, setup: CommunicationSetup, stage: int = 3, **more: Any
) -> tuple[Any, Any]:
    make = more.pop("optimizer", sgd)
    config = configuration(stage, communication=setup.communication(), **more)
    return zero_ext.prepare(model, make(list(model.parameters())), config, process_group=world.group)


def check_against_simulation(
    world: World, setup: CommunicationSetup, dtype: str, micro_batches: int = 1, stage: int = 3, **more: Any
) -> Engine:
    """Losses and masters of ``STEPS`` steps have the simulation's bits; returns the engine."""
    initial = seeded(world.seed)
    model, optimizer = prepared(
        world,
        copy.deepcopy(initial),
        setup,
        stage,
        precision={"dtype": dtype},
        batch={"gradient_accumulation_steps": micro_batches},
        **more,
    )
    engine = engine_of(model)
    simulation = Simulation(engine, initial, setup, language_loss, sgd)
    for step in range(STEPS):
        losses = []
        for micro in range(micro_batches):
            loss = language_loss(model, language_batch(world.seed, step, micro, world.rank))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        wanted = simulation.step(
            lambda micro, rank, step=step: language_batch(world.seed, step, micro, rank), micro_batches
        )
        assert losses == [each[world.rank] for each in wanted], (setup, step)
    for name, parameter in model.module.named_parameters():
        master = full_state(parameter)
        assert master is not None and torch.equal(master, simulation.masters[name]), (setup, name)
    return engine


def setups_of(ranks: int) -> list[tuple[CommunicationSetup, str]]:
    """On nodes of every size, each in another precision than on those before."""
    found = []
    for number, size in enumerate(size for size in (1, 2, 3, 4) if ranks % size == 0):
        setup = [
            CommunicationSetup(ranks, size, weights="int8"),
            CommunicationSetup(ranks, size, gradients="int4"),
            CommunicationSetup(ranks, size, secondary=True),
            CommunicationSetup(ranks, size, weights="int4", gradients="int8", secondary=True),
        ]
        found += [(each, ("fp32", "bf16")[(number + position) % 2]) for position, each in enumerate(setup)]
    return found


@on_ranks(2, 3, 4)
def test_every_setup_has_the_bits_of_the_simulation(world: World) -> None:
    for setup, dtype in setups_of(world.size):
        check_against_simulation(world, setup, dtype, micro_batches=2 if setup.secondary else 1)


@on_ranks(4)
def test_sharding_groups_have_the_bits_of_the_simulation(world: World) -> None:
    for dtype, per_node in (("fp32", 2), ("bf16", 4), ("bf16", 1)):
        check_against_simulation(world, CommunicationSetup(4, per_node, group=2), dtype)
    check_against_simulation(
        world, CommunicationSetup(4, 2, weights="int8", group=2), "bf16", micro_batches=2
    )


@on_ranks(2, 4)
def test_quantized_gradients_in_stage_2(world: World) -> None:
    setup = CommunicationSetup(world.size, world.size // 2, gradients="int4")
    check_against_simulation(world, setup, "bf16", stage=2)


@on_ranks(4)
def test_shards_in_other_tiers(world: World) -> None:
    """Shards on the host and on NVMe, gradients too; staging holds what was planned, messages included."""
    setup = CommunicationSetup(4, 2, weights="int8", gradients="int4", secondary=True)
    with tempfile.TemporaryDirectory() as folder:
        for tier in ("host", "nvme"):
            offload = {"params": tier, "optimizer": tier, "grads": tier}
            paths = {"nvme_paths": [folder]} if tier == "nvme" else {}
            engine = check_against_simulation(world, setup, "bf16", 2, offload={**offload, **paths})
            assert not engine.pool.overflow.total_bytes
        check_against_simulation(world, CommunicationSetup(4, 2, group=2), "bf16", offload={"params": "host"})


@on_ranks(4)
def test_updates_in_backward(world: World) -> None:
    setup = CommunicationSetup(4, 2, weights="int8", gradients="int4", secondary=True)
    check_against_simulation(world, setup, "bf16", offload={"update_mode": "in_backward"})
    check_against_simulation(
        world, CommunicationSetup(4, 2, group=2), "bf16", offload={"update_mode": "in_backward"}
    )


def trained(world: World, setup: CommunicationSetup, step: str) -> dict[str, torch.Tensor]:
    """Whole parameters after steps, with forwards that repeat before and after each."""
    micro_batches = 1 if step == "in_backward" else 2
    model, optimizer = prepared(
        world,
        seeded(world.seed),
        setup,
        precision={"dtype": "bf16"},
        batch={"gradient_accumulation_steps": micro_batches},
        units={"persistence_threshold": 20},
        offload={"update_mode": step, "optimizer": "host" if step == "delayed" else "device"},
        optimizer=adamw,
    )
    evaluated = language_batch(world.seed, 99, 0, 0)
    for number in range(STEPS):
        for micro in range(micro_batches):
            language_loss(model, language_batch(world.seed, number, micro, world.rank)).backward()
        for stepped in (False, True):
            if stepped:
                optimizer.step()
            elif step == "in_backward":
                continue
            with torch.no_grad():
                outputs = [model(evaluated) for _ in range(2)]
            assert torch.equal(*outputs)
            assert all(torch.equal(outputs[0], other) for other in world.everyone(outputs[0]))
        optimizer.zero_grad()
    return {"outputs": outputs[0], **zero_ext.full_state_dict(model)}


@on_ranks(4)
@pytest.mark.parametrize("step", ["after_backward", "in_backward", "delayed"])
def test_secondary_shards_change_no_value(world: World, step: str) -> None:
    """Whoever changes shards drops them: no forward sees values of before."""
    setup = [
        CommunicationSetup(4, 2, weights="int8", gradients="int8", secondary=secondary)
        for secondary in (False, True)
    ]
    runs = [trained(world, each, step) for each in setup]
    check_same(runs[0], runs[1])


@on_ranks(2, 3, stand_in=True)
def test_a_device_has_the_bits_of_the_host(world: World) -> None:
    """Whatever order its streams run in."""
    torch.stand_in.set_schedule("random", world.seed)  # type: ignore[attr-defined]
    codes = {"weights": "int8", "gradients": "int4", "secondary": True}
    for setup in (
        CommunicationSetup(world.size, 1, **codes),
        CommunicationSetup(world.size, world.size, **codes),
    ):
        for tier in ("device", "host"):
            found = []
            for device in ("cpu", "stand_in:0"):
                model = seeded(world.seed)
                model, optimizer = zero_ext.prepare(
                    model,
                    sgd(list(model.parameters())),
                    configuration(
                        3,
                        communication=setup.communication(),
                        offload={"params": tier},
                        precision={"dtype": "bf16"},
                        batch={"gradient_accumulation_steps": 2},
                    ),
                    process_group=world.group,
                    device=device,
                )
                for step in range(4):
                    inputs = language_batch(world.seed, step, 0, world.rank).to(device)
                    language_loss(model, inputs).backward()
                    if step % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                found.append(zero_ext.full_state_dict(model))
            check_same(found[0], found[1])
