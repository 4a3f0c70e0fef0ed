"""Bytes between storage and an accelerator's memory without host memory between: GPUDirect Storage."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from zero_ext import ops
from zero_ext.offload.device.bounce_buffer import Move
from zero_ext.offload.device.device_memory import Arrival, Device
from zero_ext.offload.nvme.nvme_store import NvmeStore

_log = logging.getLogger(__name__)

# Without this list NVIDIA's cuFileDriverOpen was seen to read on for ever (libcufile 1.20 in a sandbox).
MODULES = Path("/proc/modules")


class DirectStorage:
    """Moves bytes between storage and memory of ``device`` by cuFile: a :class:`DeviceWay` without memory of
    its own.

    cuFile knows nothing of streams. A transfer starts, on a thread kept for that, once the device has done
    what the current stream was given before it; then nobody but the host waits for it.
    """

    nbytes = 0

    def __init__(self, device: Device) -> None:
        self._device = device
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="zero_ext-direct-storage")

    def read(self, into: torch.Tensor, move: Move) -> Arrival:
        """See :class:`DeviceWay`."""
        return _Started(self._starter.submit(_start, self._device.now(), into, move))

    def write(self, values: torch.Tensor, move: Move) -> Arrival:
        """See :class:`DeviceWay`."""
        return self.read(values, move)


class _Started:
    """A transfer that starts by itself: an :class:`Arrival`."""

    def __init__(self, transfer: Future[Arrival]) -> None:
        self._transfer = transfer

    def wait(self) -> None:
        self._transfer.result().wait()

    def let_go(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.wait()

    def followed(self) -> contextlib.AbstractContextManager[object]:
        self.wait()
        return contextlib.nullcontext()


def _start(before: torch.Event | None, memory: torch.Tensor, move: Move) -> Arrival:
    if before is not None:
        before.synchronize()
    return move(0, memory)


def direct_storage(store: NvmeStore, device: Device) -> DirectStorage | None:
    """The direct way between ``store``, none of whose extents is in use yet, and ``device``; None, and a log
    line with the reason, where there is none.

    There is one if the device is of a kind that has it, cuFile's library is there, its driver opens and
    takes the store's files, and bytes that went to every path and back by either way are what they were.
    """
    why = _why_no_library(device)
    if not why:
        way = DirectStorage(device)
        why = _why_not_tried(store, device, way)
    if why:
        line = "aio.direct_storage 'auto': bytes between NVMe and %s go through pinned host memory: %s"
        _log.warning(line, device.device, why)
        return None
    _log.info("aio.direct_storage 'auto': bytes between NVMe and %s go directly, by cuFile", device.device)
    return way


def _why_no_library(device: Device) -> str:
    module = torch.get_device_module(device.device)
    if device.type != "cuda" and not getattr(module, "has_direct_storage", lambda: False)():
        return f"GPUDirect Storage is for CUDA devices, this is {device.device}"
    if not MODULES.exists():
        return f"{MODULES} does not exist, without which cuFile's driver may never finish opening"
    return ops.why_no_cufile()


def _why_not_tried(store: NvmeStore, device: Device, way: DirectStorage) -> str:
    """Empty if a row of stripes went both ways; what it lies in is zero again afterwards."""
    nbytes = store.row_bytes
    store.reserve(nbytes)
    offset = store.allocate(nbytes)
    try:
        with torch.inference_mode(False):
            _try(store, offset, nbytes, device, way)
        why = ""
    except RuntimeError as error:
        store.close_direct()
        why = str(error)
    store.write(offset, ops.host_buffer(nbytes)).wait()
    store.release(offset)
    return why


def _try(store: NvmeStore, offset: int, nbytes: int, device: Device, way: DirectStorage) -> None:
    here = ops.host_buffer(nbytes)
    here.view(torch.int64).copy_(torch.arange(1, nbytes // 8 + 1, device="cpu"))
    there = here.to(device.device)  # also makes the device this thread's
    store.open_direct()
    back = ops.host_buffer(nbytes)
    way.write(there, lambda begin, memory: store.write(offset + begin, memory)).wait()
    store.read(offset, back).wait()
    if not torch.equal(back, here):
        raise RuntimeError("cuFile wrote other bytes than it was given")
    store.write(offset, back.bitwise_not_()).wait()
    way.read(there, lambda begin, memory: store.read(offset + begin, memory)).wait()
    if not torch.equal(there.cpu(), back):
        raise RuntimeError("cuFile read other bytes than were written")
