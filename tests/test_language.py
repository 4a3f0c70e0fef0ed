"""Prose, docstrings, errors and help use the field's words and plain sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.error_templates import ROOT

_UNIT = "bytes|[kKMGT]i?B|seconds|ms|elements|times|tokens|messages|calls|units|steps|once|twice|FLOPs?"
_RATE = (
    "rank|step|node|second|unit|token|layer|block|GPU|process|pass|day|minute|call|tensor|element|parameter"
)
# What a reader stumbles over, and what to write.
PATTERNS = {
    pattern: re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)
    for pattern in (
        "at once",  # immediately, simultaneously
        "beside",  # alongside
        "of which|whose",  # a second sentence
        r"(?:lies|lie|lay) (?:in|on|at|there|here|whole)",  # is stored in
        r"born|birth\w*",  # initialized
        "tells?|told|hears?|heard",  # publishes, reads, reports: software does not talk
        "knows?",  # has, reads, supports
        "rooms?",  # buffer, space
        "landings?",  # staging buffer
        "ledgers?|forecasts?",  # memory breakdown, OOM report
        "pictures?",  # plot
        "residency",  # prefetcher
        "postponed",  # deferred
        "wanted",  # expected
        "pieces?",  # slice, chunk
        "homes?(?! (?:directory|folder))",  # storage
        "let(?:s|ting)? go",  # release
        "(?:take|takes|took|taken|taking) back",  # roll back, release
        "(?:give|gives|gave|given|giving) up",  # abort
        "as ever|all the same",
        rf"(?:{_UNIT}) an? (?:{_RATE})",  # per
    )
}
QUESTION = re.compile(r"(?:What|Where|Which|How|Whether|Who|When)\b")
# Where a word has its plain meaning, at most 20: part of a path, and the text around the word.
ALLOWED: dict[tuple[str, str], str] = {
    ("README.md", "picture>"): "an element of HTML",
}

# Releases are described in the words that their users had, results in those of the day of their measurement.
RECORDS = ROOT / "docs" / "reference" / "benchmarks.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
    *sorted({*(ROOT / "docs").rglob("*.md")} - {RECORDS}),
    *sorted((ROOT / "zero_ext").rglob("*.md")),
    *sorted((ROOT / "csrc").rglob("*.md")),
]
PACKAGES = sorted(path.parent for path in (ROOT / "zero_ext").glob("*/__init__.py"))
FILES = {
    "pages": PAGES,
    "zero_ext": sorted((ROOT / "zero_ext").glob("*.py")),
    "examples": sorted((ROOT / "examples").rglob("*.py")),
    **{package.name: sorted(package.rglob("*.py")) for package in PACKAGES},
}


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page without its code, each with the number of its first line."""
    text = re.sub(r"^ *```.*?^ *```", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M)
    yield from _paragraphs(1, re.sub(r"`[^`\n]*`|\]\([^)]*\)", "x", text))


def prose_of_module(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a module's docstrings and other strings of several words."""
    module = ast.parse(text)
    inside = {
        id(each) for node in ast.walk(module) if isinstance(node, ast.JoinedStr) for each in node.values
    }
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            said = "".join(str(each.value) if isinstance(each, ast.Constant) else "x" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            said = node.value
        else:
            continue
        if " " in said:
            yield from _paragraphs(node.lineno, re.sub(r"``[^`]*``|`[^`\n]*`", "x", said))


def _paragraphs(line: int, text: str) -> Iterator[tuple[int, str]]:
    for paragraph in re.split(r"(\n\s*\n)", text):
        yield line, " ".join(paragraph.split())
        line += paragraph.count("\n")


def flagged(path: Path) -> list[str]:
    """Return the sentences of a file that have a word of the table, without those that are allowed."""
    name = path.relative_to(ROOT).as_posix()
    read = prose_of_page if path.suffix == ".md" else prose_of_module
    found = []
    for line, text in read(path.read_text()):
        for pattern in PATTERNS.values():
            for match in pattern.finditer(text):
                around = text[max(0, match.start() - 50) : match.end() + 50]
                if not any(start in name and said in around for start, said in ALLOWED):
                    found.append(f"{name}:{line}: {match[0]!r} in {around!r}")
    return found


@pytest.mark.parametrize("files", sorted(FILES))
def test_words(files: str) -> None:
    assert [each for path in FILES[files] for each in flagged(path)] == []


def test_few_words_are_allowed() -> None:
    assert len(ALLOWED) <= 20


@pytest.mark.parametrize("files", sorted(FILES.keys() - {"pages"}))
def test_docstrings_are_no_questions(files: str) -> None:
    assert [each for path in FILES[files] for each in questions(path)] == []


def questions(path: Path) -> list[str]:
    """Return the docstrings of a module that begin like a question, other than the help of a command."""
    return [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {said}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (said := ast.get_docstring(node))
        and QUESTION.match(said)
        and not said.split("\n")[0].endswith("?")
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The state lies\non NVMe and is born there.", 2),
        ("`it lies on NVMe` [lies](lies_in.md)\n\n```\nbeside\n```\n", 0),
        ("5 GB a rank, twice a step. A pass an hour.", 2),
        ("A block whose\nstate is at\nonce there.", 2),
    ],
)
def test_words_are_found_across_lines_and_not_in_code(text: str, count: int) -> None:
    said = [paragraph for _, paragraph in prose_of_page(text)]
    assert sum(len(pattern.findall(each)) for each in said for pattern in PATTERNS.values()) == count


def test_adjacent_strings_of_a_module_are_joined() -> None:
    module = 'def f(n):\n    """Whose is it?"""\n    raise ValueError(f"n: {n} was " f"wanted at least")\n'
    said = [paragraph for _, paragraph in prose_of_module(module)]
    assert "Whose is it?" in said and "n: x was wanted at least" in said
