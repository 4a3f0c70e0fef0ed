"""Tensors that autograd saves, moved out of the device's memory and back: nothing is computed again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zero_ext.activation.offloader import ActivationOffloader, ActivationRecord
from zero_ext.activation.packed_layout import elements_of, fits

# Dead entries are pruned when the table has doubled, from this size on.
_FEW = 64
# Whether a tensor must not be moved: parameters, and the buffers of gathered ones.
Stays = Callable[[torch.Tensor], bool]


class OffloadedMemory:
    """The memory of one storage, or of one tensor, that was moved; all views of it are made of one copy.

    Once fetched it is present until the last view is gone.
    """

    def __init__(self, offloader: ActivationOffloader, record: ActivationRecord) -> None:
        record.add_receiver(0)
        self._offloader, self._record = offloader, record
        self._present: torch.Tensor | None = None

    def flat(self) -> torch.Tensor:
        """Return the tensor that was moved."""
        if self._present is None:
            self._present = self._offloader.fetch(self._record, 0)
        return self._present


@dataclass(frozen=True)
class OffloadedView:
    """A saved tensor as a view of what was moved, ``offset`` elements from its first one."""

    moved: OffloadedMemory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """Return the tensor as it was saved."""
        memory = self.moved.flat()
        if memory.storage_offset() % self.dtype.itemsize:  # a storage that begins between elements
            memory = memory.clone()
        flat = memory[: memory.nbytes // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class UnmovedTensor:
    """A saved tensor that stays; what autograd checks where no hooks are is checked here."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> UnmovedTensor:
        """``tensor`` as it is now."""
        version = 0 if tensor.is_inference() else tensor._version
        # An op's own result, saved as it is, would hold the op's node, which holds it: a cycle that the
        # garbage collector does not see. autograd gives what it unpacks its history back.
        return cls(tensor if tensor.is_leaf else tensor.detach(), version)

    def get(self) -> torch.Tensor:
        """Return the tensor. ``RuntimeError`` if it was changed in place."""
        now = 0 if self.tensor.is_inference() else self.tensor._version
        if now != self.version:
            raise RuntimeError(
                f"saved tensor of shape {tuple(self.tensor.shape)}: it is needed in backward and was "
                f"modified by an inplace operation: expected version {self.version}, got version {now}. "
                "Change a copy of it instead (tensor.clone())."
            )
        return self.tensor


class OffloadSavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Inside, an offloader stores what autograd saves, and fetches it in backward.

    ``offloader_of`` returns the offloader of a device. A storage is moved once, however many tensors and
    views of it are saved. Tensors of fewer than ``min_bytes`` bytes, what ``stays`` and subclasses stay.
    """

    def __init__(
        self, offloader_of: Callable[[torch.device], ActivationOffloader], min_bytes: int, stays: Stays
    ) -> None:
        super().__init__(self._pack, _unpack)
        self._offloader_of, self._min_bytes, self._stays = offloader_of, min_bytes, stays
        # Offloaded memory by storage object, version and range. The weak reference keeps the object's address
        # from being used again.
        self._known: dict[tuple[int, ...], tuple[StorageWeakRef, weakref.ref[OffloadedMemory]]] = {}
        self._prune_at = _FEW

    def _pack(self, tensor: torch.Tensor) -> OffloadedView | UnmovedTensor:
        moves = fits(tensor) and not tensor.is_inference() and tensor.nbytes >= self._min_bytes
        if not moves or self._stays(tensor):
            return UnmovedTensor.of(tensor)
        memory, begin = _memory_to_move(tensor)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, begin, memory.nbytes)
        found = self._known.get(key)
        moved = found[1]() if found is not None and not found[0].expired() else None
        if moved is None:
            offloader = self._offloader_of(tensor.device)
            moved = OffloadedMemory(offloader, offloader.offload([memory], "saved tensors"))
            self._prune()
            self._known[key] = (StorageWeakRef(storage), weakref.ref(moved))
        offset = tensor.storage_offset() - begin // tensor.element_size()
        return OffloadedView(moved, tensor.dtype, tensor.shape, tensor.stride(), int(offset))

    def _prune(self) -> None:
        if len(self._known) >= self._prune_at:
            known = self._known.items()
            self._known = {
                key: each for key, each in known if not each[0].expired() and each[1]() is not None
            }
            self._prune_at = max(_FEW, 2 * len(self._known))


def _memory_to_move(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bytes of the tensor's storage, or of the tensor from its first element to its last if that
    is less than half of it; and where they begin in the storage.
    """
    storage, size = tensor.untyped_storage(), tensor.element_size()
    span = elements_of(tensor.shape, tensor.stride())
    begin, nbytes = tensor.storage_offset() * size, span * size
    if 2 * nbytes >= storage.nbytes():
        begin, nbytes = 0, storage.nbytes()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return memory[begin : begin + nbytes], int(begin)


def _unpack(packed: OffloadedView | UnmovedTensor) -> torch.Tensor:
    return packed.tensor() if isinstance(packed, OffloadedView) else packed.get()
