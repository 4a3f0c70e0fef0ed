"""The base class of the stages of one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.parallel.pipeline.schedule.schedules import schedule_named
from zero_ext.parallel.pipeline.stages.stage_partition import split_stages

Loss = Callable[[Any, Any], torch.Tensor]


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
        pipeline = mesh["pp"]
        # Not the rank in its group, which torch counts in ascending order, whatever the mesh does.
        (rank,) = pipeline.get_coordinate() or (0,)
        ranks = pipeline.size()
        self.chunks = chunks or (2 if schedule == "zbv" else 1)
        self.kind = schedule_named(schedule, self.chunks, ranks)
        self.ranges = split_stages(weights, ranks * self.chunks)
        self.stages = self.kind.stages_of(rank, ranks, self.chunks)
        self.holders = [
            self.kind.rank_of(stage, ranks) for stage, held in enumerate(self.ranges) for _ in held
        ]

    @property
    def is_first(self) -> bool:
        """Return whether this rank has the first stage, which reads the inputs."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Return whether this rank has the last stage, which reads the targets."""
        return len(self.ranges) - 1 in self.stages

    def model_ranks(self, holders: Sequence[int]) -> list[int]:
        """``holders``, ranks along "pp", as they count among the model-parallel ranks: those with this
        rank's index along "tp"."""
        tensor = self.mesh["tp"] if "tp" in (self.mesh.mesh_dim_names or ()) else None
        count, tp_rank = (tensor.size(), tensor.get_local_rank()) if tensor is not None else (1, 0)
        return [holder * count + tp_rank for holder in holders]

    @abstractmethod
    def chunk_parameters(self, chunk: int) -> Iterator[nn.Parameter]:
        """Return the parameters of stage number ``chunk`` of this rank, each once."""
