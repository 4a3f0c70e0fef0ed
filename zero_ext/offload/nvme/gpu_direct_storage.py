"""Bytes between storage and an accelerator's memory without host memory between: GPUDirect Storage."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from zero_ext import ops
from zero_ext.offload.bounce_buffer import Move
from zero_ext.offload.device_memory import CopyHandle, Device
from zero_ext.offload.nvme.nvme_store import NvmeStore

_log = logging.getLogger(__name__)

# Without this list NVIDIA's cuFileDriverOpen was seen to read on for ever (libcufile 1.20 in a sandbox).
MODULES = Path("/proc/modules")


class GpuDirectStorage:
    """A :class:`DeviceTransferPath` by cuFile between storage and memory of ``device``, without host memory.

    cuFile does not support streams. A transfer starts, on a thread kept for that, once the device has done
    what the current stream was given before it; then nobody but the host waits for it.
    """

    nbytes = 0

    def __init__(self, device: Device) -> None:
        self._device = device
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="zero_ext-direct-storage")

    def read(self, into: torch.Tensor, move: Move) -> CopyHandle:
        """See :class:`DeviceTransferPath`."""
        return _Started(self._starter.submit(_start, self._device.now(), into, move))

    write = read


class _Started(CopyHandle):
    """A transfer that starts by itself."""

    def __init__(self, transfer: Future[CopyHandle]) -> None:
        self._transfer = transfer

    def wait(self) -> None:
        self._transfer.result().wait()


def _start(before: torch.Event | None, memory: torch.Tensor, move: Move) -> CopyHandle:
    if before is not None:
        before.synchronize()
    return move(0, memory)


def open_gpu_direct_storage(store: NvmeStore, device: Device) -> GpuDirectStorage | None:
    """Return the direct path between ``store``, with no extent in use yet, and ``device``.

    Return None, and log the reason, where there is none.

    There is one if the device is of a kind that has it, cuFile's library is there, its driver opens and
    takes the store's files, and bytes that went to every path and back, in both directions, are unchanged.
    """
    why = _why_no_library(device)
    if not why:
        direct = GpuDirectStorage(device)
        why = _why_not_tried(store, device, direct)
    if why:
        line = "aio.gpu_direct_storage 'auto': bytes between NVMe and %s go through pinned host memory: %s"
        _log.warning(line, device.device, why)
        return None
    _log.info(
        "aio.gpu_direct_storage 'auto': bytes between NVMe and %s go directly, by cuFile", device.device
    )
    return direct


def _why_no_library(device: Device) -> str:
    module = torch.get_device_module(device.device)
    if device.type != "cuda" and not getattr(module, "has_direct_storage", lambda: False)():
        return f"GPUDirect Storage is for CUDA devices, this is {device.device}"
    if not MODULES.exists():
        return f"{MODULES} does not exist, without which cuFile's driver may never finish opening"
    return ops.cufile_unavailable_reason()


def _why_not_tried(store: NvmeStore, device: Device, direct: GpuDirectStorage) -> str:
    """Return an empty string if a row of stripes went in both directions.

    Its extent is zero again afterwards.
    """
    nbytes = store.row_bytes
    store.reserve(nbytes)
    offset = store.allocate(nbytes)
    try:
        with torch.inference_mode(False):
            why = _try(store, offset, nbytes, device, direct)
    except RuntimeError as error:
        why = str(error)
    if why:
        store.close_direct()
    store.write(offset, ops.host_buffer(nbytes)).wait()
    store.release(offset)
    return why


def _try(store: NvmeStore, offset: int, nbytes: int, device: Device, direct: GpuDirectStorage) -> str:
    """Return an empty string if what is written and read is the same, else what differs."""
    sent = ops.host_buffer(nbytes)
    sent.view(torch.int64).copy_(torch.arange(1, nbytes // 8 + 1, device="cpu"))
    there = sent.to(device.device)  # also makes the device this thread's
    store.open_direct()
    back = ops.host_buffer(nbytes)
    direct.write(there, lambda begin, memory: store.write(offset + begin, memory)).wait()
    store.read(offset, back).wait()
    if not torch.equal(back, sent):
        return "cuFile wrote other bytes than it was given"
    store.write(offset, back.bitwise_not_()).wait()
    direct.read(there, lambda begin, memory: store.read(offset + begin, memory)).wait()
    return "" if torch.equal(there.cpu(), back) else "cuFile read other bytes than were written"
