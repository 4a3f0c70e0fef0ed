"""Inputs that several ranks hold alike, each rank keeping its part: the comparison, and the way back."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero_ext import ops
from zero_ext.activation.counters import Counters
from zero_ext.activation.layout import Layout
from zero_ext.comm.process_group import make_collectives

_FIX = (
    "Give the group of ranks that hold the same activations (tensor parallelism) as activation_group, or set "
    "activation_checkpointing.partition_activations to false"
)


class DifferentInputs(RuntimeError):
    """The ranks of the group hold different inputs; every one of them raises this."""


class Partition:
    """The ranks of ``group`` keep 1/N of each call's inputs, which are the same on all of them.

    A collective of the group's ranks, all of which passed :func:`check_group`. What it sends is counted in
    ``counters``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_seconds: float,
        counters: Counters,
    ) -> None:
        self._collectives = make_collectives(group, timeout_seconds, device)
        self._collectives.bus, self._collectives.wire = counters.bus, counters.wire
        self._compares_all = True  # until backward begins for the first time
        self._compares_next = True

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._collectives.rank

    @property
    def size(self) -> int:
        """Number of ranks N that share the inputs."""
        return self._collectives.world_size

    def compare(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Raises :class:`DifferentInputs` on all ranks unless all of them call it with the same ``tensors``,
        maybe none. Once backward has begun for the first time it looks at the first tensors after each
        backward only."""
        if self.size == 1 or not (self._compares_all or self._compares_next):
            return
        found = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        found[self.rank] = _digest(tensors)
        seen = self._collectives.sum_(found, f"comparison of the inputs of {name}").tolist()
        differ = [rank for rank in range(self.size) if seen[rank] != seen[0]]
        if differ:
            raise DifferentInputs(
                f"rank {self.rank} of the activation group: the inputs of {name} differ between the ranks: "
                f"ranks {differ} hold other values, shapes, strides or dtypes than rank 0, or move others of "
                f"them (smallest_bytes), so no rank can keep a part for the others. {_FIX}."
            )
        # The same on all ranks, as what they hold is.
        self._compares_next = self._compares_next and not tensors

    def gather(self, part: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The region [layout.nbytes] of which this rank has ``part`` [layout.part_bytes]."""
        self._compares_all, self._compares_next = False, True
        if self.size == 1:
            return part
        region = torch.empty(layout.nbytes, dtype=torch.uint8, device=part.device)
        label = f"kept inputs of {layout.nbytes} bytes"
        self._collectives.gather(region, part, "activations", label).wait()
        return region

    def give_up(self, reason: str) -> None:
        """Has the other ranks fail, which wait for this one, with ``reason``."""
        self._collectives.give_up(reason)


def check_group(group: dist.ProcessGroup | None, data_parallel_group: dist.ProcessGroup | None) -> None:
    """``ValueError`` unless ``group`` can share activations: its ranks see the same samples."""
    if group is None:
        raise ValueError(
            f"activation_checkpointing.partition_activations is true, but there is no group. {_FIX}."
        )
    if data_parallel_group is None:
        return
    ranks, others = (set(dist.get_process_group_ranks(each)) for each in (group, data_parallel_group))
    if len(ranks & others) > 1:
        raise ValueError(
            f"activation_group has ranks {sorted(ranks)}, of which {sorted(ranks & others)} are "
            f"data-parallel: they see different samples, so none can keep a part of another's "
            f"activations. {_FIX}."
        )


def _digest(tensors: Sequence[torch.Tensor]) -> int:
    """62 bits that depend on all values, shapes, dtypes and where each value lies among the kept bytes."""
    spans = Layout.of(tensors).spans
    facts = repr((len(spans), [(str(span.dtype), span.size, span.kept) for span in spans]))
    named = zlib.crc32(facts.encode())
    total = named
    for tensor in tensors:
        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        total = ops.crc32c(flat, total)
    return (named & 0x3FFFFFFF) << 32 | total
