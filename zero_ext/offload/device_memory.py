"""The device that a model trains on: its memory by tier, pinned memory of its host, copies between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zero_ext import ops
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import TIERS, Tier, is_stored
from zero_ext.offload.side_stream import COMPLETED, CopyHandle, SideStream, current

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process
_SYS = Path("/sys")


@contextlib.contextmanager
def numa_affinity(device: torch.device) -> Iterator[None]:
    """Inside, this thread runs on the processors of the memory node that ``device`` is attached to, as far as
    it may; so do the threads that are started inside, for good, and host memory touched first inside is
    allocated on that node. Nothing happens where the kernel names no node or refuses.
    """
    cpus = node_cpus(pci_address(device)) if device.type == "cuda" else frozenset()
    before = os.sched_getaffinity(0)
    if not before & cpus or not _moved_to(before & cpus):
        yield
        return
    try:
        yield
    finally:
        _moved_to(before)


def pci_address(device: torch.device) -> str:
    """Return where the device is on the PCI bus, as the kernel writes it (domain:bus:device.function); empty
    where torch does not report it.
    """
    facts: Any = torch.cuda.get_device_properties(device)
    if not hasattr(facts, "pci_bus_id"):
        return ""
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"


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
        return _cuda_register if name == "register" else torch.cuda.cudart().cudaHostUnregister
    return getattr(torch.get_device_module(device), f"host_{name}", lambda *_: None)


def _cuda_register(pointer: int, nbytes: int) -> None:
    error = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, _PORTABLE))
    if error:
        raise RuntimeError(
            f"cudaHostRegister: the driver refused to lock the memory. Look up its error code {error}"
        )


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


_WORD = 8  # bytes: of the widest elements that go beside state


class Device:
    """Memory of the tiers "device" and "host", and copies between them.

    On a CPU both are host memory and a copy is a plain one. On an accelerator host memory is pinned, and a
    copy runs in a stream of its direction, after what the current stream was given before it. Gradients are
    packed and added up in ``reduction_stream``. Raises ``RuntimeError`` where the device's kernels cannot be
    had.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == str(device) != "cpu":  # without an index
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.device = device
        self.reduction_stream = SideStream(self.device)
        self._to_device = self._to_host = None
        if self.is_accelerator:
            ops.load_kernels(device)
            self._to_device, self._to_host = torch.Stream(device), torch.Stream(device)

    @property
    def type(self) -> str:
        """The device's type, as torch names it."""
        return self.device.type

    @property
    def is_accelerator(self) -> bool:
        """Return whether its memory is not the host's."""
        return self.device.type != "cpu"

    @property
    def captures(self) -> bool:
        """Return whether what the current stream is given goes into a graph, to be replayed, instead of
        running.
        """
        if not self.is_accelerator:
            return False
        return bool(getattr(torch.get_device_module(self.device), "is_current_stream_capturing", bool)())

    def torch_device(self, tier: Tier) -> torch.device:
        """Return the device that has the memory of ``tier``; for NVMe, of the memory that its data goes
        through.
        """
        return self.device if tier == "device" else torch.device("cpu")

    def allocate(self, tier: Tier, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed flat tensor [numel] for state that lives as long as its model: on the device; or on
        huge pages of the host, of the exact size and pinned for an accelerator.

        Raises ``RuntimeError`` where there is not so much memory.
        """
        if is_stored(tier):
            raise zero_ext_bug("storage is no memory")
        # ``prepare`` or the first use may happen in inference mode. Tensors made there could not be
        # written to in training.
        with torch.inference_mode(False):
            if tier == "device" and self.is_accelerator:
                return torch.zeros(numel, dtype=dtype, device=self.device)
            memory = (TIERS[tier].allocate or ops.host_buffer)(numel * dtype.itemsize)
            if self.is_accelerator:
                with numa_affinity(self.device):
                    memory = pinned(memory, self.device)
            return memory.view(dtype)

    def now(self) -> torch.Event | None:
        """Return the end of what the current stream was given so far, for :meth:`copy`."""
        if not self.is_accelerator:
            return None
        return torch.accelerator.current_stream(self.device).record_event()

    def copy(self, into: torch.Tensor, source: torch.Tensor, after: torch.Event | None = None) -> CopyHandle:
        """Start to copy ``source`` to ``into``, contiguous and of one dtype, after what the current stream
        was given so far, or until :meth:`now` was called for ``after``. Both stay alive, and neither is
        touched, until the handle was waited for."""
        if into.device == source.device:
            into.copy_(source)
            return COMPLETED
        stream = self._to_device if into.device == self.device else self._to_host
        if stream is None or into.dtype != source.dtype:
            raise zero_ext_bug(f"no copy from {source.dtype} on {source.device} to {into.dtype}")
        stream.wait_event(after or torch.accelerator.current_stream(self.device).record_event())
        with current(stream):
            into.copy_(source, non_blocking=True)
        return _Copy(stream, into, source)

    def to_tier(self, tier: Tier, *small: torch.Tensor) -> list[torch.Tensor]:
        """``small``, contiguous tensors of a few values in host memory, where ops on memory of ``tier`` read
        them. On an accelerator all come by one copy in the current stream, and nobody waits for it."""
        if self.torch_device(tier).type == "cpu":
            return list(small)
        sizes = [-(-each.nbytes // _WORD) * _WORD for each in small]
        # torch keeps its own pinned memory until the stream has read it.
        block = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
        for each, target in zip(small, _cut(block, small, sizes), strict=True):
            target.copy_(each)
        return _cut(block.to(self.device, non_blocking=True), small, sizes)

    def inherit_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which another thread submits its work to this thread's current stream."""
        if not self.is_accelerator:
            return contextlib.nullcontext()
        return current(torch.accelerator.current_stream(self.device))

    def synchronize(self) -> None:
        """Return when the device has done all it was given."""
        if self.is_accelerator:
            torch.accelerator.synchronize(self.device)


class _Copy:
    """A copy between host and device memory under way in ``stream``."""

    def __init__(self, stream: torch.Stream, into: torch.Tensor, source: torch.Tensor) -> None:
        self._stream = stream
        self._into: torch.Tensor | None = into
        self._source: torch.Tensor | None = source
        self._event = stream.record_event()

    def wait(self) -> None:
        self._end(self._into)
        self._into = None

    def wait_source(self) -> None:
        self._end(self._source)
        self._source = None

    def _end(self, side: torch.Tensor | None) -> None:
        if side is None:
            return
        if side.device.type == "cpu":
            self._event.synchronize()
        else:
            torch.accelerator.current_stream(side.device).wait_event(self._event)

    def stream_context(self) -> contextlib.AbstractContextManager[object]:
        return current(self._stream)


def _cut(block: torch.Tensor, like: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Slices of ``block`` of ``sizes`` bytes, as tensors with the dtypes and shapes of ``like``."""
    return [
        section[: each.nbytes].view(each.dtype).view(each.shape)
        for section, each in zip(block.split(list(sizes)), like, strict=True)
    ]


CPU = Device(torch.device("cpu"))
