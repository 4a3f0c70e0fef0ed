"""All-gather of a unit's shards into its full parameters, optionally quantized or from secondary shards."""

from __future__ import annotations

import torch

from zero_ext import ops
from zero_ext.comm import Collectives, PendingCollective
from zero_ext.config.buffer_sizes import BLOCK_ELEMENTS
from zero_ext.config.communication import CODE_BITS, CodeDtype, CommunicationConfig
from zero_ext.offload import TierManager
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.units.expert_ranges import Ranges
from zero_ext.zero.units.flat_layout import FlatLayout


def format_of(codes: CodeDtype | None) -> ops.BlockFormat | None:
    """Return the symmetric block format of ``codes``, in which zero stays zero; None for None."""
    return None if codes is None else ops.BlockFormat(CODE_BITS[codes], True, BLOCK_ELEMENTS)


class ParameterGather:
    """Gathers the shards of a unit, in quantized form if configured.

    Quantized gathers are qwZ (ZeRO++, Wang et al., arXiv 2306.10209, section 3.1).

    With secondary shards (hpZ, section 3.2) a rank stores what its counterparts in all nodes and itself sent,
    until :meth:`invalidate`. Meanwhile gathers stay in the node and need no shard. All ranks end with the
    same values, so a rank's own slice is the dequantized payload, not its shard.
    """

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        collectives: Collectives,
        pool: BufferPool,
        tiers: TierManager,
        config: CommunicationConfig,
    ) -> None:
        self._name, self._layout, self._collectives, self._pool = name, layout, collectives, pool
        alone = collectives.world_size == 1
        quantizes = not alone and layout.dtype.is_floating_point
        self._format = format_of(config.quantized_weights) if quantizes else None
        self._payload: torch.Tensor | None = None
        self._slots: list[torch.Tensor] = []
        self._secondary: torch.Tensor | None = None
        stored = config.secondary_bytes(
            layout.shard_numel, layout.dtype.itemsize, collectives.nodes.nodes, layout.dtype.is_floating_point
        )
        if stored:
            self._secondary = tiers.device.allocate("device", stored, torch.uint8)
        self._secondary_valid = False  # whether the secondary shard has the values gathered last

    @property
    def needs_shard(self) -> bool:
        """Return whether the next gather, unless it is exact, sends this rank's shard."""
        return not self._secondary_valid

    @property
    def is_lossy(self) -> bool:
        """Return whether gathered parameters differ from their shards."""
        return self._format is not None

    def invalidate(self) -> None:
        """Discard the secondary shard after the shards changed, on all ranks."""
        self._secondary_valid = False

    def allocated_bytes(self) -> int:
        """Return the bytes of device memory of the secondary shard."""
        return 0 if self._secondary is None else self._secondary.nbytes

    def start(
        self,
        flat: torch.Tensor,
        own: torch.Tensor,
        kind: str,
        label: str,
        exact: bool,
        ranges: Ranges | None = None,
    ) -> PendingCollective:
        """Start to fill ``flat`` [layout.numel] on every rank. Call :meth:`finish` when it has ended.

        ``own`` is this rank's slice of it, with its shard. The traffic is counted under ``kind``, and errors
        name ``label``. ``exact``: gather the shards without quantization. ``ranges``: fill only these.
        """
        if ranges is not None:
            return self._collectives.gather_ranges(flat, ranges, kind, label)
        # Without quantization every gather is exact, also one from secondary shards.
        exact = exact and self.is_lossy
        if exact or (self._format is None and self._secondary is None):
            return self._collectives.gather(flat, own, kind, label)
        ranks, rank = self._collectives.world_size, self._collectives.rank
        if self._format is not None:
            nbytes = ranks * self._format.payload_bytes(own.numel())
            self._payload = self._pool.acquire(nbytes, self._name, "payload")
        self._slots = list((flat.view(torch.uint8) if self._payload is None else self._payload).chunk(ranks))
        if self._secondary_valid:
            for stored, slot in self._secondary_slots():
                slot.copy_(stored)
        elif self._format is not None:
            ops.quantize_(self._slots[rank], own, self._format, 1)
        return self._collectives.gather_payloads(
            self._slots, kind, self._layout.numel, label, in_node=self._secondary_valid
        )

    def finish(self, flat: torch.Tensor) -> None:
        """Write the gathered values to ``flat`` once the collective of :meth:`start` has ended."""
        # An exact gather of a quantized unit has no slots and leaves the secondary shard as it is. The
        # secondary shard has the form in which it was sent, so later gathers have the same bits.
        if self._secondary is not None and self._slots and not self._secondary_valid:
            for stored, slot in self._secondary_slots():
                stored.copy_(slot)
            self._secondary_valid = True
        self._slots = []
        if self._payload is not None and self._format is not None:
            payload, self._payload = self._payload, None
            ops.dequantize_(flat, payload, self._format, self._collectives.world_size)
            self._pool.release(payload)

    def _secondary_slots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each slice of the secondary shard with its slot in the payload."""
        nodes = self._collectives.nodes
        if self._secondary is None:
            return []
        slots = [self._slots[rank] for rank in nodes.counterparts]
        return list(zip(self._secondary.chunk(nodes.nodes), slots, strict=True))
