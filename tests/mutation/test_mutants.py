"""Mutants of small sources: where they are, what they change, and what is left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.mutation.mutants import Mutant, mutants_of

PYTHON = '''
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 3


def area(width: int = 2, *, high: bool = True) -> float:
    """Return 1 + 1."""
    if width < 0 and not high:
        raise ValueError(f"expected {width + 1}")
    print("ä", width - 1)
    return width * 3
'''

CPP = """
// a < b
static_assert(1 + 1 == 2);
template <class T, int N = 1 + 1>
int f(int a, int b) {
  const char* text = "a + b";  /* a * b
     a / b */
  return a < b && b != 0 ? a + b : a << 2;
}
"""


def _lines(source: str, path: Path, root: Path) -> list[str]:
    path.write_text(source)
    mutants = mutants_of(path, root)
    for one in mutants:
        assert one.applied(source) != source
        if path.suffix == ".py":
            ast.parse(one.applied(source))
    return [one.described(source).split(" => ")[1] for one in mutants]


def test_python_changes_what_runs_and_no_annotation_message_or_typing_block(tmp_path: Path) -> None:
    assert sorted(_lines(PYTHON, tmp_path / "area.py", tmp_path)) == sorted(
        [
            "def area(width: int = 3, *, high: bool = True) -> float:",
            "def area(width: int = 2, *, high: bool = False) -> float:",
            "if width <= 0 and not high:",
            "if width < 1 and not high:",
            "if width < 0 or not high:",
            "if width < 0 and high:",
            "if not (width < 0 and not high):",
            "pass",
            'print("ä", width + 1)',
            'print("ä", width - 2)',
            "return width // 3",
            "return width * 4",
        ]
    )


def test_cpp_changes_operators_in_code_only(tmp_path: Path) -> None:
    assert _lines(CPP, tmp_path / "f.cpp", tmp_path) == [
        "return a <= b && b != 0 ? a + b : a << 2;",
        "return a < b || b != 0 ? a + b : a << 2;",
        "return a < b && b == 0 ? a + b : a << 2;",
        "return a < b && b != 0 ? a - b : a << 2;",
        "return a < b && b != 0 ? a + b : a >> 2;",
    ]


def test_a_source_that_changed_since_the_draw_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.py: expected '<' at 2"):
        Mutant("a.py", 2, "<", "<=").applied("a > b")
