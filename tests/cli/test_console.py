"""Everything that all commands share, seen from a shell: exit statuses, colors, and readers that stop."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import run
from zero_ext.cli.console import EXIT_STATUSES, errors_on_stderr

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "zero_ext.cli"]
PLAIN = {
    name: value
    for name, value in os.environ.items()
    if name not in {"NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"}
} | {"TERM": "xterm-256color"}


@pytest.mark.parametrize("options", [("--json",), ()])
def test_a_reader_that_has_had_enough_is_no_error(options: tuple[str, ...], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    config = tmp_path / "config.json"
    command = [*COMMAND, "plan", "7.5B", "--gpus", "64", "--write", str(config), *options]
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=300, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
    assert config.stat().st_size > 0


@pytest.mark.parametrize(
    "options", [("plan", "7.5B", "--gpus", "64"), ("plan", "7.5B", "--gpus", "64", "--all")]
)
def test_a_pipe_gets_no_trailing_spaces(options: tuple[str, ...]) -> None:
    lines = run(*options).splitlines()
    assert len(lines) > 10 and [line for line in lines if line != line.rstrip()] == []


def on_a_terminal(environment: dict[str, str], *arguments: str) -> str:
    """Both streams of a command whose stdout and stderr are a terminal."""
    main, terminal = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=terminal, stderr=terminal, cwd=ROOT, env=environment
    ) as process:
        os.close(terminal)
        found = b""
        while True:
            try:
                data = os.read(main, 1 << 16)
            except OSError:  # Linux reports the closed terminal so.
                break
            if not data:
                break
            found += data
        process.wait(timeout=300)
    os.close(main)
    return found.decode()


COLORED = (("plan", "125m"), ("plan", "125m", "--all"), ("simulate", "no-such-model"))


@pytest.mark.parametrize("arguments", COLORED)
def test_colors_are_for_terminals_and_never_with_no_color(arguments: tuple[str, ...]) -> None:
    assert "\x1b[" in on_a_terminal(PLAIN, *arguments)
    assert "\x1b" not in on_a_terminal({**PLAIN, "NO_COLOR": "1"}, *arguments)
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT, env=PLAIN, check=False
    )
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stdout + done.stderr


def test_statuses_are_those_of_the_help_and_of_the_reference_page() -> None:
    page = next((ROOT / "docs").rglob("command_line.md")).read_text()
    text = " ".join(run("--help").split())
    assert list(EXIT_STATUSES) == [0, 1, 2]
    for status, meaning in EXIT_STATUSES.items():
        assert f"{status} {meaning}" in text
        assert f"| {status} | {meaning} |" in page


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("--gpus is wrong"), 2),
        (FileNotFoundError("config.json"), 2),
        (RuntimeError("the device failed"), 1),
        (PermissionError("config.json"), 1),
        (ModuleNotFoundError("matplotlib"), 1),
    ],
)
def test_errors_end_with_the_status_of_their_kind(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception) as ended, errors_on_stderr():
        raise error
    assert ended.value.exit_code == status
    assert re.search(r"^error: \S", capsys.readouterr().err)
