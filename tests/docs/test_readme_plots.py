"""The README's plots and the tables of docs/reference/figures.md show the figures of benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.harness.statistics import Ratio
from scripts.plot_readme import (
    FOLDER,
    PLOTS,
    THEMES,
    shown_in,
    speed_figures,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_shows_the_results_of_today(name: str, theme: str) -> None:
    _, _, figures = PLOTS[name]
    shown = shown_in(FOLDER / f"{name}_{theme}.svg")
    assert shown == figures(), "redraw it by `python -m scripts.plot_readme`"
    assert f"docs/images/{name}_{theme}.svg" in (ROOT / "README.md").read_text()


def test_the_first_page_is_short_and_begins_with_a_plot() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert any("<picture>" in line for line in lines[:12])


def test_the_first_page_has_the_ratios_of_the_plot() -> None:
    """Those of stage 3 stand in a sentence."""
    text = " ".join((ROOT / "README.md").read_text().split())
    ratios = {title: median for title, median, _, _ in speed_figures()}
    assert f"{ratios['stage 3 / FSDP2']:.2f} × as long as FSDP2's" in text
    assert f"{ratios['stage 3 / DeepSpeed']:.2f} × as long as DeepSpeed's" in text


def test_ratios_of_figures_are_those_of_the_result() -> None:
    """Direct and through gloo, with their intervals."""
    text = (ROOT / "docs" / "reference" / "figures.md").read_text()
    compared = json.loads((ROOT / "benchmarks" / "results" / "step-34m.json").read_text())["comparisons"]
    ratios = {(row["subject"], row["peer"]): Ratio(**row["ratio"]).text() for row in compared}
    peers = {"FSDP2": "fsdp2", "FSDP2 without reshard": "fsdp2-keep", "DDP with fp32 masters": "ddp"}
    peers |= {f"DeepSpeed {stage}": f"deepspeed{stage}" for stage in (1, 2, 3)}
    pattern = r"^\| stage (\d) \| ([^|]+) \| ([\d.]+ \([^|]+\)) \| ([\d.]+ \([^|]+\)) \|"
    rows = re.findall(pattern, text, re.MULTILINE)
    assert len(rows) == 6
    for stage, peer, direct, gloo in rows:
        assert direct == ratios[f"stage{stage}", peers[peer]], (stage, peer)
        assert gloo == ratios[f"stage{stage}-gloo", peers[peer]], (stage, peer)
    (alone,) = re.findall(r"^\| stage 3, one rank \|[^|]+\| ([\d.]+ \([^|]+\)) \|", text, re.MULTILINE)
    assert alone == ratios["stage3@1", "plain@1"]
