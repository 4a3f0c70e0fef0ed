"""``Init``: born sharded, and yet every weight and the random state are those of plain construction."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules import module as registration

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import Block, TinyModel, llama
from tests.zero.training import check_same as check_values
from tests.zero.training import configuration, language_steps, prepared, sgd
from zero_ext.zero.construction import sharded_init as init_module
from zero_ext.zero.units.presharded import PreshardedParameter, presharded_of, unshard_presharded


class Handmade(nn.Module):
    """Parameters made, edited and tied in the ways people do it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.second = nn.Linear(9, 7)
        self.scale = nn.Parameter(torch.randn(1))
        self.table = nn.ParameterDict(
            {"a": nn.Parameter(torch.randn(3, 5)), "b": nn.Parameter(torch.zeros(4))}
        )
        self.rows = nn.ParameterList([torch.randn(3), torch.randn(2, 2)])
        self.twin = copy.deepcopy(self.first)
        self.register_buffer("seen", torch.tensor(3))
        self.first.weight.data.normal_(0.0, 0.5)
        self.first.bias.data[2:4].fill_(5.0)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight.t() + self.twin.weight.t())
            self.scale.add_(self.table["a"].sum())
        nn.init.orthogonal_(self.table["a"], gain=2.0)
        views = [parameter.data for parameter in self.second.parameters()]
        for view in views:
            view.mul_(3.0)
        self.second.bias.requires_grad_(False)
        self.counts = nn.Parameter(torch.arange(6), requires_grad=False)


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(13, 7), nn.Embedding(11, 5, padding_idx=2), nn.LayerNorm(5)),
    "attention": lambda: nn.MultiheadAttention(12, 3, kdim=5, vdim=7),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2),
    "lstm": lambda: nn.LSTM(5, 6, num_layers=2, bidirectional=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 7)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 7)),
    "convolution": convolution,
    "tied": lambda: TinyModel(tied=True),
    "reinitialized": lambda: TinyModel().apply(initialize),
    "handmade": Handmade,
}
FROM_META: dict[str, Callable[[], nn.Module]] = {
    **{name: MODELS[name] for name in ("linear", "attention", "lstm")},
    "norms": lambda: nn.Sequential(Block(), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4)),
    "tied": lambda: TinyModel(tied=True),
}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=16))


HUGGING_FACE = {"llama": llama, "gpt2": gpt2}


def check_same(
    world: World, make: Callable[[], nn.Module], limit: int, meta: bool = False, stage: int = 3
) -> None:
    """``make`` inside Init and outside: the same values, memory order, buffers and random state."""
    torch.manual_seed(world.seed)
    plain = make()
    random_state = torch.get_rng_state()
    torch.manual_seed(world.seed)
    with (
        mock.patch.object(init_module, "UNSHARDED_ELEMENTS_LIMIT", limit),
        zero_ext.Init({"stage": 3}, process_group=world.group),
        torch.device("meta") if meta else contextlib.nullcontext(),
    ):
        model = make()
    assert make is FROM_META["tied"] or torch.equal(torch.get_rng_state(), random_state)
    presharded = [presharded_of(parameter) is not None for parameter in model.parameters()]
    assert all(presharded) if world.size > 1 else not any(presharded)
    before = dict(model.named_parameters())
    model, _ = prepared(world, model, stage, sgd)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    check_values(model, plain)
    with zero_ext.gathered(model):
        for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert one.stride() == two.stride() and one.requires_grad == two.requires_grad, name


@on_ranks(1, 2, 3, 4, by_turns=True)
def test_weights_are_those_of_plain_construction(world: World) -> None:
    for number, make in enumerate(MODELS.values()):
        check_same(world, make, limit=(1, 60, 1 << 23)[(number + world.seed) % 3])
    check_same(world, Handmade, limit=1, stage=1)


@on_ranks(1, 2, 3)
def test_from_the_meta_device(world: World) -> None:
    for make in FROM_META.values():
        check_same(world, make, limit=60, meta=True)


@on_ranks(2)
def test_a_parent_initializes_after_its_children(world: World) -> None:
    with zero_ext.Init(process_group=world.group), torch.device("meta"):
        model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    model, _ = prepared(world, model, 3, None)
    for name, value in zero_ext.full_state_dict(model).items():
        if value.dim() > 1:
            bound = math.sqrt(6 / sum(value.shape))  # xavier, which Transformer itself does at its end
            assert bound / 2 < value.abs().max() <= bound, name
        elif "attn" in name:
            assert not value.any(), name
        elif "norm" in name:
            assert bool((value == float("weight" in name)).all()), name


@on_ranks(2)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models_initialize_themselves(world: World, name: str) -> None:
    check_same(world, HUGGING_FACE[name], limit=300)


@on_ranks(2)
def test_meta_context_around_init(world: World) -> None:
    torch.manual_seed(world.seed)
    plain = TinyModel()
    torch.manual_seed(world.seed)
    with torch.device("meta"), zero_ext.Init(process_group=world.group):
        model = TinyModel()
    check_values(prepared(world, model, 3, None)[0], plain)


@on_ranks(1, 2)
def test_modules_that_cannot_leave_the_meta_device_are_named(world: World) -> None:
    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

    for make, pattern in (
        (Handmade, r"ParameterDict, built .* \['a', 'b'\]"),
        (Position, r"Position, .* \['angles'\]"),
    ):
        init = zero_ext.Init(process_group=world.group)
        with pytest.raises(ValueError, match=pattern), init, torch.device("meta"):
            nn.ModuleList([make()])
        check_nothing_left()


def check_nothing_left() -> None:
    assert not registration._global_parameter_registration_hooks
    assert not registration._global_module_registration_hooks
    assert not registration._global_buffer_registration_hooks
    assert not torch.overrides._get_current_function_mode_stack()
    weight = nn.Linear(2, 2).weight
    assert presharded_of(weight) is None and not weight.isnan().any()


@on_ranks(1, 2)
def test_an_exception_inside_restores_everything(world: World) -> None:
    before = nn.Module.register_parameter
    made: list[nn.Module] = []
    init = zero_ext.Init(process_group=world.group)
    with mock.patch.object(init_module, "UNSHARDED_ELEMENTS_LIMIT", 1):
        with pytest.raises(ZeroDivisionError), init:
            made.append(nn.Linear(3, 3))
            raise ZeroDivisionError
        check_nothing_left()
        with init:  # the same object again, with nothing of the first time left in it
            again = nn.Linear(4, 4)
    assert nn.Module.register_parameter is before
    assert not made[0].bias.isnan().any()
    assert (presharded_of(again.weight) is not None) == (world.size > 1)
    check_nothing_left()


@on_ranks(2)
def test_nested_and_repeated(world: World) -> None:
    torch.manual_seed(world.seed)
    plain = nn.ModuleList([TinyModel(), TinyModel(tied=True), Block()])
    torch.manual_seed(world.seed)
    with mock.patch.object(init_module, "UNSHARDED_ELEMENTS_LIMIT", 100):
        with zero_ext.Init(process_group=world.group):
            first = TinyModel()
            with zero_ext.Init(process_group=world.group):
                second = TinyModel(tied=True)
                with torch.no_grad():
                    first.norm.weight.add_(0.0)
            second.blocks[0].norm.bias.data.add_(0.0)
        with zero_ext.Init(process_group=world.group):
            model = nn.ModuleList([first, second, Block()])
        with (
            pytest.raises(RuntimeError, match="active already"),
            zero_ext.Init(process_group=world.group) as one,
        ):
            one.__enter__()
    check_nothing_left()
    check_values(prepared(world, model, 3, None)[0], plain)


def shard_nbytes(presharded: PreshardedParameter) -> int:
    return presharded.layout.shard_numel * presharded.spec.dtype.itemsize


@on_ranks(2, 4)
def test_memory_while_building_is_near_one_parameter(world: World) -> None:
    seen: list[int] = []
    parameters: list[nn.Parameter] = []

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        parameters.append(parameter)
        with torch._C.DisableTorchFunction():  # a look at the memory must not gather it
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
        shards = sum(
            shard_nbytes(presharded) for p in parameters if (presharded := presharded_of(p)) is not None
        )
        seen.append((sum(storages.values()) + shards) // 4)

    limit = 300
    with mock.patch.object(init_module, "UNSHARDED_ELEMENTS_LIMIT", limit):
        handle = registration.register_module_parameter_registration_hook(count)
        with zero_ext.Init(process_group=world.group):
            model = nn.Sequential(*(Block() for _ in range(20)))
        handle.remove()
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    padding = 16 * world.size * len(parameters)
    assert max(seen) <= limit + 2 * largest + total // world.size + padding
    assert max(seen) < 0.8 * total
    presharded = [presharded_of(parameter) for parameter in model.parameters()]
    engine_count = sum(one.layout.shard_numel for one in presharded if one is not None)
    assert total / world.size <= engine_count <= total / world.size + padding


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_build_plainly_and_any_stage_prepares_a_presharded_model(
    world: World, stage: int
) -> None:
    with zero_ext.Init({"stage": stage}, process_group=world.group):
        model = TinyModel()
    assert all(presharded_of(parameter) is None for parameter in model.parameters())
    check_same(world, TinyModel, limit=60, stage=stage)


@on_ranks(2)
def test_a_presharded_model_trains_like_a_plain_one(world: World) -> None:
    losses = []
    for context in (contextlib.nullcontext(), zero_ext.Init(process_group=world.group)):
        torch.manual_seed(world.seed)
        with context:
            model = TinyModel(tied=True)
        model, optimizer = prepared(world, model, precision={"dtype": "bf16"})
        losses.append(language_steps(world, model, optimizer, range(3)))
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_copy_before_prepare_is_an_ordinary_module(world: World) -> None:
    torch.manual_seed(world.seed)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    for around in (contextlib.nullcontext, zero_ext.gathered):
        with zero_ext.Init(process_group=world.group):
            model = nn.Sequential(*map(copy.deepcopy, plain))
            model.tied = model[0]
        with around(model):
            copied = copy.deepcopy(model)
        assert copied.tied is copied[0]
        for name, value in plain.named_parameters():
            found = copied.get_parameter(name)
            assert type(found) is nn.Parameter and found.requires_grad and torch.equal(found, value)
        pickle.dumps(copied)


EDITS: list[tuple[str, Callable[[Any], Any]]] = [
    ("bias", lambda model: nn.init.zeros_(model.bias)),
    ("weight", lambda model: nn.init.zeros_(model.weight)),
    ("weight", lambda model: setattr(model.weight, "data", torch.ones(1, 3))),
    ("weight", lambda model: model.weight.data[0, 1:].fill_(7.0)),
]


def presharded_linear(world: World) -> Any:
    with zero_ext.Init(process_group=world.group):
        return nn.Linear(3, 1)


@on_ranks(2)
def test_edits_and_misuse_between_init_and_prepare(world: World) -> None:
    model = presharded_linear(world)
    with pytest.raises(RuntimeError, match=r"from zero_ext.Init cannot be pickled: this rank holds only"):
        pickle.dumps(model)
    torch.manual_seed(world.rank)
    with pytest.raises(RuntimeError, match="expected the same value on all ranks"):
        nn.init.normal_(model.weight)
    with pytest.raises(RuntimeError, match=r"expected a tensor of \(1, 3\) torch.float32"):
        model.bfloat16()
    for name, edit in EDITS:
        model, plain = presharded_linear(world), nn.Linear(3, 1)
        with torch.no_grad():
            for own, parameter in zip(plain.parameters(), model.parameters(), strict=True):
                own.copy_(parameter)
            edit(plain)
            edit(model)
        prepared(world, model, 3, None)
        assert torch.equal(zero_ext.full_state_dict(model)[name], plain.get_parameter(name))
    with pytest.raises(RuntimeError, match=r"the 2 ranks of zero_ext.Init in prepare, got 3"):
        unshard_presharded(presharded_linear(world).weight, mock.Mock(world_size=3))


@on_ranks(1, 2)
def test_init_skip_prepares_meta_and_presharded_parameters(world: World) -> None:
    with torch.device("meta"):
        meta = TinyModel()
    wanted = r"'embedding.weight': expected values, got device 'meta'.*zero_ext.Init"
    with pytest.raises(ValueError, match=wanted):
        prepared(world, meta, 3, None)
    with zero_ext.Init(process_group=world.group):
        presharded = TinyModel()
    plain = TinyModel()
    for model, stage in ((copy.deepcopy(meta), 2), (meta, 3), (presharded, 2)):
        config = configuration(stage)
        model, _ = zero_ext.prepare(model, None, config, process_group=world.group, init="skip")
        zero_ext.load_full_state_dict(model, plain.state_dict())
        check_values(model, plain)


@on_ranks(2)
def test_buffers_that_no_checkpoint_fills_are_named(world: World) -> None:
    class Position(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(4.0), persistent=False)
            self.register_buffer("scale", torch.arange(4.0))

    with torch.device("meta"):
        model = Position()
    with pytest.warns(RuntimeWarning, match=r"buffers \['angles'\] stay on the meta device"):
        model, _ = zero_ext.prepare(model, None, configuration(3), process_group=world.group, init="skip")
    assert model.angles.is_meta and not model.scale.is_meta
