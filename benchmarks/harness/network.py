"""Nodes on one machine: namespaces joined by veth pairs and a bridge, a token bucket at every node's link.

A node is a network namespace with addresses of its own; `tc`'s tbf holds what leaves and what enters it to
a rate, while its ranks speak over its own loopback without limit. It is a mount namespace with a /dev/shm of
its own, too: ranks of different nodes find no common segment, as on two machines, so zero_ext picks sockets
for them, and its exchange through memory for groups inside a node.

Nothing is made in the machine's own namespaces. All of it lives as long as the processes that hold it, and
these end when their standard input does: with the context, or with the process that opened it, however that
ends.
"""

from __future__ import annotations

import json
import subprocess
from types import TracebackType
from typing import Protocol

ADDRESSES = "10.77.0"
INTERFACE = "link0"
LEAST_BURST = 128 << 10  # bytes that may leave at once: more than a segment handed to the card
BURST_SECONDS = 0.002
LEAST_QUEUE = 1 << 20
QUEUE_SECONDS = 0.05


class NetworkRefused(RuntimeError):
    """No namespaces or links on this machine; the message has the command and its complaint."""


class Network(Protocol):
    """What joins the nodes that a team of ranks runs on."""

    nodes: int
    ranks_per_node: int
    name: str  # for reports

    def limit(self, bits_per_second: float | None) -> None:
        """Holds what leaves and what enters every node to a rate; None: no limit."""

    def prefix(self, rank: int) -> list[str]:
        """What a rank's command line begins with."""

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set for a rank besides the port, and what lets gloo find its interface."""


class EmulatedNetwork:
    """`nodes` namespaces of `ranks_per_node` ranks each. Use as a context manager.

    Raises NetworkRefused on entering where namespaces, veth, bridge or tbf are not permitted or not there.
    """

    name = "network namespaces joined by veth and a bridge, tc tbf at every node"

    def __init__(self, nodes: int, ranks_per_node: int, bits_per_second: float | None = None) -> None:
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self._rate = bits_per_second
        self._holders: list[subprocess.Popen[bytes]] = []  # of the nodes, then of the bridge

    def __enter__(self) -> EmulatedNetwork:
        try:
            self._build()
            self.limit(self._rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the holders; the kernel removes the namespaces with all that is in them."""
        for holder in self._holders:
            holder.kill()
            holder.wait()
            for stream in (holder.stdin, holder.stdout):
                if stream is not None:
                    stream.close()
        self._holders.clear()

    def limit(self, bits_per_second: float | None) -> None:
        """See Network."""
        for node in range(self.nodes):
            for endpoint, device in ((node, INTERFACE), (self.nodes, f"port{node}")):
                if bits_per_second is None:
                    self._inside(
                        endpoint, "tc", "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "1000"
                    )
                    continue
                burst = max(LEAST_BURST, int(bits_per_second / 8 * BURST_SECONDS))
                queue = max(LEAST_QUEUE, int(bits_per_second / 8 * QUEUE_SECONDS))
                bucket = ["rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "limit", str(queue)]
                self._inside(endpoint, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *bucket)

    def prefix(self, rank: int) -> list[str]:
        """See Network."""
        return self._enter(rank // self.ranks_per_node)

    def environment(self, rank: int) -> dict[str, str]:
        """See Network."""
        found = launched(rank, self.nodes, self.ranks_per_node)
        return found | {"MASTER_ADDR": f"{ADDRESSES}.1", "GLOO_SOCKET_IFNAME": INTERFACE}

    def bytes_sent(self, node: int) -> int:
        """Bytes that have left a node over its link, with headers, by the kernel's count."""
        said = self._inside(node, "ip", "-json", "-statistics", "link", "show", INTERFACE)
        return int(json.loads(said)[0]["stats64"]["tx"]["bytes"])

    def _build(self) -> None:
        for _ in range(self.nodes):
            self._holders.append(_hold("--net", "--mount", "--uts", "--ipc"))
        self._holders.append(_hold("--net"))
        self._inside(self.nodes, "ip", "link", "add", "bridge0", "up", "type", "bridge")
        for node in range(self.nodes):
            port, peer = f"port{node}", str(self._holders[node].pid)
            joined = ["type", "veth", "peer", "name", INTERFACE, "netns", peer]
            self._inside(self.nodes, "ip", "link", "add", port, *joined)
            self._inside(self.nodes, "ip", "link", "set", port, "master", "bridge0", "up")
            self._inside(node, "mount", "-t", "tmpfs", "shm", "/dev/shm")
            self._inside(node, "hostname", f"node{node}")
            self._inside(node, "ip", "link", "set", "lo", "up")
            self._inside(node, "ip", "address", "add", f"{ADDRESSES}.{node + 1}/24", "dev", INTERFACE)
            self._inside(node, "ip", "link", "set", INTERFACE, "up")

    def _enter(self, endpoint: int) -> list[str]:
        """Begins a command line that runs in a node or, at the place after them, where the bridge is."""
        spaces = ["--net", "--mount", "--uts", "--ipc"] if endpoint < self.nodes else ["--net"]
        return ["nsenter", "--target", str(self._holders[endpoint].pid), *spaces, "--"]

    def _inside(self, endpoint: int, *command: str) -> str:
        return _run([*self._enter(endpoint), *command])


def launched(rank: int, nodes: int, ranks_per_node: int) -> dict[str, str]:
    """What torchrun sets on a rank of `nodes` nodes of `ranks_per_node`, besides where rank 0 listens."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_RANK": str(rank // ranks_per_node),
        "GROUP_WORLD_SIZE": str(nodes),
    }


def _hold(*spaces: str) -> subprocess.Popen[bytes]:
    """A process with namespaces of its own that ends when its standard input does."""
    command = ["unshare", *spaces, "--", "sh", "-c", "echo ready; exec cat"]
    try:
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except FileNotFoundError as error:
        raise NetworkRefused(f"{error.filename} is not installed (util-linux)") from None
    said = holder.stdout.readline() if holder.stdout is not None else b""
    if said.strip() != b"ready":
        _, complaint = holder.communicate()
        raise NetworkRefused(f"{' '.join(command)}: {complaint.decode(errors='replace').strip()}")
    if holder.stderr is not None:
        holder.stderr.close()
    return holder


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NetworkRefused(f"{error.filename} is not installed (util-linux, iproute2)") from None
    if done.returncode:
        raise NetworkRefused(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
