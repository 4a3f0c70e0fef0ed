"""The two phases of a 1-bit all-reduce: reduce-scatter of sign bits to slice owners, and all-gather."""

from __future__ import annotations

import torch

from zero_ext import ops
from zero_ext.comm.collectives import Collectives
from zero_ext.comm.pending_collective import PendingCollective
from zero_ext.config.internal_error import zero_ext_bug


class OneBitAllReduce:
    """A 1-bit all-reduce of a flat buffer [numel]. Every rank owns an equal slice of it.

    Each rank sends every other one the signs of its slice (:meth:`scatter`, :meth:`scattered`). The owner
    makes one payload of them, in ``own``. All ranks receive these (:meth:`gather`, :meth:`gathered`).
    ``name`` names the buffer in labels.

    Source: Tang et al., "1-bit Adam" (arXiv 2102.02888), section 5 (the compressed all-reduce).
    """

    def __init__(self, collectives: Collectives, numel: int, device: torch.device, name: str) -> None:
        self._collectives = collectives
        self._numel = numel
        self._name = name
        ranks = collectives.world_size
        self._payload_bytes = ops.sign_payload_bytes(numel // ranks)
        self._payloads = torch.empty(ranks * self._payload_bytes, dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._payloads)
        self._pending: PendingCollective | None = None

    @property
    def own(self) -> torch.Tensor:
        """The slot of this rank's payload, to be filled before :meth:`gather`."""
        return self._payloads.chunk(self._collectives.world_size)[self._collectives.rank]

    def scatter(self, values: torch.Tensor, errors: torch.Tensor, factor: float) -> None:
        """Begin to send the signs of ``factor`` x ``values`` + ``errors`` [numel] and keep in ``errors``
        what they lose."""
        ranks, rank = self._collectives.world_size, self._collectives.rank
        ops.compress_1bit_(self._payloads, errors, values, factor, ranks)
        sends, receives = self._payloads.chunk(ranks), self._received.chunk(ranks)
        # The exchange moves nothing from a rank to itself, but ``scattered`` returns the payloads
        # of all.
        receives[rank].copy_(sends[rank])
        self._pending = self._collectives.exchange_payloads(
            receives, sends, "onebit_reduce_scatter", self._numel, f"exchange of the signs of {self._name}"
        )

    def scattered(self) -> torch.Tensor:
        """Return the payloads of all ranks for this rank's slice, in rank order."""
        self._wait()
        return self._received

    def gather(self) -> None:
        """Begin to send ``own`` to all ranks."""
        slots = self._payloads.chunk(self._collectives.world_size)
        # Scales may be NaN, and codes look like it.
        self._pending = self._collectives.gather_payloads(
            slots, "onebit_all_gather", self._numel, f"gather of the signs of {self._name}", may_be_nan=True
        )

    def gathered(self) -> torch.Tensor:
        """Return the payloads of all ranks, each of its own slice, in rank order."""
        self._wait()
        return self._payloads

    def _wait(self) -> None:
        if self._pending is None:
            raise zero_ext_bug("no all-reduce was started")
        self._pending.wait()
        self._pending = None
