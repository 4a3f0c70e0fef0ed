"""Values on a device come and go through host memory of fixed size, a piece after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zero_ext.checkpoint.files.raw_buffers import byte_view, copy_bytes
from zero_ext.checkpoint.format.manifest import CHUNK_BYTES
from zero_ext.offload import Arrival, Device

PIECE_BYTES = 4 * CHUNK_BYTES
_ROOMS = 2


class DeviceStaging:
    """Copies between host memory and devices, through ``2 * PIECE_BYTES`` of pinned memory for each device
    that is met. One piece is used on the host while the next is on its way.
    """

    def __init__(self) -> None:
        self._rooms: dict[torch.device, _Rooms] = {}

    def read(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """The bytes of ``values``, contiguous on a device, as uint8 runs of ``PIECE_BYTES`` at most; each is
        valid until the next one."""
        rooms = self._rooms_of(values.device)
        parts = byte_view(values).split(PIECE_BYTES)
        coming = [rooms.bring(part) for part in parts[:1]]
        for number in range(len(parts)):
            room, arrival = coming.pop()
            arrival.wait()
            if number + 1 < len(parts):
                coming.append(rooms.bring(parts[number + 1]))
            yield room

    def write(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Copies ``values``, host memory that may be used again once this returns, to ``into``, contiguous
        on a device and of the same dtype and size, in the order of the current stream."""
        rooms = self._rooms_of(into.device)
        for part, source in zip(
            byte_view(into).split(PIECE_BYTES), byte_view(values).split(PIECE_BYTES), strict=True
        ):
            rooms.send(part, source)

    def _rooms_of(self, device: torch.device) -> _Rooms:
        if device not in self._rooms:
            self._rooms[device] = _Rooms(Device(device))
        return self._rooms[device]


class _Rooms:
    """Two pieces of pinned memory, used in turn."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rooms = device.allocate("host", _ROOMS * PIECE_BYTES, torch.uint8).split(PIECE_BYTES)
        self._leaving: list[Arrival | None] = [None] * _ROOMS
        self._next = 0

    def _take(self, size: int) -> tuple[int, torch.Tensor]:
        number, self._next = self._next, (self._next + 1) % _ROOMS
        leaving, self._leaving[number] = self._leaving[number], None
        if leaving is not None:
            leaving.let_go()
        return number, self._rooms[number][:size]

    def bring(self, part: torch.Tensor) -> tuple[torch.Tensor, Arrival]:
        _, room = self._take(part.numel())
        return room, self._device.copy(room, part)

    def send(self, part: torch.Tensor, source: torch.Tensor) -> None:
        number, room = self._take(part.numel())
        copy_bytes(room, source)
        arrival = self._device.copy(part, room)
        arrival.wait()  # of the current stream: whoever reads ``part`` does so later
        self._leaving[number] = arrival
