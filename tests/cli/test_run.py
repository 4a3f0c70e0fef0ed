"""``zero-ext run``: torchrun's arguments handed through, and what --deepspeed-compat changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

from tests.cli.command import run
from zero_ext.cli.run import launch

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ROOT / "zero_ext" / "integrations" / "deepspeed" / "run_script.py"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What torchrun would have been told, in a folder with a script and a package."""
    found: list[Any] = []
    monkeypatch.setattr(torchrun, "run", found.append)
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
        "--help",
    ]
    run("run", *ours)
    assert started == [torchrun.parse_args(ours)]


@pytest.mark.parametrize("place", [0, 2])
def test_the_look_alike_starts_the_script(started: list[Any], place: int) -> None:
    arguments = ["--nproc-per-node", "2"]
    arguments.insert(place, "--deepspeed-compat")
    launch([*arguments, "train.py", "--deepspeed", "c.json", "--deepspeed-compat"])
    launch(["--deepspeed-compat", "-m", "own_package.train", "--x"])
    assert [each.training_script for each in started] == [str(RUNNER), str(RUNNER)]
    assert not any(each.module for each in started)
    # What stands behind the script is the script's.
    given = [each.training_script_args for each in started]
    assert given == [
        ["train.py", "--deepspeed", "c.json", "--deepspeed-compat"],
        ["-m", "own_package.train", "--x"],
    ]


def test_wrong_use(started: list[Any]) -> None:
    assert "--deepspeed-compat" in run("run", "--help") and "--nproc" in run("run", "--help")
    with pytest.raises(SystemExit, match="is for Python scripts"):
        launch(["--deepspeed-compat", "--no-python", "x"])
    run("run", status=2)
    for compat in ([], ["--deepspeed-compat"]):
        for arguments, words in (
            (["nope.py"], "nope.py: no such script .looked from .*check the path"),
            (["own_package"], "own_package: a folder without __main__.py"),
            (["-m", "no_such_package.train"], "no module 'no_such_package'"),
            (["--nproc-per-node", "two", "train.py"], "--nproc-per-node: got 'two', wanted a number"),
            (["--nproc-per-node", "0", "train.py"], "--nproc-per-node: got '0', wanted at least 1"),
        ):
            with pytest.raises(SystemExit, match=words):
                launch([*compat, *arguments])
    assert started == []
    launch(["--no-python", "nope"])  # a program may be on the path
    assert len(started) == 1


def test_a_rank_that_fails_is_told_of_once(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('own reason')\n")
    command = [
        sys.executable,
        "-m",
        "zero_ext.cli",
        "run",
        "--standalone",
        "--nproc-per-node",
        "1",
        str(script),
    ]
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
    for runner in ([], [str(RUNNER)]):
        command = [sys.executable, *runner, str(script), "--own", "1"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    theirs, ours = found
    assert theirs["spec"] and not theirs["active"] and theirs["version"] == "0.1"
    assert theirs["file"] == str(tmp_path / "site" / "deepspeed" / "__init__.py")
    assert ours["spec"] and ours["active"] and ours["version"] != "0.1"
    assert ours["file"].endswith("zero_ext/integrations/deepspeed/__init__.py")
    for each in found:
        assert each["argv"] == ["--own", "1"] and each["name"] == "__main__" and each["path"] == str(tmp_path)


PLANTED = ("zero_ext", "torch", "json", "runpy", "pathlib", "typing", "importlib", "sitecustom")


@pytest.mark.parametrize("as_module", [False, True])
def test_modules_of_the_working_folder_do_not_run_before_the_script(tmp_path: Path, as_module: bool) -> None:
    """Nor do those of the runner's own folder; those of the script's folder are found as ever."""
    work, scripts = tmp_path / "work", tmp_path / "scripts"
    work.mkdir()
    scripts.mkdir()
    for name in PLANTED:
        (work / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    (work if as_module else scripts).joinpath("helper.py").write_text("VALUE = 17\n")
    (work if as_module else scripts).joinpath("engine.py").write_text("VALUE = 18\n")
    script = (work if as_module else scripts) / "train.py"
    script.write_text(
        "import json, sys, torch, deepspeed, helper, engine\n"
        "try:\n    import look_alike\n    found = True\nexcept ImportError:\n    found = False\n"
        "print(json.dumps([helper.VALUE, engine.VALUE, found, deepspeed.__file__, sys.argv, sys.path[0]]))\n"
    )
    program = ["-m", "train"] if as_module else [str(script)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import zero_ext.cli.run, os; "
        f"os.chdir({str(work)!r}); zero_ext.cli.run.launch(sys.argv[1:])"
    )
    command = [sys.executable, "-P", "-c", code, "--deepspeed-compat", "--standalone", *program, "--own"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[:3] == [17, 18, False]
    assert found[3].endswith("zero_ext/integrations/deepspeed/__init__.py")
    assert found[4][1:] == ["--own"] and found[5] == str(script.parent)
    assert not (tmp_path / "ran").exists()
