"""The runner of the GPU check with programs of a line each, its report, and its steps."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from zero_ext.gpu_check.report import markdown, summary, verdict, write
from zero_ext.gpu_check.runner import Runner, last_json, last_line
from zero_ext.gpu_check.step import Bar, Outcome, Step
from zero_ext.gpu_check.steps import chosen, gpu_steps, is_source_tree, needs_modules, rehearsal_steps

ROOT = Path(__file__).resolve().parents[2]


def program(name: str, code: str, **more: object) -> Step:
    """A step of one line of Python."""
    step = Step(name, f"runs {name}", (sys.executable, "-S", "-c", code), limit=20.0, least=0.1)
    return replace(step, **more)


def run(folder: Path, *steps: Step, seconds: float = 60.0) -> tuple[dict[str, Outcome], list[str]]:
    lines: list[str] = []
    outcomes = Runner(folder, folder, seconds, lines.append).run(steps)
    return {outcome.name: outcome for outcome in outcomes}, lines


RESULT = {"bars": [{"name": "rate", "value": 0.9, "bar": 0.95, "unit": "", "most": False}], "line": "slow"}


def test_steps_end_in_every_way_and_the_others_go_on(tmp_path: Path) -> None:
    told = f"import json; print('noise'); print({json.dumps(json.dumps(RESULT))})"
    outcomes, lines = run(
        tmp_path,
        program("good", told),
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


def test_a_step_that_does_not_end_is_ended_and_keeps_what_it_told(tmp_path: Path) -> None:
    code = (
        "import json, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'line': 'half', 'pid': child.pid}), flush=True); time.sleep(600)"
    )
    began = time.monotonic()
    import zero_ext.gpu_check.runner as module

    grace, module.GRACE_SECONDS = module.GRACE_SECONDS, 0.3
    try:
        outcomes, _ = run(tmp_path, program("stuck", code, limit=6.0), program("next", "print(1)"))
    finally:
        module.GRACE_SECONDS = grace
    assert time.monotonic() - began < 60
    assert outcomes["stuck"].status == "failed" and "its limit" in outcomes["stuck"].reason
    assert outcomes["stuck"].result["line"] == "half"
    assert outcomes["next"].status == "passed"
    status = Path(f"/proc/{outcomes['stuck'].result['pid']}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_budgeted_steps_are_told_their_time(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:])"
    outcomes, _ = run(tmp_path, program("one", code, budgeted=True, limit=12.4), seconds=8.0)
    assert outcomes["one"].reason in ("['--seconds', '8']", "['--seconds', '7']")


def test_results_are_the_last_json_object() -> None:
    assert last_json('{"a": 1}\nwords\n[3]\n{"a": 2}\n{broken\n') == {"a": 2}
    assert last_json("words\n") == {}
    assert last_line("one\n== 3 passed ==\n\n") == "3 passed"


def test_bars_point_both_ways_and_nan_meets_none() -> None:
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
def test_the_report_gives_the_verdict(
    tmp_path: Path, status: str, value: float, judged: bool, exit_status: int
) -> None:
    outcomes = outcomes_of(status, value)
    assert verdict(outcomes, judged) == exit_status
    write(tmp_path, outcomes, {"GPU": "none"}, judged)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["exit_status"] == exit_status and data["judged"] == judged
    assert data["steps"][0]["result"]["bars"][0]["met"] is (value == 1.0)
    text = (tmp_path / "report.md").read_text()
    assert text == markdown(outcomes, {"GPU": "none"}, judged)
    for part in ("## Rates", "| we | 1 |", "As counted.", "a\\|b", "DeepSpeed: not installed", "- GPU: none"):
        assert part in text
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
            if argument.startswith(("benchmarks.", "tests.")):
                assert (ROOT / f"{argument.replace('.', '/')}.py").is_file(), argument
    assert [step.name for step in chosen(steps, "adam,build")] == ["build", "adam"]
    assert chosen(steps, "") == steps
    with pytest.raises(ValueError, match="--only names nonsense; the steps are build"):
        chosen(steps, "nonsense,adam")


def test_missing_modules_are_named() -> None:
    assert needs_modules("json", "zero_ext_nowhere")() == "Python cannot import zero_ext_nowhere"
    assert needs_modules("json")() == ""
