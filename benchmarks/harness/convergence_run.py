"""One training to its end, in as many sittings as it takes; its record is kept beside its checkpoint."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.ranks import Team

RANKS = 4
WORKER = "benchmarks.harness.convergence_rank"
CURVE_POINTS = 30
LAST_STEPS, LAST_EVERY = 100, 10
SAVE_EVERY = 5  # points of the curve


@dataclass
class Record:
    """What is known of a run after `done` of its `steps`; the losses are nats per byte.

    `curve` holds [step, held-out loss], `losses` every step's training loss, mean over the ranks. Bytes by
    kind of collective are those of all ranks and all steps so far, `seconds` what the steps alone took.
    """

    what: str
    mode: str
    seed: int
    dtype: str
    steps: int
    done: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    crossing: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return self.done == self.steps

    @property
    def held_out(self) -> float:
        """Mean of the held-out losses over the last steps."""
        last = [loss for step, loss in self.curve if step > self.steps - _last_steps(self.steps)]
        return sum(last) / len(last)

    def folder(self, root: Path) -> Path:
        """Where this run keeps what it goes on from."""
        return root / self.what / f"{self.mode}-seed{self.seed}"

    def read(self, root: Path) -> Record:
        """This run as an earlier sitting left it, or as it is. One with other settings is refused."""
        path = self.folder(root) / "record.json"
        if not path.exists():
            return self
        found = Record(**json.loads(path.read_text()))
        if (found.steps, found.dtype) != (self.steps, self.dtype):
            raise ValueError(
                f"{path} is of {found.steps} steps in {found.dtype}, wanted are {self.steps} in "
                f"{self.dtype}: remove its folder, or ask for the same"
            )
        return found

    def write(self, root: Path) -> None:
        """Leaves what is known for the next sitting."""
        folder = self.folder(root)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "record.json").write_text(json.dumps(asdict(self)))


def evaluation_steps(steps: int) -> list[int]:
    """Steps after which the held-out loss is taken: along the curve, and closer together at its end."""
    every = max(1, steps // CURVE_POINTS)
    last = _last_steps(steps)
    close = range(steps - last + LAST_EVERY, steps + 1, LAST_EVERY) if last > LAST_EVERY else ()
    return sorted({*range(every, steps - last + 1, every), *close, steps})


def advance(record: Record, root: Path, deadline: float, publish: Callable[[Record], None]) -> Record:
    """Trains until the run is at its end or `time.monotonic()` passes `deadline`; `publish` gets every
    point of the curve. Returns the record, which is in `root` as well, where a corpus must be."""
    folder = record.folder(root) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        name: getattr(record, name) for name in ("what", "mode", "seed", "dtype", "steps")
    }
    with Team(f"{record.mode}, seed {record.seed}", RANKS, 1, worker=WORKER) as team:
        stored = team.ask("start", **settings, text=str(root), folder=str(folder))[0]
        record = Record(**(stored or settings))
        unsaved = 0
        for target in [target for target in evaluation_steps(record.steps) if target > record.done]:
            _append(record, target, team.ask("train", until=target), team.ask("held_out")[0])
            publish(record)
            unsaved += 1
            late = time.monotonic() > deadline
            if late or unsaved == SAVE_EVERY:
                team.ask("save", record=asdict(record))
                unsaved = 0
            if late:
                break
    record.write(root)
    if record.finished:
        shutil.rmtree(folder)
    return record


def _append(record: Record, target: int, answers: list[dict[str, Any]], held_out: float) -> None:
    record.done = target
    record.curve.append((target, held_out))
    losses = zip(*(answer["losses"] for answer in answers), strict=True)
    record.losses += [sum(of_step) / len(of_step) for of_step in losses]
    for name in ("sent", "crossing"):
        total = Counter(getattr(record, name))
        for answer in answers:
            total.update(answer[name])
        setattr(record, name, dict(total))
    record.seconds += max(answer["seconds"] for answer in answers)


def _last_steps(steps: int) -> int:
    return min(LAST_STEPS, max(1, steps // 5))
