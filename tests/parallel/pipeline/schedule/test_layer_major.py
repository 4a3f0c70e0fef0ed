"""The layer-major schedule: all micro-batches through a layer before the next one."""

from __future__ import annotations

import tempfile
import weakref
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.pipeline.test_training import assert_as_alone
from tests.parallel.pipeline.toy_stages import (
    BLOCKS,
    WIDTH,
    Block,
    mesh_of,
    train,
)
from tests.parallel.training import (
    WORDS,
    adamw,
    alone,
    assert_same_steps,
    assert_same_values,
    batches,
    mean_loss,
)
from tests.zero.training import gathered_once
from zero_ext.parallel.pipeline import LayerSpec, PipelineModule
from zero_ext.zero import Engine, engine_of

OFFLOADED = {"tier": "host", "min_offload_bytes": 0}
layer_major = partial(train, schedule="layer_major")


def untied(dropped: float = 0.0) -> list[LayerSpec]:
    """Layers whose gradients come once a micro-batch."""
    blocks = [LayerSpec(Block, dropped) for _ in range(BLOCKS)]
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, WORDS)]


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("tp", "checkpoint"), [(1, True), (2, False), (4, True)])
def test_steps_are_those_of_one_process(world: World, tp: int, checkpoint: bool, stage: int) -> None:
    config = {"stage": stage, "gradient_clipping": 0.5}
    trained = layer_major(world.seed, 1, config, tp=tp, checkpoint=checkpoint)
    assert_as_alone(trained, world.seed, 8 * 4 // tp, clip=0.5)
    order = [(slot.what, slot.stage, slot.micro_batch) for slot in trained.pipeline.slots]
    layers = [0, *range(1, BLOCKS + 2), BLOCKS + 3]  # the function goes with the layer before
    forward = [("forward", layer, batch) for layer in layers for batch in range(4)]
    assert order == forward + [("backward", layer, batch) for layer in layers[::-1] for batch in range(4)]


def accumulated(
    seed: int, config: dict[str, Any], layers: list[LayerSpec], micro_batches: int, steps: int = 3
) -> tuple[dict[str, torch.Tensor], Engine]:
    """The parameters after the steps of :func:`train`, by ordinary accumulation."""
    torch.manual_seed(seed)
    mesh = mesh_of(1)
    module = PipelineModule(layers, mesh, loss=mean_loss)
    model, optimizer = zero_ext.prepare(module, adamw(module), config, process_group=mesh)
    samples, own = 2 * micro_batches, mesh["dp"].get_local_rank()
    for words, wanted in batches(seed, steps, samples * mesh["dp"].size()):
        own_samples = slice(samples * own, samples * (own + 1))
        pairs = zip(
            words[own_samples].chunk(micro_batches), wanted[own_samples].chunk(micro_batches), strict=True
        )
        for number, (inputs, targets) in enumerate(pairs):
            engine = engine_of(model)
            with engine.collector.scaled_pass(number == micro_batches - 1 or "batch" in config):
                (mean_loss(model(0, inputs), targets) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero_ext.full_state_dict(model), engine_of(model)


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sums_have_the_order_of_accumulation_without_reduction(world: World, dtype: str, stage: int) -> None:
    config = {"stage": stage, "precision": {"dtype": dtype}}
    wanted, _ = accumulated(world.seed, config, untied(), 4)
    for checkpoint, batch in ((True, {}), (False, {"batch": {"gradient_accumulation_steps": 4}})):
        trained = layer_major(
            world.seed, 1, {**config, **batch}, layers=untied(), steps=3, checkpoint=checkpoint
        )
        for name, value in trained.parameters.items():
            assert torch.equal(value, wanted[name]), name


@on_ranks(4)
def test_weights_move_once_a_pass_whatever_the_micro_batches(world: World) -> None:
    def moved(engine: Engine) -> tuple[int, ...]:
        """Bytes of weights read from storage, and sent, in the last step."""
        sent = engine.traffic.last_bytes_sent
        return engine.tiers.transfers.last_moved["nvme", "device"], sent["gather"]

    with tempfile.TemporaryDirectory() as folder:
        config = {"stage": 3, "offload": {"params": "nvme", "nvme_paths": [folder]}}
        found = {
            count: layer_major(world.seed, 1, config, layers=untied(), micro_batches=count, steps=3)
            for count in (1, 4)
        }
        config["batch"] = {"gradient_accumulation_steps": 4}
        _, ordinary = accumulated(world.seed, config, untied(), 4)
    stored = sum(4 * unit.layout.shard_numel for unit in ordinary.units)
    assert moved(found[1].engine) == moved(found[4].engine) == (2 * stored, 2 * 3 * stored)
    once = 4 * gathered_once(ordinary) // world.size
    assert moved(ordinary) == (4 * (2 * stored - once), 4 * 3 * (2 * stored - once))
    reduced = [engine.traffic.last_bytes_sent["reduce_scatter"] for engine in (found[4].engine, ordinary)]
    assert reduced == [3 * stored, 4 * 3 * stored]


class Watched(nn.Module):
    """Lets go of nothing; counts the gradients of its outputs that still live when another one comes."""

    living: ClassVar[list[weakref.ref[torch.Tensor]]] = []
    most: ClassVar[int] = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.view_as(hidden)
        if hidden.requires_grad:
            hidden.register_hook(self.came)
        return hidden

    @classmethod
    def came(cls, gradient: torch.Tensor) -> None:
        cls.living = [*(each for each in cls.living if each() is not None), weakref.ref(gradient)]
        cls.most = max(cls.most, len(cls.living))


@on_ranks(4)
def test_gradients_between_layers_do_not_pile_up(world: World) -> None:
    layers = [LayerSpec(nn.Embedding, WORDS, WIDTH)]
    for _ in range(6):
        layers += [LayerSpec(Block, 0.0), LayerSpec(Watched)]
    layers.append(LayerSpec(nn.Linear, WIDTH, WORDS))
    layer_major(world.seed, 1, {"stage": 0}, layers=layers, steps=1, micro_batches=2, checkpoint=False)
    assert 0 < Watched.most <= 4


@on_ranks(4)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_shared_parameter_is_reduced_once(world: World, stage: int) -> None:
    trained = layer_major(world.seed, 1, {"stage": stage})
    layout = sum(unit.layout.numel for unit in trained.engine.units)
    assert trained.engine.traffic.last_bytes_sent["reduce_scatter"] == 4 * layout * 3 // 4


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_is_the_same_again_in_backward(world: World, stage: int) -> None:
    """Against one process that draws in the schedule's order and runs no layer twice."""
    config = {"stage": stage}
    trained = layer_major(world.seed, 1, config, layers=untied(0.5), tp=4, checkpoint=True)
    torch.manual_seed(world.seed)
    module = PipelineModule(untied(0.5), mesh_of(1, 4), loss=mean_loss)

    def loss(module: PipelineModule, words: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        chunks = words.chunk(4)
        for layer in module.layers.values():
            chunks = [layer(chunk) for chunk in chunks]
        return torch.stack([*map(mean_loss, chunks, wanted.chunk(4))]).mean()

    records = alone(module, batches(world.seed, 4, 8), loss, clip=0.0)
    assert_same_steps(trained.losses, records.losses)
    assert_same_values(trained.parameters, module.state_dict())


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(
    "config",
    [
        {"offload": {"optimizer": "host", "grads": "host", "params": "host"}},
        {"offload": {"optimizer": "host", "update_mode": "in_backward"}, "gradient_clipping": 0.0},
        {"offload": {"optimizer": "host", "update_mode": "in_backward"}},
        {"units": {"max_live_elements": 300, "prefetch_elements": 0}},
        {"activation_checkpointing": OFFLOADED},
        {"activation_checkpointing": {**OFFLOADED, "mode": "offload_saved_tensors"}},
    ],
)
def test_with_what_else_moves(world: World, config: dict[str, Any]) -> None:
    config = {"stage": 3, "gradient_clipping": 0.5, **config}
    trained = layer_major(world.seed, 1, config)
    assert_as_alone(trained, world.seed, 32, clip=config["gradient_clipping"])


@on_ranks(4)
def test_a_loss_scale_that_is_too_large_is_found(world: World) -> None:
    config = {"stage": 3, "precision": {"dtype": "fp16"}, "loss_scale": {"initial_power": 24}}
    assert layer_major(world.seed, 1, config).engine.skipped_steps > 0
    config["loss_scale"] = {"initial_power": 8}
    found, wanted = (run(world.seed, 1, config, layers=untied()) for run in (layer_major, train))
    assert found.engine.skipped_steps == wanted.engine.skipped_steps == 0
    assert found.losses == wanted.losses
    assert all(torch.equal(value, wanted.parameters[name]) for name, value in found.parameters.items())
