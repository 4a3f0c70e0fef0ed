"""All micro-batches through one layer before the next: its weights move once per pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from zero_ext.activation import checkpoint_activations
from zero_ext.parallel.pipeline.schedule.graph_cut import Crossing, backward, cross
from zero_ext.parallel.pipeline.schedule.pipeline_timeline import Slot
from zero_ext.parallel.pipeline.schedule.runner import PipelineRunner
from zero_ext.parallel.pipeline.stages.stage_layers import PipelineModule, in_turn
from zero_ext.zero.api.manual_backward import LayerPasses, present
from zero_ext.zero.engine import Engine


class LayerMajorRunner(PipelineRunner):
    """Runs a whole model in the vertical schedule of GreedySnake (arXiv 2512.17570).

    A group of layers, one that has parameters and the functions behind it, is gathered once for all
    micro-batches in forward and once in backward, where their gradients add up in order and are reduced once.
    With ``checkpoint`` a group stores its inputs of each micro-batch, by
    :func:`zero_ext.checkpoint_activations`, and runs again in backward; without, it keeps its graphs.
    """

    def __init__(
        self,
        module: PipelineModule,
        prepared: nn.Module,
        engine: Engine,
        micro_batches: int,
        checkpoint: bool,
    ) -> None:
        super().__init__(module, prepared, engine, micro_batches)
        self._checkpoint = checkpoint
        layers = [tuple(module.layer_parameters(number)) for number in module.ranges[0]]
        starts = [0, *(number for number in range(1, len(layers)) if layers[number])]
        self._groups = [range(*ends) for ends in zip(starts, [*starts[1:], len(layers)], strict=True)]
        self._units = [
            tuple(dict.fromkeys(engine.index[each][0] for number in group for each in layers[number]))
            for group in self._groups
        ]
        self._passes = LayerPasses(engine, self._units, micro_batches)
        # Of each group whose backward is still to run, by micro-batch: the outputs of the group before.
        self._crossings: list[list[list[Crossing]]] = []

    def train(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None, shape: int
    ) -> list[torch.Tensor]:
        """See :class:`PipelineRunner`."""
        self.slots = []
        losses = self.evaluate(inputs, targets)
        ends = [[Crossing(get_gradient_edge(loss), torch.ones_like(loss))] for loss in losses]
        with self._passes.all_layers():
            for number in reversed(range(len(self._groups))):
                if any(ends):  # not where nothing below is trained
                    with self._passes.layer(number):
                        for micro_batch, crossings in enumerate(ends):
                            self._timed("backward", number, micro_batch, partial(backward, crossings))
                ends = self._crossings.pop()
        return [loss.detach() for loss in losses]

    def evaluate(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None) -> list[torch.Tensor]:
        """See :class:`PipelineRunner`."""
        self.drop()
        wanted = targets.chunk(self._micro_batches) if targets is not None else ()
        # Not an argument: floating-point tensors among a model's arguments are cast to its precision.
        losses = self._prepared(0, self._split(inputs), through=partial(self._forward, wanted))
        return [self._scaled_loss(loss) for loss in losses]

    def drop(self) -> None:
        """See :class:`PipelineRunner`."""
        self._crossings = []

    def _forward(
        self, targets: Sequence[torch.Tensor], *calls: Callable[..., Any], values: tuple[list[Any]]
    ) -> list[Any]:
        """Return the losses of micro-batches of inputs."""
        (batches,) = values
        for number, group in enumerate(self._groups):
            runs = [partial(in_turn, *calls[group.start : group.stop])] * len(batches)
            if group.stop == len(calls):
                runs = [partial(_loss_of, self._module.loss, target, *runs[0].args) for target in targets]
            with present(self._engine, self._units[number], self._engine.prefetcher.forward_order):
                batches = self._through(number, runs, batches)
        return batches

    def _through(self, number: int, runs: Sequence[Callable[..., Any]], batches: Sequence[Any]) -> list[Any]:
        """Return what a group makes of every micro-batch."""
        made = []
        if torch.is_grad_enabled():
            crossed = [cross(batch) if number else (batch, []) for batch in batches]
            self._crossings.append([crossings for _, crossings in crossed])
            batches = [batch for batch, _ in crossed]
        for micro_batch, (run, batch) in enumerate(zip(runs, batches, strict=True)):
            call = partial(checkpoint_activations, run) if self._checkpoint else run
            made.append(self._timed("forward", number, micro_batch, partial(call, values=batch)))
        return made

    def _timed(
        self,
        what: Literal["forward", "backward"],
        number: int,
        micro_batch: int,
        run: Callable[[], Any],
    ) -> Any:
        began = time.perf_counter()
        result = run()
        layer = self._groups[number].start
        if torch.is_grad_enabled():  # an evaluation is no step
            self.slots.append(Slot(what, layer, micro_batch, began, time.perf_counter() - began))
        return result


def _loss_of(
    loss: Callable[..., torch.Tensor], target: torch.Tensor, *calls: Callable[..., Any], values: Any
) -> torch.Tensor:
    return loss(in_turn(*calls, values=values), target)
