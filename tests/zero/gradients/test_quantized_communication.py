"""Quantized weights and gradients, secondary shards and sharding groups (ZeRO++, MiCS), bit for bit."""

from __future__ import annotations

import copy
import dataclasses
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
from tests.zero.training import adamw, check_near, check_same, configuration, language_steps, placed
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


ALL_ON = CommunicationSetup(4, 2, weights="int8", gradients="int4", secondary=True)
GROUPS = CommunicationSetup(4, 2, group=2)


@on_ranks(2, 3, 4, by_turns=True)
def test_every_setup_has_the_bits_of_the_simulation(world: World) -> None:
    for setup, dtype in setups_of(world.size):
        check_against_simulation(world, setup, dtype, micro_batches=2 if setup.secondary else 1)
    if world.size % 2 == 0:
        setup = CommunicationSetup(world.size, world.size // 2, gradients="int4")
        check_against_simulation(world, setup, "bf16", stage=2)


@on_ranks(4)
def test_sharding_groups_and_updates_in_backward_have_the_bits_of_the_simulation(world: World) -> None:
    for dtype, per_node in (("fp32", 2), ("bf16", 4), ("bf16", 1)):
        check_against_simulation(world, CommunicationSetup(4, per_node, group=2), dtype)
    check_against_simulation(world, dataclasses.replace(GROUPS, weights="int8"), "bf16", micro_batches=2)
    for setup in (ALL_ON, GROUPS):
        check_against_simulation(world, setup, "bf16", offload={"update_mode": "in_backward"})


@on_ranks(4)
def test_shards_in_other_tiers(world: World) -> None:
    """Shards on the host and on NVMe, gradients too; staging holds what was planned, messages included."""
    for tier in ("host", "nvme"):
        with placed({"params": tier, "optimizer": tier, "grads": tier}) as offload:
            engine = check_against_simulation(world, ALL_ON, "bf16", 2, offload=offload)
            assert not engine.pool.overflow.total_bytes
    check_against_simulation(world, GROUPS, "bf16", offload={"params": "host"})


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


@on_ranks(2, 3, stand_in=True, by_turns=True)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_device_has_the_bits_of_the_host(world: World, tier: str) -> None:
    """Whatever order its streams run in."""
    torch.stand_in.set_schedule("random", world.seed)  # type: ignore[attr-defined]
    for per_node in (1, world.size):
        setup = CommunicationSetup(world.size, per_node, weights="int8", gradients="int4", secondary=True)
        config = configuration(
            3,
            communication=setup.communication(),
            offload={"params": tier},
            precision={"dtype": "bf16"},
            batch={"gradient_accumulation_steps": 2},
        )
        found = []
        for device in ("cpu", "stand_in:0"):
            model = seeded(world.seed)
            optimizer = sgd(list(model.parameters()))
            model, optimizer = zero_ext.prepare(
                model, optimizer, config, process_group=world.group, device=device
            )
            for step in range(4):
                inputs = language_batch(world.seed, step, 0, world.rank).to(device)
                language_loss(model, inputs).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(zero_ext.full_state_dict(model))
        check_same(*found, setup)


ALL_INT4 = CommunicationSetup(4, 2, weights="int4", gradients="int4", secondary=True)
INT8_GROUPS = CommunicationSetup(4, 2, weights="int8", group=2)


def steps(world: World, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    return language_steps(world, model, optimizer, range(first, last))


def masters(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.module.named_parameters():
        value = full_state(parameter)
        assert value is not None
        found[name] = value
    return found


@on_ranks(4)
@pytest.mark.parametrize("setup_name", ["all on", "groups"])
def test_values_outside_forward_are_exact(world: World, setup_name: str) -> None:
    """Whole parameters are rounded masters, whatever a forward left gathered, and an edit of one leaves the
    others their precision."""
    setup = ALL_INT4 if setup_name == "all on" else INT8_GROUPS
    model, optimizer = prepared(
        world, seeded(world.seed), setup, precision={"dtype": "bf16"}, optimizer=adamw
    )
    steps(world, model, optimizer, 0, 2)
    with torch.no_grad():
        before = model(language_batch(world.seed, 9, 0, 0))
    expected = masters(model)
    check_same(zero_ext.full_state_dict(model), {name: value.bfloat16() for name, value in expected.items()})
    block = model.module.blocks[0]
    name, edited = next(iter(block.named_parameters()))
    with zero_ext.gathered(block, modifier_rank=1):
        if world.rank == 1:
            with torch.no_grad():
                edited.mul_(2)
    expected[f"blocks.0.{name}"] = (2 * expected[f"blocks.0.{name}"].bfloat16()).float()
    check_same(masters(model), expected)
    with torch.no_grad():
        after = model(language_batch(world.seed, 9, 0, 0))
    assert not torch.equal(before, after)
    assert all(torch.equal(after, other) for other in world.everyone(after))


@on_ranks(2)
def test_a_write_inside_forward_would_round_the_shard(world: World) -> None:
    setup = CommunicationSetup(2, 1, weights="int8")
    model, _ = prepared(world, seeded(world.seed), setup)

    def write(module: torch.nn.Module, _: Any) -> None:
        with zero_ext.gathered(module, modifier_rank=0):
            pass

    next(model.module.blocks[0].children()).register_forward_pre_hook(write)
    with pytest.raises(RuntimeError, match=r"quantized_weights.*outside forward"):
        model(language_batch(world.seed, 0, 0, 0))


@on_ranks(4)
@pytest.mark.parametrize("setup_name", ["all on", "groups"])
def test_training_resumes_exactly(world: World, setup_name: str) -> None:
    """Also into a model whose ranks share the state otherwise: masters and moments come back bit for bit."""
    setup = ALL_INT4 if setup_name == "all on" else INT8_GROUPS
    more: dict[str, Any] = {"precision": {"dtype": "bf16"}, "optimizer": adamw}
    model, optimizer = prepared(world, seeded(world.seed), setup, **more)
    steps(world, model, optimizer, 0, 2)
    other = CommunicationSetup(4, 2, group=2) if setup_name == "all on" else CommunicationSetup(4, 1)
    with tempfile.TemporaryDirectory() as own:
        folder = world.everyone(own)[0]
        zero_ext.save_checkpoint(folder, model)
        expected, losses = masters(model), steps(world, model, optimizer, 2, 4)
        for resumed in (setup, other):
            twin, twin_optimizer = prepared(world, seeded(world.seed + 1), resumed, **more)
            steps(world, twin, twin_optimizer, 0, 1)  # secondary shards of the values before must not stay
            zero_ext.load_checkpoint(folder, twin)
            check_same(masters(twin), expected)
            if resumed is setup:
                assert steps(world, twin, twin_optimizer, 2, 4) == losses
                check_same(masters(twin), masters(model))
        world.barrier()


@on_ranks(4)
def test_norms_and_gradients_count_replicas_once(world: World) -> None:
    """A step of sharding groups clips by the same norm, and has the same gradients, as one without."""
    found = []
    for setup in (CommunicationSetup(4, 2), CommunicationSetup(4, 2, group=2)):
        model, optimizer = prepared(world, seeded(world.seed), setup, gradient_clipping=0.1)
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
        norms = [parameter.grad.norm().item() for parameter in model.parameters()]
        gradients = {name: zero_ext.full_gradient(each) for name, each in model.named_parameters()}
        norms.append(float(model.clip_grad_norm_(1e9, float("inf"))))
        optimizer.step()
        found.append(([*norms, engine_of(model).grad_norm], gradients, masters(model)))
    plain, groups = found
    assert groups[0] == pytest.approx(plain[0], rel=1e-5)
    check_near(groups[1], plain[1], 1e-4, 1e-6)
    check_near(groups[2], plain[2], 1e-5, 1e-6)


@on_ranks(4)
def test_presharded_models(world: World) -> None:
    for setup in (ALL_INT4, INT8_GROUPS):
        config = {"stage": 3, "communication": setup.communication()}
        torch.manual_seed(world.seed % 1000)
        with zero_ext.Init(config, process_group=world.group):
            model = TinyModel(layers=2)
        model, _ = zero_ext.prepare(model, adamw(model.parameters()), config, process_group=world.group)
        full = {name: value.detach() for name, value in seeded(world.seed).named_parameters()}
        check_same(zero_ext.full_state_dict(model), full)


@on_ranks(4)
def test_overflow_on_one_rank_is_seen_by_all(world: World) -> None:
    """A value that is not finite makes its block's codes so, and nothing is updated."""
    model, optimizer = prepared(
        world, seeded(world.seed), ALL_INT4, precision={"dtype": "fp16"}, loss_scale={"initial_power": 8}
    )
    expected = masters(model)
    loss = language_loss(model, language_batch(world.seed, 0, 0, world.rank))
    model.backward(loss * (float("inf") if world.rank == 2 else 1.0))
    optimizer.step()
    assert engine_of(model).skipped_steps == 1
    check_same(masters(model), expected)


@on_ranks(4)
def test_groups_that_cannot_be_are_refused_on_all_ranks(world: World) -> None:
    model = seeded(world.seed)
    before = copy.deepcopy(model.state_dict())
    for setup, text in (
        (CommunicationSetup(4, 3), r"ranks_per_node: expected a divisor of the 4 ranks.*, got 3"),
        (CommunicationSetup(4, 2, group=3), r"shard_group_size: expected a divisor of the 4 ranks, got 3"),
        (CommunicationSetup(4, 4, group=1), r"shard_group_size: expected at least 2, got 1.*stage to 0"),
        (CommunicationSetup(4, 2, group=8), r"shard_group_size: expected a divisor of the 4 ranks, got 8"),
    ):
        with pytest.raises(ValueError, match=text):
            prepared(world, model, setup)
    check_same(model.state_dict(), before)
