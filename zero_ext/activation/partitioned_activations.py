"""Partitioned inputs: several ranks hold the same ones, and each stores a shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero_ext.activation.fingerprint import Fingerprint, checksum
from zero_ext.activation.packed_layout import PackedLayout
from zero_ext.activation.transfer_counters import TransferCounters
from zero_ext.comm.process_group import make_collectives

_FIX = (
    "Give the group of ranks that hold the same activations (tensor parallelism) as activation_group, or set "
    "activation_checkpointing.partition_activations to false"
)


class DifferentInputsError(RuntimeError):
    """The ranks of the group hold different inputs; every one of them raises this."""


class ActivationPartition:
    """The ranks of ``group`` store 1/N of each call's inputs, which are the same on all of them.

    A collective of the group's ranks, all after :func:`check_group`. What it sends is counted in
    ``counters``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_seconds: float,
        counters: TransferCounters,
    ) -> None:
        self._collectives = make_collectives(group, timeout_seconds, device)
        self._collectives.bus, self._collectives.traffic = counters.bus, counters.traffic
        self._device = device
        self._compares_all = True  # until backward begins for the first time
        self._compares_next = True  # false while there are calls that the next gather compares
        self._later = Fingerprint(device)
        self._names: dict[str, None] = {}

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._collectives.rank

    @property
    def size(self) -> int:
        """Number of ranks N that share the inputs."""
        return self._collectives.world_size

    def compare(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Raise :class:`DifferentInputsError` unless all ranks call it with the same ``tensors``, maybe none.
        Once backward has begun for the first time it does so for the first tensors after each
        backward; the other ones are compared in the first :meth:`gather`."""
        if self.size == 1:
            return
        if self._compares_all or self._compares_next:
            found = torch.zeros(self.size, dtype=torch.int64, device="cpu")
            found[self.rank] = checksum(tensors)
            self._collectives.sum_(found, f"comparison of the inputs of {name}")
            self._check(found, f"inputs of {name}")
            # The same on all ranks, as what they hold is.
            self._compares_next = self._compares_next and not tensors
        else:
            self._later.add(tensors)
            self._names[name] = None

    def gather(self, shard: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """Return the region [layout.nbytes] with this rank's ``shard`` [layout.shard_bytes].

        Raises :class:`DifferentInputsError` on all ranks if calls since the last backward had different
        tensors.
        """
        if self.size == 1:
            return shard
        compared, self._compares_all, self._compares_next = self._compares_next, False, True
        if not compared:
            self._agree_on_later()
        region = torch.empty(layout.nbytes, dtype=torch.uint8, device=shard.device)
        label = f"partitioned inputs of {layout.nbytes} bytes"
        self._collectives.gather(region, shard, "activations", label).wait()
        return region

    def _agree_on_later(self) -> None:
        later, self._later = self._later, Fingerprint(self._device)
        names, self._names = self._names, {}
        found = torch.empty(self.size, dtype=torch.int64, device=self._device)
        # Over the transport of the next gather: a rank that aborted before it reports its reason there.
        label = "comparison of the partitioned inputs of calls since the last backward"
        self._collectives.gather(found, later.value(), "scalars", label).wait()
        called = ", ".join(names) or "none here"
        self._check(found, f"inputs of the later calls since the last backward ({called})")

    def _check(self, found: torch.Tensor, what: str) -> None:
        """Raise unless all ranks' numbers ``found`` are the same."""
        seen = found.tolist()
        differ = [rank for rank in range(self.size) if seen[rank] != seen[0]]
        if differ:
            raise DifferentInputsError(
                f"rank {self.rank} of the activation group: the {what} differ between the ranks: ranks "
                f"{differ} hold other values, shapes, strides or dtypes than rank 0, or move others of them "
                f"(min_offload_bytes), so no rank can store a shard for the others. {_FIX}."
            )

    def abort(self, reason: str) -> None:
        """Fail the other ranks, which wait for this one, with ``reason``."""
        self._collectives.abort(reason)


def check_group(group: dist.ProcessGroup | None, data_parallel_group: dist.ProcessGroup | None) -> None:
    """``ValueError`` unless ``group`` can share activations: its ranks see the same samples."""
    if group is None:
        raise ValueError(
            f"activation_checkpointing.partition_activations: expected an activation_group, got none. {_FIX}."
        )
    if data_parallel_group is None:
        return
    ranks, others = (set(dist.get_process_group_ranks(each)) for each in (group, data_parallel_group))
    if len(ranks & others) > 1:
        raise ValueError(
            f"activation_group: expected at most one data-parallel rank, got "
            f"{sorted(ranks & others)} in ranks {sorted(ranks)}. They process different samples, so none "
            f"can store a shard of another's activations. {_FIX}."
        )
