"""The runner of the GPU check with programs of a line each, its report, and its steps."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.gpu_check.report import markdown, summary, verdict, write
from scripts.gpu_check.runner import Runner, last_json, last_line
from scripts.gpu_check.step import Bar, Outcome, Step
from scripts.gpu_check.steps import (
    FAMILIES,
    SUITES,
    TESTS,
    chosen,
    gpu_steps,
    is_source_tree,
    needs_modules,
    rehearsal_steps,
)
from tests.gpu import exercise
from tests.multi.process_states import reaches

ROOT = Path(__file__).resolve().parents[2]


def program(name: str, code: str, **more: object) -> Step:
    """A step of one line of Python."""
    step = Step(name, f"runs {name}", (sys.executable, "-S", "-c", code), limit=20.0, least=0.1)
    return replace(step, **more)


def run(
    folder: Path, *steps: Step, seconds: float = 60.0, jobs: int = 1
) -> tuple[dict[str, Outcome], list[str]]:
    lines: list[str] = []
    outcomes = Runner(folder, folder, seconds, lines.append, jobs=jobs).run(steps)
    return {outcome.name: outcome for outcome in outcomes}, lines


RESULT = {"bars": [{"name": "rate", "value": 0.9, "bar": 0.95, "unit": "", "most": False}], "line": "slow"}


def test_one_step_may_end_in_any_state_and_the_others_run(tmp_path: Path) -> None:
    script = f"import json; print('noise'); print({json.dumps(json.dumps(RESULT))})"
    outcomes, lines = run(
        tmp_path,
        program("good", script),
        program("bad", "import sys; print('{}'); print('words', file=sys.stderr); sys.exit(7)"),
        program("absent", "", missing=lambda: "tool is not installed"),
        program("dependent", "", after=("bad",)),
        program("free", "print('last words')", after=("good", "unheard of")),
        program("long", "", least=1e6),
    )
    assert [outcome.status for outcome in outcomes.values()] == [
        *("passed", "failed", "skipped", "skipped", "passed", "left out")
    ]
    assert outcomes["good"].bars == [Bar("rate", 0.9, 0.95)] and outcomes["good"].reason == "slow"
    assert "exit status 7" in outcomes["bad"].reason and "words" in outcomes["bad"].reason
    assert outcomes["absent"].reason == "tool is not installed"
    assert outcomes["dependent"].reason == "needs bad to pass"
    assert outcomes["free"].reason == "last words"
    text = "\n".join(lines)
    assert "rate: 0.9 (≥ 0.95)  MISSED" in text and "skipped: tool is not installed" in text
    assert (tmp_path / "bad.log").read_text().startswith("words")


def test_steps_run_beside_each_other_and_those_alone_do_not(tmp_path: Path) -> None:
    """Each waits until the other has begun; a third that must be alone finds neither under way."""
    meet = (
        "import pathlib, time\nfolder = pathlib.Path({folder!r})\n(folder / '{me}').touch()\n"
        "while not (folder / '{other}').exists(): time.sleep(0.01)\n(folder / '{me}.done').touch()"
    )
    see = "import os; print(sorted(os.listdir({folder!r})))"
    folder = tmp_path / "meet"
    folder.mkdir()
    outcomes, _ = run(
        tmp_path,
        program("a", meet.format(folder=str(folder), me="a", other="b")),
        program("b", meet.format(folder=str(folder), me="b", other="a")),
        program("c", see.format(folder=str(folder)), alone=True),
        jobs=2,
    )
    assert [outcome.status for outcome in outcomes.values()] == ["passed"] * 3, outcomes
    assert outcomes["c"].reason == "['a', 'a.done', 'b', 'b.done']"


def test_a_crash_is_reported_by_signal_and_a_missing_program_by_name(tmp_path: Path) -> None:
    outcomes, _ = run(
        tmp_path,
        program("trap", "import os; os.abort()"),
        replace(program("gone", ""), command=("/nowhere/program",)),
    )
    assert "ended by SIGABRT" in outcomes["trap"].reason
    assert "/nowhere/program does not start" in outcomes["gone"].reason


def test_the_outcomes_so_far_are_recorded_after_every_step(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    steps = [program("one", "print(1)"), program("two", "print(2)")]
    Runner(
        tmp_path,
        tmp_path,
        60.0,
        lambda line: None,
        record=lambda outcomes: seen.append([outcome.name for outcome in outcomes]),
    ).run(steps)
    assert seen == [["one"], ["one", "two"]]


def test_of_long_output_beginning_and_end_are_saved(tmp_path: Path) -> None:
    run(tmp_path, program("loud", "print('first'); print('x' * 2_000_000); print('last')"))
    text = (tmp_path / "loud.log").read_text()
    assert text.startswith("first") and text.endswith("last\n") and len(text) < 300_000


def test_a_step_that_hangs_is_ended_and_its_output_is_saved(tmp_path: Path) -> None:
    code = (
        "import json, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'line': 'half', 'pid': child.pid}), flush=True); time.sleep(600)"
    )
    began = time.monotonic()
    import scripts.gpu_check.runner as module

    grace, module.GRACE_SECONDS = module.GRACE_SECONDS, 0.3
    try:
        outcomes, _ = run(tmp_path, program("stuck", code, limit=6.0), program("next", "print(1)"))
    finally:
        module.GRACE_SECONDS = grace
    assert time.monotonic() - began < 60
    assert outcomes["stuck"].status == "failed" and "its limit" in outcomes["stuck"].reason
    assert outcomes["stuck"].result["line"] == "half"
    assert outcomes["next"].status == "passed"
    # Nobody waits for the step's own child, which has been killed by now.
    assert reaches(outcomes["stuck"].result["pid"], "XZ")


def test_budgeted_steps_receive_their_time(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:])"
    outcomes, _ = run(tmp_path, program("one", code, budgeted=True, limit=12.4), seconds=8.0)
    assert outcomes["one"].reason in ("['--seconds', '8']", "['--seconds', '7']")


def test_results_are_the_last_json_object() -> None:
    assert last_json('{"a": 1}\nwords\n[3]\n{"a": 2}\n{broken\n') == {"a": 2}
    assert last_json("words\n") == {}
    assert last_line("one\n== 3 passed ==\n\n") == "3 passed"


def test_bars_point_in_both_directions_and_nan_meets_none() -> None:
    assert Bar("x", 1.0, 1.0).met and not Bar("x", 0.9, 1.0).met
    assert Bar("x", 1.0, 1.02, most=True).met and not Bar("x", 1.1, 1.02, most=True).met
    assert not Bar("x", float("nan"), 1.0).met and not Bar("x", float("nan"), 1.0, most=True).met


def outcomes_of(status: str, value: float) -> list[Outcome]:
    bar = {"name": "a|b", "value": value, "bar": 1.0, "unit": "", "most": False}
    table = {"title": "Rates", "columns": ["who", "rate"], "rows": [["we", "1"]], "note": "As counted."}
    result = {"bars": [bar], "left_out": ["DeepSpeed: not installed"], "tables": [table]}
    return [Outcome("adam", "measures", status, 1.0, "words\nmore", result, "adam.log")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "value", "judged", "exit_status"),
    [
        ("passed", 1.0, True, 0),
        ("passed", 0.5, True, 1),
        ("passed", float("nan"), True, 1),
        ("passed", 0.5, False, 0),
        ("failed", 1.0, False, 1),
        ("skipped", 1.0, True, 0),
    ],
)
def test_the_report_contains_the_verdict(
    tmp_path: Path, status: str, value: float, judged: bool, exit_status: int
) -> None:
    outcomes = outcomes_of(status, value)
    assert verdict(outcomes, judged) == exit_status
    (tmp_path / "adam.log").write_text("what it said")
    output = tmp_path / "report"
    output.mkdir()
    write(output, tmp_path, outcomes, {"GPU": "none"}, judged)
    assert sorted(path.name for path in output.iterdir()) == ["logs.tar.gz", "report.json", "report.md"]
    with tarfile.open(output / "logs.tar.gz") as archive:
        packed = archive.extractfile("logs/adam.log")
        assert packed is not None and packed.read() == b"what it said"
    data = json.loads((output / "report.json").read_text())
    assert data["exit_status"] == exit_status and data["judged"] == judged
    assert data["steps"][0]["result"]["bars"][0]["met"] is (value == 1.0)
    text = (output / "report.md").read_text()
    assert text == markdown(outcomes, {"GPU": "none"}, judged)
    for suite in (
        "## Rates",
        "| we | 1 |",
        "As counted.",
        "a\\|b",
        "DeepSpeed: not installed",
        "- GPU: none",
    ):
        assert suite in text
    assert ("rehearsal" in text) is not judged
    assert ("adam failed" in text) is (status == "failed")
    words = {"met", "MISSED"} if judged else {"not judged"}
    assert summary(outcomes, judged)[1][2] in words


def test_steps_name_programs_that_exist() -> None:
    assert is_source_tree(ROOT) and not is_source_tree(ROOT / "docs")
    steps = gpu_steps()
    assert len({step.name for step in steps}) == len(steps)
    for step in steps + rehearsal_steps():
        for argument in step.command:
            if argument.startswith(("benchmarks.", "tests.", "scripts.")):
                assert (ROOT / f"{argument.replace('.', '/')}.py").is_file(), argument
    assert set(FAMILIES) == set(exercise.FAMILIES)
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert set(TESTS) == files
    by_suite = [gpu_steps(suite)[1:] for suite in SUITES]
    assert [step.name for suite in by_suite for step in suite] == [step.name for step in steps[1:]]
    assert [step.name for step in chosen(steps, "adam,build")] == ["build", "adam"]
    assert chosen(steps, "") == steps
    with pytest.raises(ValueError, match=r"got nonsense. Use build, "):
        chosen(steps, "nonsense,adam")


def test_missing_modules_are_named() -> None:
    assert needs_modules("json", "zero_ext_nowhere")() == "Python cannot import zero_ext_nowhere"
    assert needs_modules("json")() == ""
