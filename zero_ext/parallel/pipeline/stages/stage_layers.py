"""The layers of a pipeline that this rank has, under the names they have in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.parallel.pipeline.stages.layers import Layer, LayerSpec, TiedLayerSpec, outline_of
from zero_ext.parallel.pipeline.stages.stage_module import Loss, StageModule
from zero_ext.parallel.pipeline.stages.tied_params import check_ties, layer_of, mark_ties, tied_groups


def in_turn(*calls: Callable[..., Any], values: Any) -> Any:
    """What ``calls`` make of ``values``, one after another; a tuple is passed on as several arguments."""
    for call in calls:
        values = call(*values) if isinstance(values, tuple) else call(values)
    return values


class PipelineModule(StageModule):
    """This rank's part of a model that is a list of layers, each called with what the one before returned.

    ``layers`` are modules, :class:`LayerSpec` (built only where they are needed), functions, or an
    ``nn.Sequential``; a tuple is passed on as several arguments. They are cut into ``chunks`` stages a rank,
    ``split`` "parameters" (as many elements of parameters in each as can be), "uniform" (as many layers), or
    a weight for every layer, as its measured seconds. ``loss`` is called with the last layer's output and the
    targets, and returns a mean over the samples. ``schedule`` is one of :data:`SCHEDULES`. Parameters are
    named by the layer's number in the whole model, ``layers.<number>.<parameter>``, on whatever rank.

    A parameter in stages on several ranks is one parameter if ``ties`` names it: groups of such names, whose
    gradients are added up. Those of :class:`TiedLayerSpec` need no naming.

    Give it, with the mesh, to :func:`zero_ext.prepare`, and the result to :class:`Pipeline`. Raises
    ``ValueError`` on all ranks alike for fewer layers than stages, a mesh without "pp", an unknown schedule
    or split, a parameter in several stages without a tie, and a tie of what cannot be tied.
    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[Layer],
        mesh: DeviceMesh,
        *,
        loss: Loss,
        schedule: str = "1f1b",
        chunks: int | None = None,
        split: str | Sequence[float] = "parameters",
        ties: Sequence[Sequence[str]] = (),
    ) -> None:
        listed = list(layers)
        super().__init__(mesh, loss, schedule, chunks, weights_of(listed, split))
        groups = tied_groups(listed, ties)
        check_ties(listed, self.holders, groups)
        self.layers = nn.ModuleDict()
        self._tied: dict[str, nn.Module] = {}
        self._calls = [
            [self._add_layer(number, listed) for number in self.ranges[stage]] for stage in self.stages
        ]
        mark_ties(
            dict(self.layers.items()),
            groups,
            [self.model_ranks([self.holders[layer_of(name)] for name in group]) for group in groups],
        )

    def _add_layer(self, number: int, listed: Sequence[Layer]) -> Callable[..., Any]:
        """Register layer ``number``, and return the callable of its stage."""
        layer = listed[number]
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self._tied:
                numbers = (i for i, other in enumerate(listed) if getattr(other, "key", None) == layer.key)
                self._tied[layer.key] = layer.build(layer_seed(next(numbers)))
            module = self.layers[str(number)] = self._tied[layer.key]
            return module if layer.forward is None else partial(layer.forward, module)
        if isinstance(layer, LayerSpec):
            layer = layer.build(layer_seed(number))
        if isinstance(layer, nn.Module):
            self.layers[str(number)] = layer
        return layer

    def forward(self, chunk: int, *inputs: Any, through: Callable[..., Any] = in_turn) -> Any:
        """Runs this rank's stage number ``chunk``, counted from 0 on this rank; ``through`` takes the inputs
        through its calls."""
        return through(*self._calls[chunk], values=inputs)

    def layer_parameters(self, number: int) -> Iterator[nn.Parameter]:
        """The parameters of layer ``number``, none of a function."""
        return self.layers[str(number)].parameters() if str(number) in self.layers else iter(())

    def chunk_parameters(self, chunk: int) -> Iterator[nn.Parameter]:
        """See the base class."""
        present = [str(number) for number in self.ranges[self.stages[chunk]] if str(number) in self.layers]
        return nn.ModuleList(self.layers[number] for number in present).parameters()


def weights_of(layers: Sequence[Layer], split: str | Sequence[float]) -> list[float]:
    """Return the cost of each layer.

    Raises ``ValueError`` for an unknown ``split``, or a number of weights that is not that of the layers.
    """
    if not isinstance(split, str):
        if len(split) != len(layers):
            raise ValueError(f"split: {len(split)} weights given for {len(layers)} layers, one each wanted")
        return list(split)
    if split == "uniform":
        return [1.0] * len(layers)
    if split == "parameters":
        outlines = (outline_of(layer) for layer in layers)
        return [
            float(sum(parameter.numel() for parameter in outline.parameters()))
            if outline is not None
            else 0.0
            for outline in outlines
        ]
    raise ValueError(f"split: {split!r} given; 'parameters', 'uniform' or a weight for every layer wanted")


def layer_seed(number: int) -> int:
    """The seed that layer ``number`` is built with, of torch's own."""
    return (torch.initial_seed() + 1_000_003 * (number + 1)) % 2**63
