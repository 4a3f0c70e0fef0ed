"""Host memory that an accelerator's copies read and write directly."""

from __future__ import annotations

import ctypes
import resource
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from zero_ext.offload.device import cuda


def pinned(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``memory``, a uint8 tensor with host memory of its own, pinned for ``device`` until its last view is
    gone; then the device is waited for first.

    Pages are registered as they are: torch's own pinned memory comes in powers of two. A device that cannot
    register pages copies anyway. Raises ``RuntimeError`` if the driver refuses.
    """
    if not memory.nbytes:
        return memory
    _register(memory, device)
    view = (ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())
    # The tensor made of it keeps the view, which keeps the pages until they are free of the device.
    weakref.finalize(view, _release, memory, device).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


def _release(memory: torch.Tensor, device: torch.device) -> None:
    torch.accelerator.synchronize(device)
    _of_device(device, "unregister")(memory.data_ptr())


def _of_device(device: torch.device, name: str) -> Callable[..., object]:
    """Return what pins or frees pages for ``device``; it does nothing for a device that does not say how."""
    if device.type == "cuda":
        return cuda.register if name == "register" else cuda.unregister
    return getattr(torch.get_device_module(device), f"host_{name}", lambda *_: None)


def _register(memory: torch.Tensor, device: torch.device) -> None:
    try:
        _of_device(device, "register")(memory.data_ptr(), memory.nbytes)
    except RuntimeError as error:
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked} bytes"
        raise RuntimeError(
            f"host memory: {memory.nbytes} bytes cannot be pinned: {error}. "
            f"The limit of locked memory (ulimit -l) is {limit}, and {_available()} bytes of memory are "
            "available. Raise the limit, free memory, or offload less to the host ('offload' tiers 'nvme' or "
            "'device', or a smaller 'offload.ratio')."
        ) from error


def _available() -> str:
    table = Path("/proc/meminfo").read_text().splitlines()
    found = [int(line.split()[1]) << 10 for line in table if line.startswith("MemAvailable:")]
    return str(found[0]) if found else "unknown"
