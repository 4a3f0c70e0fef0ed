"""The schedules of torch that a pipeline may run, and which stages they put on a rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.pipelining import schedules as torchs


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule by torch's class for it; None is not torch's, and of one stage.

    ``chunks`` is how many stages a rank has: exactly that many, or any number where it is None. In a V the
    second of a rank's two stages is as far from the end as the first is from the beginning; else rank r of P
    has the stages r, r + P, ...
    """

    made: type | None
    chunks: int | None = 1
    is_v: bool = False

    def stages_of(self, rank: int, ranks: int, chunks: int) -> list[int]:
        """Return the stages of a rank, in the order of the model."""
        if self.is_v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + turn * ranks for turn in range(chunks)]

    def rank_of(self, stage: int, ranks: int) -> int:
        """Return the rank that has ``stage``."""
        return min(stage, 2 * ranks - 1 - stage) if self.is_v else stage % ranks


SCHEDULES = {
    "gpipe": ScheduleKind(torchs.ScheduleGPipe),
    "1f1b": ScheduleKind(torchs.Schedule1F1B),
    "interleaved": ScheduleKind(torchs.ScheduleInterleaved1F1B, chunks=None),
    "zero_bubble": ScheduleKind(torchs.ScheduleInterleavedZeroBubble, chunks=None),
    "zbv": ScheduleKind(torchs.ScheduleZBVZeroBubble, chunks=2, is_v=True),
    "layer_major": ScheduleKind(None),
}
"""Schedules of a pipeline by name."""


def schedule_named(name: str, chunks: int, ranks: int) -> ScheduleKind:
    """Return the schedule called ``name``; ``ValueError`` with the known names, or for ``chunks`` a rank, or
    ``ranks`` in a pipeline, that it cannot have."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {name!r}. Use one of these.")
    kind = SCHEDULES[name]
    if chunks < 1 or (kind.chunks is not None and chunks != kind.chunks):
        wanted = "at least 1" if kind.chunks is None else str(kind.chunks)
        raise ValueError(
            f"chunks: expected {wanted} per rank in schedule {name!r}, got {chunks}. Leave it out, or choose "
            "another schedule."
        )
    if kind.made is None and ranks > 1:
        raise ValueError(
            f"schedule: {name!r} runs full models, and 'pp' of the mesh is {ranks}. Set 'pp' to 1, or choose "
            "another schedule."
        )
    return kind
