"""The pages of the demonstrations: complete by themselves, with charts that say their values."""

from __future__ import annotations

import base64
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib import pyplot

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SVG = "{http://www.w3.org/2000/svg}"
PNG = b"\x89PNG and the rest"


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLES))
    yield {name: importlib.import_module(f"demo.{name}") for name in ("charts", "page")}
    sys.path.remove(str(EXAMPLES))


def test_a_page_loads_nothing_and_its_tables_sort(demo: Any, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(PNG)
    lines = [
        "# Title & more",
        "",
        "| run | MB |",
        "|---|---:|",
        "| <b> | 10 |",
        "",
        "![of it](photo.png)",
        "",
    ]
    page = demo["page"].write_page(tmp_path, lines)
    text = page.read_text()
    assert page == tmp_path / "report.html" and "<title>Title &amp; more</title>" in text
    assert (tmp_path / "report.md").read_text() == "\n".join(lines)
    assert re.findall(r'<th scope="col"[^>]*><button type="button">(.*?)</button></th>', text) == [
        "run",
        "MB",
    ]
    sources = re.findall(r'\b(?:src|href)="([^"]*)"', text)
    assert sources == ["data:image/png;base64," + base64.b64encode(PNG).decode()]


def test_points_and_bars_say_their_values_where_they_are(demo: Any, tmp_path: Path) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 4))
    left.plot([1, 2, 4], [0.5, 0.25, 0.125], label="loss")
    left.axhline(0.3, label="bar")
    left.set_xlabel("step")
    right.bar([0, 1], [3.0, 6.0], bottom=[0.0, 1.0])
    right.set_ylabel("MB")
    demo["charts"].save_chart(figure, tmp_path / "chart.png")
    text = (tmp_path / "chart.svg").read_text()
    assert '<use xlink:href="#' in text and "ns1:" not in text
    root = ElementTree.fromstring(text)
    said = [
        (shape, title.text)
        for shape in root
        for title in shape.findall(f"{SVG}title")
        if shape.get("fill") == "transparent"
    ]
    assert [text for _, text in said] == [
        "loss: 0.5 at step 1",
        "loss: 0.25 at step 2",
        "loss: 0.125 at step 4",
        "MB: 3",
        "MB: 6",
    ]
    first, second, _, low, high = (shape for shape, _ in said)
    drawn = next(path for path in root.iter(f"{SVG}path") if "#1f77b4" in (path.get("style") or ""))
    corners = [tuple(map(float, each)) for each in re.findall(r"[ML] (\S+) (\S+)", drawn.get("d") or "")]
    for circle, corner in zip((first, second), corners, strict=False):
        center = float(circle.get("cx", "nan")), float(circle.get("cy", "nan"))
        assert center == pytest.approx(corner, abs=0.06)
    assert float(high.get("height", "0")) == pytest.approx(2 * float(low.get("height", "0")), abs=0.2)
    page = demo["page"].write_page(tmp_path, ["# Charts", "", "![chart](chart.png)", ""]).read_text()
    assert "<title>loss: 0.25 at step 2</title>" in page and "data:image" not in page
    pyplot.close(figure)


def test_long_lines_say_some_of_their_values(demo: Any, tmp_path: Path) -> None:
    figure, axes = pyplot.subplots()
    axes.plot(range(1001), range(1001))
    demo["charts"].save_chart(figure, tmp_path / "chart.png")
    titles = re.findall("<title>.*?</title>", (tmp_path / "chart.svg").read_text())
    assert 150 < len(titles) <= 200
    pyplot.close(figure)
