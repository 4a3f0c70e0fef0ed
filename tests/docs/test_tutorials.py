"""Tutorials run as written, command by command, and print what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.docs.run_page import ROOT, different_lines, follow


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs" / "tutorials").glob("*.md")))
def test_a_tutorial_runs(page: str, tmp_path: Path) -> None:
    follow(f"tutorials/{page}", tmp_path)
    assert len((ROOT / "docs" / "tutorials" / page).read_text().splitlines()) < 150


def test_lines_for_other_machines_are_arguments_of_the_launcher() -> None:
    """A page marks what cannot run here by ``sh``."""
    lines = [
        line.split()
        for page in (ROOT / "docs" / "tutorials").glob("*.md")
        for text in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        for line in text.splitlines()
    ]
    assert len(lines) >= 2
    for line in lines:
        assert line[:2] == ["zero-ext", "run"]
        parsed = get_args_parser().parse_args(line[2:])
        assert parsed.training_script == "train.py" and int(parsed.nproc_per_node) == 8


def test_output_differs_by_rounding_alone() -> None:
    shown = "epoch 1: loss 2.367\n140,864 bytes\n"
    assert not different_lines("epoch 1: loss 2.368\n140,900 bytes\n", shown)
    assert different_lines("epoch 1: loss 3.367\n140,864 bytes\n", shown)
    assert different_lines("epoch 1: error 2.367\n140,864 bytes\n", shown)
    assert different_lines("epoch 1: loss 2.367\n", shown)
    assert not different_lines(f"a warning\n{shown}", shown)
    assert different_lines(f"{shown}another line\n", shown)
