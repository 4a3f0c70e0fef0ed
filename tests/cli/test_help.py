"""The help of every command: a question, examples that run, ``--json`` that parses, consistent options."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.main

from tests.checkpoint.fake_source import SMALL, FakeSource
from tests.cli.command import run, run_json
from tests.cli.test_measure_machine import SMALL as SMALL_SCALE
from tests.integrations.deepspeed_checkpoint.forged import Forged
from zero_ext.checkpoint import save_state
from zero_ext.cli import app, environment, measure_machine

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = r"""
import json, os, sys
assert sys.argv[1:] == ["--lr", "0.1"], sys.argv
if "ZERO_EXT_TRIAL_RESULT" in os.environ:
    open(os.environ["ZERO_EXT_TRIAL_RESULT"], "w").write(json.dumps({"samples_per_second": 1.0}))
found = ""
if os.environ.get("ZERO_EXT_DEEPSPEED_COMPAT") == "1":
    import deepspeed
    found = deepspeed.__file__
# One write: two ranks share the pipe, and print() may write the text and the end of its line separately.
os.write(1, f"rank {os.environ.get('RANK')} {found}\n".encode())
"""


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(leaves(typer.main.get_command(app)))
ANSWERING = [path for path in COMMANDS if path != ("run",)]


def examples(*path: str) -> list[str]:
    lines = (line.strip() for line in run(*path, "--help").splitlines())
    return [line for line in lines if line.startswith("zero-ext ")]


def names(paths: Any) -> list[str]:
    return [" ".join(path) for path in paths]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with everything that the examples name, and a machine that is measured quickly."""
    measure, threads = measure_machine.measure_machine, torch.get_num_threads()

    def quick(name: str, ranks: int | None, path: Path | None, tick: Any) -> Any:
        return measure(name, ranks, path, SMALL_SCALE, tick)

    monkeypatch.setattr(measure_machine, "measure_machine", quick)
    monkeypatch.setattr(measure_machine, "_BUDGET_SECONDS", 0.05)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment, "build_kernels", lambda wanted: SimpleNamespace(__file__="_C_cuda.so"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    offload = {"grads": "host", "optimizer": "host"}
    (tmp_path / "config.json").write_text(json.dumps({"stage": 3, "offload": offload}))
    for step in (1, 2):
        save_state(tmp_path / "checkpoints", FakeSource(SMALL, step))
    Forged(2, 2).write(tmp_path / "deepspeed_run")
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("path", COMMANDS, ids=names(COMMANDS))
def test_help_begins_with_a_question_and_ends_with_examples(path: tuple[str, ...]) -> None:
    text = run(*path, "--help")
    if path != ("run",):
        first = COMMANDS[path].help.split("\n")[0]
        assert first.endswith("?") and first in text
    assert "Examples" in text and 1 <= len(examples(*path)) <= 2
    assert all(shlex.split(line)[1 : 1 + len(path)] == list(path) for line in examples(*path))
    assert "\x1b" not in text


def test_the_help_of_the_app_has_every_command_and_examples() -> None:
    text = run("--help")
    assert all(path[0] in text for path in COMMANDS)
    assert len(examples()) == 2 and examples("attention") == examples("attention", "plot")[:1]


CALLS = [line for path in ((), *ANSWERING) for line in examples(*path)]


@pytest.mark.parametrize("line", dict.fromkeys(CALLS))
def test_examples_run(line: str, folder: Path) -> None:
    arguments = shlex.split(line)[1:]
    text = run(*arguments)
    assert text.strip() and "\x1b" not in text
    for option in ("--write", "--plot", "--measure"):
        if option in arguments:
            assert (folder / arguments[arguments.index(option) + 1]).stat().st_size > 0


@pytest.mark.parametrize("line", examples("run"))
def test_examples_of_run_start_both_ranks(line: str, folder: Path) -> None:
    command = [sys.executable, "-m", "zero_ext.cli", *shlex.split(line)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0" in done.stdout and "rank 1" in done.stdout
    assert ("integrations/deepspeed" in done.stdout) == ("--deepspeed-compat" in line)


@pytest.mark.parametrize("path", ANSWERING, ids=names(ANSWERING))
def test_every_result_is_there_as_json(path: tuple[str, ...], folder: Path) -> None:
    arguments = shlex.split(examples(*path)[0])[1 + len(path) :]
    assert run_json(*path, "--json", *arguments)


def test_options_of_one_name_have_one_meaning() -> None:
    """Their help is the same in every command, or the reference page has what all of them mean."""
    texts: dict[str, set[str]] = {}
    commands: dict[str, int] = {}
    for command in COMMANDS.values():
        for option in (name for parameter in command.params for name in parameter.opts if name[:2] == "--"):
            commands[option] = commands.get(option, 0) + 1
        for parameter in command.params:
            texts.setdefault(parameter.opts[0], set()).add(parameter.help)
    shared = {option for option, count in commands.items() if count > 1}
    assert {"--json", "--gpus", "--write", "--config", "--seq", "--machine"} <= shared
    differing = {option for option in shared if len(texts[option]) > 1}
    known = {"--plot", "--write", "--ranks", "--micro-batch", "--nvme-path", "--recompute", "--optimizer"}
    assert differing == known
    page = next((ROOT / "docs").rglob("command_line.md")).read_text()
    assert {option for option in shared if f"`{option}`" not in page} == set()


def test_the_reference_page_has_the_question_of_every_command() -> None:
    page = next((ROOT / "docs").rglob("command_line.md")).read_text()
    for path, command in COMMANDS.items():
        question = command.help.split("\n")[0]
        assert f"| {question} | `zero-ext {' '.join(path)}` |" in page
