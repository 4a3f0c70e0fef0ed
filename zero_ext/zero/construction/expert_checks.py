"""Checks of experts that are spread over ranks, before anything is sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero_ext.config import ZeroConfig
from zero_ext.optim.lamb import Lamb
from zero_ext.zero.construction.grouping import OwnedParameter
from zero_ext.zero.tiling.replace_layers import Tiling
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.presharded import presharded_of
from zero_ext.zero.units.quantized_params import is_packed
from zero_ext.zero.units.rank_groups import RankGroups


def check_experts(
    owned: Sequence[OwnedParameter],
    tiling: Tiling,
    optimizer: torch.optim.Optimizer | None,
    settings: ZeroConfig,
    groups: RankGroups,
) -> None:
    """Refuse experts whose ranks are not those of the mesh, and features that need equal parameters.

    Raises:
        ValueError: On all ranks, with the parameter and the reason.
    """
    experts = [item for item in owned if expert_ranks(item.parameter)]
    if not experts:
        return
    ranks = tuple(dist.get_process_group_ranks(groups.experts)) if groups.experts is not None else ()
    for item in experts:
        problem = _problem(item, tiling, ranks)
        if problem:
            raise ValueError(f"parameter '{item.spec.name}' belongs to an expert and {problem}")
    if settings.communication.shard_group_size is not None:
        raise ValueError(
            f"communication.shard_group_size is {settings.communication.shard_group_size}, and the model has "
            "experts on several ranks, which are sharded over those with the same ones; leave it out"
        )
    if isinstance(optimizer, Lamb):
        raise ValueError(
            "Lamb with experts on several ranks: a trust ratio needs the norm of a parameter, and the ranks "
            "have different ones. Use torch.optim.AdamW"
        )


def _problem(item: OwnedParameter, tiling: Tiling, ranks: tuple[int, ...]) -> str:
    spread = expert_ranks(item.parameter)
    if spread != ranks:
        return (
            f"is one of those on ranks {list(spread)}, but the mesh has 'ep' ranks {list(ranks)}; give "
            "zero_ext.prepare, as its process_group, the mesh that MixtureOfExperts was built with"
        )
    if presharded_of(item.parameter) is not None:
        return (
            "was built inside zero_ext.Init, which shards over all ranks and gives them one rank's values; "
            "build experts outside of it"
        )
    if any(name.rpartition(".")[0] in tiling.splits for name in item.names):
        return "is to be tiled (units.tiles), which experts on several ranks cannot be; name other layers"
    if is_packed(item.parameter):
        return "is quantized, which experts on several ranks cannot be; quantize other layers"
    return ""
