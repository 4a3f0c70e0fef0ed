"""Muon of matrices whose elements are on several ranks: as in one process, bit for bit.

Newton-Schulz in bfloat16 makes large differences of the last bits of gradients. So gradients here are
integers, as the loss is linear in the parameters: the order in which those of ranks are added up does not
matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel import training
from tests.parallel.experts import mixtures
from tests.parallel.tensor import test_tensor_parallel as tensors
from tests.parallel.training import mesh_of, mesh_of_one
from tests.zero.training import placed
from zero_ext.optim.full_tensors import muon_stepper
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule, TiedLayerSpec
from zero_ext.parallel.tensor.tp_styles import ParameterSplit, ToLocalSlice, split_parameter
from zero_ext.zero import Engine, engine_of
from zero_ext.zero.units.dtensor_local import local_value
from zero_ext.zero.units.parameter_marks import mark_expert

STEPS = 3
SETTINGS: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "adamw": {"lr": 1e-2, "eps": 1e-3}}
MIXED = {"units": {"persistence_threshold": 100, "bucket_elements": 600}}
SHAPES: dict[str, tuple[int, ...]] = {
    "flat": (4, 33),
    "wide": (12, 40),
    "tall": (40, 8),
    "fused": (24, 10),
    "stack": (4, 8, 10),
    "square": (16, 16),
    "vector": (24,),
}
SPLITS = {
    "wide": ParameterSplit(1, 1),
    "tall": ParameterSplit(0, 1),
    "fused": ParameterSplit(0, 3),
    "stack": ParameterSplit(1, 1),
    "vector": ParameterSplit(0, 1),
}
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
Parameters = dict[str, torch.Tensor]


class Block(nn.Module):
    """Parameters of these shapes, multiplied with integers. Those in ``ranks_of`` count on some ranks."""

    def __init__(self, seed: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.ranks_of: dict[str, range] = {}
        for name, shape in shapes.items():
            generator = torch.Generator().manual_seed(seed + crc32(name.encode()))
            values = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, step: int, rank: int) -> torch.Tensor:
        """The sum of the products. Gradients are the integers, which depend on the numbers given."""
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            if rank not in self.ranks_of.get(name, (rank,)):
                continue
            generator = torch.Generator().manual_seed(crc32(f"{name} {step} {rank}".encode()))
            shape = torch.empty(tuple(parameter.shape)).shape
            integers = torch.randint(-32, 33, shape, generator=generator) * 4.0
            local = ToLocalSlice.apply(parameter) if isinstance(parameter, DTensor) else parameter
            total = total + (local * local_value(parameter, integers)).sum()
        return total


class Blocks(nn.Module):
    """Two blocks, whose losses are added."""

    def __init__(self, seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seed + number, shapes) for number in range(2))

    def forward(self, step: int, rank: int) -> torch.Tensor:
        return sum(block(step, rank) for block in self.blocks)


def alone(model: nn.Module, ranks: int, steps: int = STEPS) -> Parameters:
    """The parameters after steps of the model in one process, of the mean of the ranks' losses."""
    optimizer = zero_ext.Muon(model.parameters(), **SETTINGS)
    for step in range(steps):
        for rank in range(ranks):
            (model(step, rank) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def trained(model: nn.Module, config: dict[str, Any], group: Any) -> tuple[Engine, Parameters]:
    """The engine, and the full parameters after the same steps of a prepared model."""
    optimizer = zero_ext.Muon(model.parameters(), **SETTINGS)
    config = {"timeout_seconds": 60.0, **MIXED, **config}
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=group)
    engine = engine_of(model)
    for step in range(STEPS):
        model(step, engine.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine, zero_ext.full_state_dict(model, rank0_only=False)


def assert_equal(found: Parameters, wanted: Parameters) -> None:
    """Bit for bit, but for vectors: the fused AdamW that steps these rounds in other places than torch's."""
    assert found
    for name, value in found.items():
        tolerance = 0.0 if value.dim() >= 2 else 1e-6
        torch.testing.assert_close(value, wanted[name], rtol=tolerance, atol=tolerance, msg=name)


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(
    ("tp", "offload"),
    [
        (2, {}),
        (4, {}),
        (2, {"update_mode": "in_backward"}),
        (4, {"update_mode": "in_backward"}),
        (2, {"grads": "host", "optimizer": "nvme"}),
        (2, {"optimizer": "host", "update_mode": "delayed"}),
    ],
)
def test_split_matrices(world: World, tp: int, offload: dict[str, Any]) -> None:
    wanted = alone(Blocks(world.seed), world.size // tp)
    for stage in (2, 3) if "optimizer" in offload else (0, 1, 2, 3):
        mesh, model = mesh_of(tp=tp), Blocks(world.seed)
        for block in model.blocks:
            for name, split in SPLITS.items():
                split_parameter(block, name, mesh["tp"], split)
        with placed(offload) as section:
            assert_equal(trained(model, {"stage": stage, "offload": section}, mesh)[1], wanted)


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_split_matrices_are_orthogonalized_once_and_travel_twice(world: World, stage: int) -> None:
    mesh, model = mesh_of(tp=2), Blocks(world.seed, {"wide": SHAPES["wide"], "tall": SHAPES["tall"]})
    for block in model.blocks:
        for name in ("wide", "tall"):
            split_parameter(block, name, mesh["tp"], SPLITS[name])
    shapes: list[tuple[int, ...]] = []
    original = muon_stepper.newton_schulz

    def counting(matrices: torch.Tensor, group: Any) -> torch.Tensor:
        shapes.extend(tuple(matrix.shape) for matrix in matrices)
        return original(matrices, group)

    with mock.patch.object(muon_stepper, "newton_schulz", counting):
        engine, _ = trained(model, {"stage": stage}, mesh)
    owned = [shape for shapes in world.everyone(shapes) for shape in shapes]
    # In stage 0 both data-parallel ranks have everything, and do the same.
    copies = 1 if stage else 2
    assert owned.count(SHAPES["wide"]) == owned.count(SHAPES["tall"]) == STEPS * 2 * copies
    assert len(owned) == STEPS * 4 * copies
    assert len(shapes) == STEPS * copies  # of four matrices, on each of four ranks
    sent = sum(world.everyone(engine.traffic.last_bytes_sent["matrices"]))
    matrix_bytes = 2 * 2 * (math.prod(SHAPES["wide"]) + math.prod(SHAPES["tall"]))
    # What an owner has of its matrices does not travel.
    assert matrix_bytes * copies / 2 <= sent <= 2 * copies * matrix_bytes


@on_ranks(4)
def test_groups_of_shards_and_replicas(world: World) -> None:
    """Every group of shards does the same on its own."""
    wanted = alone(Blocks(world.seed), world.size)
    groups = {"shard_group_size": 2}
    for offload in ({}, {"optimizer": "host"}, {"update_mode": "in_backward"}):
        config = {"stage": 3, "offload": offload, "communication": groups}
        engine, found = trained(Blocks(world.seed), config, world.group)
        assert_equal(found, wanted)
        assert {unit.collectives.world_size for unit in engine.units} == {2}
    config = {"stage": 3, "communication": {"hierarchical_partition": True, "ranks_per_node": 2}}
    assert_equal(trained(Blocks(world.seed), config, world.group)[1], wanted)


@on_ranks(4)
@pytest.mark.parametrize("ep", [2, 4])
def test_experts(world: World, ep: int) -> None:
    """A matrix of each expert, and a stack of several, on the ranks that have them."""
    mesh = mesh_of(ep=ep)
    own, shapes = mesh["ep"].get_local_rank(), {"expert": (8, 20), "experts": (3, 6, 10)}
    names = [[f"{name}_{number}" for name in shapes] for number in range(ep)]
    of_all = {name: shape for each in names for name, shape in zip(each, shapes.values(), strict=True)}
    full = Blocks(world.seed, {"wide": SHAPES["wide"], **of_all})
    for block in full.blocks:
        # An expert's gradient is the sum of those of ranks with different experts, here one of these.
        block.ranks_of = {
            name: range(number, world.size, ep) for number in range(ep) for name in names[number]
        }
    wanted = alone(full, world.size)
    for stage in (0, 1, 2, 3):
        model = Blocks(world.seed, {"wide": SHAPES["wide"], **{name: of_all[name] for name in names[own]}})
        for name, parameter in model.named_parameters():
            if "expert" in name:
                mark_expert(parameter, mesh["ep"].mesh.tolist())
        _, found = trained(model, {"stage": stage}, mesh)
        assert_equal(found, wanted)
        assert sum("expert" in name for name in found) == 4


@on_ranks(4)
@pytest.mark.parametrize("update_mode", ["after_backward", "in_backward"])
def test_a_slice_that_is_not_finite_stops_all_ranks(world: World, update_mode: str) -> None:
    """Also those that have other slices, which would wait for it."""
    mesh, model = mesh_of(tp=2), Blocks(world.seed, {"wide": SHAPES["wide"]})
    for block in model.blocks:
        split_parameter(block, "wide", mesh["tp"], SPLITS["wide"])
    optimizer = zero_ext.Muon(model.parameters(), **SETTINGS)
    config = {"stage": 2, "offload": {"update_mode": update_mode}, "timeout_seconds": 60.0}
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=mesh)
    factor = math.nan if world.rank == 1 else 1.0
    (model(0, world.rank) * factor).backward()
    with pytest.raises(FloatingPointError, match="gradients"):
        optimizer.step()


@on_ranks(4)
@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_models_of_experts_and_of_split_layers(world: World, layout: str) -> None:
    """Updates differ by rounding alone, while slices that are orthogonalized alone change all of the update.
    In bf16 the iterations would amplify what rounds in a gate's gradient: its rows add up to zero, so that
    one of its singular values is rounding alone."""

    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return zero_ext.Muon(model.parameters(), **SETTINGS, ns_dtype="fp32")

    steps = training.batches(world.seed, STEPS)
    with mock.patch.object(training, "adamw", muon):
        if layout == "ep":
            course = mixtures.course_of(world.seed, mesh_of(ep=2), {"stage": 3})
            _, wanted = mixtures.alone(world.seed, STEPS)
        else:
            course = tensors.course_of(world.seed, 2, {"stage": 3}, sequence=True)
            model = tensors.seeded(world.seed)
            training.alone(model, steps)
            wanted = dict(model.state_dict())
        start = zero_ext.full_state_dict(course.model)
        course.steps(steps)
    found = zero_ext.full_state_dict(course.model)
    assert found.keys() == start.keys()
    for name, value in found.items():
        error, update = (value - wanted[name]).norm(), (wanted[name] - start[name]).norm()
        assert error <= 0.002 * update, name


class Layers(nn.Module):
    """Layers of different inputs, to be tiled."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(23, 12)
        self.hidden = nn.Linear(12, 18)
        self.last = nn.Linear(20, 13, bias=False)

    def forward(self, step: int, rank: int) -> torch.Tensor:
        """A loss with integer gradients."""
        generator = torch.Generator().manual_seed(100 * step + rank)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-8, 9, shape, generator=generator) * 4.0

        ids = torch.randint(23, (30,), generator=generator)
        total = (self.words(ids) * integers(30, 12)).sum()
        for layer in (self.hidden, self.last):
            inputs = integers(7, layer.in_features)
            total = total + (layer(inputs) * integers(7, layer.out_features)).sum()
        return total


@on_ranks(1, 2, 3)
def test_tiles(world: World) -> None:
    """Those of units.tiles, and a layer of tiles in rows and columns in all stages."""
    wanted = alone(Layers(world.seed), world.size)
    for stage, offload in ((0, {}), (1, {}), (2, {"optimizer": "host"}), (3, {}), (3, HOST)):
        model = Layers(world.seed)
        plain, model.last = model.last, zero_ext.TiledLinear(20, 13, bias=False, in_splits=3, out_splits=2)
        model.last.load_state_dict(plain.state_dict())
        units = {**MIXED["units"], "tiles": {"words": 3, "hidden": 4}} if stage == 3 else MIXED["units"]
        config = {"stage": stage, "units": units, "offload": offload}
        assert_equal(trained(model, config, world.group)[1], wanted)


class Adding(Block):
    """A layer that adds its loss of each sample to the first column of its input, from a number in the
    second."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        added = torch.stack([super(Adding, self).forward(int(number), 0) for number in hidden[:, 1]])
        return hidden + torch.stack([added, torch.zeros_like(added)], 1)


def mean_of_losses(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0].mean()


def pipelined(seed: int, mesh: Any) -> PipelineModule:
    """Four layers with matrices, of which the first and the last are tied."""
    matrices = {name: SHAPES[name] for name in ("wide", "tall", "vector")}
    tied = TiedLayerSpec("square", Adding, seed, {"square": SHAPES["square"]})
    return PipelineModule(
        [tied, LayerSpec(Adding, seed + 1, matrices), LayerSpec(Adding, seed + 2, matrices), tied],
        mesh,
        loss=mean_of_losses,
    )


@on_ranks(4)
@pytest.mark.parametrize("tp", [1, 2])
def test_pipeline_stages(world: World, tp: int) -> None:
    """Tied matrices are orthogonalized in both stages, alike."""
    samples = 8 * 2 // tp
    numbers = torch.arange(STEPS * samples, dtype=torch.float32).view(STEPS, samples)
    inputs = torch.stack([torch.zeros_like(numbers), numbers], -1)
    full = pipelined(world.seed, mesh_of_one()).layers
    optimizer = zero_ext.Muon(full.parameters(), **SETTINGS)
    for step in inputs:
        hidden = step
        for number in (0, 1, 2, 0):
            hidden = full[str(number)](hidden)
        hidden[:, 0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = {f"layers.{name}": value.detach() for name, value in full.named_parameters()}
    wanted["layers.3.square"] = wanted["layers.0.square"]
    mesh = mesh_of(pp=2, tp=tp)
    for stage in (0, 1, 2, 3):
        module = pipelined(world.seed, mesh)
        for layer in module.layers.values():
            for name in ("wide", "tall") if tp > 1 else ():
                if hasattr(layer, name):
                    split_parameter(layer, name, mesh["tp"], SPLITS[name])
        config = {"stage": stage, "timeout_seconds": 60.0, **MIXED}
        optimizer = zero_ext.Muon(module.parameters(), **SETTINGS)
        model, optimizer = zero_ext.prepare(module, optimizer, config, process_group=mesh)
        pipeline = Pipeline(model, optimizer, micro_batches=4)
        for step in inputs:
            own = step.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
            pipeline.train_batch(own, targets=own)
        found = zero_ext.full_state_dict(model, rank0_only=False)
        assert_equal(found, wanted)
        assert len(found) == 4


class Tiled(Blocks):
    """The blocks, and a layer of tiles."""

    def __init__(self, seed: int, rows: int) -> None:
        super().__init__(seed)
        self.last = zero_ext.TiledLinear(20, 13, bias=False, in_splits=2, out_splits=rows)
        self.last.load_state_dict({"weight": torch.arange(260.0).view(13, 20) / 260})

    def forward(self, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs, factors = torch.randint(-8, 9, (2, 20, 20), generator=generator) * 4.0
        return super().forward(step, rank) + (self.last(inputs) * factors[:, :13]).sum()


@on_ranks(4)
def test_resumed_in_another_split(world: World) -> None:
    """Momentum is saved under the full tensors' names, of tiles too."""

    def made(stage: int, **lengths: int) -> Any:
        mesh, model = mesh_of(**lengths), Tiled(world.seed, world.size // mesh_of(**lengths)["dp"].size())
        for block in model.blocks if "tp" in lengths else ():
            for name, split in SPLITS.items():
                split_parameter(block, name, mesh["tp"], split)
        optimizer = zero_ext.Muon(model.parameters(), **SETTINGS)
        return zero_ext.prepare(model, optimizer, {"stage": stage, **MIXED}, process_group=mesh)

    def steps(model: Any, optimizer: Any, numbers: range) -> Parameters:
        engine = engine_of(model)
        share = world.size // engine.world_size
        for step in numbers:
            sum(model(step, engine.rank * share + rank) / share for rank in range(share)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero_ext.full_state_dict(model, rank0_only=False)

    folder, first = world.shared_folder(), made(3, tp=2)
    steps(*first, range(2))
    zero_ext.save_checkpoint(folder, first[0]).wait()
    wanted = steps(*first, range(2, 4))
    for stage, lengths in ((1, {"tp": 4}), (3, {"dp": 4})):
        then = made(stage, **lengths)
        zero_ext.load_checkpoint(folder, then[0])
        assert_equal(steps(*then, range(2, 4)), wanted)


@on_ranks(4)
def test_layouts_that_are_refused(world: World) -> None:
    def refused(message: str, model: nn.Module, config: dict[str, Any], group: Any = None) -> None:
        values = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            zero_ext.prepare(
                model, zero_ext.Muon(model.parameters()), config, process_group=group or world.group
            )
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())

    uneven = Blocks(world.seed, {"odd": (7, 12)})
    split_parameter(uneven.blocks[0], "odd", mesh_of(tp=2)["tp"], ParameterSplit(0, 1))
    refused("'blocks.0.odd': expected a size that divides by the 2", uneven, {"stage": 1}, mesh_of(tp=2))
    in_backward = {"stage": 3, "offload": {"update_mode": "in_backward"}}
    tiles = {**in_backward, "units": {"tiles": {"hidden": 2}}}
    refused(r"'in_backward', as the update of a tile .* got \['hidden.weight'\]", Layers(world.seed), tiles)
    tiled = nn.ModuleList([zero_ext.TiledLinear(8, 8, out_splits=2)])
    tiled[0].tiles[0].weight.use_muon = False
    refused("tiles of '0.weight': expected all of them in one param group", tiled, {"stage": 3})


class FirstTile(nn.Module):
    """Uses one of two tiles of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = zero_ext.TiledLinear(8, 8, bias=False, out_splits=2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return next(self.layer.chunks(inputs)).sum()


@on_ranks(2)
def test_a_step_without_some_tiles_is_refused(world: World) -> None:
    model: Any = FirstTile()
    optimizer = zero_ext.Muon(model.parameters())
    model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3}, process_group=world.group)
    before = zero_ext.full_state_dict(model, rank0_only=False)
    model(torch.ones(3, 8)).backward()
    with pytest.raises(RuntimeError, match=r"'layer\.tiles\.1\.weight': expected a gradient, as other tiles"):
        optimizer.step()
    assert_equal(zero_ext.full_state_dict(model, rank0_only=False), before)
