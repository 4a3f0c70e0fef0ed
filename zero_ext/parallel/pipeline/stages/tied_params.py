"""Parameters that several layers of a pipeline share, wherever the stages put them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.parallel.pipeline.stages.layers import Layer, TiedLayerSpec, outline_of
from zero_ext.zero.units.parameter_marks import mark_tied

Group = tuple[str, ...]


def full_name(number: int, name: str) -> str:
    """Return the name of a parameter of layer ``number`` in the whole model."""
    return f"layers.{number}.{name}"


def layer_of(name: str) -> int:
    """Return the layer's number in a :func:`full_name`."""
    return int(name.split(".")[1])


def tied_groups(layers: Sequence[Layer], named: Sequence[Sequence[str]]) -> list[Group]:
    """Return groups of full names of one parameter each: those ``named``, and those of tied specifications.

    Raises ``ValueError`` for a name that no layer has, a group of fewer than two, and parameters that are
    neither one object nor equal.
    """
    groups = [tuple(group) for group in named]
    for group in groups:
        _check(layers, group)
    by_key: dict[str, list[int]] = defaultdict(list)
    for number, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            by_key[layer.key].append(number)
    for key, numbers in by_key.items():
        outlines = [dict(_specification(layers[number]).outline().named_parameters()) for number in numbers]
        shapes = [{name: tuple(each.shape) for name, each in outline.items()} for outline in outlines]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(
                f"TiedLayerSpec '{key}': expected the same parameters in layers {numbers}, got {shapes[0]} "
                f"and {next(shape for shape in shapes if shape != shapes[0])}. Give them one class and the "
                "same arguments."
            )
        groups += [tuple(full_name(number, name) for number in numbers) for name in shapes[0]]
    return groups


def check_ties(layers: Sequence[Layer], ranks: Sequence[int], groups: Sequence[Group]) -> None:
    """Raise ``ValueError`` for a parameter that layers on several ranks share, ``ranks`` those of the
    layers, in none of ``groups``."""
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for number, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            for name, parameter in layer.named_parameters():
                owners[parameter].append(full_name(number, name))
    known = {frozenset(group) for group in groups}
    for names in owners.values():
        if len({ranks[layer_of(name)] for name in names}) > 1 and frozenset(names) not in known:
            raise ValueError(
                f"parameter '{names[0]}': it is also {names[1:]}, and these layers are in stages on several "
                "ranks, where they would train apart. To sum their gradients, name the tie: "
                f"PipelineModule(..., ties=[{tuple(names)}])."
            )


def mark_ties(
    layers: Mapping[str, nn.Module], groups: Sequence[Group], ranks: Sequence[Sequence[int]]
) -> None:
    """Declare this rank's tied parameters; ``ranks`` are those, among the ranks with the model's parts, that
    have the members of each group."""
    for group, holders in zip(groups, ranks, strict=True):
        distinct = sorted(set(holders))
        for name in group:
            number, rest = name.split(".", 2)[1:]
            if number in layers and len(distinct) > 1:
                mark_tied(layers[number].get_parameter(rest), group[0], distinct)


def _specification(layer: Layer) -> TiedLayerSpec:
    if not isinstance(layer, TiedLayerSpec):
        raise zero_ext_bug("a tied layer without a specification")
    return layer


def _check(layers: Sequence[Layer], group: Group) -> None:
    if len(group) < 2:
        raise ValueError(
            f"ties: expected the names of at least two parameters, got {group}. Name all parameters of the "
            "tie."
        )
    found = [_parameter(layers, name) for name in group]
    first = found[0]
    for name, parameter in zip(group, found, strict=True):
        if parameter is not first and (first.shape != parameter.shape or not torch.equal(first, parameter)):
            raise ValueError(
                f"ties: '{group[0]}' and '{name}' are different parameters with different values. Set one "
                "module's parameter to the other's before, or use TiedLayerSpec."
            )


def _parameter(layers: Sequence[Layer], name: str) -> nn.Parameter:
    prefix, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
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
