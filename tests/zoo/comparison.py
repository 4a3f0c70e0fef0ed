"""Run cases on a pool of ranks and compare each variant of zero_ext with plain torch."""

from __future__ import annotations

import json
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.multi.pool import RankFailure, RankPool
from tests.zoo.case import Case
from tests.zoo.training import STEPS_BEFORE_CHECKPOINT

MODULE = "tests.zoo.training"
TOLERANCE = 1e-5
# Differences are relative to the largest element of a tensor, and to this where that is smaller: a bias that
# started at zero has moved by a few thousandths after four steps, in directions that rounding decides.
SMALLEST_SCALE = 1e-2
LIMIT_SECONDS = 90.0
SHORT_MESSAGE = 160


@dataclass(frozen=True)
class Outcome:
    """How a variant of a case came out.

    Attributes:
        kind: "equal", "refused" or "failed".
        detail: the largest relative difference, the message of the refusal, or why it failed.
        tail: the end of the traceback, where there is one.
        passed: whether this is what the case expects.
        seconds: wall time of the run.
    """

    case: str
    variant: str
    kind: str
    detail: str
    tail: str = ""
    passed: bool = True
    seconds: float = 0.0

    @property
    def summary(self) -> str:
        """The outcome in one line."""
        text = " ".join(self.detail.split())
        return text if len(text) <= SHORT_MESSAGE else text[: SHORT_MESSAGE - 3] + "..."


class Comparison:
    """A pool of two ranks that runs cases, with the references of the current case kept."""

    def __init__(self) -> None:
        self._pool = RankPool(2)
        self._references: dict[str, dict[str, Any] | Outcome] = {}

    def close(self) -> None:
        """End all ranks."""
        self._pool.close()

    def outcome(self, case: Case, variant: str) -> Outcome:
        """Run one variant of a case and compare it with plain torch."""
        began = time.monotonic()
        reference = self.reference(case)
        if isinstance(reference, Outcome):
            return _replaced(reference, variant=variant)
        found = self._variant(case, variant, reference)
        return _replaced(_judged(case, found), seconds=time.monotonic() - began)

    def reference(self, case: Case) -> dict[str, Any] | Outcome:
        """Return what plain torch computes, or how it failed."""
        if case.name not in self._references:
            self._references.clear()
            with tempfile.TemporaryDirectory(prefix="zoo") as folder:
                answer = self._run(1, "train_plain", {"name": case.name}, folder)
            if isinstance(answer, tuple):
                reference: dict[str, Any] | Outcome = Outcome(
                    case.name, "", "failed", f"plain torch: {answer[1]}", answer[2], passed=False
                )
            else:
                reference = answer[0]
            self._references[case.name] = reference
        return self._references[case.name]

    def _variant(self, case: Case, variant: str, reference: dict[str, Any]) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="zoo") as folder:
            arguments = {"name": case.name, "variant": variant}
            answer = self._run(2, "train_variant", arguments, folder)
            if isinstance(answer, tuple):
                return Outcome(case.name, variant, *answer)
            if variant == "checkpoint":
                head = {name: reference[name][:STEPS_BEFORE_CHECKPOINT] for name in ("losses", "evaluations")}
                difference, worst = _difference([_only(record, head) for record in answer], head)
                if not difference <= TOLERANCE:
                    return _differs(case, variant, difference, f"before the checkpoint, {worst}")
                answer = self._run(1, "train_variant", arguments, folder)
                if isinstance(answer, tuple):
                    return Outcome(case.name, variant, answer[0], f"after the load: {answer[1]}", answer[2])
                reference = _after_checkpoint(reference)
        difference, worst = _difference(answer, reference)
        if not difference <= TOLERANCE:
            return _differs(case, variant, difference, worst)
        return Outcome(case.name, variant, "equal", f"{difference:.1e}")

    def _run(
        self, ranks: int, target: str, arguments: dict[str, Any], folder: str
    ) -> list[dict[str, Any]] | tuple[str, str, str]:
        """Return the ranks' records, or kind, message and traceback of what ended them."""
        try:
            return self._pool.run(
                ranks, f"{MODULE}:{target}", {**arguments, "folder": folder}, timeout=LIMIT_SECONDS
            )
        except RankFailure as failure:
            return _explained(str(failure), ranks, Path(folder))


def _replaced(outcome: Outcome, **changes: Any) -> Outcome:
    return Outcome(**{**vars(outcome), **changes})


def _judged(case: Case, outcome: Outcome) -> Outcome:
    """Return ``outcome`` with the verdict of the case's expectation."""
    expected = case.expectation(outcome.variant)
    if expected == "equal":
        passed = outcome.kind == "equal"
    else:
        passed = outcome.kind == "refused" and re.search(expected, outcome.detail) is not None
    return outcome if passed else _replaced(outcome, passed=False)


def _differs(case: Case, variant: str, difference: float, worst: str) -> Outcome:
    return Outcome(case.name, variant, "failed", f"wrong values: {worst} {_by(difference)}")


def _by(difference: float) -> str:
    return f"differs by {difference:.2g}" if difference < float("inf") else "is NaN, or of another shape"


def _explained(failure: str, ranks: int, folder: Path) -> tuple[str, str, str]:
    """Return kind, message and traceback of a failure of the pool."""
    errors = [json.loads(text) for text in re.findall(r"CaseError: (\{.*\})", failure)]
    if errors and all(error["kind"] == "refused" for error in errors):
        if len(errors) == ranks:
            return "refused", errors[0]["message"], errors[0]["tail"]
        return "failed", f"refused on one rank alone: {errors[0]['message']}", failure[-1500:]
    died = re.search(r"the process died, exit code (-?\d+)", failure)
    if died is not None:
        stacks = "\n".join(file.read_text() for file in sorted(folder.glob("crash-*")))
        return "failed", f"a rank died, exit code {died[1]}", stacks[:2500]
    for error in errors:
        if error["kind"] == "failed":
            return "failed", error["message"], error["tail"]
    return "failed", "no answer within the time limit" if "no answer" in failure else failure, failure[-2500:]


def _only(record: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in head}


def _after_checkpoint(reference: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a reference that a run continued from the checkpoint computes."""
    return {
        "losses": reference["losses"][STEPS_BEFORE_CHECKPOINT:],
        "evaluations": reference["evaluations"][STEPS_BEFORE_CHECKPOINT:],
        "generated": reference["generated"][1:],
        "recorded": {
            name: value
            for name, value in reference["recorded"].items()
            if int(name.rpartition("@")[2]) >= STEPS_BEFORE_CHECKPOINT
        },
        "states": reference["states"],
    }


def _difference(records: list[dict[str, Any]], reference: dict[str, Any]) -> tuple[float, str]:
    """Return the largest relative difference of any rank, and where it is; infinite for other shapes."""
    largest, worst = 0.0, "nothing"
    for rank, record in enumerate(records):
        for name, one, two in _pairs(record, reference):
            apart = _apart(one, two)
            if apart > largest:
                largest, worst = apart, f"{name} of rank {rank}"
    return largest, worst


def _pairs(record: dict[str, Any], reference: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs: list[tuple[str, Any, Any]] = []
    for kind in reference:
        own, other = record[kind], reference[kind]
        if len(own) != len(other):
            pairs.append((f"number of {kind}", torch.tensor(len(own)), torch.tensor(len(other))))
        elif kind == "recorded":
            pairs += [(name, own.get(name), other[name]) for name in other]
        elif kind == "states":
            for one, two in zip(own, other, strict=True):
                pairs += [(name, one.get(name), two.get(name)) for name in {**one, **two}]
        else:
            pairs += [(f"{kind}[{i}]", *both) for i, both in enumerate(zip(own, other, strict=True))]
    return pairs


def _apart(one: Any, two: Any) -> float:
    """Return the relative difference of two tensors or numbers; infinite for NaN and for other shapes."""
    if one is None or two is None:
        return float("inf")
    one, two = torch.as_tensor(one), torch.as_tensor(two)
    if one.shape != two.shape or one.dtype != two.dtype:
        return float("inf")
    if not (two.is_floating_point() or two.is_complex()):
        return 0.0 if torch.equal(one, two) else float("inf")
    if two.numel() == 0:
        return 0.0
    if two.is_complex():
        one, two = torch.view_as_real(one), torch.view_as_real(two)
    one, two = one.double(), two.double()
    finite = torch.isfinite(two)
    if not torch.equal(torch.isfinite(one), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    one, two = one[finite], two[finite]
    return float((one - two).abs().max() / two.abs().max().clamp(min=SMALLEST_SCALE))
