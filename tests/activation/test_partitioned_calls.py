"""Partitioned inputs beside all else that calls may do, beside sharded parameters, and after errors."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_ext
from tests.activation.blocks import same
from tests.activation.tensor_parallel import WIDTH, slopes, stack
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.activation import ActivationCheckpointing, BufferFullError
from zero_ext.config import ActivationCheckpointingConfig
from zero_ext.zero import Engine, engine_of


class Prepared(nn.Module):
    """Tensor-parallel blocks, checkpointed or not."""

    def __init__(self, blocks: nn.ModuleList, run: bool) -> None:
        super().__init__()
        self.blocks, self.run = blocks, run

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = zero_ext.checkpoint_activations(block, hidden, mask) if self.run else block(hidden, mask)
        return hidden


@contextlib.contextmanager
def two_by_two(world: World) -> Iterator[tuple[World, World]]:
    """This rank's index among two tensor-parallel ranks, and among two data-parallel ones."""
    column, row = world.rank % 2, world.rank // 2
    # Every rank makes all of them: names of groups that some ranks make alone differ in this world.
    made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    groups = [made[row], made[2 + column]]
    try:
        yield World(column, 2, groups[0], world.seed), World(row, 2, groups[1], world.seed)
    finally:
        world.barrier()
        for group in groups:
            dist.destroy_process_group(group)


def steps_of(tensor: World, data: World, section: dict[str, Any] | None) -> tuple[nn.Module, Engine]:
    """Two steps of a prepared model whose blocks are checkpointed if there is a ``section``."""
    blocks, _ = stack(tensor, torch.float32)
    config = {"stage": 3, "timeout_seconds": 120.0, "activation_checkpointing": section or {}}
    model, optimizer = zero_ext.prepare(
        module := Prepared(blocks, section is not None),
        torch.optim.AdamW(blocks.parameters(), lr=1e-2),
        config,
        process_group=data.group,
        activation_group=tensor.group if section else None,
    )
    engine = engine_of(model)
    for block in module.blocks:
        block.streams = engine.checkpointing.streams
    engine.checkpointing.streams.seed_model_parallel(tensor.seed + data.rank, tensor.rank)
    generator = torch.Generator().manual_seed(tensor.seed + data.rank)
    for _ in range(2):
        features = torch.randn(64, WIDTH, generator=generator).requires_grad_()
        model.backward(model(features, torch.rand(64, 1, generator=generator) > 0.5).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model, engine


@on_ranks(4)
def test_beside_sharded_parameters_on_two_by_two_ranks(world: World) -> None:
    """Parameters are sharded over two ranks, inputs over two others; the engine counts both."""
    with two_by_two(world) as (tensor, data):
        wanted = zero_ext.full_state_dict(steps_of(tensor, data, None)[0])
        model, engine = steps_of(tensor, data, {"partition_activations": True, "tier": "host"})
        found = zero_ext.full_state_dict(model)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        inputs = 4 * 64 * WIDTH * 4
        assert engine.traffic.last_elements["activations"] == inputs
        assert engine.traffic.last_bytes_sent["activations"] == inputs // 2
        moved = engine.tiers.transfers.last_moved
        assert moved == {("device", "host"): inputs // 2, ("host", "device"): inputs // 2}
        gc.collect()
        assert engine.checkpointing.allocated_bytes()["host"] > 0 == engine.checkpointing.used_bytes()
        del model, engine


@on_ranks(2)
def test_what_else_calls_may_do(world: World) -> None:
    """Results that are saved, calls inside calls, and graphs that are gone through twice."""
    for values in ({"save_ops": ("aten.mm",)}, {"save_budget_bytes": 2**14}, {"prefetch": 2, "tier": "host"}):
        blocks, streams = stack(world, torch.float32)
        wanted = slopes(world, blocks, streams, None)
        policy = ActivationCheckpointingConfig(partition_activations=True, **values)
        checkpointing = ActivationCheckpointing(policy, world.group, streams=streams)
        for _ in range(2):
            assert same(slopes(world, blocks, streams, checkpointing), wanted), values
    source = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(world.seed)).requires_grad_()

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpointing(torch.cos, checkpointing(torch.sin, x))

    out = checkpointing(inner, checkpointing(inner, source * 1))
    assert checkpointing.used_bytes() == 2 * source.nbytes // world.size
    plain = source.sin().cos().sin().cos()
    wanted = [torch.autograd.grad(plain.sum(), source)[0]]
    for _ in range(2):
        assert same([torch.autograd.grad(out.sum(), source, retain_graph=True)[0]], wanted)
    del out
    assert checkpointing.used_bytes() == 0


@on_ranks(2)
def test_an_exception_in_backward_is_followed_by_a_good_step(world: World) -> None:
    blocks, streams = stack(world, torch.float32)
    wanted = slopes(world, blocks, streams, None)
    for values in ({"tier": "host"}, {"prefetch": 2}):
        policy = ActivationCheckpointingConfig(partition_activations=True, **values)
        checkpointing = ActivationCheckpointing(policy, world.group, streams=streams)

        def fails(gradient: torch.Tensor) -> None:
            raise ZeroDivisionError("mine")

        hidden = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(world.seed)).requires_grad_()
        for number in range(3):
            hidden = checkpointing(torch.sin, hidden * 1)
            if number == 1:
                hidden.register_hook(fails)
        with pytest.raises(ZeroDivisionError, match="mine"):
            hidden.sum().backward()
        del hidden
        gc.collect()
        assert checkpointing.used_bytes() == 0
        assert same(slopes(world, blocks, streams, checkpointing), wanted)


@on_ranks(2)
def test_a_full_buffer_ends_the_groups_connections(world: World) -> None:
    """On one rank alone: the other one hears of it where it would wait."""
    values = {"contiguous_memory_optimization": True, "number_checkpoints": 2}
    policy = ActivationCheckpointingConfig(partition_activations=True, **values)
    checkpointing = ActivationCheckpointing(policy, world.group, timeout_seconds=120.0)
    hidden = torch.ones(64, WIDTH, requires_grad=True) * 1
    outputs = [checkpointing(torch.sin, hidden + number) for number in range(2)]
    began = time.monotonic()
    if world.rank == 1:
        (offloader,) = checkpointing._offloaders.values()
        with pytest.raises(BufferFullError, match=r"number_checkpoints: .* for 2 calls"):
            offloader.offload([hidden], "one more")
    with pytest.raises(RuntimeError, match=r"number_checkpoints: .* for 2 calls|comparison of the inputs"):
        checkpointing(torch.sin, hidden + 3)
    assert time.monotonic() - began < 38  # of 40 seconds
    world.barrier()
    del outputs
    fresh = ActivationCheckpointing(policy, world.group)  # connections of its own
    fresh(torch.sin, hidden + 1).sum().backward()
