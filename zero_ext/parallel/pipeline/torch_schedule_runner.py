"""Batches on the schedules of torch: their stages make passes through a prepared model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, Schedule1F1B, ScheduleGPipe

from zero_ext.parallel.pipeline.pipeline_runner import PipelineRanks, PipelineRunner
from zero_ext.parallel.pipeline.pipeline_timeline import Slot
from zero_ext.parallel.pipeline.stage_module import StageModule
from zero_ext.zero.api.manual_backward import adopt_assigned
from zero_ext.zero.engine import Engine

# Of what an evaluation sends, by their numbers in a header: dtype, number of dimensions, and their lengths.
_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.bool, torch.uint8),
)
_HEADER = 10


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
        outputs = self._outputs(batches)
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
        progress = _Progress(self._reduces_once)
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

    def _outputs(self, micro_batches: Sequence[tuple[torch.Tensor, ...]]) -> list[Any]:
        """Return the last stage's outputs for each of ``micro_batches``, inputs that are read where the first
        stage is; empty on the other ranks. Not on a schedule of torch's: those in a V cannot leave out
        backward."""
        rank, ranks = dist.get_rank(self._ranks.group), dist.get_world_size(self._ranks.group)
        last, found = len(self._module.ranges) - 1, []
        local: list[Any] = []  # what a stage on this rank made for the next one, which is here too
        sending: list[tuple[dist.Work | None, torch.Tensor]] = []
        for chunk, stage in enumerate(self._module.stages):
            source, target = (self._module.kind.rank_of(near, ranks) for near in (stage - 1, stage + 1))
            local_inputs, local = local, []
            for number, inputs in enumerate(micro_batches):
                if stage > 0:
                    inputs = local_inputs[number] if source == rank else self._receive(source)
                values = self._prepared(chunk, *inputs)
                if stage == last:
                    found.append(values)
                    continue
                tensors = values if isinstance(values, tuple) else (values,)
                if target == rank:
                    local.append(tensors)
                else:
                    sending += self._send(tensors, target)
        for work, _ in sending:
            if work is not None:
                work.wait()
        return found

    def _send(self, tensors: tuple[Any, ...], target: int) -> list[tuple[dist.Work | None, torch.Tensor]]:
        payloads = [self._numbers([len(tensors)])]
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
                raise TypeError(
                    f"output of a stage: expected tensors or a tuple of them, got {type(tensor).__name__}. "
                    "Return tensors from the last layer of each stage."
                )
            header = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
            payloads += [self._numbers(header + [0] * (_HEADER - len(header))), tensor.contiguous()]
        return [(dist.isend(each, group=self._ranks.group, group_dst=target), each) for each in payloads]

    def _receive(self, source: int) -> tuple[torch.Tensor, ...]:
        def received(tensor: torch.Tensor) -> torch.Tensor:
            dist.recv(tensor, group=self._ranks.group, group_src=source)
            return tensor

        found = []
        for _ in range(int(received(self._numbers([0])))):
            dtype, dimensions, *shape = received(self._numbers([0] * _HEADER)).tolist()
            found.append(
                received(torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=self._engine.device))
            )
        return tuple(found)

    def _numbers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._engine.device)


@dataclass
class _Progress:
    """Of the step under way: how many passes that make gradients of weights are still to come on this rank,
    and the slots so far. ``reduces_once``: gradients stay unreduced until the last of them."""

    reduces_once: bool
    passes: int = 0
    slots: list[Slot] = field(default_factory=list)


class _Made(NamedTuple):
    """Torch's schedule, which serves batches of one shape."""

    schedule: Any
    stages: list[ZeroStage]
    progress: _Progress


def _timed(what: str, run: Callable[..., Any]) -> Any:
    """Return ``run``, a method of torch's stages for one micro-batch, with each call recorded as a slot."""

    def timed(self: ZeroStage, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = run(self, micro_batch, *args, **kwargs)
        slot = Slot(what, self.stage_index, micro_batch, began, time.perf_counter() - began)
        self._progress.slots.append(slot)
        return result

    return timed


class ZeroStage(PipelineStage):
    """Stage ``chunk`` of this rank's ``module``, which ``engine`` moves; ``prepared`` is what is called."""

    forward_one_chunk = _timed("forward", PipelineStage.forward_one_chunk)
    backward_one_chunk = _timed("backward", PipelineStage.backward_one_chunk)
    backward_weight_one_chunk = _timed("weights", PipelineStage.backward_weight_one_chunk)

    def __init__(
        self,
        module: StageModule,
        prepared: nn.Module,
        chunk: int,
        engine: Engine,
        group: dist.ProcessGroup,
        progress: _Progress,
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
        floating = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
        anchor = torch.ones((), device="cpu", requires_grad=True)
        if not isinstance(outputs, tuple):
            return _ZeroGradients.apply(outputs, anchor, *floating)
        return tuple(
            _ZeroGradients.apply(each, anchor, *floating) if each.is_floating_point() else each
            for each in outputs
        )


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
