"""Replacement of named layers by tiled ones, in place, and of their parameters in the optimizer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.tiling.tiled_layers import TiledEmbedding, TiledLinear, arguments_of, set_tile_consensus
from zero_ext.zero.tiling.tiled_module import TiledModule, bounds
from zero_ext.zero.units.presharded import presharded_of, set_presharded, unshard_presharded

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


def plan_tiling(model: nn.Module, wanted: Mapping[str, int]) -> dict[str, int]:
    """Find and check the layers that ``wanted`` names, by module or class name, without changing them.

    Returns each by its first name, with its number of tiles.

    Raises ``ValueError`` naming the entry for a name that matches nothing, a layer that is neither
    ``nn.Linear`` nor ``nn.Embedding``, a bad number of tiles, layers with hooks, and weights that are tied
    to one that is not tiled alike.
    """
    splits: dict[str, int] = {}
    unmatched = set(wanted)
    for name, module in model.named_modules():
        # A layer that is tiled already counts as what it was: prepare may be called again after an error.
        kind = type(module).__name__
        kind = kind.removeprefix("Tiled") if isinstance(module, TiledModule) else kind
        labels = [label for label in (name, kind) if label in wanted]
        unmatched.difference_update(labels)
        if labels and not isinstance(module, TiledModule):
            splits[name] = wanted[labels[0]]  # a module's own name counts before its class
            _check_layer(name, module, splits[name])
    if unmatched:
        raise ValueError(
            f"units.tiles: {sorted(unmatched)} match no module. Use full names of nn.Linear or nn.Embedding "
            "modules, such as 'lm_head', or their class."
        )
    _check_ties(model, splits)
    return splits


def _check_layer(name: str, module: nn.Module, splits: int) -> None:
    key = f"units.tiles.{name}"
    if not name:
        raise ValueError("units.tiles: the model itself cannot be tiled. Put the layer into a module.")
    # Not subclasses, whose forward may be another; the second half is for type checkers.
    if type(module) not in (nn.Linear, nn.Embedding) or not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(
            f"{key}: expected nn.Linear or nn.Embedding, got {type(module).__name__}. Leave it out."
        )
    bounds(module.out_features if isinstance(module, nn.Linear) else module.num_embeddings, splits, key)
    for option in ("max_norm", "sparse"):
        if getattr(module, option, None):
            raise ValueError(
                f"{key}: tiles do not support {option}, got {getattr(module, option)!r}. Leave the layer out."
            )
    hooked = [kind for kind in _HOOKS if _has_foreign(getattr(module, kind, None))]
    hooked += [
        f"{inner}.{kind}"
        for inner, parameter in module.named_parameters()
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
        if _has_foreign(getattr(parameter, kind, None))
    ]
    if hooked or module._compiled_call_impl is not None:
        raise ValueError(
            f"{key}: it has hooks or is compiled ({hooked}), which tiles would lose. Register hooks on the "
            "module around it, or after zero_ext.prepare."
        )


def _has_foreign(hooks: Mapping[int, object] | None) -> bool:
    """Return whether there are other hooks than those of an engine, which go with it before layers are
    tiled."""
    return any(not getattr(hook, "__module__", "").startswith(_OWN) for hook in (hooks or {}).values())


def _check_ties(model: nn.Module, splits: Mapping[str, int]) -> None:
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners[parameter].append(f"{prefix}.{name}" if prefix else name)
    for names in owners.values():
        numbers = {splits.get(name.rpartition(".")[0]) for name in names}
        if len(numbers) > 1:
            raise ValueError(
                f"units.tiles: expected one number of tiles for the tied parameters {names}, got "
                f"{[splits.get(name.rpartition('.')[0]) for name in names]} (None: not tiled). Name all "
                "their modules with the same number."
            )


def apply_tiling(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tiling: Mapping[str, int],
    collectives: Collectives,
) -> None:
    """Replace the planned layers in ``model``, and their parameters in ``optimizer``'s groups by the tiles.

    Tiles share the memory of the parameter that they replace, or its shard if that is presharded. A
    presharded parameter that is not contiguous is gathered, a collective. Tied parameters stay tied. From
    then on the ranks agree on the tiles that embeddings gather.
    """
    tiles_of: dict[nn.Parameter, list[nn.Parameter]] = {}
    for name, number in tiling.items():
        layer = model.get_submodule(name)
        made = (
            TiledLinear(**arguments_of(layer), out_splits=number)
            if isinstance(layer, nn.Linear)
            else TiledEmbedding(**arguments_of(cast(nn.Embedding, layer)), splits=number)
        )
        for inner, parameter in layer.named_parameters():
            if parameter not in tiles_of:
                tiles_of[parameter] = _cut(made, inner, parameter, collectives)
            made.set_tiles(inner, tiles_of[parameter])
        made.train(layer.training)
        # A layer that several modules share has to be replaced in each of them.
        for parent in list(model.modules()):
            for child, module in parent._modules.items():
                if module is layer:
                    parent._modules[child] = made
    for group in optimizer.param_groups if optimizer is not None else ():
        _follow(group, tiles_of)
    set_tile_consensus(model, collectives)


def _cut(
    made: TiledLinear | TiledEmbedding, name: str, parameter: nn.Parameter, collectives: Collectives
) -> list[nn.Parameter]:
    """Cut ``parameter``, the layer's ``name``, into one parameter per tile, in the order of the tiles."""
    presharded = presharded_of(parameter)
    slices = [tile for _, tile in made.tile_slices() if tile.name == name]
    if presharded is None or presharded.spec.stride != slices[0].stride:
        value = parameter if presharded is None else unshard_presharded(parameter, collectives)
        return made.cut(name, value, parameter.requires_grad)
    tiles = []
    for tile in slices:
        # Layers are cut into rows, so a tile is one range of the full tensor.
        ((_, start, _),) = tile.ranges(0, math.prod(tile.sizes))
        shard = presharded.slice(start, tile.sizes)
        tiles.append(nn.Parameter(shard.placeholder, requires_grad=parameter.requires_grad))
        set_presharded(tiles[-1], shard)
    return tiles


def _follow(group: dict[str, object], tiles_of: Mapping[nn.Parameter, list[nn.Parameter]]) -> None:
    """Replace parameters by their tiles in a param group, and in its ``param_names``."""
    parameters, names = group["params"], group.get("param_names")
    if not isinstance(parameters, list):
        raise zero_ext_bug("a param group without a list of parameters")
    group["params"] = [tile for parameter in parameters for tile in tiles_of.get(parameter, [parameter])]
    if isinstance(names, list):
        group["param_names"] = [
            f"{name}.{number}" if parameter in tiles_of else name
            for name, parameter in zip(names, parameters, strict=True)
            for number, _ in enumerate(tiles_of.get(parameter, [parameter]))
        ]
