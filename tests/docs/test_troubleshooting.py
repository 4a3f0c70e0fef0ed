"""The messages that the page on errors quotes are messages of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def texts_of(path: Path) -> list[str]:
    """Every text in a file, parts of one f-string joined."""
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


def test_quoted_messages_exist() -> None:
    page = (ROOT / "docs" / "how_to" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 20
    texts = "\n".join(text for path in (ROOT / "zero_ext").rglob("*.py") for text in texts_of(path))
    assert [each for each in quoted if each not in texts] == []
