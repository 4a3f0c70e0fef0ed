"""The checkpointing of a prepared model: what `zero_ext.checkpoint_activations` does inside its forward."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from zero_ext.activation import ActivationCheckpointing
from zero_ext.activation.partitioned_activations import TransferCounters, check_group
from zero_ext.comm import Collectives
from zero_ext.config import ActivationCheckpointingConfig, ZeroConfig
from zero_ext.offload import TierManager
from zero_ext.zero.units.rank_groups import RankGroups
from zero_ext.zero.units.unit import Unit


def checkpointing_of(
    settings: ZeroConfig,
    units: Iterable[Unit],
    collectives: Collectives,
    tiers: TierManager,
    data_group: dist.ProcessGroup | None,
    group: dist.ProcessGroup | None,
) -> ActivationCheckpointing:
    """Keep calls as ``settings`` say, across ``group`` where inputs are partitioned. ``data_group`` has the
    data-parallel ranks."""
    # Storage objects of gathered parameters stay the same for life while memory comes and goes.
    storages = frozenset(unit.flat.untyped_storage()._cdata for unit in units)
    return ActivationCheckpointing(
        settings.activation_checkpointing,
        group,
        data_parallel_group=data_group,
        aio=settings.aio,
        stays=lambda tensor: tensor.untyped_storage()._cdata in storages,
        counters=TransferCounters(collectives.bus, collectives.traffic, tiers.transfers),
        timeout_seconds=settings.timeout_seconds,
    )


def activation_group_of(
    policy: ActivationCheckpointingConfig, group: dist.ProcessGroup | None, groups: RankGroups
) -> dist.ProcessGroup | None:
    """Return the ranks to partition activations over: the ``group`` given, else those with other parts of the
    same tensors. ``ValueError`` for a group that nothing is partitioned over, or with ranks that see other
    samples.
    """
    if group is None:
        return groups.tensor if policy.partition_activations else None
    if not policy.partition_activations:
        raise ValueError(
            "activation_group: expected None, as activation_checkpointing.partition_activations "
            "is false, got a group that would have no effect. Set partition_activations to true, "
            "or leave the group out."
        )
    if dist.is_initialized():
        check_group(group, groups.data or dist.group.WORLD)
    return group
