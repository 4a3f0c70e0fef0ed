"""The stages of a rank: which ones a schedule puts there, their layers, and their base class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules as torchs

Loss = Callable[[Any, Any], torch.Tensor]
_Cost = tuple[float, float]


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


class StageModule(nn.Module, ABC):
    """This rank's stages of a model that is cut into consecutive groups of layers, balanced by ``weights``.

    ``ranges`` are the groups of every stage, ``stages`` the numbers of the stages of this rank, ``holders``
    the rank along "pp" of every group.
    """

    def __init__(
        self, mesh: DeviceMesh, loss: Loss, schedule: str, chunks: int | None, weights: Sequence[float]
    ) -> None:
        super().__init__()
        if "pp" not in (mesh.mesh_dim_names or ()):
            raise ValueError(
                f"mesh: expected a dimension 'pp', got {mesh.mesh_dim_names}. Make it with "
                "zero_ext.parallel.make_mesh(pp=...)."
            )
        self.mesh, self.loss, self.schedule = mesh, loss, schedule
        # Not the rank in its group, which torch counts in ascending order, whatever the mesh does.
        (rank,) = mesh["pp"].get_coordinate() or (0,)
        ranks = mesh["pp"].size()
        self.chunks = chunks or (2 if schedule == "zbv" else 1)
        self.kind = _schedule_named(schedule, self.chunks, ranks)
        self.ranges = split_stages(weights, ranks * self.chunks)
        owners = [self.kind.rank_of(stage, ranks) for stage in range(len(self.ranges))]
        self.stages = [stage for stage, owner in enumerate(owners) if owner == rank]
        self.holders = [owner for owner, held in zip(owners, self.ranges, strict=True) for _ in held]

    @property
    def is_first(self) -> bool:
        """Return whether this rank has the first stage, which reads the inputs."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Return whether this rank has the last stage, which reads the targets."""
        return len(self.ranges) - 1 in self.stages

    def model_ranks(self, groups: Iterable[int]) -> list[int]:
        """Return the ranks that have ``groups`` of layers, each once, as they count among the model-parallel
        ranks: those with this rank's index along "tp"."""
        tensor = self.mesh["tp"] if "tp" in (self.mesh.mesh_dim_names or ()) else None
        count, tp_rank = (tensor.size(), tensor.get_local_rank()) if tensor is not None else (1, 0)
        return sorted({self.holders[group] * count + tp_rank for group in groups})

    @abstractmethod
    def chunk_parameters(self, chunk: int) -> Iterator[nn.Parameter]:
        """Return the parameters of stage number ``chunk`` of this rank, each once."""


def _schedule_named(name: str, chunks: int, ranks: int) -> ScheduleKind:
    """Return the schedule called ``name``; ``ValueError`` with the known names, or for ``chunks`` a rank, or
    ``ranks`` in a pipeline, that it cannot have."""
    kind = SCHEDULES.get(name)
    if kind is None:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {name!r}. Use one of these.")
    if chunks < 1 or chunks != (kind.chunks or chunks):
        raise ValueError(
            f"chunks: expected {kind.chunks or 'at least 1'} per rank in schedule {name!r}, got {chunks}. "
            "Leave it out, or choose another schedule."
        )
    if kind.made is None and ranks > 1:
        raise ValueError(
            f"schedule: {name!r} runs full models, and 'pp' of the mesh is {ranks}. Set 'pp' to 1, or choose "
            "another schedule."
        )
    return kind


def split_stages(weights: Sequence[float], stages: int) -> list[range]:
    """Divide layers into stages of consecutive ones, so that the heaviest stage is as light as possible.

    Exact, by dynamic programming over the cuts. Where several are as good, smaller squares of the sums count,
    so that the lighter stages are even too.

    Args:
        weights: cost of each layer: 1 each, its parameters, its seconds.
        stages: number of stages.

    Returns:
        The layers of each stage, none empty.

    Raises:
        ValueError: fewer layers than stages, less than one stage, or a weight that is negative or not finite.

    Examples:
        >>> from zero_ext.parallel import split_stages
        >>> split_stages([4, 1, 1, 1, 1], stages=2)
        [range(0, 1), range(1, 5)]
    """
    layers = len(weights)
    if stages < 1:
        raise ValueError(f"pipeline stages: expected at least 1, got {stages}. Use 1 or more.")
    if layers < stages:
        raise ValueError(
            f"pipeline stages: expected at most {layers}, as each needs one of {layers} layers, got "
            f"{stages}. Use fewer stages, or split the model into more layers."
        )
    for number, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise ValueError(
                f"weight of layer {number}: expected a finite number of at least 0, got {weight}. Correct it."
            )
    sums = [*accumulate(weights, initial=0.0)]
    # best[count]: the largest sum and the sum of squares of the first ``count`` layers in the stages so far.
    best: list[_Cost | None] = [None, *((each, each**2) for each in sums[1:])]
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        best, begins = _one_more_stage(best, sums, stage)
        cuts.append(begins)
    ends = [layers]
    for begins in reversed(cuts):
        ends.append(begins[ends[-1]])
    return [range(begin, end) for begin, end in pairwise([0, *reversed(ends)])]


def _one_more_stage(
    best: Sequence[_Cost | None], sums: Sequence[float], stage: int
) -> tuple[list[_Cost | None], list[int]]:
    """Return the costs with one stage more, and where that stage begins for each number of layers."""
    found: list[_Cost | None] = [None] * len(best)
    begins = [0] * len(best)
    for count in range(stage + 1, len(best)):
        for begin in range(count - 1, stage - 1, -1):
            before, own, known = best[begin], sums[count] - sums[begin], found[count]
            if known is not None and own > known[0]:
                break  # it only grows from here
            if before is None:
                continue
            cost = (max(before[0], own), before[1] + own**2)
            if known is None or cost < known:
                found[count], begins[count] = cost, begin
    return found, begins
