"""Elements and bytes that collectives send, by kind and step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class CollectiveTraffic(NamedTuple):
    """Elements and bytes of one collective, some bytes to other nodes; :class:`TrafficStats` counts them."""

    kind: str
    elements: int
    bytes_sent: int
    crossing_bytes: int


@dataclass
class TrafficStats:
    """Elements and bytes of collectives since :meth:`begin_step`, and of the last finished step.

    ``elements[kind]`` counts the full (padded) buffer of each collective once, before the factor
    ``(N - 1) / N`` that turns it into what one rank sends. ``bytes_sent[kind]`` is what this rank really
    handed to the transport, with the scales and padding of codes. ``crossing_bytes[kind]`` are the bytes of
    it that go to other nodes. The kinds are those of
    :data:`zero_ext.config.events.COLLECTIVE_KINDS`, each with the suffix ``_persistent`` for units below the
    persistence threshold.
    """

    elements: Counter[str] = field(default_factory=Counter)
    bytes_sent: Counter[str] = field(default_factory=Counter)
    crossing_bytes: Counter[str] = field(default_factory=Counter)
    last_elements: Counter[str] = field(default_factory=Counter)
    last_bytes_sent: Counter[str] = field(default_factory=Counter)
    last_crossing_bytes: Counter[str] = field(default_factory=Counter)

    def record(self, traffic: CollectiveTraffic) -> None:
        """Add one collective."""
        kind, elements, bytes_sent, crossing_bytes = traffic
        self.elements[kind] += elements
        self.bytes_sent[kind] += bytes_sent
        self.crossing_bytes[kind] += crossing_bytes

    def move_from(self, other: TrafficStats) -> None:
        """Add what ``other`` has counted since its last step, and set it to zero there."""
        own, others = ((each.elements, each.bytes_sent, each.crossing_bytes) for each in (self, other))
        for counts, added in zip(own, others, strict=True):
            counts.update(added)
            added.clear()

    def begin_step(self) -> None:
        """Close the current step: its counts become ``last_*`` and the running ones start at zero."""
        self.last_elements, self.elements = self.elements, Counter()
        self.last_bytes_sent, self.bytes_sent = self.bytes_sent, Counter()
        self.last_crossing_bytes, self.crossing_bytes = self.crossing_bytes, Counter()
