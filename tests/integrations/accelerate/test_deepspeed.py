"""``accelerate launch`` with DeepSpeed's plugin: a script under the real DeepSpeed, and under zero_ext where
DeepSpeed is not installed."""

from __future__ import annotations

import json
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.accelerate.deepspeed_script import SAMPLES, json_of
from tests.integrations.launch import found_in, started

SCRIPT = Path(__file__).resolve().parent / "deepspeed_script.py"

TRAIN_AND_SAVE = (
    "as_launched",
    *(f"by_flags-{stage}-no" for stage in range(4)),
    "by_flags-2-bf16",
    "by_plugin-2-scheduler",
    "by_plugin-3",
)
COMPARED = (*TRAIN_AND_SAVE, "two_plugins", "two_accelerators")
# DeepSpeed refuses fp16 on CPUs, and would compile an optimizer.
ALONE = ("by_flags-2-fp16", "by_flags-3-fp16", "overflowing", "offloaded")


def python_without_deepspeed(folder: Path) -> Path:
    """Python in a virtual environment that has all packages of this one but DeepSpeed."""
    venv.create(folder, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    for package in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not package.name.startswith("deepspeed"):
            Path(paths["purelib"], package.name).symlink_to(package)
    return folder / "bin" / "python"


def launched(python: Path, out: Path, start: list[str], cases: tuple[str, ...]) -> dict[str, Any]:
    """What the script finds under ``accelerate launch`` with a configuration file that names a JSON."""
    out.mkdir()
    (out / "zero.json").write_text(json.dumps({**json_of(3), "gradient_accumulation_steps": 2}))
    settings = {"deepspeed_config_file": str(out / "zero.json"), "zero3_init_flag": True}
    accelerate = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED"}
    # YAML has JSON as a part.
    (out / "accelerate.yaml").write_text(
        json.dumps({**accelerate, "deepspeed_config": settings, "num_machines": 1, "num_processes": 2})
    )
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", out / "accelerate.yaml"]
    command = [*start, python, *launch, "--main_process_port", "0", SCRIPT, out, *cases]
    started(command, cwd=out)
    return found_in(out)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = launched(Path(sys.executable), tmp_path_factory.mktemp("real") / "out", [], COMPARED)
    assert "site-packages/deepspeed/" in found["file"]
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ours")
    python = python_without_deepspeed(folder / "venv")
    start = [str(python), "-m", "zero_ext.cli", "run", "--deepspeed-compat", "--"]
    found = launched(python, folder / "out", start, (*COMPARED, *ALONE))
    assert not found["installed"] and found["file"].endswith("zero_ext/integrations/deepspeed/__init__.py")
    return found


@pytest.mark.parametrize("case", TRAIN_AND_SAVE)
def test_a_script_trains_alike(real: dict[str, Any], ours: dict[str, Any], case: str) -> None:
    own, theirs = ours[case], real[case]
    assert (own["engine"], theirs["engine"]) == ("zero_ext", "deepspeed")
    # DeepSpeed adds gradients of micro-batches and ranks in bf16, this engine in fp32.
    tolerance = 4e-3 if "bf16" in case else 1e-5
    for phase in ("first", "after", "again"):
        assert own[phase]["losses"] == pytest.approx(theirs[phase]["losses"], rel=tolerance)
        assert own[phase]["rates"] == pytest.approx(theirs[phase]["rates"])
        if case != "by_flags-0-no":  # where DeepSpeed has no norm
            assert own[phase]["norms"] == pytest.approx(theirs[phase]["norms"], rel=tolerance)
        assert not any(own[phase]["skipped"]) and len(own[phase]["norms"]) == len(theirs[phase]["norms"])
    assert own["again"] == own["after"] != own["first"]
    assert len(own["outputs"]) == len(theirs["outputs"]) == SAMPLES
    for key in ("outputs", "weights") if tolerance == 1e-5 else ():
        torch.testing.assert_close(tensors(own[key]), tensors(theirs[key]), rtol=1e-4, atol=1e-5)
    for key in ("saved", "unwrapped", "type", "freed"):
        assert own[key] == theirs[key]


def tensors(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: torch.tensor(value) for name, value in values.items()}
    return torch.tensor(values)


@pytest.mark.parametrize("case", ["two_plugins", "two_accelerators"])
def test_two_models(real: dict[str, Any], ours: dict[str, Any], case: str) -> None:
    assert len(ours[case]["losses"]) >= 6
    assert ours[case]["losses"] == pytest.approx(real[case]["losses"], rel=1e-5)


@pytest.mark.parametrize("case", ["by_flags-2-fp16", "by_flags-3-fp16", "offloaded"])
def test_cases_that_deepspeed_cannot_run(ours: dict[str, Any], case: str) -> None:
    wanted = ours["by_flags-2-no"]
    for phase in ("first", "after", "again"):
        for key in ("losses", "norms", "rates"):
            assert ours[case][phase][key] == pytest.approx(
                wanted[phase][key], rel=5e-3 if "fp16" in case else 1e-5
            )
    assert ours[case]["again"] == ours[case]["after"]


def test_steps_that_overflow_are_skipped(ours: dict[str, Any]) -> None:
    first, after = ours["overflowing"]["first"], ours["overflowing"]["after"]
    assert all(first["skipped"]) and len(first["skipped"]) == 6
    # The schedule waits, as Accelerate's scheduler does where its optimizer says so.
    assert set(first["rates"]) == {1e-2}
    assert not after["skipped"][-1] and after["rates"][-1] < 1e-2
