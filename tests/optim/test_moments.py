"""Adam's moments in 8-bit blocks: the stepper against the op, in slices, what it refuses, their values."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import zero_ext
from tests.optim.memory_range import alone, device_tiers, memory_range, step_one
from zero_ext import ops
from zero_ext.config import AioConfig, OffloadConfig
from zero_ext.offload import (
    MemoryShard,
    OptimizerStateStorage,
    StagingSizes,
    StepStaging,
    TierManager,
    TransferStats,
    staging_chunk_elements,
)
from zero_ext.optim import OwnedRange, Segment, Update, make_stepper
from zero_ext.optim.fused import AdamStepper
from zero_ext.optim.moments import DequantizedState, moment_fields
from zero_ext.optim.stepper import StepperInputs

COUNT = 1500
SEGMENTS = (Segment("a", 0, 0, 700, 0), Segment("b", 0, 720, COUNT - 720, 0))
ONE = torch.ones(())


def adamw() -> optim.AdamW:
    return optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.01, weight_decay=0.1)


def one_range(master: torch.Tensor, output: torch.Tensor | None = None) -> OwnedRange:
    return memory_range(master, output, SEGMENTS)


def test_steps_as_the_op_does_from_zeros(generator: torch.Generator) -> None:
    master = torch.randn(COUNT, generator=generator)
    output = torch.full((COUNT,), float("nan"), dtype=torch.bfloat16)
    wanted, wanted_output = master.clone(), output.clone()
    owned = one_range(master, output)
    stepper = AdamStepper(StepperInputs(adamw(), [owned], device_tiers().staging, "8bit"))
    exp_avg = ops.quantize_blockwise(torch.zeros(COUNT), True)
    exp_avg_sq = ops.quantize_blockwise(torch.zeros(COUNT), False)
    for step in range(1, 4):
        gradient = torch.randn(COUNT, generator=generator).bfloat16()
        step_one(stepper, gradient, ONE, frozenset({"a", "b"}))
        segments = torch.tensor([[0, 700], [720, COUNT]])
        hyper = torch.tensor([[0.01, 0.9, 0.999, 1e-8, 0.1, step, 1, 0]] * 2, dtype=torch.float64)
        ops.adam_step_8bit_(wanted, exp_avg, exp_avg_sq, gradient, wanted_output, segments, hyper, ONE)
    assert torch.equal(master, wanted)
    inside = torch.ones(COUNT, dtype=torch.bool)
    inside[700:720] = False
    assert torch.equal(output[inside], wanted_output[inside]) and output[~inside].isnan().all()
    assert owned.state.allocated_bytes() == 4 * COUNT + 2 * (COUNT + 4 * 6)


def test_chunks_through_staging_equal_one_step(generator: torch.Generator) -> None:
    start = torch.randn(COUNT, generator=generator)
    gradients = [torch.randn(COUNT, generator=generator) for _ in range(3)]
    results = []
    for elements in (COUNT, 512, 256):
        master, output = start.clone(), torch.zeros(COUNT, dtype=torch.bfloat16)
        staging = StepStaging({"device": StagingSizes(4 * elements, 0, 0)})
        stepper = AdamStepper(StepperInputs(adamw(), [one_range(master, output)], staging, "8bit"))
        for gradient in gradients:
            # A gradient in another tier than the state comes in parts.
            update = Update(0, MemoryShard("host", gradient, TransferStats()))
            list(stepper.step([update], ONE, frozenset({"a", "b"})))
        results.append(master)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_ring_sizes_that_the_configuration_allows_hold_full_blocks() -> None:
    for staging_buffer_bytes in (2**20, 2**20 + 4096):
        elements = staging_chunk_elements(
            OffloadConfig(staging_buffer_bytes=staging_buffer_bytes).staging_buffer_bytes
        )
        assert 0 < 8 * elements <= staging_buffer_bytes and elements % ops.BLOCK_ELEMENTS == 0


def test_only_fused_adam_supports_them() -> None:
    ranges = [one_range(torch.zeros(COUNT))]
    assert isinstance(make_stepper(adamw(), ranges, "8bit", False, device_tiers(), alone), AdamStepper)
    for other in (optim.SGD([nn.Parameter(torch.ones(1))], 0.1), optim.AdamW([torch.ones(1)], amsgrad=True)):
        with pytest.raises(ValueError, match="moments_dtype: expected Adam or AdamW without amsgrad"):
            make_stepper(other, ranges, "8bit", False, device_tiers(), alone)


@pytest.mark.parametrize("moments", ["8bit", "fp32"])
def test_a_state_dict_resumes_in_8_bits(moments: str) -> None:
    def prepared(dtype: str) -> tuple[Any, Any]:
        torch.manual_seed(3)
        model = nn.Linear(20, 30)
        config = {"stage": 3, "precision": {"moments_dtype": dtype}}
        return zero_ext.prepare(model, optim.AdamW(model.parameters(), lr=0.01), config)

    def step(model: Any, optimizer: Any, seed: int) -> None:
        model(torch.randn(4, 20, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    saved, optimizer = prepared(moments)
    step(saved, optimizer, 1)
    state = optimizer.state_dict()
    assert {entry.dtype for entry in state["shards"].values()} == {torch.float32}
    loaded, other = prepared("8bit")
    step(loaded, other, 7)
    other.load_state_dict(state)
    if moments == "8bit":
        assert_same(other.state_dict()["shards"], state["shards"])
        for seed in (2, 3):
            step(saved, optimizer, seed)
            step(loaded, other, seed)
        assert_same(other.state_dict()["shards"], optimizer.state_dict()["shards"])
        return
    for key, entry in other.state_dict()["shards"].items():
        assert (entry - state["shards"][key]).abs().max() <= 0.0071 * state["shards"][key].abs().max(), key


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


NUMEL = 40_001  # more than a chunk of the smallest ring
KINDS = {"exp_avg": True, "exp_avg_sq": False}


def filled(tier: str, path: Path, values: dict[str, torch.Tensor]) -> OptimizerStateStorage:
    """State in ``tier`` whose moments are ``values``, quantized."""
    fields = moment_fields("8bit")
    policy = OffloadConfig(
        optimizer=tier, nvme_paths=(str(path),) if tier == "nvme" else (), staging_buffer_bytes=1 << 20
    )
    tiers = TierManager(policy, AioConfig(), {}, {"": fields})
    tiers.reserve(tiers.stored_state_bytes(tier, NUMEL))
    state = tiers.allocate_optimizer_state(tier, NUMEL, None)
    for kind, field in fields.items():
        state.add(kind, field)
    for kind, signed in KINDS.items():
        quantized = ops.quantize_blockwise(values[kind], signed)
        state.write_kinds((f"{kind}_codes", f"{kind}_scales"), 0, NUMEL, quantized)
    return state


def stored(state: OptimizerStateStorage) -> list[torch.Tensor]:
    return [entries.clone() for entries in state.read_kinds(list(moment_fields("8bit")), 0, NUMEL)]


def random_values(generator: torch.Generator) -> dict[str, torch.Tensor]:
    values = torch.randn(NUMEL, generator=generator) * 10 ** (6 * torch.rand(NUMEL, generator=generator))
    return {"exp_avg": values, "exp_avg_sq": values.square()}


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_values_written_in_random_slices_become_the_blocks_they_were(tier: str, tmp_path: Path) -> None:
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    state = filled(tier, tmp_path, random_values(generator))
    wanted = stored(state)
    cuts = sorted({0, NUMEL, *draw.sample(range(1, NUMEL), 60), 256, 300, 310, 511, 1024})
    slices = list(itertools.pairwise(cuts))
    other = filled(tier, tmp_path, random_values(generator))
    assert not torch.equal(stored(other)[0], wanted[0])
    for kind, signed in KINDS.items():
        source, target = DequantizedState(state, kind, signed), DequantizedState(other, kind, signed)
        draw.shuffle(slices)
        for begin, end in slices:
            target.view(0, NUMEL).write(begin, source.view(begin, end).read(0, end - begin))
        assert not target._partial
    assert all(torch.equal(found, value) for found, value in zip(stored(other), wanted, strict=True))


def test_one_slice_is_stored_immediately_and_its_neighbors_stay(
    tmp_path: Path, generator: torch.Generator
) -> None:
    values = random_values(generator)
    state = filled("host", tmp_path, values)
    blocks = DequantizedState(state, "exp_avg", True)
    before = blocks.read(0, NUMEL)
    new = torch.randn(30, generator=generator) * 1e-3
    blocks.view(0, NUMEL).subrange(100, NUMEL).write(0, new)
    after = DequantizedState(state, "exp_avg", True).read(0, NUMEL)
    assert torch.equal(after[256:], before[256:])
    bound = 0.0071 * before[:256].abs().max()
    assert (after[100:130] - new).abs().max() <= bound
    unwritten = torch.ones(256, dtype=torch.bool)
    unwritten[100:130] = False
    assert (after[:256] - before[:256])[unwritten].abs().max() <= bound


def test_a_later_value_wins_over_an_earlier_one(tmp_path: Path) -> None:
    values = {kind: torch.zeros(NUMEL) for kind in KINDS}
    blocks = DequantizedState(filled("host", tmp_path, values), "exp_avg", True)
    blocks.write(10, torch.ones(5))
    blocks.write(0, torch.full((512,), 2.0))
    blocks.write(100, torch.full((5,), 2.0))
    assert torch.equal(blocks.read(0, 512), torch.full((512,), 2.0))


def test_a_negative_second_moment_is_refused(tmp_path: Path) -> None:
    values = {kind: torch.zeros(NUMEL) for kind in KINDS}
    blocks = DequantizedState(filled("host", tmp_path, values), "exp_avg_sq", False)
    with pytest.raises(RuntimeError, match="at least 0 with the unsigned code"):
        blocks.write(3, torch.tensor([1.0, -1.0]))
