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
    memory_figures,
    shown_in,
    speed_figures,
    step_comparisons,
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


def test_the_first_page_names_what_the_lines_of_a_plot_are() -> None:
    (step,) = {frozenset(each["ratio"]) for each in step_comparisons()}
    shown = "lines are 95% intervals" if "low" in step else "lines are ranges"
    assert shown in " ".join((ROOT / "README.md").read_text().split())


def test_the_tables_of_figures_are_those_of_the_plots() -> None:
    text = (ROOT / "docs" / "reference" / "figures.md").read_text()
    ratios = {title: median for title, median, _, _ in speed_figures()}
    rows = re.findall(r"^\| (stage \d) \| (\w+)[^|]* \| [^|]+ \| [^|]+ \| ([\d.]+) \|$", text, re.MULTILINE)
    shown = {f"{stage} / {peer}": float(ratio) for stage, peer, ratio in rows}
    assert shown == ratios
    peaks = {(stage, title): round(value, 1) for stage, title, value in memory_figures()}
    for stage, title in peaks:
        (row,) = re.findall(rf"^\| {stage[-1]} \| .*$", text, re.MULTILINE)
        own, peers = row.split(" | ")[-2:]
        found = own if title == "zero_ext" else peers[peers.index(title) :].split(",")[0]
        assert float(re.findall(r"[\d.]+(?= \||$)", found.strip())[-1]) == peaks[stage, title], (stage, title)


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
