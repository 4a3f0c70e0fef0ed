"""Base class for running a pipeline on a rank, and failures that reach all of its ranks."""

from __future__ import annotations

import contextlib
import datetime
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from zero_ext.config.config_errors import clause_of
from zero_ext.parallel.pipeline.pipeline_timeline import Slot
from zero_ext.parallel.pipeline.stage_module import StageModule
from zero_ext.zero.engine import Engine


class PipelineRunner(ABC):
    """Runs ``module``, which ``engine`` moves and ``prepared`` is called for, on batches of
    ``micro_batches``. ``slots`` are what it computed in the last step."""

    def __init__(self, module: StageModule, prepared: nn.Module, engine: Engine, micro_batches: int) -> None:
        self.slots: list[Slot] = []
        self._module, self._prepared, self._engine = module, prepared, engine
        self._micro_batches = micro_batches

    @abstractmethod
    def train(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None, shape: int
    ) -> list[torch.Tensor]:
        """Run forward and backward of a batch of the shapes ``shape``; each micro-batch's share of the
        mean loss, scaled as its gradients are, on the rank with the last stage."""

    @abstractmethod
    def evaluate(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the same without gradients, unscaled."""

    @abstractmethod
    def drop(self) -> None:
        """Release what a failed batch has left."""

    def _split(self, inputs: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
        return list(zip(*(each.chunk(self._micro_batches) for each in inputs), strict=True))

    def _scaled_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's share of the batch's mean loss, scaled where gradients are fp16."""
        if torch.is_grad_enabled():
            loss = self._engine.scale_loss(loss)
        return loss / self._micro_batches


class PipelineRanks:
    """The ranks that have the stages of ``module``, on connections of their own; a collective of all ranks.

    ``group`` waits for ``timeout_seconds`` of the engine's configuration, whatever the mesh's groups do.
    """

    def __init__(self, module: StageModule, engine: Engine) -> None:
        self._stages = f"stages {module.stages} of {len(module.ranges)}"
        self._model = engine.collectives.model
        self._device = engine.device
        names = module.mesh.mesh_dim_names or ()
        columns = module.mesh.mesh.movedim(names.index("pp"), -1).reshape(-1, module.mesh["pp"].size())
        timeout = datetime.timedelta(seconds=engine.config.timeout_seconds)
        group, _ = dist.new_subgroups_by_enumeration(columns.tolist(), timeout=timeout)
        self._groups = [group]  # the only reference that lasts: connections end with it
        self._rank = module.mesh["pp"].get_local_rank()
        self._finalizer = weakref.finalize(self, _forget, self._groups)
        self._finalizer.atexit = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of torch's. ``RuntimeError`` once the pipeline has failed."""
        if not self._groups or self._groups[0] is None:
            raise RuntimeError("pipeline: it has failed before. Restart all ranks from the last checkpoint.")
        return self._groups[0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """``values``, float64 on the CPU, summed over the ranks."""
        with self.abort_on_error():
            serves_host = "cpu:" in dist.get_backend_config(self.group)
            summed = values.to("cpu" if serves_host else self._device)
            dist.all_reduce(summed, group=self.group)
        return summed.cpu()

    @contextlib.contextmanager
    def abort_on_error(self, drop: Callable[[], None] = lambda: None) -> Iterator[None]:
        """End the pipeline after an error inside on all its ranks, so that none waits for its time-out; it is
        raised as ``RuntimeError``. ``drop`` releases all references to the group."""
        try:
            yield
        except Exception as error:
            # Connections close when nobody refers to the group: frames that the error came through do.
            traceback.clear_frames(error.__traceback__)
            drop()
            self._finalizer()
            reason: BaseException = error
            while reason.__cause__ is not None:  # what torch's schedules put around it
                reason = reason.__cause__
            if self._model is not None:
                self._model.abort(f"pipeline rank {self._rank} stopped: {reason}")
            raise RuntimeError(
                f"pipeline rank {self._rank} ({self._stages}): it stopped in a batch: {clause_of(reason)}. "
                "Its other ranks stop too. Look for the first message among them, and restart all of them "
                "from a checkpoint."
            ) from error


def _forget(groups: list[dist.ProcessGroup]) -> None:
    """End the connections, where they have not ended with everything."""
    if dist.is_initialized():
        dist.destroy_process_group(groups[0])
    groups.clear()
