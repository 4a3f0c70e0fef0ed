"""Host memory that an accelerator's copies read and write directly."""

from __future__ import annotations

import ctypes
import resource
import weakref
from pathlib import Path

import torch


def pinned(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``memory``, a uint8 tensor with host memory of its own, pinned for ``device`` until its last view is
    gone; then the device is waited for first.

    Pages are registered as they are: torch's own pinned memory comes in powers of two. A device that cannot
    register pages copies all the same. Raises ``RuntimeError`` if the driver refuses.
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
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    else:
        getattr(torch.get_device_module(device), "host_unregister", _nothing)(memory.data_ptr())


def _nothing(*_: int) -> None:
    """A device that does not register pages."""


def _register(memory: torch.Tensor, device: torch.device) -> None:
    why = ""
    if device.type == "cuda":
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        why = f"cudaHostRegister returned {error}" if error else ""
    else:
        try:
            module = torch.get_device_module(device)
            getattr(module, "host_register", _nothing)(memory.data_ptr(), memory.nbytes)
        except RuntimeError as error:
            why = str(error)
    if why:
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked} bytes"
        raise RuntimeError(
            f"{memory.nbytes} bytes of host memory cannot be pinned: {why}. "
            f"The limit of locked memory (ulimit -l) is {limit}, and {_available()} bytes of memory are "
            "available. Raise the limit, free memory, or offload less to the host ('offload' tiers 'nvme' or "
            "'device', or a smaller 'offload.ratio')."
        )


def _available() -> str:
    table = Path("/proc/meminfo").read_text().splitlines()
    found = [int(line.split()[1]) << 10 for line in table if line.startswith("MemAvailable:")]
    return str(found[0]) if found else "unknown"
