"""Tiled layers compute and train as plain ones do, and never gather more than a tile and the look-ahead."""

from __future__ import annotations

import copy
import gc
import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import VOCABULARY, TinyModel, language_batch, language_loss
from tests.zero.training import (
    Plan,
    Run,
    adamw,
    check_close,
    check_equal,
    check_same,
    configuration,
    distance,
    language_steps,
    placed,
    prepared,
    train_prepared,
)
from tests.zero.unshard.test_prefetcher import Peak
from zero_ext import TiledEmbedding, TiledLinear
from zero_ext.zero import engine_of
from zero_ext.zero.tiling import Tile
from zero_ext.zero.tiling.replace_layers import plan_tiling
from zero_ext.zero.tiling.tiled_module import TileSlice, bounds

BOTH = {"embedding": 4, "head": 3}
TIED = {"embedding": 4, "head": 4}


@pytest.fixture(autouse=True)
def seed() -> int:
    value = torch.seed() & 0x7FFFFFFF
    print(f"seed {value}")
    torch.manual_seed(value)
    return value


# -- tile slices ---------------------------------------------------------------------------------------------


def test_ranges_are_the_elements_of_the_tile() -> None:
    for shape in ((7, 5), (6, 1), (9,)):
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        for splits in (1, 2, 3):
            for first, last in bounds(shape[0], splits, "rows"):
                for left, right in (
                    bounds(shape[1], min(splits, shape[1]), "columns") if shape[1:] else [(0, 0)]
                ):
                    axes = len(shape)
                    tile_slice = TileSlice(
                        "w", shape, (first, left)[:axes], (last - first, right - left)[:axes]
                    )
                    tile = tile_slice.view_in(full).flatten()
                    for start in range(len(tile)):
                        for end in range(start, len(tile) + 1):
                            found: list[int] = []
                            for begin, at, count in tile_slice.ranges(start, end - start):
                                assert begin == len(found) and count > 0
                                found += range(at, at + count)
                            assert found == tile[start:end].tolist()


@pytest.mark.parametrize("splits", [0, -1, 8, True, 2.0])
def test_bad_splits_are_refused_by_name(splits: Any) -> None:
    with pytest.raises(ValueError, match=r"in_splits: expected an integer from 1 to 7, got "):
        TiledLinear(7, 20, in_splits=splits)
    with pytest.raises(ValueError, match="out_splits"):
        TiledLinear(20, 7, out_splits=splits)
    with pytest.raises(ValueError, match="splits"):
        TiledEmbedding(7, 3, splits)


# -- the layers by themselves --------------------------------------------------------------------------------


def gradients(layer: nn.Module, inputs: torch.Tensor, outgoing: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, and the gradients of the input and of the whole weight and bias."""
    layer.zero_grad()
    inputs = inputs.detach().clone().requires_grad_(inputs.is_floating_point())
    output = layer(inputs)
    output.backward(outgoing)
    found = {"output": output.detach()}
    if inputs.grad is not None:
        found["input"] = inputs.grad
    with torch.no_grad():
        twin = copy.deepcopy(layer)
        for own, other in zip(twin.parameters(), layer.parameters(), strict=True):
            assert other.grad is not None
            own.copy_(other.grad)
        found |= dict(twin.state_dict())
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 4), (3, 1), (2, 5)])
def test_linear_agrees_with_the_plain_one(in_splits: int, out_splits: int, bias: bool) -> None:
    plain = nn.Linear(29, 37, bias=bias)
    tiled = TiledLinear.from_linear(copy.deepcopy(plain), in_splits, out_splits)
    assert len(list(tiled.tiles)) == in_splits * out_splits
    inputs, outgoing = torch.randn(2, 3, 29), torch.randn(2, 3, 37)
    exact = gradients(copy.deepcopy(plain).double(), inputs.double(), outgoing.double())
    found = gradients(tiled, inputs, outgoing)
    weight = plain.weight.detach().double()
    # |computed - exact| <= gamma(k) * sum of |products|, for a sum of k terms in any order and fp32.
    sizes = {
        "output": (29, inputs.double().abs() @ weight.abs().T + 1),
        "input": (37, outgoing.double().abs() @ weight.abs()),
        "weight": (6, outgoing.double().abs().flatten(0, 1).T @ inputs.double().abs().flatten(0, 1)),
        "bias": (6, outgoing.double().abs().sum((0, 1))),
    }
    assert found.keys() == exact.keys()
    for name, value in found.items():
        terms, size = sizes[name]
        assert bool(((value - exact[name]).abs() <= (terms + 2) * 2.0**-24 * size).all()), name


def test_output_tiles_are_columns_of_the_plain_output_bit_for_bit() -> None:
    # Sizes that BLAS computes by one kernel, tiled or not; odd sizes of a few columns it does not.
    plain = nn.Linear(64, 96)
    tiled = TiledLinear.from_linear(copy.deepcopy(plain), out_splits=3)
    inputs = torch.randn(8, 64)
    assert torch.equal(tiled(inputs), plain(inputs))
    assert [chunk.shape[-1] for chunk in tiled.chunks(inputs)] == [32, 32, 32]
    assert torch.equal(torch.cat(list(tiled.chunks(inputs)), -1), plain(inputs))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 7}, {"padding_idx": -1, "scale_grad_by_freq": True}])
def test_embedding_is_the_plain_one_bit_for_bit(options: dict[str, Any]) -> None:
    plain = nn.Embedding(23, 5, **options)
    tiled = TiledEmbedding.from_embedding(copy.deepcopy(plain), 4)
    for ids in (
        torch.randint(0, 23, (4, 9)),
        torch.randint(0, 6, (11,), dtype=torch.int32),  # one tile only, with repetitions
        torch.empty(0, 3, dtype=torch.int64),
    ):
        outgoing = torch.randn(*ids.shape, 5)
        found, wanted = gradients(tiled, ids, outgoing), gradients(plain, ids, outgoing)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
    assert tiled.padding_idx == plain.padding_idx
    for bad in (-1, 23):
        with pytest.raises(IndexError, match=f"{bad}"):
            tiled(torch.tensor([3, bad]))


def test_tiles_share_memory_with_the_plain_layer() -> None:
    linear, embedding = nn.Linear(8, 12), nn.Embedding(12, 8)
    for plain, tiled in (
        (linear, TiledLinear.from_linear(linear, 2, 3)),
        (embedding, TiledEmbedding.from_embedding(embedding, 5)),
    ):
        own = {parameter.untyped_storage().data_ptr() for parameter in plain.parameters()}
        assert {parameter.untyped_storage().data_ptr() for parameter in tiled.parameters()} == own


def test_a_new_layer_starts_as_the_plain_one_does() -> None:
    tiled = TiledLinear(400, 300, in_splits=4, out_splits=2)
    for value in tiled.state_dict().values():
        assert 0.045 < value.abs().max() <= 0.05
    rows = TiledEmbedding(300, 100, 7, padding_idx=31).state_dict()["weight"]
    assert abs(float(rows.std()) - 1) < 0.05 and not rows[31].any()


def test_state_dicts_are_those_of_the_plain_layers() -> None:
    plain = TinyModel()
    plain.blocks[0].up.bias.requires_grad_(False)
    tiled = copy.deepcopy(plain)
    tiled.embedding = TiledEmbedding.from_embedding(tiled.embedding, 4)
    tiled.blocks[0].up = TiledLinear.from_linear(tiled.blocks[0].up, 2, 3)
    state = tiled.state_dict()
    assert state.keys() == plain.state_dict().keys()
    check_same(plain.state_dict(), state)
    assert not any(tile.bias.requires_grad for tile in tiled.blocks[0].up.tiles if tile.bias is not None)
    fresh = {name: torch.randn_like(value) for name, value in state.items()}
    assert not any(tiled.load_state_dict(fresh))
    check_same(tiled.state_dict(), fresh)
    with pytest.raises(RuntimeError, match=r"embedding.weight: expected shape \(23, 12\), got \(2, 2\)"):
        tiled.load_state_dict({**fresh, "embedding.weight": torch.zeros(2, 2)})


def test_a_layer_that_is_tiled_already_is_left_alone() -> None:
    model = nn.Sequential(TiledLinear(4, 4, out_splits=2), TiledEmbedding(4, 4, 2))
    assert plan_tiling(model, {"Linear": 2, "1": 2, "Embedding": 3}) == {}


# -- under prepare -------------------------------------------------------------------------------------------


def train(world: World, plan: Plan, tied: bool = False, make: Any = adamw, **units: Any) -> Run:
    # On one rank parameters are gathered only where they live in another tier.
    config = configuration(3, plan, units=units, offload={"params": "host" if world.size == 1 else "device"})
    return train_prepared(world, model_of(world, tied), language_loss, language_batch, config, plan, make)


def model_of(world: World, tied: bool = False) -> TinyModel:
    torch.manual_seed(world.seed)
    return TinyModel(2, tied)


def tile_names(run: Run) -> list[str]:
    assert run.engine is not None
    return [unit.name for unit in run.engine.units if "tiles" in unit.name]


EMBEDDING = [f"embedding.tiles.{number}" for number in range(4)]


@on_ranks(1, 2, 3, by_turns=True)
def test_training_is_that_of_the_plain_model(world: World) -> None:
    for plan, tolerance in ((Plan(2, 2, clip=0.5), 1e-6), (Plan(2, dtype="bf16"), 2e-2)):
        plain = train(world, plan)
        run = train(world, plan, tiles=BOTH)
        check_close(run, plain, tolerance)
        check_equal(train(world, plan, tiles={"Embedding": 5}), plain)
        assert tile_names(run) == [*EMBEDDING, *(f"head.tiles.{number}" for number in range(3))]


@on_ranks(1, 2)
def test_inner_layers_of_blocks_have_tiles_and_tied_layers_share_theirs(world: World) -> None:
    for tied, tiles in ((False, {"Linear": 3}), (True, TIED)):
        run = train(world, Plan(3), tied, tiles=tiles)
        check_close(run, train(world, Plan(3), tied), 1e-6)
        assert tile_names(run) == EMBEDDING if tied else len(tile_names(run)) == 15


@on_ranks(1)
def test_tiles_come_from_storage(world: World) -> None:
    plan, found = Plan(3), []
    for tiers in ({"params": "host"}, {"params": "nvme", "optimizer": "nvme"}):
        with placed(tiers) as offload:
            config = configuration(3, plan, units={"tiles": TIED}, offload=offload)
            model = model_of(world, True)
            found.append(train_prepared(world, model, language_loss, language_batch, config, plan))
            gc.collect()
    check_equal(found[1], found[0])


class Wide(nn.Module):
    """Next to nothing but a large vocabulary, which ids below ``used`` use in part."""

    def __init__(self, tied: bool, vocabulary: int = 120) -> None:
        super().__init__()
        self.embedding = TiledEmbedding(vocabulary, 16, 6)
        self.norm = nn.LayerNorm(16)
        self.middle = TiledLinear(16, 48, in_splits=2, out_splits=2)
        self.back = nn.Linear(48, 16)
        self.head = TiledLinear.tied_to(self.embedding) if tied else TiledLinear(16, vocabulary, False, 1, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(ids))
        logits: torch.Tensor = self.head(self.back(self.middle(hidden)))
        return logits


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_no_more_than_a_tile_and_the_next_are_gathered(world: World, tied: bool) -> None:
    for ahead, tiles in ((0, 1), (1, 2)):
        peak = Peak()
        with peak.watch():
            units = {"prefetch_elements": ahead, "persistence_threshold": 20}
            model, optimizer = prepared(world, Wide(tied), units=units)
            engine = engine_of(model)
            peak.units = tuple(unit for unit in engine.units if unit.placement.params)
            back = model.back.weight.numel()  # held by the model's own call
            for step in range(4):
                ids = language_batch(world.seed, step, 0, world.rank) * 5
                model.backward(functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
                optimizer.step()
                optimizer.zero_grad()
        largest = max(unit.layout.numel for unit in peak.units if "tiles" in unit.name)
        assert 0 < peak.elements <= back + tiles * largest, (ahead, peak.elements, largest)
        assert engine.prefetcher.live_elements == 0


@on_ranks(1, 2)
def test_only_what_some_rank_looks_up_is_gathered(world: World) -> None:
    plain, ids = Wide(False), torch.tensor([[3, 25]]) + 20 * world.rank
    gathers: list[str] = []
    model, _ = prepared(
        world, copy.deepcopy(plain), 3, None, units={"prefetch_elements": 0}, offload={"params": "host"}
    )
    engine_of(model).subscribe(lambda event: gathers.append(getattr(event, "unit", "")))
    values = zero_ext.full_state_dict(model)
    gathers.clear()
    with torch.no_grad():
        found, wanted = model(ids), plain(ids)
    used = {name for name in gathers if name.startswith("embedding")}
    assert used == {f"embedding.tiles.{number}" for number in range(world.size + 1)}
    if world.rank == 0:
        assert torch.equal(found, wanted)
        assert torch.equal(values["head.weight"], plain.state_dict()["head.weight"])


@on_ranks(2)
def test_the_optimizer_follows(world: World) -> None:
    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        *most, head = parameters
        return torch.optim.AdamW([{"params": [head], "lr": 0.02}, {"params": most}], lr=1e-3, eps=1e-3)

    plan = Plan(3)
    tiled, plain = (train(world, plan, False, two_groups, **units) for units in ({"tiles": BOTH}, {}))
    check_close(tiled, plain, 1e-6)
    model = model_of(world)
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    config = configuration(3, units={"tiles": BOTH})
    _, optimizer = zero_ext.prepare(model, named, config, process_group=world.group)
    (group,) = optimizer.param_groups
    assert len(group["params"]) == len(group["param_names"]) == len(list(model.parameters()))
    assert set(group["params"]) == set(model.parameters())


@on_ranks(1, 3)
@pytest.mark.parametrize("make", ["AdamW", "NAdam"])
def test_state_goes_between_tiled_and_plain_models(world: World, make: str) -> None:
    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, make)(parameters, lr=1e-3, eps=1e-3)

    rows, after = {"tiles": BOTH}, []
    trained, optimizer = prepared(world, model_of(world), 3, optimizer_of, units=rows)
    language_steps(world, trained, optimizer, range(2))
    with tempfile.TemporaryDirectory() as own:
        folder = world.everyone(own)[0]
        zero_ext.save_checkpoint(folder, trained)
        for units in (rows, {}, {"tiles": {"embedding": 2, "Linear": 5}}):
            model, optimizer = prepared(world, model_of(world), 3, optimizer_of, units=units)
            zero_ext.load_checkpoint(folder, model)
            full = zero_ext.full_state_dict(model)
            assert full.keys() == model_of(world).state_dict().keys()
            check_same(full, trained)
            language_steps(world, model, optimizer, [9])
            after.append(zero_ext.full_state_dict(model))
            model.load_state_dict(full)
            check_same(model, full)
            with pytest.raises(ValueError, match=r"missing \['head.weight'\], unexpected \['tail'\]"):
                model.load_state_dict({"tail" if n == "head.weight" else n: v for n, v in full.items()})
        world.barrier()
    assert distance(after[1], after[0]) < 1e-6 and distance(after[2], after[0]) < 1e-6


@on_ranks(2)
def test_tiles_of_inputs_are_saved_as_one_weight(world: World) -> None:
    states = []
    with tempfile.TemporaryDirectory() as own:
        folder = world.everyone(own)[0]
        for splits in ((2, 3), (1, 1), (3, 2)):
            model, _ = prepared(world, nn.Sequential(TiledLinear(6, 7, True, *splits), nn.Linear(7, 2)))
            if states:
                zero_ext.load_checkpoint(folder, model)
            else:
                zero_ext.save_checkpoint(folder, model)
            states.append(zero_ext.full_state_dict(model))
        world.barrier()
    assert states[0].keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for state in states[1:]:
        check_same(state, states[0])


class Recomputing(TinyModel):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, ids, use_reentrant=False)


@on_ranks(2)
def test_checkpointed_meta_and_sharded_models_can_be_tiled(world: World) -> None:
    plan, tiles = Plan(2), {"embedding": 4, "Linear": 3}
    config = configuration(3, units={"tiles": tiles})
    plain = train(world, plan, tiles=tiles)
    torch.manual_seed(world.seed)
    check_equal(train_prepared(world, Recomputing(2), language_loss, language_batch, config, plan), plain)
    with torch.device("meta"):
        empty = TinyModel(2)
    model, _ = zero_ext.prepare(empty, None, config, process_group=world.group, init="skip")
    model.load_state_dict(plain.parameters)
    check_same(plain.parameters, model)
    tied = configuration(3, units={"tiles": TIED})
    torch.manual_seed(world.seed)
    with zero_ext.Init(tied, process_group=world.group):
        model = TinyModel(2, True)
    run = train_prepared(world, model, language_loss, language_batch, tied, plan)
    check_equal(run, train(world, plan, True, tiles=TIED))


@on_ranks(1)
def test_what_cannot_be_tiled_is_refused_by_name_and_nothing_changes(world: World) -> None:
    class Own(nn.Linear):
        pass

    model = TinyModel(1, tied=True)
    model.own = Own(3, 3)
    model.renormed = nn.Embedding(4, 4, max_norm=1.0)
    model.hooked = nn.Linear(3, 3)
    model.hooked.register_forward_hook(lambda *_: None)
    before = {name: type(module) for name, module in model.named_modules()}
    for tiles, message in (
        ({"heads": 2}, r"\['heads'\] match no module"),
        ({"head": 2}, r"tied parameters \['embedding.weight', 'head.weight'\].*\[None, 2\]"),
        ({"head": 2, "embedding": 3}, r"got \[3, 2\]"),
        ({"head": VOCABULARY + 1, "embedding": 2}, rf"units.tiles.head: expected .*, got {VOCABULARY + 1}"),
        ({"norm": 2}, "units.tiles.norm: expected .*got LayerNorm"),
        ({"own": 2}, "units.tiles.own: expected .*got Own"),
        ({"renormed": 2}, "units.tiles.renormed: tiles do not support max_norm, got 1.0"),
        ({"hooked": 2}, "units.tiles.hooked: it has hooks"),
    ):
        with pytest.raises(ValueError, match=message):
            zero_ext.prepare(model, None, configuration(3, units={"tiles": tiles}), process_group=world.group)
    assert before == {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(zero_ext.ConfigError, match=r"units\.tiles"):
        zero_ext.load_config(configuration(3, units={"tiles": {"head": 0}}))
    for change in ({"max_norm": 1.0}, {"sparse": True}):
        with pytest.raises(ValueError, match=f"{next(iter(change))}: expected the default, got"):
            TiledEmbedding.from_embedding(nn.Embedding(4, 4, **change), 2)
    assert not any(isinstance(module, Tile) for module in model.modules())
