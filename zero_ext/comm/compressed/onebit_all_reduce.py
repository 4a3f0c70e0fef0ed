"""The two halves of a compressed all-reduce: signs to the owners of parts, and back to all ranks."""

from __future__ import annotations

import torch

from zero_ext import ops
from zero_ext.comm.collectives import Collectives
from zero_ext.comm.transport import Pending


class SignExchange:
    """One exchange of a flat buffer [numel], of which every rank owns an equal part; ``name`` says of what.

    Each rank sends every other one the signs of its part (:meth:`scatter`, :meth:`scattered`); the owner
    makes one message of them, in ``own``, and all ranks get all of these (:meth:`gather`, :meth:`gathered`).

    Source: Tang et al., "1-bit Adam" (arXiv 2102.02888), section 5 (the compressed all-reduce).
    """

    def __init__(self, collectives: Collectives, numel: int, device: torch.device, name: str) -> None:
        self._collectives = collectives
        self._numel = numel
        self._name = name
        ranks = collectives.world_size
        self._message_bytes = ops.sign_message_bytes(numel // ranks)
        self._messages = torch.empty(ranks * self._message_bytes, dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._messages)
        self._pending: Pending | None = None

    @property
    def own(self) -> torch.Tensor:
        """Where this rank's message goes before :meth:`gather`."""
        return self._messages.chunk(self._collectives.world_size)[self._collectives.rank]

    def scatter(self, values: torch.Tensor, errors: torch.Tensor, factor: float) -> None:
        """Begins to send the signs of ``factor`` x ``values`` + ``errors`` [numel] and keeps in ``errors``
        what they lose."""
        ranks, rank = self._collectives.world_size, self._collectives.rank
        ops.compress_signs_(self._messages, errors, values, factor, ranks)
        sends, receives = self._messages.chunk(ranks), self._received.chunk(ranks)
        receives[rank].copy_(sends[rank])
        self._pending = self._collectives.exchange_messages(
            receives, sends, "signs_to_owners", self._numel, f"exchange of the signs of {self._name}"
        )

    def scattered(self) -> torch.Tensor:
        """The messages of all ranks for this rank's part, in rank order."""
        self._wait()
        return self._received

    def gather(self) -> None:
        """Begins to send ``own`` to all ranks."""
        slots = self._messages.chunk(self._collectives.world_size)
        # Scales may be NaN, and codes look like it.
        self._pending = self._collectives.gather_messages(
            slots, "signs_to_all", self._numel, f"gather of the signs of {self._name}", may_be_nan=True
        )

    def gathered(self) -> torch.Tensor:
        """The messages of all ranks, each of its own part, in rank order."""
        self._wait()
        return self._messages

    def _wait(self) -> None:
        if self._pending is None:
            raise AssertionError("no exchange was begun")
        self._pending.wait()
        self._pending = None
