"""State in 8-bit blocks as float32 values: the same blocks come back, whatever the slices."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from zero_ext import ops
from zero_ext.config import AioConfig, OffloadConfig
from zero_ext.offload import OptimizerStateStorage, TierManager
from zero_ext.optim.steppers.dequantized_state import DequantizedState
from zero_ext.optim.steppers.moments import moment_fields

NUMEL = 40_001  # more than a chunk of the smallest ring
KINDS = {"exp_avg": True, "exp_avg_sq": False}


def filled(tier: str, path: Path, values: dict[str, torch.Tensor]) -> OptimizerStateStorage:
    """State in ``tier`` whose moments are ``values``, quantized."""
    fields = moment_fields("8bit")
    policy = OffloadConfig(
        optimizer=tier, nvme_paths=(str(path),) if tier == "nvme" else (), staging_buffer_bytes=1 << 20
    )
    tiers = TierManager(policy, AioConfig(), {}, fields)
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
