"""The messages that the page on errors quotes are messages of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def texts_of(path: Path) -> list[str]:
    """Every text in a file, fragments of one f-string joined."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append(
                "".join(
                    literal.value if isinstance(literal, ast.Constant) else "…" for literal in node.values
                )
            )
    return found


PAGES = {"troubleshooting": 20, "gpu": 8, "activation": 8, "transformers": 3}
TABLE = re.compile(r"^\| (?:in the message|message|error) \|.*\n\| -.*\n((?:\|.*\n)+)", re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_quoted_messages_exist(name: str) -> None:
    """Three dots stand for what differs from case to case."""
    page = (ROOT / "docs" / "how_to" / f"{name}.md").read_text()
    rows = "".join(TABLE.findall(page))
    cells = re.findall(r"^\| (.*?`.*?) \|", rows, re.MULTILINE)
    assert len(cells) >= PAGES[name] and len(cells) == rows.count("\n")
    own = [cell for cell in cells if "ccelerate" not in cell]  # messages of another library
    quoted = [text for cell in own for text in re.findall("`([^`]+)`", cell)]
    texts = "\n".join(text for path in (ROOT / "zero_ext").rglob("*.py") for text in texts_of(path))
    fragments = [fragment for each in quoted for fragment in re.split(r"\.\.\.|…", each) if len(fragment) > 3]
    assert [fragment for fragment in fragments if fragment not in texts] == []
