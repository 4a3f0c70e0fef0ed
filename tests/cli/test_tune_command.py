"""``zero-ext tune`` on a script whose speed is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import run
from zero_ext import load_config

SCRIPT = """
import json, os, signal, sys
assert sys.argv[1:] == ["--lr", "0.1"], sys.argv
config = json.load(open(os.environ["ZERO_EXT_TRIAL_CONFIG"]))
stage, samples = config["stage"], config["batch"]["micro_batch_size"]
if samples * (4 - stage) > 8:
    os.kill(os.getpid(), signal.SIGKILL)
units = config["units"]["prefetch_elements" if stage == 3 else "bucket_elements"]
rate = 100 * samples / (samples + 1) / (1 + 0.1 * stage) * (1.2 if units == 4_000_000 else 1)
open(os.environ["ZERO_EXT_TRIAL_RESULT"], "w").write(json.dumps({"samples_per_second": rate}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_the_best_configuration_of_24_points_is_written(script: Path, tmp_path: Path) -> None:
    best, results = tmp_path / "best.json", tmp_path / "results.json"
    options = ("--stages", "1,2,3", "--micro-batches", "1,2,4,8", "--unit-elements", "4M,16M")
    where = ("--write", str(best), "--results", str(results), "--steps", "2")
    text = run("tune", *options, *where, str(script), "--lr", "0.1")
    found = load_config(best)
    rates = {
        (stage, samples): 1.2 * 100 * samples / (samples + 1) / (1 + 0.1 * stage)
        for stage in (1, 2, 3)
        for samples in (1, 2, 4, 8)
        if samples * (4 - stage) <= 8
    }
    chosen = rates[found.stage, found.batch.micro_batch_size or 0]
    assert chosen >= 0.95 * max(rates.values())
    units = found.units.prefetch_elements if found.stage == 3 else found.units.bucket_elements
    assert units == 4_000_000
    table = json.loads(results.read_text())
    assert table["points"] == 24
    assert 0 < table["trials"] < 24
    assert {one["fate"] for one in table["measured"]} == {"measured", "out of memory"}
    assert table["best"]["samples_per_second"] == pytest.approx(chosen)
    assert "samples/s" in text
    assert "best configuration in" in text


def test_other_keys_stay_as_they_were(script: Path, tmp_path: Path) -> None:
    base, best = tmp_path / "base.json", tmp_path / "best.json"
    base.write_text(json.dumps({"gradient_clipping": 0.5, "batch": {"train_batch_size": 12}}))
    options = (
        "--config",
        str(base),
        "--micro-batches",
        "1,2,5",
        "--unit-elements",
        "4M",
        "--write",
        str(best),
    )
    text = run("tune", *options, str(script), "--lr", "0.1")
    assert load_config(best).gradient_clipping == 0.5
    assert load_config(best).batch.train_batch_size == 12
    assert "left out" in text and "train_batch_size" in text  # why 5 was left out


def test_a_script_that_never_runs_ends_with_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('no data')")
    best = tmp_path / "best.json"
    text = run("tune", "--most-trials", "1", "--write", str(best), str(script), status=1)
    assert "ValueError: no data" in text
    assert not best.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--stages", "4"), "0 to 3, got '4'"),
        (("--tiers", "tape"), "expected some of device, host, nvme and 0 to 3, got 'tape'"),
        (("--tiers", "nvme"), "--nvme-path"),
        (("--micro-batches", "0"), "--micro-batches: expected whole numbers from 1, got '0'"),
        (("--micro-batches", ","), "--micro-batches: expected at least one number, got ','"),
        (("--aio", "1MiB"), "I/O threads, got '1MiB'"),
        (("--aio", "5x1x1"), "block_bytes"),
        (("--model", "no-such"), "MODEL: expected"),
        (("--config", "missing.json"), "missing.json"),
        (("--write", "/no/such/folder/best.json"), "its folder does not exist"),
    ],
)
def test_bad_options_are_refused_by_name(script: Path, options: tuple[str, ...], words: str) -> None:
    assert words in run("tune", *options, str(script), status=2)


def test_no_script_is_an_error(tmp_path: Path) -> None:
    assert "SCRIPT: expected a file" in run("tune", str(tmp_path / "missing.py"), status=2)
