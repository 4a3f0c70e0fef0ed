"""The device that a model trains on: its memory by tier, and the copies that run alongside its work."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload.device.numa import numa_affinity
from zero_ext.offload.device.pinned import pinned
from zero_ext.offload.device.side_stream import COMPLETED, CopyHandle, SideStream, current

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
        if tier == "nvme":
            raise zero_ext_bug("storage is no memory")
        # ``prepare`` or the first use may happen in inference mode. Tensors made there could not be
        # written to in training.
        with torch.inference_mode(False):
            if tier == "device" and self.is_accelerator:
                return torch.zeros(numel, dtype=dtype, device=self.device)
            memory = ops.host_buffer(numel * dtype.itemsize)
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
