"""Volumes of collectives: closed formulas, a step walked event by event, and what the engine counts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import configuration, units_gathered_once
from zero_ext.config import CommunicationConfig
from zero_ext.config.buffer_sizes import sign_payload_bytes
from zero_ext.plan import (
    Sent,
    TrainingState,
    bytes_sent,
    collective_elements,
    model_staging,
    model_state_bytes,
    onebit_state_bytes,
    onebit_step_bytes,
    secondary_bytes,
    step_bytes,
)
from zero_ext.plan.step_traffic import lines_sent, matrices_sent
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


@on_ranks(2, 4, by_turns=True)
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


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize(
    ("stage", "no_sync", "multiple"),
    [
        (0, False, lambda k: 2),
        (0, True, lambda k: 2),
        (1, False, lambda k: 2),
        (1, True, lambda k: 2),
        (2, False, lambda k: k + 1),
        (2, True, lambda k: 2),
        (3, False, lambda k: 3 * k),
        (3, True, lambda k: 2 * k + 1),
    ],
)
def test_closed_formulas(stage: int, no_sync: bool, multiple, k: int) -> None:
    kinds = collective_elements(stage, 4, 1024, accumulation_steps=k, no_sync=no_sync)
    assert sum(kinds.values()) == multiple(k) * 1024


@settings(deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.integers(1, 6),
    st.booleans(),
)
def test_each_kind_against_a_walk_through_one_step(
    stage: int, world_size: int, trainable: int, frozen: int, k: int, no_sync: bool
) -> None:
    walked = {"gather": 0, "gather_updated": 0, "reduce_scatter": 0, "gather_gradients": 0}
    for micro_batch in range(k):
        if stage == 3:
            walked["gather"] += 2 * (trainable + frozen)  # forward and backward
        if micro_batch == k - 1 or (stage >= 2 and not no_sync):
            walked["reduce_scatter"] += trainable
    if stage == 0:
        walked["gather_gradients"] += trainable
    if stage in (1, 2):
        walked["gather_updated"] += trainable
    if world_size == 1:
        walked = dict.fromkeys(walked, 0)
    found = collective_elements(
        stage, world_size, trainable, frozen=frozen, accumulation_steps=k, no_sync=no_sync
    )
    assert {**dict.fromkeys(walked, 0), **found} == walked


def test_a_rank_sends_all_but_its_own_shard() -> None:
    assert bytes_sent({"gather": 1024, "reduce_scatter": 512}, 4, 2) == {
        "gather": 1536,
        "reduce_scatter": 768,
    }
    assert bytes_sent({"gather": 1024}, 1, 2) == {"gather": 0}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"stage": 4}, "stage: expected .*, got 4"),
        ({"stage": 4, "world_size": 1}, "stage: expected .*, got 4"),
        ({"world_size": 0}, "world_size: expected .*, got 0"),
        ({"trainable": -1}, "trainable: expected .*, got -1"),
        ({"frozen": 0.5}, "frozen: expected .*, got 0.5"),
        ({"accumulation_steps": 0}, "accumulation_steps: expected .*, got 0"),
    ],
)
def test_impossible_arguments_are_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        collective_elements(**{"stage": 3, "world_size": 2, "trainable": 8, **arguments})


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("stage", [0, 1])
def test_volumes_are_those_counted(world: World, stage: int) -> None:
    for per_node in (1, 2, 4)[: world.size // 2 + 1]:
        model = Decoder()
        config = {
            "stage": stage,
            "communication": {"ranks_per_node": per_node},
            "units": {"bucket_elements": 40_000},
            "timeout_seconds": 120.0,
        }
        optimizer = zero_ext.OneBitAdam(model.parameters(), freeze_step=1)
        model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
        for _ in range(2):
            model(torch.randint(0, 96, (2, 5))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine = engine_of(model)
        units = Counter(unit.layout.numel for unit in engine.units)
        assert len(engine.units) > 1
        found = {kind: sent for kind, sent in counted(engine).items() if sent.all}
        assert found == onebit_step_bytes(world.size, units, ranks_per_node=per_node)
        messages = sum(2 * world.size * sign_payload_bytes(numel // world.size) for numel in units.elements())
        allocated = engine.updates.allocated_bytes()["device"]
        wanted = allocated + messages if world.size > 1 else allocated
        assert onebit_state_bytes(stage, world.size, units) == wanted


def test_bytes_of_matrices_to_owners_and_back() -> None:
    # Of 96 elements on 4 ranks three quarters belong to others: 2 bytes out and 2 bytes back.
    assert matrices_sent(72, 4) == Sent(4 * 96 // 4 * 3 // 4, 0)
    assert matrices_sent(72, 4, 2) == Sent(72, 48)  # two of the three others are in the other node
    assert matrices_sent(72, 4, 2, "fp32") == Sent(144, 96)
    assert matrices_sent(0, 1) == Sent()


def test_bytes_of_sums_over_rows_and_columns() -> None:
    # 10 float64 numbers to each of the others.
    assert lines_sent(10, 4) == Sent(240, 0) and lines_sent(10, 4, 2) == Sent(240, 160)
    assert lines_sent(10, 1) == Sent()


def test_ranks_that_do_not_fill_their_nodes() -> None:
    with pytest.raises(ValueError, match=r"ranks_per_node: expected a divisor of the 4 ranks.*, got 3"):
        onebit_step_bytes(4, {64: 1}, ranks_per_node=3)
    with pytest.raises(ValueError, match="world_size"):
        onebit_step_bytes(0, {64: 1})
