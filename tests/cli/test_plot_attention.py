"""``zero-ext attention plot``: the image, the figures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.command import run
from zero_ext.attention import BlockLayout, build_layout
from zero_ext.attention.plot_layout import density_cells
from zero_ext.config import SparseAttentionConfig


@pytest.mark.parametrize(
    "arguments",
    [
        ("fixed", "--causal"),
        ("bigbird", "--heads", "3", "--set", "different_layout_per_head=true", "--set", "seed=5"),
        ("variable", "--set", "local_window_blocks=[2,4]", "--set", "attention=unidirectional"),
        ("bslongformer", "--seq", "300000"),
    ],
)
def test_plots(arguments: tuple[str, ...], tmp_path: Path) -> None:
    image = tmp_path / "layout.png"
    text = run("attention", "plot", *arguments, "--block", "32", "--plot", str(image))
    assert "blocks of 32 × 32" in text
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size > 8_000


def test_the_section_of_a_configuration(tmp_path: Path) -> None:
    config, image = tmp_path / "config.json", tmp_path / "layout.svg"
    config.write_text(json.dumps({"sparse_attention": {"mode": "fixed", "num_local_blocks": 8}}))
    where = ("--config", str(config), "--seq", "1000", "--plot", str(image))
    layout = build_layout(SparseAttentionConfig(mode="fixed", num_local_blocks=8), 1, 1000)
    assert f"{layout.blocks:,} blocks of 16 × 16 in 1 layout(s)" in run("attention", "plot", *where)
    assert "blocks of 64 × 64" in run("attention", "plot", *where, "--block", "64")
    assert "<svg" in image.read_text()


def test_mistakes_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    out = ("--plot", str(tmp_path / "a.png"))
    for arguments, words in (
        (("strided", *out), "got 'strided'"),
        (("fixed", "--block", "48", *out), "block: expected 16, 32, 64 or 128, got 48"),
        (("fixed", "--set", "num_local_blocks", *out), "--set: expected key=value"),
        (("fixed", "--set", "num_random_blocks=2", *out), "it has no effect in mode 'fixed'"),
        (("fixed", "--plot", str(tmp_path / "a.txt")), "a file ending in .png"),
        (("fixed", "--plot", str(tmp_path / "none" / "a.png")), "in a folder that exists"),
        (("--config", str(empty), *out), "expected a sparse_attention section"),
        (out, "MODE: expected a mode"),
    ):
        assert words in run("attention", "plot", *arguments, status=2)
    assert not (tmp_path / "a.png").exists()


def test_cells_are_fractions_of_blocks() -> None:
    mask = torch.rand(2, 1300, 700) < 0.2
    layout = BlockLayout.from_block_mask(mask, 16)
    cells = density_cells(layout, 1)
    step = 6
    assert cells.shape == (217, 117)
    for row, column in ((0, 0), (100, 50), (216, 116)):
        block = mask[1, row * step : (row + 1) * step, column * step : (column + 1) * step]
        assert cells[row, column] == pytest.approx(float(block.float().mean()))
    small = BlockLayout.from_block_mask(mask[:, :9, :7], 16)
    assert np.array_equal(density_cells(small, 0), mask[0, :9, :7].numpy())
