"""The default answer of ``zero-ext plan``: one screen, the recommendation first, the best row on top."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command import run, run_json

ROOT = Path(__file__).resolve().parents[2]
COLUMNS, LINES = 100, 40
CASES = {
    "small": ("125m", "--gpus", "1"),
    "middle": ("llama-7b", "--gpus", "8", "--gpu-memory", "40GB", "--tokens", "300B"),
    "several hosts": ("llama-3-70b", "--gpus", "64", "--batch", "256", "--objective", "memory"),
    "slow link": ("1.5B", "--link-bandwidth", "2GB/s", "--batch", "64"),
    "175b on NVMe": ("175b", "--gpus", "8"),
    "175b on many": ("175b", "--gpus", "1024", "--batch", "2048", "--seq", "2048"),
    "mapped ranks": ("llama-7b", "--gpus", "32", "--3d", "pp=4,tp=4", "--tokens", "300B"),
    "largest": ("100t", "--machine", "dgx-h200", "--gpus", "1536"),
}
NOWHERE = ("175b", "--machine", "dgx2-v100", "--nvme", "0")
ROW = re.compile(
    r"^ (stage \d, [a-z ]+?)  +(.*?)  +(yes|no: [A-Za-z, ]+?)  +(\S+)  +(\S.*?) *$", re.MULTILINE
)


def assert_one_screen(text: str) -> None:
    lines = text.rstrip().split("\n")
    assert max(map(len, lines)) <= COLUMNS, max(lines, key=len)
    assert len(lines) <= LINES


@pytest.mark.by_turns()
@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_the_answer_is_one_screen_with_a_row_for_every_placement(arguments: tuple[str, ...]) -> None:
    """It begins with the recommendation; rows are in the order of what placements are worth."""
    text, found = run("plan", *arguments), run_json("plan", *arguments, "--json")
    assert_one_screen(text)
    best, lines, rows = found["recommendation"], text.splitlines(), ROW.findall(text)
    assert lines[0].startswith(f"Recommended: {best['placement']} for ")
    words = " ".join(text.replace("\n   ", " ").split())
    reasons = [words.index(f"- {reason}") for reason in best["reasons"]]
    assert reasons == sorted(reasons) and reasons[-1] < words.index("placement GPU host NVMe fits")
    assert len({name for name, *_ in rows}) == len(rows) == len(found["placements"]) == 12
    assert rows[0][0] == best["placement"]
    fitting = [float(seconds) for _, _, fits, seconds, _ in rows[1:] if fits == "yes"]
    assert fitting == sorted(fitting)
    fits = sorted((row["fits"] for row in found["placements"]), reverse=True)
    assert [fitted == "yes" for _, _, fitted, _, _ in rows] == fits


def test_cells_are_the_figures_of_the_plan() -> None:
    (row,) = (row for row in ROW.findall(run("plan", *CASES["175b on NVMe"])) if "stage 2, host" in row[0])
    (one,) = (
        one
        for one in run_json("plan", *CASES["175b on NVMe"], "--json")["placements"]
        if (one["stage"], one["optimizer"]) == (2, "host")
    )
    device, host = (sum(one["bytes"][tier].values()) for tier in ("device", "host"))
    assert row[1].split() == [f"{device / 1e9:.0f}", "GB", f"{host / 1e12:.2f}", "TB", "-"]
    assert row[2] == "no: GPU, host"
    assert (row[3], row[4]) == (f"{one['step_seconds']:.3g}", one["busiest"])


def test_what_fits_nowhere_is_said_first_on_one_screen() -> None:
    text = run("plan", *NOWHERE, status=1)
    assert_one_screen(text)
    assert text.startswith("Nothing fits. gpt-175b fits no placement on 8 GPUs of dgx2-v100.")
    rows = ROW.findall(text)
    assert len(rows) == 12 and all(row[2].startswith("no: ") for row in rows)
    found = run_json("plan", *NOWHERE, "--json", status=1)
    reason = " ".join(found["why_nothing_fits"].split())
    assert reason in " ".join(text.split()) and found["recommendation"] is None


def test_everything_else_is_shown_on_request() -> None:
    arguments = ("plan", "llama-7b", "--gpus", "16")
    short, full = run(*arguments), run(*arguments, "--all")
    for word in ("activations", "autograd", "PCIe in", "tokens/s", "NVMe read", "Between hosts"):
        assert word in full
    for word in ("autograd", "PCIe in", "NVMe read", "Between hosts"):
        assert word not in short
    assert "--all" in short and full.startswith(short.split("\n")[0])


def test_the_page_of_the_planner_shows_what_its_first_command_prints() -> None:
    page = next((ROOT / "docs").rglob("planner.md")).read_text()
    (command,) = re.findall(r"^zero-ext (plan llama-7b --gpus 8 --gpu-memory .*)$", page, re.MULTILINE)
    lines = [line.rstrip() for line in run(*command.split()).rstrip().splitlines()]
    assert "```\n" + "\n".join(lines) + "\n```\n" in page
