"""A stage of torch's schedules with passes through a prepared model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from zero_ext.parallel.pipeline.schedule.pipeline_timeline import Slot
from zero_ext.parallel.pipeline.stages.stage_module import StageModule
from zero_ext.zero.api.manual_backward import adopt_assigned
from zero_ext.zero.engine import Engine


@dataclass
class StepProgress:
    """Of the step under way: how many passes that make gradients of weights are still to come on this rank,
    and the slots so far. ``reduces_once``: gradients stay unreduced until the last of them."""

    reduces_once: bool
    passes: int = 0
    slots: list[Slot] = field(default_factory=list)


class ZeroStage(PipelineStage):
    """Stage ``chunk`` of this rank's ``module``, which ``engine`` moves; ``prepared`` is what is called."""

    def __init__(
        self,
        module: StageModule,
        prepared: nn.Module,
        chunk: int,
        engine: Engine,
        group: dist.ProcessGroup,
        progress: StepProgress,
    ) -> None:
        super().__init__(
            _Outline(prepared, chunk), module.stages[chunk], len(module.ranges), engine.device, group=group
        )
        self._prepared, self._chunk, self._engine, self._progress = prepared, chunk, engine, progress
        self._parameters = tuple(module.chunk_parameters(chunk))

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """See the base class."""
        return self._prepared(self._chunk, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """See the base class. Which pass is the last is counted here, over all of this rank's stages."""
        makes_gradients = backward_type != "input"
        self._progress.passes -= makes_gradients
        last = makes_gradients and (self._progress.passes == 0 or not self._progress.reduces_once)

        def run() -> Any:
            return PipelineStage.backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward)

        with self._engine.collector.scaled_pass(reduces=last):
            if backward_type == "weight":
                return adopt_assigned(self._engine, self._parameters, run)
            return run()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See the base class."""
        return self._timed(
            "forward",
            fwd_chunk_id,
            lambda: super(ZeroStage, self).forward_one_chunk(fwd_chunk_id, *args, **kwargs),
        )

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """See the base class."""
        self._timed(
            "backward",
            bwd_chunk_id,
            lambda: super(ZeroStage, self).backward_one_chunk(bwd_chunk_id, *args, **kwargs),
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """See the base class."""
        self._timed(
            "weights",
            bwd_chunk_id,
            lambda: super(ZeroStage, self).backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs),
        )

    def _timed(self, what: str, micro_batch: int, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = run()
        slot = Slot(what, self.stage_index, micro_batch, began, time.perf_counter() - began)
        self._progress.slots.append(slot)
        return result


class _Outline(nn.Module):
    """The call by which torch finds the shapes and dtypes of a stage's outputs: a forward without autograd,
    dropout or statistics, and outputs with gradients that reach the inputs."""

    _prepared: nn.Module

    def __init__(self, prepared: nn.Module, chunk: int) -> None:
        super().__init__()
        object.__setattr__(self, "_prepared", prepared)
        self._chunk = chunk

    def parameters(self, recurse: bool = True) -> Any:
        """Return those of the prepared model."""
        return self._prepared.parameters(recurse)

    def forward(self, *inputs: Any) -> Any:
        """Return the stage's outputs."""
        modules = [module for module in self._prepared.modules() if module.training]
        try:
            for module in modules:
                module.training = False
            with torch.no_grad():
                outputs = self._prepared(self._chunk, *inputs)
        finally:
            for module in modules:
                module.training = True
        if not torch.is_grad_enabled():
            return outputs
        through = _ZeroGradients.apply
        floating = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
        anchor = torch.ones((), device="cpu", requires_grad=True)
        if isinstance(outputs, tuple):
            return tuple(
                through(each, anchor, *floating) if each.is_floating_point() else each for each in outputs
            )
        return through(outputs, anchor, *floating)


class _ZeroGradients(torch.autograd.Function):
    """``output`` as it is; its gradient gives the inputs gradients of zeros."""

    @staticmethod
    def forward(
        context: Any, output: torch.Tensor, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        context.save_for_backward(anchor, *inputs)
        return output.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return (None, *(torch.zeros_like(each) for each in context.saved_tensors))
