"""Threads and memory on the processors that a device is attached to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from zero_ext.offload.device import cuda

_SYS = Path("/sys")


@contextlib.contextmanager
def numa_affinity(device: torch.device) -> Iterator[None]:
    """Inside, this thread runs on the processors of the memory node that ``device`` is attached to, as far as
    it may; so do the threads that are started inside, for good, and host memory touched first inside is
    allocated on that node. Nothing happens where the kernel names no node or refuses.
    """
    cpus = node_cpus(cuda.pci_address(device)) if device.type == "cuda" else frozenset()
    before = os.sched_getaffinity(0)
    if not before & cpus or not _moved_to(before & cpus):
        yield
        return
    try:
        yield
    finally:
        _moved_to(before)


def _moved_to(cpus: set[int]) -> bool:
    """Return whether this thread runs there now: containers may forbid to say where, or take
    processors away.
    """
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return False
    return True


def node_cpus(address: str, sys: Path = _SYS) -> frozenset[int]:
    """Return the processors of the memory node of the PCI device at ``address``; none where the kernel does
    not say.
    """
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (sys / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):
        return frozenset()
    found: set[int] = set()
    for cpus in filter(None, listed.split(",")):
        first, _, last = cpus.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
