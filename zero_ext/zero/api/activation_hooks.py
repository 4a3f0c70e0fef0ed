"""The checkpointing of a prepared model: what `zero_ext.checkpoint_activations` does inside its forward."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from zero_ext.activation import Checkpointing
from zero_ext.activation.partitioned_activations import check_group
from zero_ext.activation.transfer_counters import Counters
from zero_ext.config import ActivationPolicy
from zero_ext.zero.engine import Engine
from zero_ext.zero.units.rank_groups import RankGroups


def checkpointing_of(engine: Engine, group: dist.ProcessGroup | None) -> Checkpointing:
    """Keeps calls as the engine's configuration says, across ``group`` where inputs are partitioned."""
    settings = engine.config
    alive = weakref.ref(engine)

    def stays(tensor: torch.Tensor) -> bool:
        found = alive()
        storage = tensor.untyped_storage()._cdata
        return found is not None and storage in found.flat_storages

    return Checkpointing(
        settings.activation_checkpointing,
        group,
        data_parallel_group=engine.group,
        aio=settings.aio,
        stays=stays,
        counters=Counters(engine.collectives.bus, engine.wire, engine.tiers.transfers),
        timeout_seconds=settings.timeout_seconds,
    )


def activation_group_of(
    policy: ActivationPolicy, group: dist.ProcessGroup | None, groups: RankGroups
) -> dist.ProcessGroup | None:
    """The ranks to partition activations over: the ``group`` given, else those with other parts of the same
    tensors. ``ValueError`` for a group that nothing is partitioned over, or whose ranks see other samples."""
    if group is None:
        return groups.tensor if policy.partition_activations else None
    if not policy.partition_activations:
        raise ValueError(
            "activation_group is given, which has no effect: activation_checkpointing.partition_activations "
            "is false; set it to true, or leave the group out"
        )
    if dist.is_initialized():
        check_group(group, groups.data or dist.group.WORLD)
    return group
