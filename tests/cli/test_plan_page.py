"""The page of ``zero-ext plan --html``: complete by itself, with the figures of the plan, safe to open."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run, run_json

FITS = ("llama-7b", "--gpus", "8")
NOWHERE = ("175b", "--machine", "dgx2-v100", "--nvme", "0")
# "llama-7b" takes at most 1.27 times the memory of a GPU, so no bar of it is cut.
BAR_AREA = 960 - 190 - 80


class Page(HTMLParser):
    """The tags of a page with their attributes and texts, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "br"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.setdefault(self._open[-1], []).append(data.strip())

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(folder: Path, *arguments: str, status: int = 0) -> str:
    path = folder / "report.html"
    run("plan", *arguments, "--html", str(path), status=status)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("arguments", "status"), [(FITS, 0), (NOWHERE, 1)], ids=["fits", "nowhere"])
def test_the_page_loads_nothing(arguments: tuple[str, ...], status: int, tmp_path: Path) -> None:
    text = page_of(tmp_path, *arguments, status=status)
    assert re.findall(r"//|@import|url\(|\b(?:src|href|srcset|action)\s*=", text) == []
    policy = next(tag["content"] for tag in Page(text).all("meta") if "http-equiv" in tag)
    assert policy.startswith("default-src 'none'; ")
    assert {tag for tag, _ in Page(text).tags}.isdisjoint(
        {"link", "img", "iframe", "object", "embed", "base"}
    )


def test_the_answer_and_its_reasons_come_first(tmp_path: Path) -> None:
    text = page_of(tmp_path, *FITS)
    page, found = Page(text), run_json("plan", *FITS, "--json")["recommendation"]
    assert page.texts["h1"] == [f"Recommended: {found['placement']} for llama-7b on 8 GPUs of dgx-a100"]
    assert page.texts["li"] == found["reasons"]
    assert text.index("<h1>") < text.index("<li>") < text.index("<table>") < text.index("<svg")
    nowhere = page_of(tmp_path, *NOWHERE, status=1)
    why = run_json("plan", *NOWHERE, "--json", status=1)["why_nothing_fits"]
    assert Page(nowhere).texts["h1"] == ["Nothing fits: gpt-175b on 8 GPUs of dgx2-v100"]
    assert why in Page(nowhere).texts["p"]


def test_columns_are_sorted_by_the_figures_of_the_plan(tmp_path: Path) -> None:
    page = Page(page_of(tmp_path, *FITS))
    headings = page.texts["button"]
    keys = [tag["data-key"] for tag in page.all("td")]
    columns = {name: keys[number :: len(headings)] for number, name in enumerate(headings)}
    found = run_json("plan", *FITS, "--json")["placements"]
    assert len(columns["placement"]) == len(found) == 12
    for heading, tier in (("GPU", "device"), ("host", "host"), ("NVMe", "nvme")):
        totals = sorted(sum(row["bytes"][tier].values()) for row in found)
        assert sorted(map(int, columns[heading])) == totals
    seconds = sorted(round(row["step_seconds"], 6) for row in found)
    assert sorted(map(float, columns["s/step"])) == pytest.approx(seconds, abs=1e-6)
    assert sum(float(key) > 0 for key in columns["fits"]) == sum(not row["fits"] for row in found)


def test_bars_are_as_long_as_their_bytes_and_say_them(tmp_path: Path) -> None:
    text = page_of(tmp_path, *FITS)
    found = run_json("plan", *FITS, "--json")
    capacity = found["machine"]["device_bytes"]
    chart = text.split("<svg")[1].split("</svg>")[0]
    bars = re.findall(r'<rect x="\S+" y="\S+" width="(\S+)" [^>]*><title>(.*?): (\w+) .*?</title>', chart)
    expected = [
        nbytes for row in found["placements"] for kind, nbytes in row["bytes"]["device"].items() if nbytes
    ]
    assert len(bars) == len(expected)
    widths = sorted(float(width) for width, _, _ in bars)
    assert widths == pytest.approx(
        sorted(nbytes / (1.6 * capacity) * BAR_AREA for nbytes in expected), abs=0.06
    )
    parsed = Page(text)
    shapes = len(parsed.all("rect")) + len(parsed.all("line"))
    assert len(parsed.all("svg")) == 3 and len(parsed.texts["title"]) == shapes + 1


def test_names_of_models_do_not_become_markup(tmp_path: Path) -> None:
    model = tmp_path / '<script>alert("1")<'
    model.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100}
    config = {"model_type": "llama", "intermediate_size": 128, **sizes}
    (model / "config.json").write_text(json.dumps(config))
    text = page_of(tmp_path, str(model), "--gpus", "1")
    assert "&lt;script&gt;alert(&quot;1&quot;)" in text and "<script>alert" not in text
    assert len(Page(text).all("script")) == 1


def test_a_search_for_layouts_has_no_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    text = run("plan", "llama-7b", "--3d", "best", "--html", str(path), status=2)
    assert "--html" in text and not path.exists()
