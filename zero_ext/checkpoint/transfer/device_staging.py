"""Values on a device come and go through host memory of fixed size, one buffer after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zero_ext.checkpoint.files.raw_buffers import byte_view, copy_bytes
from zero_ext.checkpoint.format.manifest import CHUNK_BYTES
from zero_ext.offload import CopyHandle, Device

STAGING_BYTES = 4 * CHUNK_BYTES
_BUFFERS = 2


class DeviceStaging:
    """Copies between host memory and devices, through ``2 * PIECE_BYTES`` of pinned memory for each device
    that is met. One buffer is used on the host while the next is on its way.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.device, _PinnedBuffers] = {}

    def read(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the bytes of ``values``, contiguous on a device, as uint8 chunks of ``STAGING_BYTES`` at
        most; each is valid until the next one.
        """
        buffers = self._buffers_of(values.device)
        chunks = byte_view(values).split(STAGING_BYTES)
        pending = [buffers.copy_to_host(chunk) for chunk in chunks[:1]]
        for number in range(len(chunks)):
            buffer, handle = pending.pop()
            handle.wait()
            if number + 1 < len(chunks):
                pending.append(buffers.copy_to_host(chunks[number + 1]))
            yield buffer

    def write(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Copy ``values``, host memory that may be used again once this returns, to ``into``, contiguous
        on a device and of the same dtype and size, in the order of the current stream."""
        buffers = self._buffers_of(into.device)
        for chunk, source in zip(
            byte_view(into).split(STAGING_BYTES), byte_view(values).split(STAGING_BYTES), strict=True
        ):
            buffers.copy_to_device(chunk, source)

    def _buffers_of(self, device: torch.device) -> _PinnedBuffers:
        if device not in self._buffers:
            self._buffers[device] = _PinnedBuffers(Device(device))
        return self._buffers[device]


class _PinnedBuffers:
    """Two buffers of pinned memory, used in turn."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = device.allocate("host", _BUFFERS * STAGING_BYTES, torch.uint8).split(STAGING_BYTES)
        self._leaving: list[CopyHandle | None] = [None] * _BUFFERS
        self._next = 0

    def _acquire(self, size: int) -> tuple[int, torch.Tensor]:
        number, self._next = self._next, (self._next + 1) % _BUFFERS
        leaving, self._leaving[number] = self._leaving[number], None
        if leaving is not None:
            leaving.wait_source()
        return number, self._buffers[number][:size]

    def copy_to_host(self, chunk: torch.Tensor) -> tuple[torch.Tensor, CopyHandle]:
        _, buffer = self._acquire(chunk.numel())
        return buffer, self._device.copy(buffer, chunk)

    def copy_to_device(self, chunk: torch.Tensor, source: torch.Tensor) -> None:
        number, buffer = self._acquire(chunk.numel())
        copy_bytes(buffer, source)
        handle = self._device.copy(chunk, buffer)
        handle.wait()  # of the current stream: whoever reads ``chunk`` does so later
        self._leaving[number] = handle
