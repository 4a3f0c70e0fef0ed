"""``zero-ext inspect`` and ``export``: what they print, what they write, how they end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.fake_source import MIXED, SMALL, FakeSource, dense, random_state
from tests.checkpoint.mutations import flip
from tests.cli.command import run
from zero_ext.checkpoint import save_state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_state(tmp_path / "run", FakeSource(MIXED, step))
    return tmp_path / "run"


def test_inspect_shows_the_table(saved: Path) -> None:
    output = run("inspect", str(saved))
    assert "step-000002: step 2, saved by 1 rank" in output
    assert "embed.weight = head.weight" in output
    assert "(700, 1013)" in output
    assert f"exp_avg: {4 * (700 * 1013 + 600 + 1 + 5 + 11 * 3):,} bytes" in output
    assert "every byte of 1 file verified" in output


def test_inspect_one_step_without_tensors(saved: Path) -> None:
    for arguments in ((str(saved), "--step", "1"), (str(saved / "step-000001"),)):
        output = run("inspect", *arguments, "--no-tensors")
        assert "step 1," in output
        assert "embed.weight" not in output


def test_inspect_reports_damage(saved: Path) -> None:
    path = saved / "step-000002" / "rank-00000.safetensors"
    flip(path, -1)
    assert "damaged" in run("inspect", str(saved), status=1)
    path.unlink()
    assert "error:" in run("inspect", str(saved), status=1)


def test_export(saved: Path, tmp_path: Path) -> None:
    output = run("export", str(saved), str(tmp_path / "hf"), "--dtype", "float32", "--step", "1")
    assert output.split() == [str(tmp_path / "hf" / "model.safetensors")]
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    full = random_state(MIXED, 1)["master", "embed.weight"]
    assert torch.equal(tensors["embed.weight"], full.reshape(700, 1013))


@pytest.mark.parametrize(("size", "files"), [("0.5kb", 2), ("100", 3), ("1MiB", 1), ("1.5 KB", 1)])
def test_export_splits(tmp_path: Path, size: str, files: int) -> None:
    save_state(tmp_path / "run", FakeSource(SMALL, 1))
    output = run("export", str(tmp_path / "run"), str(tmp_path / "hf"), "--max-shard-size", size)
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(shards) == files
    index = [tmp_path / "hf" / "model.safetensors.index.json"] if files > 1 else []
    assert output.split() == [str(path) for path in (*shards, *index)]


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (("--max-shard-size", "5 parsecs"), 2, "--max-shard-size: expected bytes, got '5 parsecs'"),
        (("--max-shard-size", "0"), 2, "max_shard_bytes: expected a whole number of bytes from 1, got 0"),
        (("--dtype", "float3"), 2, "got 'float3'"),
        (("--dtype", "int64"), 2, "dtype: expected float32, bfloat16, float16 or float64, got 'int64'"),
        (("--step", "7"), 1, "expected a checkpoint step-000007, got"),
    ],
)
def test_export_refuses(
    saved: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, named: str
) -> None:
    output = run("export", str(saved), str(tmp_path / "hf"), *arguments, status=status)
    assert f"error: {named}" in output or named in output
    assert not (tmp_path / "hf").exists()


def test_nothing_there(tmp_path: Path) -> None:
    assert "holds no checkpoint" in run("inspect", str(tmp_path / "absent"), status=1)


def test_names_do_not_command_the_terminal(tmp_path: Path) -> None:
    bad = "w\x1b]0;title\x07\x1b[2J\x9b\u202e\nevery byte verified"
    table = {
        bad: dense(3, aliases=("tied\x1b[31m",), kinds={"master": torch.float32, "m\x1b[1m": torch.float32})
    }
    save_state(tmp_path / "run", FakeSource(table, 1))
    output = run("inspect", str(tmp_path / "run"))
    assert not set(output) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert r"w\x1b]0;title\x07" in output and r"tied\x1b[31m" in output and r"m\x1b[1m: 12 bytes" in output
    assert "\nevery byte verified" not in output
    output = run("inspect", str(tmp_path / "none\x1b[2J"), status=1)
    assert r"none\x1b[2J: it holds no checkpoint" in output and "\x1b" not in output
