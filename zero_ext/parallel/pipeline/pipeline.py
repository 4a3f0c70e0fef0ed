"""Steps and evaluations of a model with stages on several ranks."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import torch
from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.parallel.pipeline.layer_major import LayerMajorRunner
from zero_ext.parallel.pipeline.pipeline_runner import PipelineRanks, PipelineRunner
from zero_ext.parallel.pipeline.pipeline_timeline import Slot
from zero_ext.parallel.pipeline.stage_layers import PipelineModule
from zero_ext.parallel.pipeline.stage_module import StageModule
from zero_ext.parallel.pipeline.torch_schedule_runner import TorchScheduleRunner
from zero_ext.zero.api.engine_lookup import engine_of


class Pipeline:
    """Train a prepared `PipelineModule` on batches split into micro-batches.

    Args:
        module: what [`prepare`][zero_ext.prepare] returned for a
            [`PipelineModule`][zero_ext.parallel.pipeline.PipelineModule] and its mesh.
        optimizer: what `prepare` returned; None for evaluation.
        micro_batches: micro-batches of a batch.
        grad_reduction: with "per_step" every rank stores the full gradients of a step until its last
            micro-batch. "per_micro_batch" reduces them after every one in ZeRO stages 2 and 3: memory for a
            shard instead of all, for `micro_batches` times the traffic.
        checkpoint: for the schedule "layer_major" only. Unless it is False, a layer stores its inputs of each
            micro-batch, by [`checkpoint_activations`][zero_ext.checkpoint_activations], and runs again in
            backward.

    Raises:
        ValueError: another module, or a number of micro-batches or settings that the schedule or the
            configuration does not fit.

    Examples:
        On four ranks:

        ```python
        from zero_ext.parallel import make_mesh
        from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule

        mesh = make_mesh(pp=2)  # "dp" takes the other two
        layers = [LayerSpec(torch.nn.Linear, 4, 8), torch.tanh, LayerSpec(torch.nn.Linear, 8, 1)]
        module = PipelineModule(layers, mesh, loss=torch.nn.functional.mse_loss)
        optimizer = torch.optim.AdamW(module.parameters())
        module, optimizer = zero_ext.prepare(module, optimizer, {"stage": 1}, process_group=mesh)
        pipeline = Pipeline(module, optimizer, micro_batches=2)
        loss = pipeline.train_batch(torch.ones(4, 4), targets=torch.ones(4, 1))
        assert loss > 0
        ```
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        micro_batches: int,
        grad_reduction: Literal["per_step", "per_micro_batch"] = "per_step",
        checkpoint: bool | None = None,
    ) -> None:
        found = getattr(module, "module", module)
        if not isinstance(found, StageModule):
            raise ValueError(
                f"module: expected a prepared PipelineModule, got {type(found).__name__}. Pass the one that "
                "zero_ext.prepare returned."
            )
        self._prepared, self._module, self._optimizer = module, found, optimizer
        self._engine = engine_of(module)
        _check_settings(self._engine.config, found, micro_batches, grad_reduction, checkpoint)
        self._micro_batches = micro_batches
        self._ranks = PipelineRanks(found, self._engine)
        self._runner: PipelineRunner
        if isinstance(found, PipelineModule) and found.kind.made is None:
            again = checkpoint is not False
            self._runner = LayerMajorRunner(found, module, self._engine, micro_batches, again)
        else:
            once = grad_reduction == "per_step"
            self._runner = TorchScheduleRunner(found, module, self._engine, micro_batches, self._ranks, once)

    @property
    def slots(self) -> list[Slot]:
        """The work of this rank in the last step."""
        return self._runner.slots

    @property
    def is_first(self) -> bool:
        """Return whether this rank has the first stage, which reads the inputs."""
        return self._module.is_first

    @property
    def is_last(self) -> bool:
        """Return whether this rank has the last stage, which reads the targets."""
        return self._module.is_last

    def train_batch(self, *inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Make one optimizer step on this data-parallel rank's batch; a collective of the mesh's ranks.

        Args:
            *inputs: [batch, ...], read where the first stage is; elsewhere they may be left out.
            targets: [batch, ...], read where the last stage is; elsewhere they may be left out.

        Returns:
            The mean loss over micro-batches and data-parallel ranks, 0-d float32 on the CPU, on all ranks.

        Raises:
            ValueError: on all ranks of the pipeline, the batch does not divide by the micro-batches.
            RuntimeError: on all of them, a stage failed, or there is no optimizer.
        """
        if self._optimizer is None:
            raise RuntimeError(
                "train_batch: expected an optimizer, got none. Pass the prepared one to Pipeline."
            )
        step = self._engine.optimizer_step
        shape = self._agree(inputs, targets)
        with self._ranks.abort_on_error(self._runner.drop):
            losses = self._runner.train(inputs, targets, shape)
        loss = self._mean_loss(losses, step.scaler.scale if step.scales_loss else 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def eval_batch(self, *inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean loss of a batch without dropout, gradients or a step.

        A collective of the ranks of the mesh.

        Args:
            *inputs: as for `train_batch`.
            targets: as for `train_batch`.

        Returns:
            The mean loss over micro-batches and data-parallel ranks, 0-d float32 on the CPU, on all ranks.
        """
        training = [module for module in self._prepared.modules() if module.training]
        self._agree(inputs, targets)
        self._prepared.eval()
        try:
            with torch.no_grad(), self._ranks.abort_on_error(self._runner.drop):
                losses = self._runner.evaluate(inputs, targets)
        finally:
            for module in training:
                module.training = True
        return self._mean_loss(losses, 1.0)

    def _mean_loss(self, losses: list[torch.Tensor], scale: float) -> torch.Tensor:
        """Of the micro-batches and data-parallel ranks, on all ranks."""
        own = torch.zeros(1, dtype=torch.float64, device="cpu")
        for loss in losses:
            own += loss.detach().double().cpu() / scale
        total = self._ranks.sum(own)
        self._engine.collectives.sum_(total, "mean loss of a batch")
        return (total / self._engine.world_size).float()[0]

    def _agree(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None) -> int:
        """Return a number that stands for the shapes of the first stage's inputs; the same on all stages.

        Raises ``ValueError`` on all of them if a batch cannot be split.
        """
        problem = ""
        if self.is_first:
            problem = _batch_problem("inputs", inputs, self._micro_batches)
        if self.is_last:
            problem = problem or _batch_problem("targets", (targets,), self._micro_batches)
        shape = 0
        if self.is_first and not problem:
            described = repr([(tuple(each.shape), str(each.dtype), each.requires_grad) for each in inputs])
            shape = int.from_bytes(hashlib.sha256(described.encode()).digest()[:6], "little")
        summary = torch.tensor([shape, bool(problem)], dtype=torch.float64, device="cpu")
        shape, problems = (int(value) for value in self._ranks.sum(summary).tolist())
        if problems:
            elsewhere = "batch: another stage of the pipeline cannot use it. See the message of that stage."
            raise ValueError(problem or elsewhere)
        return shape


def _check_settings(
    config: ZeroConfig, module: StageModule, micro_batches: int, grad_reduction: str, checkpoint: bool | None
) -> None:
    """Raise ``ValueError`` for settings of a pipeline of ``module`` that are wrong, or that do not fit it or
    ``config``."""
    chunks, by_layers = module.chunks, module.kind.made is None
    accumulated = config.batch.gradient_accumulation_steps
    if grad_reduction not in ("per_step", "per_micro_batch"):
        raise ValueError(
            f"grad_reduction: expected 'per_step' or 'per_micro_batch', got {grad_reduction!r}. Use one of "
            "them."
        )
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(
            f"micro_batches: expected an integer of at least 1, got {micro_batches!r}. Pass the number of "
            "micro-batches per step."
        )
    if accumulated not in (1, micro_batches):
        raise ValueError(
            f"micro_batches: expected batch.gradient_accumulation_steps ({accumulated}), which counts the "
            f"micro-batches of a pipeline, got {micro_batches}. Set the key to the same number or leave it "
            "out."
        )
    if grad_reduction == "per_micro_batch" and by_layers:
        raise ValueError(
            f"grad_reduction: expected 'per_step' in schedule {module.schedule!r}, where a layer's gradients "
            "of all micro-batches are computed one after another and reduced once, got 'per_micro_batch'. "
            "Leave it out."
        )
    if checkpoint is not None and not by_layers:
        raise ValueError(
            f"checkpoint: expected None in schedule {module.schedule!r}, where it has no effect, got "
            f"{checkpoint!r}. Leave it out, and use zero_ext.checkpoint_activations inside the layers."
        )
    if grad_reduction == "per_micro_batch" and chunks > 1:
        raise ValueError(
            f"grad_reduction: expected 'per_step' with {chunks} stages per rank, as a pass computes the "
            "gradients of one of them and all would be reduced, got 'per_micro_batch'. Use 'per_step'."
        )
    if grad_reduction == "per_micro_batch" and accumulated != micro_batches:
        raise ValueError(
            f"batch.gradient_accumulation_steps: expected the number of micro-batches ({micro_batches}) with "
            f"grad_reduction 'per_micro_batch', got {accumulated}. Set it to {micro_batches}, or use "
            "'per_step'."
        )
    if config.offload.update_mode == "in_backward" and not by_layers:
        raise ValueError(
            "offload.update_mode: expected 'after_backward' or 'delayed' in a pipeline, where no backward "
            "pass before the last has the full batch's gradients, got 'in_backward'. Use one of the others, "
            "or schedule 'layer_major' with 'pp' 1."
        )


def _batch_problem(name: str, values: tuple[Any, ...], micro_batches: int) -> str:
    """Why ``values``, the inputs or targets of a batch, cannot be split here; empty if they can."""
    if not values or values == (None,):
        return f"batch: expected {name} on a rank with a stage that reads them, got none. Pass them there."
    for each in values:
        if not isinstance(each, torch.Tensor):
            return f"{name}: expected a tensor [batch, ...], got {type(each).__name__}. Pass a tensor."
        if each.dim() == 0 or each.shape[0] == 0 or each.shape[0] % micro_batches:
            return (
                f"{name}: expected a batch that divides into {micro_batches} micro-batches, got shape "
                f"{tuple(each.shape)}. Make it a multiple of that, or choose another number of micro-batches."
            )
    return ""
