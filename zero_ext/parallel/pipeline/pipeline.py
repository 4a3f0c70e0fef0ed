"""Steps and evaluations of a model whose stages are on several ranks."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from zero_ext.parallel.pipeline.checks import batch_problem, check_settings
from zero_ext.parallel.pipeline.evaluation import ForwardPasses
from zero_ext.parallel.pipeline.ranks import PipelineRanks
from zero_ext.parallel.pipeline.stage import StepProgress, ZeroStage
from zero_ext.parallel.pipeline.staged import StagedModule
from zero_ext.parallel.pipeline.timeline import Slot
from zero_ext.zero.lookup import engine_of


class _Runner(NamedTuple):
    """Torch's schedule, which serves batches of one shape."""

    schedule: Any
    stages: list[ZeroStage]
    progress: StepProgress


class Pipeline:
    """Trains a prepared :class:`PipelineModule`, ``micro_batches`` parts of a batch after one another.

    ``module`` and ``optimizer`` are what :func:`zero_ext.prepare` returned for it and its mesh. ``reduce``
    "once" keeps gradients of a step whole on every rank until its last micro-batch, "each" reduces them after
    every one in ZeRO stages 2 and 3: memory for a shard instead of all, for ``micro_batches`` times the
    traffic. ``slots`` are what this rank computed in the last step.

    Raises ``ValueError`` for another module, a number of micro-batches that the schedule or the configuration
    does not fit, and updates in backward.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        micro_batches: int,
        reduce: Literal["once", "each"] = "once",
    ) -> None:
        found = getattr(module, "module", module)
        if not isinstance(found, StagedModule):
            raise ValueError(f"{type(found).__name__} given, a prepared PipelineModule wanted")
        self._prepared, self._module, self._optimizer = module, found, optimizer
        self._engine = engine_of(module)
        check_settings(self._engine.config, found.chunks, micro_batches, reduce)
        self._micro_batches, self._reduces_once = micro_batches, reduce == "once"
        self._ranks = PipelineRanks(found, self._engine)
        self._runners: dict[int, _Runner] = {}
        self.slots: list[Slot] = []
        self._make_runner()  # torch refuses here what its schedule cannot do

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, which reads the inputs."""
        return 0 in self._module.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which reads the targets."""
        return len(self._module.ranges) - 1 in self._module.stages

    def train_batch(self, *inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """One optimizer step on a batch, this data-parallel rank's; a collective of all ranks of the mesh.

        ``inputs`` [batch, ...] are read where the first stage is, ``targets`` [batch, ...] where the last one
        is; elsewhere they may be left out. Returns the mean loss over micro-batches and data-parallel ranks,
        0-d float32 on the CPU, on all ranks.

        Raises ``ValueError`` on all ranks of the pipeline for a batch that does not divide by the
        micro-batches, ``RuntimeError`` on all of them if a stage fails.
        """
        if self._optimizer is None:
            raise RuntimeError("train_batch without an optimizer; pass the prepared one to Pipeline")
        step = self._engine.optimizer_step
        losses = self._train(inputs, targets)
        loss = self._mean_loss(losses, step.scaler.scale if step.scales_loss else 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def eval_batch(self, *inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The mean loss of a batch, without dropout, gradients or a step; else as :meth:`train_batch`."""
        training = [module for module in self._prepared.modules() if module.training]
        self._agree(inputs, targets)
        self._prepared.eval()
        try:
            with torch.no_grad(), self._ranks.failing_together():
                losses = self._evaluate(inputs, targets)
        finally:
            for module in training:
                module.training = True
        return self._mean_loss(losses, 1.0)

    def _train(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None) -> list[torch.Tensor]:
        shape = self._agree(inputs, targets)
        if shape not in self._runners:
            self._runners[shape] = self._make_runner()
        schedule, _, progress = self._runners[shape]
        progress.passes = self._micro_batches * self._module.chunks
        progress.slots.clear()
        losses: list[torch.Tensor] = []
        with self._ranks.failing_together(self._drop):
            schedule.step(
                *(inputs if self.is_first else ()),
                target=targets if self.is_last else None,
                losses=losses,
                return_outputs=False,
            )
        self.slots = list(progress.slots)
        return losses

    def _drop(self) -> None:
        for runner in self._runners.values():
            for stage in runner.stages:
                stage.group = None
        self._runners.clear()

    def _evaluate(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None) -> list[torch.Tensor]:
        parts: list[tuple[torch.Tensor, ...]] = [()] * self._micro_batches
        if self.is_first:
            parts = list(zip(*(each.chunk(self._micro_batches) for each in inputs), strict=True))
        passes = ForwardPasses(self._module, self._prepared, self._ranks.group, self._engine.device)
        outputs = passes.outputs(parts)
        if targets is None or not self.is_last:
            return []
        pairs = zip(outputs, targets.chunk(self._micro_batches), strict=True)
        return [self._loss(output, wanted) for output, wanted in pairs]

    def _make_runner(self) -> _Runner:
        progress, group = StepProgress(self._reduces_once), self._ranks.group
        stages = [
            ZeroStage(self._module, self._prepared, chunk, self._engine, group, progress)
            for chunk in range(self._module.chunks)
        ]
        made = self._module.kind.made
        several = issubclass(made, PipelineScheduleMulti)
        schedule = made(stages if several else stages[0], self._micro_batches, self._loss, scale_grads=False)
        return _Runner(schedule, stages, progress)

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """A micro-batch's part of the batch's mean loss, scaled where gradients are fp16."""
        loss = self._module.loss(outputs, targets)
        if torch.is_grad_enabled():
            loss = self._engine.scale_loss(loss)
        return loss / self._micro_batches

    def _mean_loss(self, losses: list[torch.Tensor], scale: float) -> torch.Tensor:
        """Of the micro-batches and data-parallel ranks, on all ranks."""
        own = torch.zeros(1, dtype=torch.float64, device="cpu")
        for loss in losses:
            own += loss.detach().double().cpu() / scale
        total = self._ranks.sum(own)
        self._engine.collectives.sum_(total, "mean loss of a batch")
        return (total / self._engine.world_size).float()[0]

    def _agree(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None) -> int:
        """A number that stands for the shapes of the first stage's inputs; the same on all stages.

        Raises ``ValueError`` on all of them if a batch cannot be split.
        """
        problem = batch_problem(
            inputs if self.is_first else None, (targets,) if self.is_last else None, self._micro_batches
        )
        shape = 0
        if self.is_first and not problem:
            described = repr([(tuple(each.shape), str(each.dtype), each.requires_grad) for each in inputs])
            shape = int.from_bytes(hashlib.sha256(described.encode()).digest()[:6], "little")
        told = torch.tensor([shape, bool(problem)], dtype=torch.float64, device="cpu")
        shape, problems = (int(value) for value in self._ranks.sum(told).tolist())
        if problems:
            raise ValueError(problem or "another stage of the pipeline cannot use its batch; see its message")
        return shape
