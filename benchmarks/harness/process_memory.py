"""What this process occupies, read from /proc (Linux): resident now, and its high-water mark."""

import ctypes
import gc
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def status_bytes(field: str, status: str | None = None) -> int:
    """Bytes of a kB field of /proc/self/status, such as VmRSS or VmHWM; RuntimeError if it is absent."""
    text = STATUS.read_text() if status is None else status
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no field {field!r}; resident memory is measured on Linux only")


def resident_bytes() -> int:
    """VmRSS: bytes resident now, anonymous, file-backed and shared."""
    return status_bytes("VmRSS")


def peak_bytes() -> int:
    """VmHWM: most bytes resident since the start or the last `reset_peak`."""
    return status_bytes("VmHWM")


def reset_peak() -> None:
    """Start the high-water mark again from what is resident now."""
    CLEAR_REFS.write_text("5")


def return_free_pages() -> None:
    """Hand glibc's free heap pages back, so that what stays resident is in use."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def live_tensor_bytes() -> int:
    """Bytes of the distinct storages of every tensor that Python holds, gradients included."""
    gc.collect()
    seen: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):  # isinstance would wake lazily loaded modules
            continue
        for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
            if tensor is not None and tensor.device.type != "meta":
                address, nbytes = _memory_behind(tensor)
                seen[address] = max(seen.get(address, 0), nbytes)
    return sum(seen.values())


def _memory_behind(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        # Sparse and wrapper tensors have no storage; one whose memory was taken out of it has no address.
        return 0, 0
