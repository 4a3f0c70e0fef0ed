"""Slices of state in memory, on a device or in a store: their checks, and their bytes in host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from zero_ext.checkpoint.files import CheckpointError, byte_view, copy_bytes
from zero_ext.checkpoint.format.manifest import CHUNK_BYTES
from zero_ext.checkpoint.format.state_source import StoredValues, TensorSlice
from zero_ext.offload import CopyHandle, Device

STAGING_BYTES = 4 * CHUNK_BYTES
_BUFFERS = 2


class CheckpointSlice(NamedTuple):
    """A slice of a stored tensor, by the name that the checkpoint has for it: live memory of host or device,
    a staged copy of it, or values in a store."""

    kind: str
    name: str
    start: int
    values: torch.Tensor | StoredValues
    shape: tuple[int, ...] | None = (
        None  # of all of a state tensor, None for elements of the parameter's shape
    )

    @classmethod
    def of(cls, state: TensorSlice) -> CheckpointSlice:
        """Return a source's slice; TypeError or ValueError unless it is a 1-D contiguous tensor or stored."""
        where = f"{state.kind} of {state.name!r}"
        _check_values(state.tensor, where)
        if type(state.start) is not int or state.start < 0:
            raise ValueError(
                f"{where}: start: expected an element offset of 0 or more, got {state.start!r}. Pass such a "
                "number."
            )
        values = state.tensor.detach() if isinstance(state.tensor, torch.Tensor) else state.tensor
        found = cls(state.kind, state.name, state.start, values, state.shape)
        if state.shape is not None and (state.start, found.numel) != (0, math.prod(state.shape)):
            raise ValueError(
                f"{where}: expected all elements of shape {state.shape}, got {found.numel} from element "
                f"{state.start}. Pass all of them."
            )
        return found

    @property
    def label(self) -> str:
        """Its name in errors."""
        return f"{self.kind} of {self.name!r}"

    @property
    def numel(self) -> int:
        """Elements of it."""
        return self.values.numel() if isinstance(self.values, torch.Tensor) else self.values.numel

    def chunks(self, staging: DeviceStaging) -> Iterator[torch.Tensor]:
        """Yield its bytes in host memory, as uint8 chunks of CHUNK_BYTES at most.

        Each is valid until the next one. What is on a device comes through ``staging``, stored values are in
        memory two chunks at a time. CheckpointError names the slice if its store cannot be read.
        """
        values = self.values
        if isinstance(values, torch.Tensor):
            on_host = values.device.type == "cpu"
            for chunk in (byte_view(values),) if on_host else staging.read(values):
                yield from chunk.split(CHUNK_BYTES) if chunk.numel() else ()
            return
        elements = CHUNK_BYTES // values.dtype.itemsize
        for begin in range(0, values.numel, elements):
            yield byte_view(self._read_stored(values, begin, min(begin + elements, values.numel)))

    def put(self, begin: int, found: torch.Tensor, staging: DeviceStaging) -> None:
        """Fill the slice's elements from ``begin`` on with ``found`` (1-D, host memory; floats convert).

        What is on a device gets them through ``staging``. CheckpointError naming the slice if its store
        cannot take them.
        """
        if not isinstance(self.values, torch.Tensor):
            try:
                self.values.write(begin, found.to(self.values.dtype))
            except Exception as error:
                raise self._store_error("writing", begin, begin + found.numel(), error) from error
            return
        destination = self.values[begin : begin + found.numel()]
        if destination.device.type != "cpu":
            staging.write(destination, found.to(destination.dtype))
        elif found.data_ptr() != destination.data_ptr():
            destination.copy_(found)
        # Written behind autograd's back: a graph that has saved the old values must find out.
        torch.autograd.graph.increment_version(destination)

    def _read_stored(self, values: StoredValues, begin: int, end: int) -> torch.Tensor:
        try:
            found = values.read(begin, end)
        except Exception as error:
            raise self._store_error("reading", begin, end, error) from error
        if found.dtype != values.dtype or found.shape != (end - begin,):
            raise CheckpointError(
                f"{self.label}: a read of elements {begin} to {end} of its store: expected shape "
                f"{(end - begin,)} of {values.dtype}, got {tuple(found.shape)} of {found.dtype}. Fix the "
                "store."
            )
        return found.cpu()

    def _store_error(self, doing: str, begin: int, end: int, error: Exception) -> CheckpointError:
        failure = f"{doing} elements {begin} to {end} of its store failed: {type(error).__name__}: {error}"
        return CheckpointError(f"{self.label}: {failure}. Check the store and its disk.")


def _check_values(values: object, label: str) -> None:
    if isinstance(values, torch.Tensor):
        if values.is_meta or values.dim() != 1 or not values.is_contiguous():
            raise ValueError(
                f"{label}: expected a contiguous tensor of one dimension in memory, got shape "
                f"{tuple(values.shape)}, stride {values.stride()} on {values.device}. Flatten it, and make "
                "it contiguous."
            )
        return
    if not isinstance(values, StoredValues):
        raise TypeError(
            f"{label}: expected a tensor or StoredValues, got {type(values).__name__}. Pass one of these."
        )
    if type(values.numel) is not int or values.numel < 0:
        raise ValueError(
            f"{label}: numel of its store: expected a number of elements, got {values.numel!r}. Return such "
            "a number."
        )
    if not isinstance(values.dtype, torch.dtype):
        raise TypeError(
            f"{label}: dtype of its store: expected a torch.dtype, got {values.dtype!r}. Return a "
            "torch.dtype."
        )


class DeviceStaging:
    """Copies between host memory and devices, through ``2 * STAGING_BYTES`` of pinned memory for each device
    that is met. One buffer is used on the host while the next is on its way.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.device, _PinnedBuffers] = {}

    def read(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the bytes of ``values`` as uint8 chunks of ``STAGING_BYTES``, each valid until the next."""
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
