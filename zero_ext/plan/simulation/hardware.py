"""The capabilities of a machine: memory sizes and rates that programs reach, not those of data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from zero_ext.config.base_section import ConfigSection, Positive
from zero_ext.config.config_errors import ConfigError
from zero_ext.config.json_file import read_json_object

Rate = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]


class Hardware(ConfigSection):
    """Nodes that are all alike. Rates in bytes/s, sizes in bytes, times in seconds.

    Attributes:
        name: for tables.
        ranks_per_node: devices of a node; a rank has one.
        matmul_flops: peak rate of a device's matrix products in compute precision, FLOP/s.
        matmul_efficiency: the share of it that large products reach. Small ones reach less: every unit also
            takes the time in which its weights and activations pass through the device's memory.
        device_bytes: memory of a device.
        device_bandwidth: bytes that a device's kernels read and write in a second.
        unit_seconds: what a forward of a unit takes besides: launches and the interpreter. Twice that in
            backward.
        host_bytes: memory of a node.
        host_bandwidth: bytes of state that the processors of a node read and write in a second of an update.
        to_host: rate of one device's copies to host memory.
        to_device: rate of one device's copies from host memory.
        node_to_host: rate of the copies of all devices of a node together.
        node_to_device: likewise, from host memory.
        nvme_bytes: capacity of the NVMe devices of a node.
        nvme_read: rate of a node.
        nvme_write: rate of a node.
        nvme_half_duplex: reads and writes share one rate, rather than each having its own.
        intra_bandwidth: bytes that a rank receives in a second of a collective inside a node.
        inter_bandwidth: bytes that a node receives from others in a second.
        collective_seconds: what a collective takes besides.
        per_node_seconds: what every further node adds to that.
        device_is_host: the device is the node's processor: its memory is the host's, and computing,
            collectives and updates take turns on it.
    """

    name: Annotated[str, Field(min_length=1)]
    ranks_per_node: Positive
    matmul_flops: Rate
    matmul_efficiency: Annotated[float, Field(gt=0, le=1)]
    device_bytes: Positive
    device_bandwidth: Rate
    unit_seconds: Seconds = 0.0
    host_bytes: Positive
    host_bandwidth: Rate
    to_host: Rate
    to_device: Rate
    node_to_host: Rate
    node_to_device: Rate
    nvme_bytes: Positive
    nvme_read: Rate
    nvme_write: Rate
    nvme_half_duplex: bool = False
    intra_bandwidth: Rate
    inter_bandwidth: Rate
    collective_seconds: Seconds = 0.0
    per_node_seconds: Seconds = 0.0
    device_is_host: bool = False

    @classmethod
    def load(cls, source: Hardware | Mapping[str, object] | str | Path) -> Hardware:
        """Return a description as it is, or read it.

        Args:
            source: a description, a mapping, or the path of a JSON file.

        Returns:
            The description.

        Raises:
            ConfigError: lists every unknown or missing key and wrong value.
        """
        if isinstance(source, Hardware):
            return source
        if isinstance(source, Mapping):
            return cls.from_mapping(dict(source))
        values = read_json_object(source)
        try:
            return cls.from_mapping(values)
        except ConfigError as error:
            raise error.within(str(source)) from None

    def shared(self, members: int, ranks: int) -> Hardware:
        """Return what a group of a node's ranks has while the others, in groups like theirs, do the same.

        Args:
            members: ranks of the group.
            ranks: ranks of the node.

        Returns:
            A node of `members` ranks, with their share of its memory and of all that goes in and out of it.
        """
        share = members / ranks
        return self.replace(
            ranks_per_node=members,
            host_bytes=max(1, int(self.host_bytes * share)),
            host_bandwidth=self.host_bandwidth * share,
            node_to_host=self.node_to_host * share,
            node_to_device=self.node_to_device * share,
            nvme_bytes=max(1, int(self.nvme_bytes * share)),
            nvme_read=self.nvme_read * share,
            nvme_write=self.nvme_write * share,
            inter_bandwidth=self.inter_bandwidth * share,
        )

    def for_rank(self, world_size: int) -> RankRates:
        """Return what one rank has while all do the same.

        Args:
            world_size: number of ranks.

        Returns:
            Its rates.
        """
        ranks = min(world_size, self.ranks_per_node)
        nodes = -(-world_size // self.ranks_per_node)
        bandwidth = self.intra_bandwidth if nodes == 1 else min(self.intra_bandwidth, self.inter_bandwidth)
        return RankRates(
            ranks=ranks,
            matmul=self.matmul_flops * self.matmul_efficiency,
            device=self.device_bandwidth,
            host=self.host_bandwidth / ranks,
            to_host=min(self.to_host, self.node_to_host / ranks),
            to_device=min(self.to_device, self.node_to_device / ranks),
            nvme_read=self.nvme_read / ranks,
            nvme_write=self.nvme_write / ranks,
            collective=bandwidth,
            latency=self.collective_seconds + (nodes - 1) * self.per_node_seconds,
        )


@dataclass(frozen=True)
class RankRates:
    """A rank's part of a node of ``ranks`` in use: FLOP/s, bytes/s, a collective's latency in seconds.

    ``collective`` is what a rank receives: hierarchical collectives bring every byte into a node once, so the
    link between nodes counts whole.
    """

    ranks: int
    matmul: float
    device: float
    host: float
    to_host: float
    to_device: float
    nvme_read: float
    nvme_write: float
    collective: float
    latency: float
