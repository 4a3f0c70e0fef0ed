"""The machines to plan for: a description by name or file, with the user's own figures."""

from __future__ import annotations

from dataclasses import dataclass

from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.machines import machine_named

DEFAULT_MACHINE = "dgx-a100"


@dataclass(frozen=True)
class ClusterOptions:
    """Replacements for figures of the machine named; None leaves one. Bytes and bytes per second.

    ``host_memory`` and ``nvme`` are those of a host (0: there is none), ``gpu_memory`` that of a GPU.
    ``link_bandwidth`` is what a rank receives in a second of a collective, inside a host and between hosts.
    """

    machine: str = DEFAULT_MACHINE
    gpus_per_host: int | None = None
    gpu_memory: int | None = None
    host_memory: int | None = None
    nvme: int | None = None
    link_bandwidth: float | None = None

    def hardware(self) -> Hardware:
        """Return the machine as it then is. Raises ValueError for one that is not known, or a figure that
        cannot be.
        """
        changes: dict[str, object] = {
            "ranks_per_node": self.gpus_per_host,
            "device_bytes": self.gpu_memory,
            "host_bytes": None if self.host_memory is None else max(1, self.host_memory),
            "nvme_bytes": None if self.nvme is None else max(1, self.nvme),
            "intra_bandwidth": self.link_bandwidth,
            "inter_bandwidth": self.link_bandwidth,
        }
        said = {name: value for name, value in changes.items() if value is not None}
        return machine_named(self.machine).replace(**said)
