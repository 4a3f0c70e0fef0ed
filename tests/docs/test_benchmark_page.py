"""The page of benchmark results is that of the results, and each of them has its origin there."""

from __future__ import annotations

import json
import re

from scripts.benchmark_page import page
from tests.docs.run_page import ROOT

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.benchmark_page docs/reference/benchmarks.md"


def test_every_result_has_its_tables_and_its_origin() -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = {section.partition("\n")[0].rpartition(": ")[2]: section for section in sections}
    names = {path.relative_to(RESULTS).with_suffix("").as_posix() for path in RESULTS.rglob("*.json")}
    assert found.keys() == {name for name in names if not name.startswith("gpu/")} and len(found) > 35
    for name, section in found.items():
        origin = json.loads((RESULTS / f"{name}.json").read_text())["environment"]
        assert f"- commit: `{origin['commit']}`\n- date: {origin['date'][:10]}\n" in section
        assert f"- command: `{origin['command']}`\n" in section and "- transport: " in section
        rows = re.findall(r"^\|.*$", (RESULTS / f"{name}.md").read_text(), re.MULTILINE)
        assert rows and rows == re.findall(r"^\|.*$", section, re.MULTILINE)
