"""How a unit's shards become its whole parameters on every rank."""

from __future__ import annotations

import torch

from zero_ext import ops
from zero_ext.comm import Collectives, Pending
from zero_ext.config.sections.communication import CommunicationPolicy
from zero_ext.offload import Tiers
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.units.flat_layout import FlatLayout
from zero_ext.zero.units.integer_formats import format_of


class ParameterExchange:
    """Gathers a unit of ``layout``: its shards, or messages of what they are quantised to (qwZ, ZeRO++, Wang
    et al., arXiv 2306.10209, section 3.1).

    Where nodes keep secondary shards (hpZ, section 3.2), a rank keeps what its counterparts in all nodes and
    itself sent, until :meth:`forget`; meanwhile gathers stay in the node and need no shard. All ranks end
    with the same values, so a rank's own slice is what its message says, and not its shard.
    """

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        collectives: Collectives,
        pool: BufferPool,
        tiers: Tiers,
        policy: CommunicationPolicy,
    ) -> None:
        self._name = name
        self._layout = layout
        self._collectives = collectives
        self._pool = pool
        alone = collectives.world_size == 1
        quantises = not alone and layout.dtype.is_floating_point
        self._format = format_of(policy.quantized_weights) if quantises else None
        self._messages: torch.Tensor | None = None
        self._slots: list[torch.Tensor] = []
        self._secondary: torch.Tensor | None = None
        kept = policy.secondary_bytes(
            layout.shard_numel,
            layout.dtype.itemsize,
            collectives.nodes.nodes,
            layout.dtype.is_floating_point,
        )
        if kept:
            self._secondary = tiers.device.allocate("device", kept, torch.uint8)
        self._knows = False  # whether the secondary shard has what was gathered last

    @property
    def needs_shard(self) -> bool:
        """Whether the next gather, unless it is exact, sends this rank's shard."""
        return not self._knows

    @property
    def rounds(self) -> bool:
        """Whether gathered parameters differ from their shards."""
        return self._format is not None

    def forget(self) -> None:
        """The shards change; on all ranks alike."""
        self._knows = False

    def held_bytes(self) -> int:
        """Bytes of device memory that the secondary shard takes."""
        return 0 if self._secondary is None else self._secondary.nbytes

    def start(self, flat: torch.Tensor, own: torch.Tensor, kind: str, label: str, exact: bool) -> Pending:
        """Begins to fill ``flat`` [layout.numel] on every rank; ``own`` is this rank's slice of it with its
        shard. ``exact``: with the shards themselves. After its end comes :meth:`finish`."""
        exact = exact and self.rounds
        if exact or (self._format is None and self._secondary is None):
            return self._collectives.gather(flat, own, kind, label)
        ranks, rank = self._collectives.world_size, self._collectives.rank
        if self._format is not None:
            nbytes = ranks * self._format.message_bytes(own.numel())
            self._messages = self._pool.take(nbytes, self._name, "messages")
        self._slots = list(
            (flat.view(torch.uint8) if self._messages is None else self._messages).chunk(ranks)
        )
        if self._knows:
            for kept, slot in self._kept():
                slot.copy_(kept)
        elif self._format is not None:
            ops.quantise_(self._slots[rank], own, self._format, 1)
        return self._collectives.gather_messages(
            self._slots, kind, self._layout.numel, label, in_node=self._knows
        )

    def finish(self, flat: torch.Tensor) -> None:
        """Once :meth:`start` has ended: ``flat`` becomes what was gathered."""
        if self._secondary is not None and self._slots and not self._knows:
            for kept, slot in self._kept():
                kept.copy_(slot)
            self._knows = True
        self._slots = []
        if self._messages is not None and self._format is not None:
            messages, self._messages = self._messages, None
            ops.dequantise_(flat, messages, self._format, self._collectives.world_size)
            self._pool.give(messages)

    def _kept(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each part of the secondary shard with its slot."""
        nodes = self._collectives.nodes
        if self._secondary is None:
            return []
        slots = [self._slots[rank] for rank in nodes.counterparts]
        return list(zip(self._secondary.chunk(nodes.nodes), slots, strict=True))
