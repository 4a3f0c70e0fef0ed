"""``torch.stand_in``: what torch looks for in a device's module, and the controls of the stand-in."""

from __future__ import annotations

import torch

_DEVICE = "stand_in"
Stream = torch.Stream
Event = torch.Event
device = torch.accelerator.device_index
_initialized = True  # whoever saves random states asks this first


def is_available() -> bool:
    """Always: the module exists only where the device does."""
    return True


def is_initialized() -> bool:
    """Always."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """Number of devices."""
    return torch.ops.stand_in.device_count()


def current_device() -> int:
    """Index of the calling thread's device."""
    return torch.accelerator.current_device_index()


def set_device(device: torch.device | int | str) -> None:
    """Makes ``device`` the calling thread's."""
    torch.accelerator.set_device_index(device)


def synchronize(device: torch.device | int | str | None = None) -> None:
    """Waits for all work of the device; raises what failed in it."""
    torch.accelerator.synchronize(device)


def current_stream(device: torch.device | int | str | None = None) -> torch.Stream:
    """The calling thread's stream of the device."""
    return torch.accelerator.current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    """Makes ``stream`` the calling thread's."""
    torch.accelerator.set_stream(stream)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes of autocast."""
    return [torch.bfloat16, torch.float16]


memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
empty_cache = torch.accelerator.empty_cache
mem_get_info = torch.accelerator.get_memory_info


def manual_seed(seed: int) -> None:
    """Seeds the current device's random numbers."""
    torch.ops.stand_in.seed(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    """Seeds the random numbers of all devices."""
    for index in range(device_count()):
        torch.ops.stand_in.seed(index, seed)


def get_rng_state(device: torch.device | int | str = _DEVICE) -> torch.Tensor:
    """State of a device's random numbers, a uint8 tensor on the CPU."""
    return torch.ops.stand_in.random_state(_index(device))


def set_rng_state(state: torch.Tensor, device: torch.device | int | str = _DEVICE) -> None:
    """Sets what :func:`get_rng_state` returned."""
    torch.ops.stand_in.set_random_state(_index(device), state)


def _index(device: torch.device | int | str) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def set_schedule(name: str, seed: int = 0) -> None:
    """How late streams start their work.

    ``lazy``: not before somebody waits for it, so that a missing wait always shows. ``random`` (at first):
    at once, up to 2 ms later or not before somebody waits, drawn from ``seed``. ``eager``: at once.
    """
    torch.ops.stand_in.set_schedule(name, seed)


def set_memory_limit(nbytes: int, device: torch.device | int | str = _DEVICE) -> None:
    """Allocations that would bring ``memory_allocated`` above ``nbytes`` raise torch.OutOfMemoryError."""
    torch.ops.stand_in.set_memory_limit(_index(device), nbytes)


def host_register(pointer: int, nbytes: int) -> None:
    """Remembers host memory as pinned; RuntimeError where :func:`refuse_pinned` says so."""
    torch.ops.stand_in.pin(pointer, nbytes)


def host_unregister(pointer: int) -> None:
    """Ends :func:`host_register`, after the copies that still use the memory."""
    torch.ops.stand_in.unpin(pointer)


def has_direct_storage() -> bool:
    """Always: GPUDirect Storage is for this device where its library is there (tests/accelerator/cufile)."""
    return True


def refuse_pinned(after: int = 0) -> None:
    """Pinning succeeds ``after`` more times and is then refused, until called with -1."""
    torch.ops.stand_in.refuse_pinned(after)


def refuse_communicators(after: int = 0) -> None:
    """``after`` more communicators form on this rank, and then none, until called with -1."""
    torch.ops.stand_in.refuse_communicators(after)


def pinned_bytes() -> int:
    """Bytes of pinned host memory, allocated or registered."""
    return torch.ops.stand_in.pinned_bytes()


def pageable_copies() -> int:
    """Copies so far that were asked for as non-blocking but had pageable memory at their host side."""
    return torch.ops.stand_in.pageable_copies()
