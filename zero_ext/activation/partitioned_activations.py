"""Partitioned inputs: several ranks hold the same ones, and each stores a shard."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zero_ext import ops
from zero_ext.activation.packed_layout import PackedLayout, TensorSpan
from zero_ext.comm import TrafficStats
from zero_ext.comm.process_group import make_collectives
from zero_ext.config.events import Bus
from zero_ext.offload import TransferStats


@dataclass(frozen=True)
class TransferCounters:
    """Counters of offloaded and partitioned inputs.

    Attributes:
        bus: publishes collectives, waits for storage, and calls where ``profile`` is set.
        traffic: bytes between the ranks, "activations" where inputs are gathered, "scalars" where compared.
        transfers: bytes between the tiers.
    """

    bus: Bus = field(default_factory=Bus)
    traffic: TrafficStats = field(default_factory=TrafficStats)
    transfers: TransferStats = field(default_factory=TransferStats)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_COLUMNS = 1024
# Odd, with bits everywhere: 2**63 over the golden ratio.
_FACTOR = 0x4F1BBCDCBFA53E0B


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """62 bits that depend on all values, shapes, dtypes and positions of values among the packed bytes."""
    spans = PackedLayout.of(tensors).spans
    total = named = _facts(spans)
    for span, tensor in zip(spans, tensors, strict=True):
        total = ops.crc32c(span.memory_of(tensor).cpu(), total)
    return (named & 0x3FFFFFFF) << 32 | total


class Fingerprint:
    """An int64 of ``device`` that depends on what was added, and on its order.

    On an accelerator nothing is waited for, and each tensor is read twice by its sums over rows and columns.
    """

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the tensors of a call, maybe none."""
        if self._total.device.type == "cpu":
            self._mix(checksum(tensors))
            return
        spans = PackedLayout.of(tensors).spans
        self._mix(_facts(spans))
        for span, tensor in zip(spans, tensors, strict=True):
            self._mix(sums(span.memory_of(tensor), tensor.element_size()))

    def value(self) -> torch.Tensor:
        """Return what was added up to now, int64 [1]."""
        return self._total.view(1)

    def _mix(self, value: torch.Tensor | int) -> None:
        self._total.mul_(_FACTOR).add_(value)


def sums(memory: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Return an int64, on its device, of the bytes ``memory``, uint8 [n], and their positions; n is a
    multiple of ``itemsize``.

    Blocks of rows with equal sums of rows and of columns have the same number: a few masks, and hardly any
    tensors of numbers.
    """
    words = memory.view(_WORDS.get(itemsize, torch.int64))
    full_rows = words.numel() // _COLUMNS * _COLUMNS
    body = words[:full_rows].view(-1, _COLUMNS)
    found = torch.cat(
        [body.sum(0, dtype=torch.int64), body.sum(1, dtype=torch.int64), words[full_rows:].long()]
    )
    positions = _mixed(torch.arange(1, found.numel() + 1, device=found.device))
    return _mixed(found + positions).sum()


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Other values for other ``values``, with bits that depend on all of theirs."""
    for _ in range(2):
        values = values * _FACTOR
        values = values ^ (values >> 32)
    return values * _FACTOR


def _facts(spans: Sequence[TensorSpan]) -> int:
    facts = repr((len(spans), [(str(span.dtype), span.size, span.packed_stride) for span in spans]))
    return zlib.crc32(facts.encode())


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
