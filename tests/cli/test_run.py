"""``zero-ext run``: torchrun's arguments handed through, and what --deepspeed-compat changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

from tests.cli.command import run
from zero_ext.cli.run import COMPAT, launch
from zero_ext_import_hooks import API_VERSION, VARIABLE

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "zero_ext.cli", "run"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What torchrun would have been told, in a folder with a script and a package."""
    found: list[Any] = []
    monkeypatch.setattr(torchrun, "run", found.append)
    monkeypatch.setenv(VARIABLE, "0")  # and back when the test has ended
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "train.py").touch()
    return found


def test_arguments_reach_torchrun_as_they_are(started: list[Any]) -> None:
    ours = [
        "--nnodes",
        "2",
        "--nproc-per-node=3",
        "--rdzv-endpoint",
        "host:1",
        "train.py",
        "--lr",
        "1",
        "--",
        "--help",
    ]
    run("run", *ours)
    assert started == [torchrun.parse_args(ours)] and os.environ[VARIABLE] == "0"


@pytest.mark.parametrize("position", [0, 2])
def test_the_flag_only_sets_the_variable(started: list[Any], position: int) -> None:
    arguments = ["--nproc-per-node", "2", "train.py", "--deepspeed", "c.json", COMPAT]
    launch([*arguments[:position], COMPAT, *arguments[position:]])
    # What stands behind the script is the script's.
    assert started == [torchrun.parse_args(arguments)] and os.environ[VARIABLE] == "1"


def test_a_python_that_does_not_start_with_the_finder(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = tmp_path / "python"
    without.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    without.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(without))
    for program in (["train.py"], ["--", "true"]):
        with pytest.raises(SystemExit, match=r"zero_ext_import_hooks.pth .* got none. Install"):
            launch([COMPAT, *program])
    assert started == []


def test_wrong_use(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    def refuses(arguments: list[str], words: str) -> None:
        with pytest.raises(SystemExit) as ended:
            launch(arguments)
        assert ended.value.code == 2
        assert re.search(words, capsys.readouterr().err)

    assert COMPAT in run("run", "--help") and "--nproc" in run("run", "--help")
    run("run", status=2)
    for command in ([], ["train.py"]):
        refuses([COMPAT, "--", *command], r"a command .*got .*Leave '--' out")
    for compat in ([], [COMPAT]):
        for arguments, words in (
            (["nope.py"], "nope.py: no such script .looked from .*check the path"),
            (["own_package"], "own_package: a folder without __main__.py"),
            (["-m", "no_such_package.train"], "no module 'no_such_package'"),
            (["--nproc-per-node", "two", "train.py"], "--nproc-per-node: expected a number .*got 'two'"),
            (["--nproc-per-node", "0", "train.py"], "--nproc-per-node: expected at least 1, got '0'"),
        ):
            refuses([*compat, *arguments], words)
    assert started == []
    launch(["--no-python", "nope"])  # a program may be on the path
    assert len(started) == 1


def test_a_failed_rank_is_reported_once(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('own reason')\n")
    command = [*COMMAND, "--standalone", "--nproc-per-node", "1", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "own reason" in done.stderr and "launch_agent" not in done.stderr


PROBE = """
import importlib.metadata, importlib.util, json, sys
found = {"spec": importlib.util.find_spec("deepspeed") is not None, "active": "zero_ext" in sys.modules}
import deepspeed
found |= {"file": deepspeed.__file__, "version": importlib.metadata.version("deepspeed")}
found |= {"argv": sys.argv[1:], "name": __name__, "path": sys.path[0]}
print(json.dumps(found))
"""


def test_only_who_asks_gets_the_look_alike(tmp_path: Path) -> None:
    """A package of the name lies beside: it is what everybody else imports."""
    (tmp_path / "site" / "deepspeed").mkdir(parents=True)
    (tmp_path / "site" / "deepspeed" / "__init__.py").write_text("")
    (tmp_path / "site" / "deepspeed-0.1.dist-info").mkdir()
    (tmp_path / "site" / "deepspeed-0.1.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0.1\n")
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}
    found = []
    for asks in ([], [*COMMAND, COMPAT, "--", "/bin/sh", "-c", '"$@"', "sh"]):
        command = [*asks, sys.executable, str(script), "--own", "1"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    theirs, ours = found
    assert theirs["spec"] and not theirs["active"] and theirs["version"] == "0.1"
    assert theirs["file"] == str(tmp_path / "site" / "deepspeed" / "__init__.py")
    # Whether it is there can be asked without the seconds that an import of torch takes.
    assert ours["spec"] and not ours["active"] and ours["version"] == API_VERSION
    assert ours["file"].endswith("zero_ext/integrations/deepspeed/__init__.py")
    for each in found:
        assert each["argv"] == ["--own", "1"] and each["name"] == "__main__" and each["path"] == str(tmp_path)


def test_a_wrong_value_is_printed() -> None:
    environment = {**os.environ, VARIABLE: "true"}
    done = subprocess.run(
        [sys.executable, "-c", ""], env=environment, capture_output=True, text=True, check=True
    )
    assert f"ValueError: {VARIABLE}: expected 1 or 0, got 'true'" in done.stderr


def test_nothing_else_is_imported_when_python_starts() -> None:
    """A file in the working folder, which accelerate launch puts on PYTHONPATH, could stand in for it."""
    code = (
        f"import os, sys; before = set(sys.modules); sys.path.append({str(ROOT)!r}); "
        "import zero_ext_import_hooks as finder; finder.start(); finder.start(); "
        "print(set(sys.modules) - before, sum(type(each) is finder.Finder for each in sys.meta_path))"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    environment = {**os.environ, VARIABLE: "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'zero_ext_import_hooks'} 1"


PLANTED = ("zero_ext", "torch", "json", "runpy", "pathlib", "typing", "importlib")


@pytest.mark.parametrize("as_module", [False, True])
def test_modules_of_the_working_folder_do_not_run_before_the_script(tmp_path: Path, as_module: bool) -> None:
    """Nor does its zero_ext, ever. A program that ``-m`` names imports others from there itself."""
    work, scripts = tmp_path / "work", tmp_path / "scripts"
    work.mkdir()
    scripts.mkdir()
    for name in PLANTED[:1] if as_module else PLANTED:
        (work / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    script = (work if as_module else scripts) / "train.py"
    script.with_name("helper.py").write_text("VALUE = 17\n")
    script.write_text(
        "import json, sys, torch, helper, deepspeed\n"
        "print(json.dumps([helper.VALUE, deepspeed.__file__, sys.argv, sys.path[0]]))\n"
    )
    program = ["-m", "train"] if as_module else [str(script)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import zero_ext.cli.run, os; "
        f"os.chdir({str(work)!r}); zero_ext.cli.run.launch(sys.argv[1:])"
    )
    command = [sys.executable, "-P", "-c", code, COMPAT, "--standalone", *program, "--own"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[0] == 17 and found[1].endswith("zero_ext/integrations/deepspeed/__init__.py")
    assert found[2][1:] == ["--own"] and found[3] == str(script.parent)
    assert not (tmp_path / "ran").exists()
