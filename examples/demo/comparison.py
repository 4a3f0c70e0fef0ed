"""Compare the measurements of runs of the same steps with the formulas, one row per run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.record import mean_losses, read_records
from demo.settings import SETTINGS
from zero_ext.plan import StateBytes, TrainingState, bytes_sent, collective_elements, model_state_bytes

BF16_BYTES = 2
MEGA = 1e6
STATE_KINDS = ("params", "grads", "optimizer")


@dataclass(frozen=True)
class Row:
    """Measurements of one run, with the bytes of the rank that stores or sends the most."""

    name: str
    stage: int
    ranks: int
    losses: list[float]
    measured: StateBytes
    formula: StateBytes
    seconds: float
    sent: int
    sent_by_formula: int

    @property
    def excess(self) -> float:
        """Relative difference of the measured bytes from the formula."""
        return self.measured.total / self.formula.total - 1


def compare(folder: Path, parameters: int) -> list[Row]:
    """Return the rows of the plain loop and of stages 0 to 3, from the records in `folder`."""
    state = TrainingState({"bf16": parameters})
    rows = [_row("plain", 0, 1, read_records(folder, "plain"), state)]
    for stage in range(4):
        records = read_records(folder, f"stage-{stage}")
        rows.append(_row(f"stage {stage}", stage, len(records), records, state))
    return rows


def _row(name: str, stage: int, ranks: int, records: list[dict[str, Any]], state: TrainingState) -> Row:
    most = max(records, key=lambda record: sum(record["bytes"].values()))
    elements = collective_elements(stage, ranks, sum(state.trainable.values()))
    return Row(
        name=name,
        stage=stage,
        ranks=ranks,
        losses=mean_losses(records),
        measured=StateBytes(**most["bytes"]),
        formula=model_state_bytes(stage, ranks, state),
        seconds=max(record["seconds"] for record in records),
        sent=max(sum(record.get("sent_bytes", {}).values()) for record in records),
        sent_by_formula=sum(bytes_sent(elements, ranks, BF16_BYTES).values()),
    )


def loss_difference(row: Row, reference: Row) -> float:
    """Return the largest relative difference between the losses of two runs, or NaN if any loss is NaN."""
    apart = [abs(one / other - 1) for one, other in zip(row.losses, reference.losses, strict=True)]
    return max(apart, key=lambda difference: (math.isnan(difference), difference))


def failures(rows: list[Row]) -> list[str]:
    """Return a message for each check of losses, memory and traffic that failed."""
    plain, first, *_ = rows
    found = []
    for row in rows[1:]:
        if row.losses != first.losses:
            found.append(f"{row.name}: losses {row.losses} differ from {first.name}'s {first.losses}")
    apart = loss_difference(first, plain)
    if not apart <= SETTINGS.plain_tolerance:
        found.append(
            f"{first.name}: losses differ by {apart:.2e} (relative) from the plain loop's, "
            f"more than {SETTINGS.plain_tolerance:g}"
        )
    for row in rows:
        if not abs(row.excess) <= SETTINGS.memory_tolerance:
            found.append(
                f"{row.name}: {row.measured.total} bytes of model state per rank differ by more than "
                f"{SETTINGS.memory_tolerance:.0%} from the formula's {row.formula.total}"
            )
        if not abs(row.sent - row.sent_by_formula) <= SETTINGS.memory_tolerance * row.sent_by_formula:
            found.append(
                f"{row.name}: {row.sent} bytes sent per step differ by more than "
                f"{SETTINGS.memory_tolerance:.0%} from the formula's {row.sent_by_formula}"
            )
    return found


HEADINGS = ("run", "loss", "vs. plain", "state", "formula", "diff.", "s/step", "sent", "formula")


def cells(row: Row, plain: Row) -> list[str]:
    """Return the cells for `HEADINGS`: the last loss, state and sent bytes in MB (10^6) per rank."""
    return [
        f"{row.name} ×{row.ranks}",
        f"{row.losses[-1]:.5f}",
        "–" if row is plain else f"{loss_difference(row, plain):.0e}",
        megabytes(row.measured.total),
        megabytes(row.formula.total),
        f"{row.excess:+.1%}",
        f"{row.seconds:.2f}",
        megabytes(row.sent),
        megabytes(row.sent_by_formula),
    ]


def megabytes(count: int) -> str:
    """Format a number of bytes in units of 10^6."""
    return f"{count / MEGA:.1f}"
