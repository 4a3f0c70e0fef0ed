"""Volumes and memory of compressed communication: as the engine counts them, and as the paper says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import configuration, units_gathered_once
from zero_ext.config import CommunicationConfig
from zero_ext.plan import Sent, TrainingState, model_staging, model_state_bytes, secondary_bytes, step_bytes
from zero_ext.zero import Engine, engine_of

SETTINGS = (
    CommunicationConfig(),
    CommunicationConfig(quantized_weights="int4"),
    CommunicationConfig(quantized_gradients="int4"),
    CommunicationConfig(hierarchical_partition=True),
    CommunicationConfig(quantized_weights="int8", quantized_gradients="int8", hierarchical_partition=True),
)


class Layer(nn.Module):
    """A Llama's layer but for its attention: the sizes matter here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.norm = nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attend(self.norm(x)).chunk(3, -1)
        x = x + self.out(query * key.tanh() + value)
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """[batch, time] ids to logits."""

    def __init__(self, width: int = 64, layers: int = 2, vocabulary: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def two_steps(world: World, stage: int, policy: CommunicationConfig, micro_batches: int = 1) -> Engine:
    """The engine after two steps in bf16; staging must be what was planned."""
    config = configuration(
        stage,
        precision={"dtype": "bf16"},
        communication=policy.to_mapping(),
        batch={"gradient_accumulation_steps": micro_batches},
        units={"bucket_elements": 40_000},
    )
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    staging = model_staging(model, optimizer, config, world.size)
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
    ids = torch.randint(0, 96, (2, 5))
    for _ in range(2):
        for _ in range(micro_batches):
            model(ids).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    assert engine.pool.total_bytes == staging.pool.nbytes and not engine.pool.overflow.total_bytes
    engine.keep_model_for_test = model
    return engine


def counted(engine: Engine) -> dict[str, Sent]:
    """What this rank sent in the last step."""
    traffic = engine.traffic
    return {
        kind: Sent(traffic.last_bytes_sent[kind], traffic.last_crossing_bytes[kind])
        for kind in traffic.last_elements
        if kind != "scalars"
    }


@on_ranks(2, 4)
@pytest.mark.parametrize("stage", [2, 3])
def test_volumes_and_memory_are_those_counted(world: World, stage: int) -> None:
    for setting in SETTINGS:
        if stage == 2 and (setting.quantized_weights or setting.hierarchical_partition):
            continue
        for per_node in (1, 2, 4)[: world.size // 2 + 1]:
            policy = setting.replace(ranks_per_node=per_node)
            for micro_batches in (1, 2) if per_node == 2 else (1,):
                engine = two_steps(world, stage, policy, micro_batches)
                lengths = [unit.layout.numel for unit in engine.units]
                planned = step_bytes(
                    stage,
                    world.size,
                    Counter(lengths),
                    policy,
                    accumulation_steps=micro_batches,
                    gathered_once=Counter(unit.layout.numel for unit in units_gathered_once(engine)),
                )
                assert counted(engine) == planned, (policy, micro_batches)
                state = TrainingState({"bf16": sum(lengths)}, accumulation_steps=micro_batches)
                secondary = sum(secondary_bytes(numel, world.size, policy, 2) for numel in lengths)
                params = model_state_bytes(stage, world.size, state).params
                assert engine.memory_breakdown()["params"] == params + secondary


@on_ranks(4)
def test_all_on_crosses_with_a_quarter_of_the_bytes(world: World) -> None:
    """At most 0.78 of the parameters' fp16 bytes cross between two nodes of two ranks, scales and padding
    included, where stage 3 would send three times all of them."""
    policy = CommunicationConfig(
        ranks_per_node=2, quantized_weights="int8", quantized_gradients="int4", hierarchical_partition=True
    )
    plain = two_steps(world, 3, CommunicationConfig(ranks_per_node=2))
    engine = two_steps(world, 3, policy)
    fp16 = 2 * sum(parameter.numel() for parameter in Decoder().parameters())
    # Embedding and head are gathered once for forward and backward.
    passes = 3 - 2 * sum(unit.layout.numel for unit in units_gathered_once(plain)) / fp16

    def crossing(one: Engine) -> float:
        """Of a node, before the factor (nodes - 1) / nodes, over the parameters' bytes."""
        counts = one.traffic.last_crossing_bytes
        sent = sum(sum(world.everyone(count)) for kind, count in counts.items() if kind != "scalars")
        return sent / 2 / (1 / 2) / fp16

    compressed, full = crossing(engine), crossing(plain)
    assert 0.75 < compressed <= 0.78
    # Flat collectives send each byte to every rank of the other node.
    assert full >= 2 * passes
    assert full / compressed >= 7.6 * passes / 3


@on_ranks(4)
@pytest.mark.parametrize("codes", [None, "int8"])
def test_volumes_of_sharding_groups(world: World, codes: str | None) -> None:
    for per_node in (1, 2, 4):
        policy = CommunicationConfig(shard_group_size=2, ranks_per_node=per_node, quantized_weights=codes)
        for micro_batches in (1, 2):
            engine = two_steps(world, 3, policy, micro_batches)
            units = Counter(unit.layout.numel for unit in engine.units)
            once = Counter(unit.layout.numel for unit in units_gathered_once(engine))
            planned = step_bytes(3, 4, units, policy, accumulation_steps=micro_batches, gathered_once=once)
            assert counted(engine) == planned, (per_node, micro_batches)


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_add_up_are_wider(world: World, stage: int) -> None:
    policy = CommunicationConfig(ranks_per_node=2)
    for micro_batches in (1, 2):
        engine = two_steps(world, stage, policy, micro_batches)
        units = Counter(unit.layout.numel for unit in engine.units)
        planned = step_bytes(stage, 4, units, policy, accumulation_steps=micro_batches)
        assert counted(engine) == planned, micro_batches


@pytest.mark.parametrize(
    ("stage", "ranks", "policy", "words"),
    [
        (3, 4, {"shard_group_size": 3}, "shard_group_size: expected a divisor of the 4 ranks, got 3"),
        (3, 4, {"shard_group_size": 1}, "shard_group_size: expected at least 2, got 1"),
        (
            3,
            12,
            {"shard_group_size": 4, "ranks_per_node": 6},
            "shard_group_size: expected .* 6 ranks of a node, got 4",
        ),
        (2, 4, {"shard_group_size": 2}, "shard_group_size: expected stage 3, got 2 in stage 2"),
        (3, 8, {"ranks_per_node": 3}, "ranks_per_node: expected a divisor of the 8 ranks.*, got 3"),
    ],
)
def test_groups_and_nodes_that_the_engine_refuses(
    stage: int, ranks: int, policy: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        step_bytes(stage, ranks, {64: 1}, CommunicationConfig(**policy))
