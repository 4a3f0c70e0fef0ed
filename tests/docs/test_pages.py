"""All pages: where they are, how they are reached, and how they read."""

from __future__ import annotations

import re

import pytest

from tests.docs.run_page import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Written by programs, which copy texts of the library.
GENERATED = {
    "contributing/cuda_kernels.md",
    "reference/benchmarks.md",
    "reference/configuration.md",
    "reference/deepspeed_api.md",
}
# In the prose of all pages together.
SEMICOLONS = 10


def semicolons(text: str) -> int:
    """Count the semicolons in prose: outside code, tables and HTML entities."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`|&\w+;", "", text)
    return text.count(";")


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == [path.relative_to(DOCS).as_posix() for path in PAGES]


def test_every_page_is_of_one_kind() -> None:
    kinds = {path.parent.relative_to(DOCS).as_posix() for path in PAGES if path.name != "index.md"}
    assert kinds == {"tutorials", "how_to", "reference", "explanation", "contributing"}


def test_the_index_leads_to_every_page() -> None:
    text = (DOCS / "index.md").read_text()
    others = [path.relative_to(DOCS).as_posix() for path in PAGES if path.name != "index.md"]
    assert [name for name in others if f"]({name}" not in text] == []


def test_prose_has_few_semicolons() -> None:
    counts = {
        path.relative_to(ROOT).as_posix(): semicolons(path.read_text())
        for path in [ROOT / "README.md", *PAGES]
        if not path.is_relative_to(DOCS) or path.relative_to(DOCS).as_posix() not in GENERATED
    }
    assert sum(counts.values()) <= SEMICOLONS, {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One; two.\n\nThree; four.", 2),
        ("```bash\na; b\n```\n| a; b |\n`a; b` &nbsp;", 0),
        ("1. Do:\n\n    ```\n    a; b\n    ```\n\n   Then; done.", 1),
    ],
)
def test_semicolons_are_counted_in_prose_alone(text: str, count: int) -> None:
    assert semicolons(text) == count
