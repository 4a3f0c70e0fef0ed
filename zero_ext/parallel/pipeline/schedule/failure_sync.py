"""The ranks of one pipeline: sums over them, and failures that reach all of them."""

from __future__ import annotations

import contextlib
import datetime
import traceback
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from zero_ext.config.config_errors import clause_of
from zero_ext.parallel.pipeline.stages.stage_module import StageModule
from zero_ext.zero.engine import Engine


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
            reason = _first_cause(error)
            if self._model is not None:
                self._model.abort(f"pipeline rank {self._rank} stopped: {reason}")
            raise RuntimeError(
                f"pipeline rank {self._rank} ({self._stages}): it stopped in a batch: {clause_of(reason)}. "
                "Its other ranks stop too. Look for the first message among them, and restart all of them "
                "from a checkpoint."
            ) from error


def _first_cause(error: BaseException) -> BaseException:
    """Return what an error came from, without what torch's schedules put around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _forget(groups: list[dist.ProcessGroup]) -> None:
    """End the connections, where they have not ended with everything."""
    if dist.is_initialized():
        dist.destroy_process_group(groups[0])
    groups.clear()
