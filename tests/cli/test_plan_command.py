"""``zero-ext plan`` and ``simulate``: tables, JSON, the plot, the written configuration, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run, run_json
from zero_ext import load_config
from zero_ext.plan.simulation import MACHINES

MUON = ("--optimizer", "muon")
ISSUE = ("--gpus", "8", "--gpu-memory", "80GB", "--host-memory", "512GB", "--nvme", "4TB")


def test_the_command_of_the_readme(tmp_path: Path) -> None:
    config, plot = tmp_path / "config.json", tmp_path / "plan.png"
    text = run(
        "plan", "llama-7b", *ISSUE, "--batch", "64", "--seq", "4096", "--tokens", "1T", "--all",
        "--write", str(config), "--plot", str(plot),
    )  # fmt: skip
    sizes = ("6,738,415,616 parameters", "80.0 GB", "512 GB", "4.00 TB")
    for word in (*sizes, "Recommended: stage", "days", "largest"):
        assert word in text
    for stage in range(4):
        assert f"stage {stage}, device" in text
    found = load_config(config)
    assert found.batch.train_batch_size == 64
    assert f"Recommended: stage {found.stage}" in text
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 20_000


def test_json_adds_up_and_agrees_with_the_configuration(tmp_path: Path) -> None:
    found = run_json("plan", "13b", *ISSUE, "--gpus", "2", "--tokens", "2B", "--json")
    assert found["gpus"] == 2
    assert len(found["placements"]) == 12
    for row in found["placements"]:
        device = sum(row["bytes"]["device"].values())
        assert row["fits"] == (not row["lacks"])
        if "device" in row["lacks"]:
            assert device == 80 * 10**9 + row["lacks"]["device"]
        assert row["step_seconds"] > 0
        assert row["total_seconds"] > row["step_seconds"]
    config = load_config(found["recommendation"]["config"])
    placement = found["recommendation"]["placement"]
    row = next(row for row in found["placements"] if placement.startswith(f"stage {row['stage']}"))
    assert config.stage == row["stage"]
    assert found["why_nothing_fits"] is None


def test_state_of_the_optimizer_that_is_named() -> None:
    def planned(*options: str) -> tuple[dict[str, Any], dict[str, Any]]:
        found = run_json("plan", "llama-7b", *ISSUE, "--json", *options)
        rows = found["placements"]
        return found, next(row for row in rows if row["stage"] == 3 and row["optimizer"] == "device")

    (_, adamw), (_, lion), (found, muon) = planned(), planned("--optimizer", "LION"), planned(*MUON)
    assert found["optimizer_type"] == "Muon"
    # 32 layers of 4 h² + 3 hf are Muon's, embedding, output matrix and norms AdamW's.
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = found["model"]["parameters"] - matrices
    state = {"adamw": 12 * (matrices + rest), "lion": 8 * (matrices + rest), "muon": 8 * matrices + 12 * rest}
    for row, wanted in zip((adamw, lion, muon), state.values(), strict=True):
        assert row["bytes"]["device"]["optimizer"] == pytest.approx(wanted / 8, rel=1e-3)
    _, adafactor = planned("--optimizer", "adafactor")
    # Averages of rows and columns are on all ranks.
    lines = 32 * (4 * 2 * 4096 + 3 * (4096 + 11008)) + 2 * (32000 + 4096)
    wanted = 4 * (matrices + rest) / 8 + 4 * lines
    assert adafactor["bytes"]["device"]["optimizer"] == pytest.approx(wanted, rel=1e-3)
    # Two bytes out and two back, of what other ranks own: between all and none of a rank's shards.
    both = 2 * 2 * matrices / 8
    assert 0.5 * both < muon["sent_bytes"] - adamw["sent_bytes"] <= both
    assert muon["bytes"]["device"]["buffers"] > adamw["bytes"]["device"]["buffers"]
    assert muon["step_seconds"] > adamw["step_seconds"] >= lion["step_seconds"]
    text = run("plan", "llama-7b", *ISSUE, *MUON)
    assert "Muon for hidden matrices, AdamW for the rest." in text
    assert "1-bit Adam" not in run("plan", "llama-7b", *ISSUE, *MUON, "--gpus", "16", "--all")


@pytest.mark.parametrize(
    ("name", "line", "section"),
    [
        ("adafactor", "Adafactor for all parameters.", {"type": "Adafactor"}),
        ("muon", "Muon for hidden matrices, AdamW for the rest.", {"type": "Muon"}),
        ("adamw", None, None),
    ],
)
def test_an_optimizer_other_than_adamw_is_named_and_written(
    name: str, line: str | None, section: dict[str, str] | None, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    text = run("plan", "llama-7b", *ISSUE, "--optimizer", name, "--write", str(path))
    assert line in text if line else "for all parameters" not in text
    assert json.loads(path.read_text()).get("optimizer") == section


def test_nvme_folders_get_into_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    where = ("--machine", "dgx2-v100", "--gpus", "16", "--write", str(config))
    run("plan", "1t", *where, "--nvme-path", "/mnt/a", "--nvme-path", "/mnt/b")
    assert load_config(config).offload.nvme_paths == ("/mnt/a", "/mnt/b")
    assert load_config(config).offload.params == "nvme"
    run("plan", "1t", *where)
    assert load_config(config).offload.nvme_paths == ("/nvme",)


def test_what_fits_nowhere_ends_with_the_reason_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = run("plan", "175b", "--machine", "dgx2-v100", "--nvme", "0", "--write", str(path), status=1)
    assert "fits no placement on 8 GPUs" in text
    assert "GB too few" in text
    assert "The largest GPT that fits" in text
    assert not path.exists()
    found = run_json("plan", "175b", "--machine", "dgx2-v100", "--nvme", "0", "--json", status=1)
    assert found["recommendation"] is None


def test_a_machine_of_a_file_is_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine = MACHINES["dgx-a100"].to_mapping()
    path.write_text(json.dumps({**machine, "name": "cellar", "device_bytes": 10**9}))
    assert "cellar" in run("plan", "1M", "--machine", str(path), "--gpus", "2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such-model",), "MODEL: expected"),
        (
            ("7B", "--gpu-memory", "much"),
            "--gpu-memory: expected bytes, got 'much'. Write a number, alone or with",
        ),
        (("7B", "--nvme", "4 parsecs"), "--nvme: expected bytes, got '4 parsecs'"),
        (("7B", "--link-bandwidth", "0"), "--link-bandwidth: expected bytes per second, got '0'"),
        (("7B", "--objective", "fame"), "--objective: expected one of memory, speed, got 'fame'"),
        (("7B", "--tokens", "many"), "--tokens: expected a number like 300B, got 'many'"),
        (("7B", "--batch", "7"), "--batch: expected a multiple of 8 GPUs, got 7"),
        (("7B", "--moments", "fp16"), "moments_dtype: expected one of fp32, bf16, 8bit, got 'fp16'"),
        (
            ("7B", "--optimizer", "sgd"),
            "--optimizer: expected one of Adafactor, Adam, AdamW, ",
        ),
        (
            ("7B", "--optimizer", "muon", "--moments", "8bit"),
            "moments_dtype: expected fp32 or bf16 with Muon, got '8bit'",
        ),
        (("7B", "--machine", "cray"), "machine: expected one of"),
        (("7B", "--machine", "missing.json"), "missing.json"),
        (("7B", "--gpu-memory", "0"), "--gpu-memory: expected more than 0, got '0'"),
    ],
)
def test_bad_options_are_refused_by_name(arguments: tuple[str, ...], words: str) -> None:
    assert words in run("plan", *arguments, status=2)


def test_impossible_counts_are_refused_by_the_parser() -> None:
    for option in ("--gpus", "--batch", "--seq", "--micro-batch"):
        run("plan", "7B", option, "0", status=2)


def test_bytes_between_hosts_with_and_without_codes() -> None:
    """Of three times the parameters, each sent to every GPU of the other host, 0.78 of them once remain; of
    a reduction and a gather, signs to the owners among these, and once from them."""
    text = run("plan", "llama-7b", "--gpus", "16", "--all")
    assert "Between hosts a GPU sends" in text and "with all of 'communication' (ZeRO++)" in text
    for row in run_json("plan", "llama-7b", "--gpus", "16", "--json")["placements"]:
        full, less = row["inter_node_bytes"]["full"], row["inter_node_bytes"]["compressed"]
        if row["stage"] == 3:
            assert 8 * 3 / 0.78 <= full / less <= 8 * 3 / 0.75
        one_bit = row["stage"] <= 1 and row["optimizer"] == "device"
        if one_bit:
            assert full / less == pytest.approx(2 * 8 * 16 / (8 + 1) / (1 + 32 / 8192), rel=1e-3)
        assert (less < full) == (row["stage"] >= 2 or one_bit)
    small = run("plan", "125m", "--gpus", "16", "--all")
    assert "with 1-bit Adam in stage 0, after its warm-up" in small
    assert "1-bit Adam" not in run("plan", "llama-7b", "--gpus", "16", "--gpu-memory", "40GB", "--all")
    assert "Between hosts" not in run("plan", "llama-7b", "--gpus", "8", "--all")


def test_rank_placement_by_link_cost() -> None:
    sizes = "llama-7b --gpus 32 --gpus-per-host 4 --3d pp=4,tp=4 --batch 64"
    arguments = ("plan", *sizes.split())
    text = run(*arguments)
    assert "Placement of the ranks" in text and "count ranks as" in text and "4 to a host" in text
    report = run_json(*arguments, "--json")["rank_placement"]
    assert sorted(map(tuple, report["mapping"])) == [("dp", 2), ("pp", 4), ("tp", 4)]
    assert sum(report["seconds"].values()) <= sum(report["naive_seconds"].values())
    assert set(report["seconds"]) == {"pp", "dp", "cp", "tp"} and report["seconds"]["cp"] == 0


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ("pp=3", "the number of GPUs, 8, got 'pp=3', which makes 6 ranks with dp=2"),
        ("ep=2", "--3d: expected lengths of pp, dp, cp, tp, each once, got 'ep=2'"),
        ("pp=2,pp=2", "each once"),
        ("tp=0", "each once, got 'tp=0'"),
        ("tp", "each once, got 'tp'"),
        ("pp=8,dp=1", "--3d: expected at most"),
    ],
)
def test_lengths_that_cannot_be(lengths: str, words: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100}
    config.write_text(json.dumps({"model_type": "llama", "intermediate_size": 128, **sizes}))
    text = run("plan", str(config), "--gpus", "8", "--micro-batch", "1", "--3d", lengths, status=2)
    assert words in text


def test_the_best_layouts_are_shown_with_reasons_and_written(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    arguments = ("plan", "llama-3-70b", "--gpus", "16", "--batch", "16", "--3d", "best")
    text = run(*arguments, "--write", str(config))
    for word in ("1. bound by compute", "of a GPU's 85.9 GB", "mesh = make_mesh(pp=", "tokens/s"):
        assert word in text
    first = run_json(*arguments, "--json")["layouts"][0]
    found = load_config(config)
    assert found == load_config(first["config"])
    assert found.batch.train_batch_size == 16
    assert first["pp"] * first["dp"] * first["tp"] == 16
    assert sum(first["seconds"].values()) == pytest.approx(first["step_seconds"])
    assert f"mesh = make_mesh(pp={first['pp']}, dp={first['dp']}, tp={first['tp']})" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "8", "--tokens", "1B"), "--tokens: --3d best does not use it, got '1B'"),
        (("--gpus", "8", "--objective", "memory"), "--objective: --3d best does not use it"),
        (("--gpus", "8", "--optimizer", "muon"), "--optimizer: --3d best does not use it, got 'muon'"),
        (("--gpus", "8", "--link-bandwidth", "0"), "--link-bandwidth: expected bytes per second, got '0'"),
        (("--gpus", "5", "--batch", "3", "--micro-batch", "2"), "a multiple of 10 samples"),
    ],
)
def test_searches_that_cannot_be(arguments: tuple[str, ...], words: str) -> None:
    assert words in run("plan", "llama-7b", "--3d", "best", *arguments, status=2)


def test_a_search_that_finds_no_layout_answers_no() -> None:
    tiny = ("--gpus", "1", "--gpu-memory", "1GB", "--host-memory", "0", "--nvme", "0")
    arguments = ("plan", "llama-7b", "--3d", "best", *tiny)
    assert "fits no layout on 1" in run(*arguments, status=1)
    found = run_json(*arguments, "--json", status=1)
    assert found["layouts"] == [] and "fits no layout on 1" in found["why_nothing_fits"]


def test_the_fastest_placements_are_simulated() -> None:
    text = run("simulate", "gpt-1.2b", "--machine", "dgx2-v100", "--gpus", "16")
    assert "TFLOP/s" in text and "device" in text


def test_a_configuration_is_simulated_and_what_does_not_fit_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"stage": 3, "offload": {"grads": "host", "optimizer": "host"}}))
    arguments = ("simulate", "gpt-10b", "--machine", "dgx2-v100", "--config", str(path))
    assert "host" in run(*arguments, "--gpus", "4")
    short = run(*arguments, "--gpus", "1", "--micro-batch", "1", "--no-recompute", status=1)
    assert "does not fit: device" in short
    path.write_text(json.dumps({"stage": 3, "optimizer": {"type": "muon"}}))
    arguments = ("simulate", "llama-7b", "--config", str(path), "--gpus", "8", "--json")
    (muon,) = run_json(*arguments)["placements"]
    assert muon["optimizer_type"] == "Muon" and muon["optimizer_flops"] > 80e12


def test_a_simulation_that_fits_nowhere_says_how_much_is_missing() -> None:
    text = run("simulate", "gpt-2t", "--machine", "dgx-a100", "--gpus", "1", status=1)
    assert "fits no placement" in text and "GB too few" in text


def test_published_runs_are_shown_with_their_error() -> None:
    text = run("simulate", "--published")
    assert all(words in text for words in ("ZeRO-Offload, 10B, one V100", "fitted", "%"))


def test_an_unknown_model_is_not_simulated() -> None:
    assert "llama-7b" in run("simulate", "no-such-model", status=2)
