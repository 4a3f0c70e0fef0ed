"""Checks of experts that are spread over ranks, before anything is sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero_ext.config import ZeroConfig
from zero_ext.optim.lamb import Lamb
from zero_ext.zero.construction.grouping import OwnedParameter
from zero_ext.zero.tiling.replace_layers import Tiling
from zero_ext.zero.units.parameter_marks import expert_ranks, is_packed
from zero_ext.zero.units.presharded import presharded_of
from zero_ext.zero.units.rank_groups import RankGroups


def check_experts(
    owned: Sequence[OwnedParameter],
    tiling: Tiling,
    optimizer: torch.optim.Optimizer | None,
    settings: ZeroConfig,
    groups: RankGroups,
) -> None:
    """Refuse experts on other ranks than those of the mesh, and features that need equal parameters.

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
            raise ValueError(f"expert parameter '{item.spec.name}': {problem}")
    if settings.communication.shard_group_size is not None:
        raise ValueError(
            "communication.shard_group_size: expected None, as experts on several ranks are "
            "sharded over those with the same ones, got "
            f"{settings.communication.shard_group_size}. Leave it out."
        )
    if isinstance(optimizer, Lamb):
        raise ValueError(
            "optimizer: expected another one than Lamb with experts on several ranks, as a trust "
            "ratio needs the norm of a parameter and the ranks have different ones. Use "
            "torch.optim.AdamW."
        )


def _problem(item: OwnedParameter, tiling: Tiling, ranks: tuple[int, ...]) -> str | None:
    spread = expert_ranks(item.parameter)
    if spread != ranks:
        return (
            f"expected a mesh with the 'ep' ranks {list(spread)} that have the experts, got "
            f"{list(ranks)}. Pass "
            "zero_ext.prepare, as its process_group, the mesh that MixtureOfExperts was built with."
        )
    if presharded_of(item.parameter) is not None:
        return (
            "expected one that was built outside of zero_ext.Init, which shards over all ranks and "
            "gives them "
            "one rank's values. Build experts outside of it."
        )
    if any(name.rpartition(".")[0] in tiling.splits for name in item.names):
        return "expected no tiles of experts on several ranks, got units.tiles. Name other layers."
    if is_packed(item.parameter):
        return "expected no quantized experts on several ranks, got some. Build them unquantized."
    return None
