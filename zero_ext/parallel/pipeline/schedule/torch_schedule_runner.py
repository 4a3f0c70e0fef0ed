"""Batches on the schedules of torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, Schedule1F1B, ScheduleGPipe

from zero_ext.parallel.pipeline.schedule.failure_sync import PipelineRanks
from zero_ext.parallel.pipeline.schedule.forward_only import ForwardPasses
from zero_ext.parallel.pipeline.schedule.runner import PipelineRunner
from zero_ext.parallel.pipeline.schedule.torch_stage import StepProgress, ZeroStage
from zero_ext.parallel.pipeline.stages.stage_module import StageModule
from zero_ext.zero.engine import Engine


class _Made(NamedTuple):
    """Torch's schedule, which serves batches of one shape."""

    schedule: Any
    stages: list[ZeroStage]
    progress: StepProgress


class TorchScheduleRunner(PipelineRunner):
    """Runs this rank's stages between those of the other ``ranks``; ``reduces_once``: gradients stay
    unreduced until a step's last micro-batch. Raises ``ValueError`` for what the schedule cannot do."""

    def __init__(
        self,
        module: StageModule,
        prepared: nn.Module,
        engine: Engine,
        micro_batches: int,
        ranks: PipelineRanks,
        reduces_once: bool,
    ) -> None:
        super().__init__(module, prepared, engine, micro_batches)
        self._ranks, self._reduces_once = ranks, reduces_once
        self._made: dict[int, _Made] = {}
        self._make()  # torch refuses here what its schedule cannot do

    def train(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None, shape: int
    ) -> list[torch.Tensor]:
        """See :class:`PipelineRunner`."""
        if shape not in self._made:
            self._made[shape] = self._make()
        schedule, _, progress = self._made[shape]
        progress.passes = self._micro_batches * self._module.chunks
        progress.slots.clear()
        losses: list[torch.Tensor] = []
        schedule.step(
            *(inputs if self._module.is_first else ()),
            target=targets if self._module.is_last else None,
            losses=losses,
            return_outputs=False,
        )
        self.slots = list(progress.slots)
        return losses

    def evaluate(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None) -> list[torch.Tensor]:
        """See :class:`PipelineRunner`."""
        batches: list[tuple[torch.Tensor, ...]] = [()] * self._micro_batches
        if self._module.is_first:
            batches = self._split(inputs)
        passes = ForwardPasses(self._module, self._prepared, self._ranks.group, self._engine.device)
        outputs = passes.outputs(batches)
        if targets is None or not self._module.is_last:
            return []
        pairs = zip(outputs, targets.chunk(self._micro_batches), strict=True)
        return [self._loss(output, wanted) for output, wanted in pairs]

    def drop(self) -> None:
        """See :class:`PipelineRunner`."""
        for made in self._made.values():
            for stage in made.stages:
                stage.group = None
        self._made.clear()

    def _make(self) -> _Made:
        progress = StepProgress(self._reduces_once)
        stages = [
            ZeroStage(self._module, self._prepared, chunk, self._engine, self._ranks.group, progress)
            for chunk in range(self._module.chunks)
        ]
        made: Any = self._module.kind.made
        if made is Schedule1F1B and self._micro_batches < len(self._module.ranges):
            made = ScheduleGPipe  # the same gradients; torch refuses 1F1B where a stage would stand still
        several = issubclass(made, PipelineScheduleMulti)
        schedule = made(stages if several else stages[0], self._micro_batches, self._loss, scale_grads=False)
        return _Made(schedule, stages, progress)

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return self._scaled_loss(self._module.loss(outputs, targets))
