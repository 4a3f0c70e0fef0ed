"""The layers of a pipeline that this rank has, under the names they have in the whole model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.parallel.pipeline.layers import Layer, LayerSpec, TiedLayerSpec, layer_seed, outline_of
from zero_ext.parallel.pipeline.stage_module import Loss, StageModule
from zero_ext.zero.units.parameter_marks import mark_tied


def in_turn(*calls: Callable[..., Any], values: Any) -> Any:
    """Return what ``calls`` make of ``values``, one after another; a tuple is passed on as several
    arguments.
    """
    for call in calls:
        values = call(*values) if isinstance(values, tuple) else call(values)
    return values


class PipelineModule(StageModule):
    """This rank's stages of a model that is a list of layers, each called with what the one before returned.

    Parameters are named by the layer's number in the full model, `layers.<number>.<parameter>`, on whatever
    rank. Give it, with the mesh, to [`prepare`][zero_ext.prepare], and the result to
    [`Pipeline`][zero_ext.parallel.pipeline.Pipeline].

    Args:
        layers: modules, `LayerSpec` (built only where they are needed), functions, or an
            `nn.Sequential`. A returned tuple is passed on as several arguments.
        mesh: has the dimension "pp", see [`make_mesh`][zero_ext.parallel.make_mesh].
        loss: called with the last layer's output and the targets; returns a mean over the samples.
        schedule: one of "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv" and "layer_major".
        chunks: stages of a rank.
        split: "parameters" (as many elements of parameters in each stage as can be), "uniform" (as many
            layers), or a weight for every layer, as its measured seconds.
        ties: a parameter in stages on several ranks is one parameter if it is named here: groups of such
            names, and their gradients are summed. Those of `TiedLayerSpec` need no naming.

    Raises:
        ValueError: on all ranks alike, fewer layers than stages, a mesh without "pp", an unknown schedule
            or split, a parameter in several stages without a tie, or a tie of what cannot be tied.

    Examples:
        On four ranks:

        ```python
        from zero_ext.parallel import make_mesh
        from zero_ext.parallel.pipeline import LayerSpec, PipelineModule

        mesh = make_mesh(pp=2)
        layers = [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(6)]
        module = PipelineModule(layers, mesh, loss=torch.nn.functional.mse_loss, split="uniform")
        first = 3 * mesh["pp"].get_local_rank()
        assert list(module.layers) == [str(number) for number in range(first, first + 3)]
        ```
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
        groups = _tied_groups(listed, ties)
        _check_ties(listed, self.holders, groups)
        self.layers = nn.ModuleDict()
        self._tied: dict[str, nn.Module] = {}
        self._calls = [
            [self._add_layer(number, listed) for number in self.ranges[stage]] for stage in self.stages
        ]
        for group in groups:
            ranks = self.model_ranks(_layer_of(name) for name in group)
            for name in group:
                number, rest = name.split(".", 2)[1:]
                if number in self.layers and len(ranks) > 1:
                    mark_tied(self.layers[number].get_parameter(rest), group[0], ranks)

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
        """Run one of this rank's stages.

        Args:
            chunk: number of the stage on this rank, from 0.
            *inputs: of the stage.
            through: takes the inputs through the calls of the stage.

        Returns:
            What the last layer of the stage returns.
        """
        return through(*self._calls[chunk], values=inputs)

    def layer_parameters(self, number: int) -> Iterator[nn.Parameter]:
        """Return the parameters of a layer.

        Args:
            number: of the layer in the full model.

        Returns:
            The parameters, none of a function.
        """
        return self.layers[str(number)].parameters() if str(number) in self.layers else iter(())

    def chunk_parameters(self, chunk: int) -> Iterator[nn.Parameter]:
        """Return the parameters of one of this rank's stages.

        Args:
            chunk: number of the stage on this rank, from 0.

        Returns:
            The parameters.
        """
        present = [str(number) for number in self.ranges[self.stages[chunk]] if str(number) in self.layers]
        return nn.ModuleList(self.layers[number] for number in present).parameters()


def weights_of(layers: Sequence[Layer], split: str | Sequence[float]) -> list[float]:
    """Return the cost of each layer.

    Raises ``ValueError`` for an unknown ``split``, or a number of weights that is not that of the layers.
    """
    if not isinstance(split, str):
        if len(split) != len(layers):
            raise ValueError(
                f"split: expected a weight for each of the {len(layers)} layers, got {len(split)} weights. "
                "Pass one per layer."
            )
        return list(split)
    if split == "uniform":
        return [1.0] * len(layers)
    if split == "parameters":
        outlines = map(outline_of, layers)
        sums = (0 if each is None else sum(p.numel() for p in each.parameters()) for each in outlines)
        return [*map(float, sums)]
    raise ValueError(
        f"split: expected 'parameters', 'uniform' or a weight for every layer, got {split!r}. Use one of "
        "these."
    )


def _full_name(number: int, name: str) -> str:
    """Return the name of a parameter of layer ``number`` in the whole model."""
    return f"layers.{number}.{name}"


def _layer_of(name: str) -> int:
    """Return the layer's number in a full name."""
    return int(name.split(".")[1])


def _tied_groups(layers: Sequence[Layer], named: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return groups of full names of one parameter each: those ``named``, and those of tied specifications.

    Raises ``ValueError`` for a name that no layer has, a group of fewer than two, and parameters that are
    neither one object nor equal.
    """
    groups = [tuple(group) for group in named]
    for group in groups:
        _check_group(layers, group)
    by_key: dict[str, dict[int, TiedLayerSpec]] = defaultdict(dict)
    for number, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            by_key[layer.key][number] = layer
    for key, tied in by_key.items():
        parameters = [each.outline().named_parameters() for each in tied.values()]
        first, *others = ({name: tuple(each.shape) for name, each in some} for some in parameters)
        if any(shapes != first for shapes in others):
            raise ValueError(
                f"TiedLayerSpec '{key}': expected the same parameters in layers {[*tied]}, got {first} and "
                f"{next(shapes for shapes in others if shapes != first)}. Give them one class and the same "
                "arguments."
            )
        groups += [tuple(_full_name(number, name) for number in tied) for name in first]
    return groups


def _check_group(layers: Sequence[Layer], group: tuple[str, ...]) -> None:
    if len(group) < 2:
        raise ValueError(
            f"ties: expected the names of at least two parameters, got {group}. Name all parameters of the "
            "tie."
        )
    first, *others = (_parameter(layers, name) for name in group)
    for name, parameter in zip(group[1:], others, strict=True):
        if parameter is not first and (first.shape != parameter.shape or not torch.equal(first, parameter)):
            raise ValueError(
                f"ties: '{group[0]}' and '{name}' are different parameters with different values. Set one "
                "module's parameter to the other's before, or use TiedLayerSpec."
            )


def _parameter(layers: Sequence[Layer], name: str) -> nn.Parameter:
    prefix, number, rest = (*name.split(".", 2), "", "")[:3]
    module = None
    if prefix == "layers" and number.isdigit() and int(number) < len(layers):
        module = outline_of(layers[int(number)])
    parameter = dict(module.named_parameters()).get(rest) if module is not None else None
    if parameter is None:
        raise ValueError(
            "ties: expected names of parameters, layers.<number>.<name in the layer> with the numbers of "
            f"{len(layers)} layers, got '{name}'. Correct the name."
        )
    return parameter


def _check_ties(layers: Sequence[Layer], ranks: Sequence[int], groups: Sequence[tuple[str, ...]]) -> None:
    """Raise ``ValueError`` for a parameter that layers on several ranks share, ``ranks`` those of the
    layers, in none of ``groups``."""
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for number, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            for name, parameter in layer.named_parameters():
                owners[parameter].append(_full_name(number, name))
    known = {frozenset(group) for group in groups}
    for names in owners.values():
        if len({ranks[_layer_of(name)] for name in names}) > 1 and frozenset(names) not in known:
            raise ValueError(
                f"parameter '{names[0]}': it is also {names[1:]}, and these layers are in stages on several "
                "ranks, where they would train apart. To sum their gradients, name the tie: "
                f"PipelineModule(..., ties=[{tuple(names)}])."
            )
