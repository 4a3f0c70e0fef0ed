"""Named layers of a model are replaced by tiled ones, in place, and the optimizer follows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.zero.tiling.tile_consensus import agree_on_tiles
from zero_ext.zero.tiling.tile_slice import bounds
from zero_ext.zero.tiling.tiled_embedding import TiledEmbedding
from zero_ext.zero.tiling.tiled_linear import TiledLinear
from zero_ext.zero.tiling.tiled_module import Tiled
from zero_ext.zero.units.presharded import born_shard, full_value, set_born

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

_OWN = "zero_ext.zero."


@dataclass(frozen=True)
class Tiling:
    """Layers to be tiled by their first name, each with its number of tiles."""

    splits: Mapping[str, int]


def plan_tiling(model: nn.Module, wanted: Mapping[str, int]) -> Tiling:
    """Finds and checks the layers that ``wanted`` names, by module or class name; changes nothing.

    Raises ``ValueError`` naming the entry for a name that matches nothing, a layer that is neither
    ``nn.Linear`` nor ``nn.Embedding``, a bad number of tiles, layers with hooks, and weights that are tied
    to one that is not tiled alike.
    """
    splits: dict[str, int] = {}
    unmatched = set(wanted)
    for name, module in model.named_modules():
        # A layer that is tiled already counts as what it was: prepare may be called again after an error.
        kind = type(module).__name__
        kind = kind.removeprefix("Tiled") if isinstance(module, Tiled) else kind
        labels = [label for label in (name, kind) if label in wanted]
        unmatched.difference_update(labels)
        if labels and not isinstance(module, Tiled):
            splits[name] = wanted[labels[0]]  # a module's own name counts before its class
            _check_layer(name, module, splits[name])
    if unmatched:
        raise ValueError(
            f"units.tiles: {sorted(unmatched)} match no module; give full names of nn.Linear or nn.Embedding "
            "modules, such as 'lm_head', or their class"
        )
    _check_ties(model, splits)
    return Tiling(splits)


def _check_layer(name: str, module: nn.Module, splits: int) -> None:
    place = f"units.tiles.{name}"
    if not name:
        raise ValueError("units.tiles: the model itself cannot be tiled; put the layer into a module")
    # Not subclasses, whose forward may be another; the second half is for type checkers.
    if type(module) not in (nn.Linear, nn.Embedding) or not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(f"{place}: a {type(module).__name__}; only nn.Linear and nn.Embedding can be tiled")
    bounds(module.out_features if isinstance(module, nn.Linear) else module.num_embeddings, splits, place)
    for option in ("max_norm", "sparse"):
        if getattr(module, option, None):
            raise ValueError(f"{place}: {option} = {getattr(module, option)!r}, which tiles cannot have")
    hooked = [kind for kind in _HOOKS if _has_foreign(getattr(module, kind, None))]
    hooked += [
        f"{inner}.{kind}"
        for inner, parameter in module.named_parameters()
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
        if _has_foreign(getattr(parameter, kind, None))
    ]
    if hooked or module._compiled_call_impl is not None:
        raise ValueError(
            f"{place}: has hooks or is compiled ({hooked}), which tiles would lose; register hooks on the "
            "module around it, or after zero_ext.prepare"
        )


def _has_foreign(hooks: Mapping[int, object] | None) -> bool:
    """Whether there are other hooks than those of an engine, which go with it before layers are tiled."""
    return any(not getattr(hook, "__module__", "").startswith(_OWN) for hook in (hooks or {}).values())


def _check_ties(model: nn.Module, splits: Mapping[str, int]) -> None:
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners[parameter].append(f"{prefix}.{name}" if prefix else name)
    for places in owners.values():
        numbers = {splits.get(place.rpartition(".")[0]) for place in places}
        if len(numbers) > 1:
            raise ValueError(
                f"units.tiles: the tied parameters {places} are to be cut into "
                f"{[splits.get(place.rpartition('.')[0]) for place in places]} tiles (None: not tiled); name "
                "all their modules with the same number"
            )


def apply_tiling(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tiling: Tiling,
    collectives: Collectives,
) -> None:
    """Replaces the planned layers in ``model``, and their parameters in ``optimizer``'s groups by the tiles.

    Tiles share the memory of what they replace, or its shard if it was sharded at birth; one whose elements
    do not lie row by row is gathered for it, a collective. Tied parameters stay tied. From here on the ranks
    agree on the tiles that embeddings gather.
    """
    parts: dict[nn.Parameter, list[nn.Parameter]] = {}
    for name, number in tiling.splits.items():
        layer = model.get_submodule(name)
        made = _like(layer, number)
        for inner, parameter in layer.named_parameters():
            if parameter not in parts:
                parts[parameter] = _cut(made, inner, parameter, collectives)
            made.take(inner, parts[parameter])
        made.train(layer.training)
        for parent in list(model.modules()):
            for child, module in parent._modules.items():
                if module is layer:
                    parent._modules[child] = made
    for group in optimizer.param_groups if optimizer is not None else ():
        _follow(group, parts)
    agree_on_tiles(model, collectives)


def _cut(
    made: TiledLinear | TiledEmbedding, name: str, parameter: nn.Parameter, collectives: Collectives
) -> list[nn.Parameter]:
    """One parameter a tile, in the order of the tiles, of ``parameter``, the layer's ``name``."""
    born = born_shard(parameter)
    places = [place for _, place in made.places() if place.name == name]
    if born is None or born.spec.stride != places[0].stride:
        value = parameter if born is None else full_value(parameter, collectives)
        return made.cut(name, value, parameter.requires_grad)
    tiles = []
    for place in places:
        # Layers are cut into rows, so a tile is one run of the whole.
        ((_, start, _),) = place.runs(0, math.prod(place.sizes))
        part = born.part(start, place.sizes)
        tiles.append(nn.Parameter(part.placeholder, requires_grad=parameter.requires_grad))
        set_born(tiles[-1], part)
    return tiles


def _like(layer: nn.Module, number: int) -> TiledLinear | TiledEmbedding:
    """A tiled layer of the sizes of ``layer``, without values."""
    if isinstance(layer, nn.Linear):
        sizes = (layer.in_features, layer.out_features, layer.bias is not None, 1, number)
        return TiledLinear(*sizes, device="meta", dtype=layer.weight.dtype)
    if not isinstance(layer, nn.Embedding):
        raise AssertionError(f"a plan to tile a {type(layer).__name__}")
    return TiledEmbedding(
        layer.num_embeddings,
        layer.embedding_dim,
        number,
        layer.padding_idx,
        layer.scale_grad_by_freq,
        "meta",
        layer.weight.dtype,
    )


def _follow(group: dict[str, object], parts: Mapping[nn.Parameter, list[nn.Parameter]]) -> None:
    """Puts the tiles of a parameter where it stood in a param group, and in the names beside it."""
    parameters, names = group["params"], group.get("param_names")
    if not isinstance(parameters, list):
        raise AssertionError("a param group without a list of parameters")
    group["params"] = [tile for parameter in parameters for tile in parts.get(parameter, [parameter])]
    if isinstance(names, list):
        group["param_names"] = [
            f"{name}.{number}" if parameter in parts else name
            for name, parameter in zip(names, parameters, strict=True)
            for number, _ in enumerate(parts.get(parameter, [parameter]))
        ]
