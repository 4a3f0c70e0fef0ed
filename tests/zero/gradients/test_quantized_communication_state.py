"""What is read, written and saved while parameters travel in codes, or shards have replicas."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.gradients.test_quantized_communication import prepared, seeded
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.simulated_communication import CommunicationSetup
from tests.zero.training import adamw, check_near
from zero_ext.zero import engine_of
from zero_ext.zero.api.full_parameters import full_state

ALL_ON = CommunicationSetup(4, 2, weights="int4", gradients="int4", secondary=True)
GROUPS = CommunicationSetup(4, 2, weights="int8", group=2)


def steps(world: World, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = language_loss(model, language_batch(world.seed, step, 0, world.rank))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def masters(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.module.named_parameters():
        value = full_state(parameter)
        assert value is not None
        found[name] = value
    return found


def check_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@on_ranks(4)
@pytest.mark.parametrize("setup_name", ["all on", "groups"])
def test_values_outside_forward_are_exact(world: World, setup_name: str) -> None:
    """Whole parameters are rounded masters, whatever a forward left gathered, and an edit of one leaves the
    others their precision."""
    setup = ALL_ON if setup_name == "all on" else GROUPS
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
    setup = ALL_ON if setup_name == "all on" else GROUPS
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
        more: dict[str, Any] = {"gradient_clipping": 0.1}
        model, optimizer = prepared(world, seeded(world.seed), setup, **more)
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
        norms = [parameter.grad.norm().item() for parameter in model.parameters()]
        gradients = [zero_ext.full_gradient(parameter) for parameter in model.parameters()]
        largest = float(model.clip_grad_norm_(1e9, float("inf")))
        optimizer.step()
        found.append((norms, largest, engine_of(model).grad_norm, gradients, masters(model)))
    plain, groups = found
    for one, two in zip(plain[0], groups[0], strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    assert groups[1] == pytest.approx(plain[1], rel=1e-5)
    assert groups[2] == pytest.approx(plain[2], rel=1e-5)
    for one, two in zip(plain[3], groups[3], strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
    check_near(groups[4], plain[4], 1e-5, 1e-6)


@on_ranks(4)
def test_presharded_models(world: World) -> None:
    for setup in (ALL_ON, GROUPS):
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
        world, seeded(world.seed), ALL_ON, precision={"dtype": "fp16"}, loss_scale={"initial_power": 8}
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
