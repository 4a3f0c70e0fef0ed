"""Follow a page as a reader would: save its files, run its commands, compare the output."""

from __future__ import annotations

import math
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d[\d,]*\.?\d*")
# Against commands that hang. CPUs without instructions for bf16 need minutes where others need seconds.
LIMIT_SECONDS = 900
TOLERANCE = 0.05  # relative and absolute, as processors round differently


def follow(page: str, folder: Path) -> str:
    """Follow ``docs/<page>`` in an empty folder and return everything that its commands printed.

    A block with a title is saved under that name. A ``bash`` block is run. The ``text`` block after it is
    compared with the end of its output, line by line, numbers within ``TOLERANCE``.
    """
    environment = _environment(folder)
    printed: list[str] = []
    for language, title, text in BLOCK.findall((ROOT / "docs" / page).read_text()):
        if title:
            (folder / title).write_text(text)
        elif language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
            )
            assert done.returncode == 0, f"{page}: {text}{done.stdout}{done.stderr}"
            printed.append(done.stdout)
        elif language == "text":
            differences = different_lines(printed[-1], text)
            assert not differences, f"{page}: {differences}\nprinted:\n{printed[-1]}"
    assert printed, f"{page} runs nothing"
    return "".join(printed)


def different_lines(printed: str, shown: str) -> list[tuple[str, str]]:
    """Return pairs of a last line of ``printed`` and one of ``shown`` that differ by more than rounding.

    Libraries print warnings before the lines that a page shows.
    """
    expected = shown.splitlines()
    found = printed.splitlines()[-len(expected) :]
    if len(found) != len(expected):
        return [(printed, shown)]
    return [pair for pair in zip(found, expected, strict=True) if not _alike(*pair)]


def _alike(found: str, expected: str) -> bool:
    if NUMBER.sub("#", found).split() != NUMBER.sub("#", expected).split():
        return False
    pairs = zip(numbers(found), numbers(expected), strict=True)
    return all(math.isclose(*pair, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for pair in pairs)


def numbers(line: str) -> list[float]:
    return [float(text.replace(",", "")) for text in NUMBER.findall(line)]


def _environment(folder: Path) -> dict[str, str]:
    """Variables under which ``python`` and ``zero-ext`` are those of this interpreter and checkout.

    Other tests may start ranks meanwhile, so each start has a port of its own.
    """
    programs = folder / ".bin"
    programs.mkdir()
    for name, arguments in {"python": "", "zero-ext": "-m zero_ext.cli"}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "PET_STANDALONE": "1",
    }
