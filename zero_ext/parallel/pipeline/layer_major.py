"""All micro-batches through one layer before the next: its weights move once per pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from zero_ext.activation import checkpoint_activations
from zero_ext.parallel.pipeline.pipeline_runner import PipelineRunner
from zero_ext.parallel.pipeline.pipeline_timeline import Slot
from zero_ext.parallel.pipeline.stage_layers import PipelineModule, in_turn
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
        self, what: Literal["forward", "backward"], number: int, micro_batch: int, run: Callable[[], Any]
    ) -> Any:
        began = time.perf_counter()
        result = run()
        if torch.is_grad_enabled():  # an evaluation is no step
            seconds = time.perf_counter() - began
            self.slots.append(Slot(what, self._groups[number].start, micro_batch, began, seconds))
        return result


def _loss_of(
    loss: Callable[..., torch.Tensor], target: torch.Tensor, *calls: Callable[..., Any], values: Any
) -> torch.Tensor:
    return loss(in_turn(*calls, values=values), target)


@dataclass
class Crossing:
    """A tensor that went from one layer to the next: where the graph goes on behind it, and, once the later
    layer's backward ran, its gradient. The tensor itself is kept by whoever saved it for backward."""

    edge: GradientEdge
    gradient: torch.Tensor | None = None


def cross(values: Any) -> tuple[Any, list[Crossing]]:
    """``values``, tensors in whatever torch's pytrees support, as the next layer gets them: the same memory,
    and a graph that begins there.
    """
    leaves, structure = pytree.tree_flatten(values)
    crossings = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            crossings.append(Crossing(get_gradient_edge(leaf)))
            anchor = torch.empty(0, device=leaf.device, requires_grad=True)
            leaves[index] = _Beginning.apply(anchor, leaf.detach(), crossings[-1])
    return pytree.tree_unflatten(leaves, structure), crossings


def backward(crossings: Iterable[Crossing]) -> None:
    """Take the gradients of what crossed back through the layer that it came from."""
    arrived = [each for each in crossings if each.gradient is not None]
    gradients = [each.gradient for each in arrived]
    for each in arrived:
        each.gradient = None  # graphs keep crossings alive to the end of the step
    if arrived:
        torch.autograd.backward([each.edge for each in arrived], gradients)


class _Beginning(torch.autograd.Function):
    """``value`` as it is; its gradient is kept. ``anchor`` makes autograd take part."""

    @staticmethod
    def forward(context: Any, anchor: torch.Tensor, value: torch.Tensor, crossing: Crossing) -> torch.Tensor:
        context.crossing = crossing
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        context.crossing.gradient = gradient
        return None, None, None
