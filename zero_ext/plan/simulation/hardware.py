"""The capabilities of a machine: memory sizes and rates that programs reach, not those of data sheets.

``docs/explanation/simulation.md`` lists the sources of the machines, the published runs that some were fitted
to, and the runs that they are checked against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from zero_ext.config.base_section import ConfigSection, Positive
from zero_ext.config.config_errors import ConfigError
from zero_ext.config.sources.json_file import read_json_object

Rate = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]
_RATES_OF_A_NODE = (
    "host_bandwidth",
    "node_to_host",
    "node_to_device",
    "nvme_read",
    "nvme_write",
    "inter_bandwidth",
)


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
        sizes = {name: max(1, int(getattr(self, name) * share)) for name in ("host_bytes", "nvme_bytes")}
        rates = {name: getattr(self, name) * share for name in _RATES_OF_A_NODE}
        return self.replace(ranks_per_node=members, **sizes, **rates)

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


GIB = 2**30
TB = 10**12

# Sixteen V100-32GB; matrix efficiency fitted to Megatron-LM's 1.2B on one of them (arXiv 1909.08053).
_DGX2 = Hardware(
    name="dgx2-v100",
    ranks_per_node=16,
    matmul_flops=125e12,
    matmul_efficiency=0.415,
    device_bytes=32 * GIB,
    device_bandwidth=0.8e12,
    unit_seconds=2e-4,
    host_bytes=int(1.5 * TB),
    host_bandwidth=110e9,
    to_host=12e9,
    to_device=12e9,
    node_to_host=48e9,
    node_to_device=48e9,
    nvme_bytes=28 * TB,
    nvme_read=25.6e9,
    nvme_write=25.6e9,
    intra_bandwidth=120e9,
    inter_bandwidth=80e9,
    collective_seconds=3e-5,
    per_node_seconds=5e-6,
)
# Eight A100-80GB of Azure's NDm A100 v4; matrix efficiency fitted to DeepSpeed's 530B on 1,024 of them.
_A100 = _DGX2.replace(
    name="dgx-a100",
    ranks_per_node=8,
    matmul_flops=312e12,
    matmul_efficiency=0.588,
    device_bytes=80 * GIB,
    device_bandwidth=1.6e12,
    unit_seconds=1.5e-4,
    host_bytes=int(1.7 * TB),
    host_bandwidth=250e9,
    to_host=24e9,
    to_device=24e9,
    node_to_host=96e9,
    node_to_device=96e9,
    nvme_bytes=7 * TB,
    nvme_read=20e9,
    nvme_write=15e9,
    intra_bandwidth=230e9,
    inter_bandwidth=160e9,
)
# Held against nothing yet: no published run of this kind was at hand.
_H200 = _A100.replace(
    name="dgx-h200",
    matmul_flops=989e12,
    matmul_efficiency=0.6,
    device_bytes=141 * 10**9,
    device_bandwidth=4.0e12,
    unit_seconds=1e-4,
    host_bytes=2 * TB,
    host_bandwidth=400e9,
    to_host=50e9,
    to_device=50e9,
    node_to_host=300e9,
    node_to_device=300e9,
    nvme_bytes=28 * TB,
    nvme_read=40e9,
    nvme_write=25e9,
    intra_bandwidth=370e9,
    inter_bandwidth=320e9,
)
_H100 = _H200.replace(name="dgx-h100", device_bytes=80 * GIB, device_bandwidth=2.8e12)

MACHINES = {machine.name: machine for machine in (_DGX2, _A100, _H100, _H200)}
"""Machines by name."""


def machine_named(name: str) -> Hardware:
    """Return a machine by name or file.

    Args:
        name: a key of `MACHINES`, or the path of a JSON file that ends in .json.

    Returns:
        The machine.

    Raises:
        ValueError: there is no such machine; names those there are.
    """
    if name in MACHINES:
        return MACHINES[name]
    if name.endswith(".json"):
        return Hardware.load(name)
    raise ValueError(
        f"machine: expected one of {', '.join(MACHINES)} or a path ending in .json, got {name!r}. Choose "
        "one of them."
    )


DEFAULT_MACHINE = "dgx-a100"


def cluster_of(
    machine: str = DEFAULT_MACHINE,
    *,
    gpus_per_host: int | None = None,
    gpu_memory: int | None = None,
    host_memory: int | None = None,
    nvme: int | None = None,
    link_bandwidth: float | None = None,
) -> Hardware:
    """Return the machine of a name or file with other figures; None leaves one. Bytes and bytes per second.

    ``host_memory`` and ``nvme`` are those of a host (0: there is none), ``gpu_memory`` that of a GPU.
    ``link_bandwidth`` is what a rank receives in a second of a collective, inside a host and between hosts.
    Raises ValueError for a machine that is not known, or a figure that cannot be.
    """
    changes: dict[str, object] = {
        "ranks_per_node": gpus_per_host,
        "device_bytes": gpu_memory,
        "host_bytes": None if host_memory is None else max(1, host_memory),
        "nvme_bytes": None if nvme is None else max(1, nvme),
        "intra_bandwidth": link_bandwidth,
        "inter_bandwidth": link_bandwidth,
    }
    said = {name: value for name, value in changes.items() if value is not None}
    return machine_named(machine).replace(**said)
