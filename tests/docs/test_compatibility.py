"""Versions on the page on compatibility are those that the project requires and tests."""

from __future__ import annotations

import re

from tests.docs.run_page import ROOT

PAGE = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
ROW = re.compile(r"^\| ([\w-]+) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def pinned() -> dict[str, str]:
    """Return the versions of the test environment, of the newer Python where two are pinned."""
    files = [*ROOT.glob("requirements-*.txt"), *ROOT.glob("benchmarks/requirements-*.txt")]
    text = "\n".join(file.read_text() for file in files)
    return dict(
        re.findall(r"^([\w-]+)(?:\[\w+\])?==([\d.]+)(?:; python_version >= .*)?$", text, re.MULTILINE)
    )


def required() -> dict[str, str]:
    text = (ROOT / "pyproject.toml").read_text()
    return dict(re.findall(r'^ +"([\w-]+)(?:\[\w+\])?>=([\d.]+)', text, re.MULTILINE))


def test_tested_versions_are_the_pinned_ones() -> None:
    rows = {name: cells for name, *cells in ROW.findall(PAGE)}
    versions = pinned()
    assert len(rows.keys() & versions.keys()) > 10
    for name in rows.keys() & versions.keys():
        assert versions[name] in rows[name][1], name


def test_required_versions_are_those_of_the_package() -> None:
    rows = {name: cells for name, *cells in ROW.findall(PAGE)}
    oldest = required()
    assert len(rows.keys() & oldest.keys()) > 10
    for name in rows.keys() & oldest.keys():
        assert rows[name][0].startswith(oldest[name] + " or newer"), name
    python = re.search(r'^requires-python = ">=(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert python and rows["Python"][0].startswith(python[1])
