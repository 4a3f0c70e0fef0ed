"""Links between nodes as a model, where namespaces are not permitted: counting crossing bytes takes time.

All ranks run on the plain host. A node's link is a file that holds its rate and the time until which it is
taken. Whenever a rank's byte counter records a collective, the rank books its crossing bytes on the link of
its node and sleeps until they would be through. What a node receives and what else would use the link at that
time are not modeled, and nothing overlaps with it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.harness.network import EmulatedNetwork, NetworkRefused, launched

FILE = "ZERO_EXT_BENCH_LINK"
STATE = struct.Struct("dd")  # bytes a second, 0 for no limit; CLOCK_MONOTONIC at which the link is free


class ModeledNetwork:
    """`nodes` links of `ranks_per_node` ranks each, as files in a folder of their own. A context manager."""

    def __init__(self, nodes: int, ranks_per_node: int, bits_per_second: float | None, why: str) -> None:
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.name = f"token bucket in the byte counter, which models the time of links ({why})"
        self._folder = tempfile.TemporaryDirectory(prefix="zero_ext_links_")
        self.limit(bits_per_second)

    def __enter__(self) -> ModeledNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def limit(self, bits_per_second: float | None) -> None:
        """See Network."""
        for node in range(self.nodes):
            self._link(node).write_bytes(STATE.pack((bits_per_second or 0.0) / 8, 0.0))

    def prefix(self, rank: int) -> list[str]:
        """See Network."""
        return []

    def environment(self, rank: int) -> dict[str, str]:
        """See Network."""
        local = {"MASTER_ADDR": "127.0.0.1", FILE: str(self._link(rank // self.ranks_per_node))}
        return launched(rank, self.nodes, self.ranks_per_node) | local

    def _link(self, node: int) -> Path:
        return Path(self._folder.name) / f"node{node}"


AnyNetwork = EmulatedNetwork | ModeledNetwork


def open_network(nodes: int, ranks_per_node: int, bits_per_second: float | None = None) -> AnyNetwork:
    """Emulated links where the machine permits them, modeled ones elsewhere; a context manager."""
    try:
        with EmulatedNetwork(nodes, ranks_per_node):
            pass
    except NetworkRefused as refused:
        return ModeledNetwork(nodes, ranks_per_node, bits_per_second, str(refused))
    return EmulatedNetwork(nodes, ranks_per_node, bits_per_second)


def book(link: Path, nbytes: int) -> float:
    """Takes the link for `nbytes` after all that was booked before; seconds until they are through."""
    with link.open("r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rate, free = STATE.unpack(file.read(STATE.size))
        if rate == 0.0:
            return 0.0
        now = time.monotonic()
        free = max(now, free) + nbytes / rate
        file.seek(0)
        file.write(STATE.pack(rate, free))
    return float(free - now)


def slow_down(traffic: Any) -> None:
    """Has an engine's `traffic` take the time that the link of this node needs, if that link is a model."""
    if FILE not in os.environ:
        return
    link, record = Path(os.environ[FILE]), traffic.record

    def slowed(kind: str, elements: int, bytes_sent: int, crossing_bytes: int) -> None:
        record(kind, elements, bytes_sent, crossing_bytes)
        time.sleep(book(link, crossing_bytes))

    traffic.record = slowed
