"""Full parameters, state dicts and gradients outside forward, with an engine or without it."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.experts.mixtures import Words, mesh_of
from tests.parallel.tensor.test_tensor_parallel import mesh_of as tensor_parallel_mesh
from tests.zero.models import TIME, VOCABULARY, TinyModel, language_batch, language_loss
from tests.zero.training import adamw, check_same, language_steps, placed, plain_backward
from tests.zero.training import prepared as prepared_for
from zero_ext.zero import Engine, engine_of
from zero_ext.zero.api.engine_lookup import checkpoint_sources
from zero_ext.zero.memory.gathered_unit import UnitState


class Everything(nn.Module):
    """Tied weights, a module under two names, frozen and one-element parameters, buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyModel(layers=2, tied=True)
        self.again = self.inner.norm
        self.scale = nn.Parameter(torch.rand(()) + 0.5)
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.norm = nn.BatchNorm1d(TIME)
        self.register_buffer("order", torch.randperm(7))
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.norm(self.inner(ids)) * self.scale
        return logits


def prepared(world: World, stage: int, model: nn.Module | None = None, **more: Any) -> tuple[Any, Any]:
    def trainable(parameters: Any) -> torch.optim.Optimizer:
        return adamw(p for p in parameters if p.requires_grad)

    return prepared_for(world, model or Everything(), stage, trainable, **more)


def train(world: World, model: Any, optimizer: Any, steps: int = 1) -> None:
    language_steps(world, model, optimizer, range(steps))


def shards(model: nn.Module) -> list[torch.Tensor]:
    engine: Engine = engine_of(model)
    return [unit.storage.read(0, unit.storage.numel).clone() for unit in engine.units] + [
        master.state.read("master", 0, master.state.numel).clone() for master in engine.masters
    ]


def check_unchanged(model: nn.Module, before: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, two) for one, two in zip(shards(model), before, strict=True))


def check_released(model: nn.Module) -> None:
    for unit in engine_of(model).units:
        sharded = unit.placement.params
        assert unit.state is (UnitState.RELEASED if sharded else UnitState.GATHERED) and not unit.holders


@on_ranks(1, 2, 3)
def test_full_values_round_trip(world: World) -> None:
    for stage in range(4):
        plain = Everything()
        wanted = copy.deepcopy(plain.state_dict())
        model, _ = prepared(world, stage, plain)
        with zero_ext.gathered(model):
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, wanted[name])
        with zero_ext.gathered([model.scale, model.inner.blocks[1].up.weight]):
            assert torch.equal(model.inner.blocks[1].up.weight, wanted["inner.blocks.1.up.weight"])
        check_released(model)
        full = zero_ext.full_state_dict(model)
        assert full.keys() == wanted.keys() and all(torch.equal(full[name], wanted[name]) for name in wanted)
        storages = {unit.flat.untyped_storage().data_ptr() for unit in engine_of(model).units}
        assert not storages & {value.untyped_storage().data_ptr() for value in full.values()}
        first = model.full_state_dict(rank0_only=True)
        assert first.keys() == (wanted.keys() if world.rank == 0 else set())
        assert model.state_dict().keys() == wanted.keys() if stage < 3 or world.size == 1 else True


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("stage", range(4))
def test_edits_of_one_rank_reach_all(world: World, stage: int) -> None:
    def masters_of(model: Any) -> list[torch.Tensor]:
        states = [master.state for master in engine_of(model).masters]
        return [state.read("master", 0, state.numel).clone() for state in states]

    for modifier in {0, world.size - 1}:
        model, optimizer = prepared(world, stage, precision={"dtype": "bf16"})
        train(world, model, optimizer)
        before, masters = zero_ext.full_state_dict(model), masters_of(model)
        assert any(not torch.equal(m, m.bfloat16().float()) for m in masters)
        with zero_ext.gathered(model, modifier_rank=modifier), torch.no_grad():
            if world.rank == modifier:
                model.scale.fill_(3.0)
                model.inner.embedding.weight[4:6] = torch.arange(12.0)
                model.frozen[1, 2] = -1.0
            else:
                model.inner.norm.weight.zero_()  # lost: this rank's values do not count
        check_released(model)
        before["scale"].fill_(3.0)
        before["frozen"][1, 2] = -1.0
        for name in ("inner.embedding.weight", "inner.head.weight"):
            before[name][4:6] = torch.arange(12.0)
        check_same(model, before)
        changed = 0
        for master, old, now in zip(engine_of(model).masters, masters, masters_of(model), strict=True):
            assert torch.equal(now.bfloat16(), master.params.read(0, now.numel()))
            changed += int((now != old).sum())
        assert sum(world.everyone(changed)) <= 25 * (1 if stage else world.size)
        train(world, model, optimizer)  # and it still trains


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", range(4))
def test_a_write_that_nobody_declared_raises(world: World, stage: int) -> None:
    model, optimizer = prepared(world, stage)
    before = shards(model)
    for name in ("inner.blocks.0.down.weight", "scale"):
        parameter = model.get_parameter("module." + name)
        refusal = pytest.raises(RuntimeError, match=rf"'{name}': it was written .*modifier_rank=0")
        with refusal, zero_ext.gathered(parameter), torch.no_grad():
            value = parameter.detach().clone()
            parameter.mul_(2.0)
        check_released(model)
        if stage == 3 and world.size > 1:
            check_unchanged(model, before)
        else:
            with zero_ext.gathered(parameter, modifier_rank=0), torch.no_grad():
                parameter.copy_(value)
    train(world, model, optimizer)


@on_ranks(1, 2)
def test_an_exception_inside_releases_and_drops_the_edits(world: World) -> None:
    for stage in range(4):
        model, optimizer = prepared(world, stage)
        before = shards(model)
        for modifier in (None, 0):
            with pytest.raises(ZeroDivisionError), zero_ext.gathered(model, modifier_rank=modifier):
                if stage == 3 and world.size > 1:
                    with torch.no_grad():
                        model.scale.zero_()
                raise ZeroDivisionError
            check_released(model)
            check_unchanged(model, before)
        for wrong in (-1, world.size, 0.5, "0"):
            with (
                pytest.raises(ValueError, match="modifier_rank"),
                zero_ext.gathered(model, modifier_rank=wrong),
            ):
                raise AssertionError("entered")
        with pytest.raises(ValueError, match="one of a prepared"), zero_ext.gathered(nn.Linear(2, 2)):
            raise AssertionError("entered")
        train(world, model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_nested_blocks(world: World, stage: int) -> None:
    model, optimizer = prepared(world, stage)
    weight, scale = model.inner.blocks[0].up.weight, model.scale
    with zero_ext.gathered(model), zero_ext.gathered(weight):
        old = weight.detach().clone()
    with zero_ext.gathered([weight], modifier_rank=1):
        with zero_ext.gathered(model):
            assert torch.equal(weight, old)
        with zero_ext.gathered(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(7.0 + world.rank)
        assert torch.equal(weight, torch.full_like(weight, 7.0))
        with torch.no_grad():
            weight[0, 0] = 5.0
        with zero_ext.gathered([weight, scale]):  # not the inner block's write
            pass
    with zero_ext.gathered(model), torch.no_grad():
        assert weight[0, 0] == 5.0 and bool((weight.flatten()[1:] == 7.0).all())
        assert language_loss(model, language_batch(world.seed, 0, 0, world.rank)).isfinite()
        assert weight[0, 0] == 5.0
    check_released(model)
    train(world, model, optimizer)


@on_ranks(2)
def test_backward_inside_is_refused_where_it_would_read_nothing(world: World) -> None:
    model, optimizer = prepared(world, 3)
    with pytest.raises(RuntimeError, match="Run backward outside"), zero_ext.gathered(model, modifier_rank=0):
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
    optimizer.step()
    check_released(model)


@on_ranks(2)
def test_a_block_gathers_only_what_it_names_and_nothing_stale_stays(world: World) -> None:
    model, optimizer = prepared(world, 3, TinyModel())
    train(world, model, optimizer, steps=2)  # the order of units is known now: prefetch is on
    engine = engine_of(model)
    with zero_ext.gathered(model.blocks[0].up.weight):
        assert [unit.name for unit in engine.units if unit.state is not UnitState.RELEASED] == ["blocks.0"]
    check_released(model)
    zero_ext.load_full_state_dict(model, TinyModel().state_dict())
    check_released(model)


@on_ranks(1, 2, 3)
def test_state_dicts_load_at_every_stage(world: World) -> None:
    for stage in range(4):
        model, optimizer = prepared(world, stage, precision={"dtype": "bf16"})
        train(world, model, optimizer)
        torch.manual_seed(world.seed + stage + 1)
        other = Everything()
        other.norm.num_batches_tracked.fill_(41)
        state = {name: value.clone() for name, value in other.state_dict().items()}
        scratch = model.scratch.clone()
        found = model.load_state_dict(state) if stage % 2 else zero_ext.load_full_state_dict(model, state)
        assert tuple(found) == ([], [])
        check_released(model)
        for name, value in zero_ext.full_state_dict(model).items():
            assert torch.equal(value, state[name].to(value.dtype)), name
        assert torch.equal(model.scratch, scratch)
        for state_slice in checkpoint_sources(engine_of(model)).own.load_slices():
            if state_slice.kind == "master" and state_slice.name != "frozen":  # fp32 values arrive unrounded
                end = state_slice.start + state_slice.tensor.numel()
                saved = state[state_slice.name].flatten()[state_slice.start : end]
                assert torch.equal(state_slice.tensor, saved)
        train(world, model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_loading_under_another_tied_name_or_a_subset(world: World, stage: int) -> None:
    model, _ = prepared(world, stage)
    state = zero_ext.full_state_dict(model)
    fresh = {name: torch.randn_like(state[name]) for name in ("inner.head.weight", "again.bias")}
    for name in ("inner.embedding.weight", "inner.norm.bias", "order"):
        del state[name]
    found = model.load_state_dict({**state, **fresh, "strange": torch.ones(1)}, strict=False)
    assert tuple(found) == (["order"], ["strange"])
    full = zero_ext.full_state_dict(model)
    fresh["inner.embedding.weight"], fresh["inner.norm.bias"] = (
        fresh["inner.head.weight"],
        fresh["again.bias"],
    )
    check_same(full, {**full, **state, **fresh})


@on_ranks(1, 2)
def test_what_does_not_fit_is_refused_before_anything_changes(world: World) -> None:
    for stage in range(4):
        model, optimizer = prepared(world, stage)
        before, buffers = shards(model), copy.deepcopy(dict(model.named_buffers()))
        good = {name: torch.zeros_like(value) for name, value in zero_ext.full_state_dict(model).items()}
        bad: list[tuple[dict[str, Any], str]] = [
            ({"scale": torch.zeros(1)}, r"'scale': expected shape \(\), got \(1,\)"),
            ({"inner.head.weight": torch.zeros(VOCABULARY)}, r"'inner.head.weight': expected shape"),
            ({"order": torch.zeros(1)}, r"'order': expected shape \(7,\), got \(1,\)"),
            ({"extra": torch.zeros(1)}, r"missing \[\], unexpected \['extra'\]"),
        ]
        for change, pattern in bad:
            with pytest.raises(ValueError, match=pattern):
                model.load_state_dict({**good, **change})
        with pytest.raises(ValueError, match=r"missing \['frozen'\], unexpected \[\]"):
            model.load_state_dict({name: value for name, value in good.items() if name != "frozen"})
        with pytest.raises(TypeError, match="'scale': expected a tensor, got float"):
            model.load_state_dict({**good, "scale": 1.0})
        with pytest.raises(ValueError, match="assign=False"):
            model.load_state_dict(good, assign=True)
        check_unchanged(model, before)
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
        train(world, model, optimizer)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("stage", range(4))
def test_full_gradients_are_those_of_one_process(world: World, stage: int) -> None:
    torch.manual_seed(world.seed)
    plain = Everything()
    plain_backward(world, plain)
    torch.manual_seed(world.seed)
    model, _ = prepared(world, stage)
    names = dict(model.named_parameters())
    assert all(zero_ext.full_gradient(parameter) is None for parameter in names.values())
    with model.no_sync() if stage == 2 else torch.enable_grad():
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
    for name, parameter in plain.named_parameters():
        gradient = zero_ext.full_gradient(names[name])
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None:
            assert gradient.stride() == parameter.grad.stride()
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)
    model, _ = prepared_for(world, TinyModel(), stage, None)
    assert zero_ext.full_gradient(next(model.parameters())) is None  # prepared without an optimizer


@on_ranks(1, 2)
def test_the_wrapper_lets_attributes_through(world: World) -> None:
    for stage in (0, 3):
        model, _ = prepared(world, stage)
        inner = model.module
        assert model.inner is inner.inner and model.frozen is inner.frozen and model.order is inner.order
        assert hasattr(model, "scratch") and not hasattr(model, "nothing")
        with pytest.raises(AttributeError, match="nothing"):
            _ = model.nothing
        assert {name for name, _ in model.named_parameters()} == {n for n, _ in inner.named_parameters()}
        assert {name for name, _ in model.named_buffers()} == {n for n, _ in inner.named_buffers()}
        assert model.eval() is model and not inner.inner.training
        assert engine_of(model) is engine_of(inner)


def built(seed: int, width: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, width), nn.LayerNorm(width), nn.Linear(width, 5))


@on_ranks(2, 3)
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_edits_of_the_modifier_reach_every_shard(world: World, tier: str) -> None:
    plain = built(world.seed)
    with placed({"params": tier}) as offload:
        settings = {"stage": 3, "offload": offload}
        with zero_ext.Init(settings, process_group=world.group):
            model = built(world.seed)
        with zero_ext.gathered(model):
            for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(own, wanted)
        with torch.no_grad():
            for number in range(world.size):
                # Only the modifier writes; what the others wrote instead is dropped.
                with zero_ext.gathered(model[0].parameters(), modifier_rank=number):
                    model[0].weight.add_(100.0 * (number + 1) if world.rank == number else -7.0)
                plain[0].weight.add_(100.0 * (number + 1))
        assert torch.equal(model[0].weight, plain[0].weight)
        prepared, _ = zero_ext.prepare(model, None, settings, process_group=world.group)
        check_same(prepared, plain)


@on_ranks(2)
def test_misuse_of_gathered(world: World) -> None:
    with zero_ext.Init({"stage": 3}, process_group=world.group):
        model = built(world.seed)
    with torch.no_grad(), pytest.raises(RuntimeError, match="written to inside"), zero_ext.gathered(model):
        model[0].weight.zero_()
    wrong_rank = pytest.raises(ValueError, match="modifier_rank: expected 0 to 1, got 2")
    with wrong_rank, zero_ext.gathered(model, modifier_rank=2):
        pass
    with pytest.raises(KeyError), zero_ext.gathered(model, modifier_rank=0):
        raise KeyError("own error")
    reshaped = pytest.raises(RuntimeError, match="Change its values, not its shape")
    with reshaped, zero_ext.gathered(model[0].bias, modifier_rank=0):
        model[0].bias.data = torch.zeros(3)
    with zero_ext.gathered(model):
        for own, wanted in zip(model.parameters(), built(world.seed).parameters(), strict=True):
            assert torch.equal(own, wanted)


@on_ranks(2)
def test_inside_an_open_init(world: World) -> None:
    """What the block reads or writes on one rank alone makes no collective of its own."""
    with zero_ext.Init({"stage": 3}, process_group=world.group):
        model = built(world.seed)
        with zero_ext.Init({"stage": 3}, process_group=world.group):
            inner = built(world.seed + 1)
        with torch.no_grad(), zero_ext.gathered(inner, modifier_rank=0):
            if world.rank == 0:
                inner[0].weight.mul_(2)
    wanted = built(world.seed + 1)[0].weight * 2
    with zero_ext.gathered([*model.parameters(), *inner.parameters()]):
        assert torch.equal(inner[0].weight, wanted)


# -- shards that a closed engine left, while no other engine has taken them -------------------------------


def close_engine_of(model: nn.Module, config: dict[str, Any], group: Any) -> None:
    """Prepare ``model`` again, with storage that cannot be made: the engine before is closed by then."""
    with tempfile.NamedTemporaryFile() as file:
        missing = {**config, "offload": {"params": "nvme", "nvme_paths": [file.name]}}
        with pytest.raises(RuntimeError, match="prepare the model again"):
            zero_ext.prepare(model, None, missing, process_group=group)


@on_ranks(2, 4)
@pytest.mark.parametrize("after", [{}, {"units": {"tiles": {"0": 3}}}], ids=["units", "tiles"])
@pytest.mark.parametrize("before", [{}, {"communication": {"shard_group_size": 2}}], ids=["all", "groups"])
def test_edits_reach_their_own_elements_on_every_rank(
    world: World, before: dict[str, Any], after: dict[str, Any]
) -> None:
    plain, model, modifier = built(world.seed, 8), built(world.seed, 8), world.size - 1
    config = {"stage": 3, "units": {"persistence_threshold": 0}}
    zero_ext.prepare(model, None, {**config, **before}, process_group=world.group)
    close_engine_of(model, {"stage": 3, **after}, world.group)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
            with zero_ext.gathered(parameter, modifier_rank=modifier):
                parameter.add_(1.0 if world.rank == modifier else -7.0)
        for parameter in plain.parameters():
            parameter.mul_(2.0).add_(1.0)
    zero_ext.prepare(model, None, config, process_group=world.group)
    check_same(model, plain)


@on_ranks(4)
def test_tensor_parallel_parameters_stay_split(world: World) -> None:
    mesh = tensor_parallel_mesh(2)
    plain, model = built(world.seed, 8), built(world.seed, 8)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    zero_ext.prepare(model, None, {"stage": 3}, process_group=mesh)
    close_engine_of(model, {"stage": 3}, mesh)
    with torch.no_grad():
        assert torch.equal(model[0].weight.clone().full_tensor(), plain[0].weight)
        for parameter in model.parameters():
            parameter.mul_(2.0)
            with zero_ext.gathered(parameter, modifier_rank=0):
                parameter.add_(1.0)
        for parameter in plain.parameters():
            parameter.mul_(2.0).add_(1.0)
    zero_ext.prepare(model, None, {"stage": 3}, process_group=mesh)
    check_same(model, plain)


@on_ranks(4)
def test_experts_have_no_common_value_to_edit(world: World) -> None:
    model = Words(mesh_of(2))
    zero_ext.prepare(model, None, {"stage": 3}, process_group=mesh_of(2))
    close_engine_of(model, {"stage": 3}, mesh_of(2))
    edit = zero_ext.gathered(model, modifier_rank=0)
    with pytest.raises(ValueError, match="holds experts, and rank 0 has others"), edit:
        pass
