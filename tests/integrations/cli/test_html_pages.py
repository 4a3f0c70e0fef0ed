"""The HTML pages that the program and the demonstrations write, in a browser."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.cli.command import run, run_json
from zero_ext.config.plot_colors import KINDS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PLAN = ("llama-7b", "--gpus", "8")
BLUE = tuple(bytes.fromhex(KINDS["params"][1:]))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # In a container there is no user namespace for Chromium's sandbox.
        yield playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "report.html"
    run("plan", *PLAN, "--html", str(path))
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("demo")
    sys.path.insert(0, str(EXAMPLES))
    figure, axes = pyplot.subplots(figsize=(8, 4.8))
    axes.plot(range(1, 11), [1 / step for step in range(1, 11)], color=KINDS["params"], linewidth=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    importlib.import_module("demo.charts").save_chart(figure, folder / "loss.png")
    pyplot.close(figure)
    table = ["| run | MB |", "|---|---:|", "| a | 9 |", "| b | 10 |", "| c | 8 |"]
    yield importlib.import_module("demo.page").write_page(
        folder, ["# Report", "", *table, "", "![loss](loss.png)", ""]
    )
    sys.path.remove(str(EXAMPLES))


def opened(browser: Browser, path: Path, width: int = 1280, scheme: str = "light") -> tuple[Page, list[str]]:
    """The page, and what was wrong with it or loaded besides it."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(path.as_uri())
    return page, said


def column(page: Page, number: int) -> list[str]:
    return page.locator(f"tbody tr td:nth-child({number})").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 640])
@pytest.mark.parametrize("name", ["plan", "report"])
def test_a_page_shows_its_charts_and_loads_nothing_else(
    browser: Browser, request: pytest.FixtureRequest, name: str, width: int, scheme: str
) -> None:
    path: Path = request.getfixturevalue(name)
    page, said = opened(browser, path, width, scheme)
    assert said == [path.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    pixels = np.asarray(Image.open(BytesIO(page.screenshot(full_page=True))).convert("RGB"))
    assert (pixels == BLUE).all(axis=2).sum() > 500
    assert pixels[0, 0].mean() > 200 if scheme == "light" else pixels[0, 0].mean() < 60
    page.close()


def test_a_click_on_a_heading_sorts_the_plan(browser: Browser, plan: Path) -> None:
    page, said = opened(browser, plan)
    seconds = sorted(row["step_seconds"] for row in run_json("plan", *PLAN, "--json")["placements"])
    heading = page.get_by_role("button", name="s/step")
    for order, expected in (("ascending", seconds), ("descending", seconds[::-1])):
        heading.click()
        keys = page.locator("tbody tr td:nth-child(6)").evaluate_all("cells => cells.map(c => c.dataset.key)")
        assert [float(key) for key in keys] == pytest.approx(expected, abs=1e-6)
        assert page.locator(f"th[aria-sort={order}]").all_inner_texts() == ["s/step"]
    assert len(said) == 1
    page.close()


def test_numbers_of_a_report_sort_as_numbers(browser: Browser, report: Path) -> None:
    page, _ = opened(browser, report)
    page.get_by_role("button", name="MB").click()
    assert column(page, 2) == ["8", "9", "10"] and column(page, 1) == ["c", "a", "b"]
    page.close()


def test_markers_and_ticks_of_a_chart_are_drawn(browser: Browser, report: Path) -> None:
    page, _ = opened(browser, report)
    script = "uses => uses.map(use => use.getBBox().width + use.getBBox().height)"
    sizes = page.locator("svg use").evaluate_all(script)
    assert len(sizes) >= 10 and min(sizes) > 0
    page.close()


def test_the_pointer_finds_the_value_of_a_point(browser: Browser, report: Path) -> None:
    page, _ = opened(browser, report)
    circle = page.locator("circle", has=page.locator("title", has_text="loss: 0.5 at step 2")).bounding_box()
    assert circle is not None
    middle = [circle["x"] + circle["width"] / 2, circle["y"] + circle["height"] / 2]
    script = "([x, y]) => document.elementFromPoint(x, y).querySelector('title').textContent"
    assert page.evaluate(script, middle) == "loss: 0.5 at step 2"
    page.close()
