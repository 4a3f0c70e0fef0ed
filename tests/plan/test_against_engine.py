"""The formulas against what the engine holds and sends: equal to the byte and to the element."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import gathered_once
from zero_ext.plan import StateBytes, TrainingState, bytes_sent, collective_elements, model_state_bytes
from zero_ext.zero import Engine, engine_of

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Stack(nn.Module):
    """A frozen block between trainable ones, with sizes that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width + 2) for width in (7, 9, 11, 13))
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(15, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs).tanh()
        return self.head(inputs)


def elements(engine: Engine, trainable: bool) -> Counter[str]:
    """Padded elements of the engine's units by dtype."""
    counts: Counter[str] = Counter()
    for unit in engine.units:
        if unit.parameters[0].requires_grad == trainable:
            counts[NAMES[unit.layout.dtype]] += unit.layout.numel
    return counts


def train(engine_config: dict, micro_batches: int, no_sync: bool, world: World) -> Engine:
    model = Stack()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = zero_ext.prepare(
        model, torch.optim.AdamW(trainable, lr=1e-3), engine_config, process_group=world.group
    )
    for _ in range(3):
        for micro_batch in range(micro_batches):
            local = no_sync and micro_batch + 1 < micro_batches
            with model.no_sync() if local else contextlib.nullcontext():
                model(
                    torch.randn(4, 7, dtype=next(model.parameters()).dtype)
                ).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.keep_model_for_test = model  # the engine holds its model weakly
    return engine


def configuration(stage: int, dtype: str, micro_batches: int, moments: str) -> dict:
    return {
        "stage": stage,
        "precision": {"dtype": dtype, "moments_dtype": moments},
        "batch": {"gradient_accumulation_steps": micro_batches},
    }


@on_ranks(1, 2, 3, 4, by_turns=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_breakdown_equals_formula(world: World, stage: int) -> None:
    for dtype, micro_batches, moments in (("bf16", 1, "fp32"), ("bf16", 2, "bf16"), ("fp32", 1, "fp32")):
        engine = train(configuration(stage, dtype, micro_batches, moments), micro_batches, False, world)
        state = TrainingState(
            elements(engine, True),
            elements(engine, False),
            moments_dtype=moments,
            accumulation_steps=micro_batches,
        )
        breakdown = engine.memory_breakdown()
        held = StateBytes(breakdown["params"], breakdown["grads"], breakdown["optimizer"])
        assert held == model_state_bytes(stage, world.size, state), (dtype, micro_batches, moments)


@on_ranks(2)
def test_moments_in_8_bits_differ_by_a_block_a_unit_at_most(world: World) -> None:
    engine = train(configuration(3, "bf16", 1, "8bit"), 1, False, world)
    state = TrainingState(elements(engine, True), elements(engine, False), moments_dtype="8bit")
    excess = engine.memory_breakdown()["optimizer"] - model_state_bytes(3, world.size, state).optimizer
    assert 0 <= excess <= 2 * 4 * len(engine.units)


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_stats_equal_formula(world: World, stage: int) -> None:
    for micro_batches, no_sync in ((1, False), (3, False), (3, True)):
        engine = train(configuration(stage, "bf16", micro_batches, "fp32"), micro_batches, no_sync, world)
        kinds = collective_elements(
            stage,
            world.size,
            elements(engine, True).total(),
            frozen=elements(engine, False).total(),
            gathered_once=gathered_once(engine),
            accumulation_steps=micro_batches,
            no_sync=no_sync,
        )
        counted = {kind: count for kind, count in engine.traffic.last_elements.items() if kind != "scalars"}
        assert counted == kinds, (counted, kinds, micro_batches, no_sync)
        if micro_batches == 1 or (stage >= 2 and not no_sync):  # else fp32 sums travel in part
            sent = {
                kind: count for kind, count in engine.traffic.last_bytes_sent.items() if kind != "scalars"
            }
            assert sent == bytes_sent(kinds, world.size, 2)
