"""Checkpoints of 8-bit moments: bit-exact where blocks are cut the same, else bounded; from and to floats."""

from __future__ import annotations

import json
import secrets
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.pool import RankPool
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from zero_ext.checkpoint.inspection import inspect_checkpoint
from zero_ext.optim.moments import moment_fields
from zero_ext.zero import engine_of
from zero_ext.zero.api.engine_lookup import checkpoint_sources

MODULE = "tests.checkpoint.test_eight_bit_moments"
SEED = secrets.randbits(20)


class Training:
    """A prepared model with moments of ``moments`` in ``tier``."""

    def __init__(self, world: World, folder: str, stage: int, tier: str, moments: str) -> None:
        torch.manual_seed(SEED)
        model = TinyModel()
        paths = {"nvme_paths": [folder]} if tier == "nvme" else {}
        config = {
            "stage": stage,
            "timeout_seconds": 120.0,
            "precision": {"dtype": "bf16", "moments_dtype": moments},
            "units": {"bucket_elements": 700},
            "offload": {"optimizer": tier, "staging_buffer_bytes": 1 << 20, **paths},
        }
        self.world = world
        self.model, self.optimizer = zero_ext.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), config, process_group=world.group
        )

    def run(self, first: int, steps: int) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            loss = language_loss(self.model, language_batch(SEED, step, 0, self.world.rank))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def blocks(self) -> list[torch.Tensor]:
        """Codes and scales of this rank."""
        kinds = list(moment_fields("8bit"))
        return [
            entries.clone()
            for master in engine_of(self.model).masters
            for entries in master.state.read_kinds(kinds, 0, master.state.numel)
        ]

    def moments(self) -> dict[str, torch.Tensor]:
        """Full moments by kind and name, from all ranks' slices."""
        mine = [
            (f"{owned.kind} {owned.name}", owned.start, values.tolist())
            for owned in checkpoint_sources(engine_of(self.model)).own.save_slices()
            if owned.kind != "master"
            for values in [owned.tensor if isinstance(owned.tensor, torch.Tensor) else read(owned.tensor)]
        ]
        slices_by_key: dict[str, list[tuple[int, list[float]]]] = {}
        for own in self.world.everyone(mine):
            for key, start, values in own:
                slices_by_key.setdefault(key, []).append((start, values))
        return {
            key: torch.tensor([value for _, values in sorted(slices) for value in values])
            for key, slices in slices_by_key.items()
        }


def read(values: Any) -> torch.Tensor:
    found: torch.Tensor = values.read(0, values.numel)
    return found


def save_on_rank(world: World, directory: str, **setting: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        training = Training(world, folder, **setting)
        training.run(0, 3)
        zero_ext.save_checkpoint(directory, training.model)
        found = {"moments": training.moments()}
        if setting["moments"] == "8bit":
            found["blocks"] = world.everyone(training.blocks())
        return {**found, "losses": world.everyone(training.run(3, 3))}


def load_on_rank(world: World, directory: str, **setting: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        training = Training(world, folder, **setting)
        training.run(7, 1)  # its own state, which must go
        zero_ext.load_checkpoint(directory, training.model)
        found = {"moments": training.moments()}
        if setting["moments"] == "8bit":
            found["blocks"] = world.everyone(training.blocks())
        return {**found, "losses": world.everyone(training.run(3, 3))}


def check_bounded(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Off by at most the stated part of a largest magnitude, which is at most that of the whole kind."""
    assert found.keys() == wanted.keys()
    assert any(not torch.equal(found[key], values) for key, values in wanted.items())
    for bound, kind in ((0.0071, "exp_avg "), (0.0036, "exp_avg_sq ")):
        largest = max(values.abs().max() for key, values in wanted.items() if key.startswith(kind))
        for key, values in wanted.items():
            if key.startswith(kind):
                assert (found[key] - values).abs().max() <= bound * largest, key


@pytest.mark.parametrize(
    ("world_size", "stage", "saved", "loaded"),
    [(1, 2, "nvme", "device"), (2, 3, "host", "nvme"), (2, 3, "nvme", "nvme"), (2, 0, "device", "device")],
)
def test_blocks_cut_the_same_come_back_bit_for_bit(
    rank_pool: RankPool, tmp_path: Path, world_size: int, stage: int, saved: str, loaded: str
) -> None:
    common = {"directory": str(tmp_path), "stage": stage, "moments": "8bit"}
    before = rank_pool.run(world_size, f"{MODULE}:save_on_rank", {**common, "tier": saved})[0]
    after = rank_pool.run(world_size, f"{MODULE}:load_on_rank", {**common, "tier": loaded})[0]
    for found, wanted in zip(after["blocks"], before["blocks"], strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    assert after["losses"] == before["losses"]
    manifest = json.loads(next(tmp_path.glob("step-*/manifest.json")).read_text())
    assert {owned["dtype"] for owned in manifest["slices"]} == {"float32"}
    report = inspect_checkpoint(tmp_path)
    assert report.damage == () and report.bytes_by_kind["exp_avg"] == report.bytes_by_kind["master"]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, 3, "host", "8bit"), (3, 2, "nvme", "8bit")),
        ((1, 3, "nvme", "8bit"), (2, 1, "device", "8bit")),
        ((2, 3, "nvme", "fp32"), (2, 3, "nvme", "8bit")),
        ((1, 3, "device", "bf16"), (1, 3, "host", "8bit")),
    ],
)
def test_other_blocks_are_within_the_bound(
    rank_pool: RankPool, tmp_path: Path, saved: tuple[Any, ...], loaded: tuple[Any, ...]
) -> None:
    before, after = (
        rank_pool.run(
            setting[0],
            f"{MODULE}:{body}",
            {"directory": str(tmp_path), **dict(zip(("stage", "tier", "moments"), setting[1:], strict=True))},
        )[0]
        for setting, body in ((saved, "save_on_rank"), (loaded, "load_on_rank"))
    )
    check_bounded(after["moments"], before["moments"])


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_float_moments_load_eight_bit_moments(rank_pool: RankPool, tmp_path: Path, moments: str) -> None:
    setting = {"directory": str(tmp_path), "stage": 3, "tier": "nvme"}
    before = rank_pool.run(2, f"{MODULE}:save_on_rank", {**setting, "moments": "8bit"})[0]
    after = rank_pool.run(1, f"{MODULE}:load_on_rank", {**setting, "moments": moments})[0]
    for key, values in before["moments"].items():
        wanted = values.bfloat16().float() if moments == "bf16" else values
        assert torch.equal(after["moments"][key], wanted), key
