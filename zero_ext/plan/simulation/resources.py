"""The resources of a rank that work simultaneously, and those that are one without an accelerator."""

from __future__ import annotations

from collections.abc import Iterable

from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.task_timeline import Timeline
from zero_ext.plan.simulation.training_setup import Training

COMPUTE, LINK, TO_DEVICE, TO_HOST = "compute", "collectives", "to device", "to host"
READ, WRITE, HOST = "NVMe read", "NVMe write", "host update"
NVME = "NVMe"


class Resources:
    """Hands tasks to the resource that does them on ``hardware``.

    Where the device is the host all but NVMe is one processor; delayed updates have a thread of their own
    there, so they are taken to find cores of their own.
    """

    def __init__(self, timeline: Timeline, hardware: Hardware, training: Training) -> None:
        self._timeline = timeline
        self._merged: dict[str, str] = {}
        if hardware.nvme_half_duplex:
            self._merged |= {READ: NVME, WRITE: NVME}
        if hardware.device_is_host:
            self._merged |= dict.fromkeys((LINK, TO_DEVICE, TO_HOST), COMPUTE)
            if training.update_mode != "delayed":
                self._merged[HOST] = COMPUTE

    def add(self, name: str, resource: str, seconds: float, after: Iterable[int] = ()) -> int:
        """See :meth:`Timeline.add`."""
        return self._timeline.add(name, self._merged.get(resource, resource), seconds, after)
