"""Transfers that share chunks: what cannot start is told by its own transfer, whoever comes to it."""

from __future__ import annotations

import pytest
import torch

from zero_ext.offload import COMPLETED, Device
from zero_ext.offload.bounce_buffer import BounceBuffer
from zero_ext.offload.device_memory import CopyHandle

CHUNK = 4096
NBYTES = 20 * CHUNK


class Storage:
    """``NBYTES`` of random bytes; moves from ``refused`` on do not start, and are counted all."""

    def __init__(self, refused: int = NBYTES) -> None:
        self.values = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
        self.begun: list[int] = []
        self._refused = refused

    def read(self, begin: int, chunk: torch.Tensor) -> CopyHandle:
        self._begin(begin)
        chunk.copy_(self.values[begin : begin + len(chunk)])
        return COMPLETED

    def write(self, begin: int, chunk: torch.Tensor) -> CopyHandle:
        self._begin(begin)
        self.values[begin : begin + len(chunk)] = chunk
        return COMPLETED

    def _begin(self, begin: int) -> None:
        self.begun.append(begin)
        if begin >= self._refused:
            raise RuntimeError(f"no room for byte {begin}")


@pytest.mark.parametrize("refused", [0, 9 * CHUNK])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_transfer_that_cannot_start_raises_its_own_error(direction: str, refused: int) -> None:
    transit = BounceBuffer(Device(torch.device("cpu")), 12 * CHUNK)
    storages = [Storage(), Storage(refused), Storage()]
    memories = [torch.randint(0, 256, (NBYTES,), dtype=torch.uint8) for _ in storages]
    transfers = [
        getattr(transit, direction)(memory, getattr(storage, direction))
        for memory, storage in zip(memories, storages, strict=True)
    ]
    transfers[2].wait()  # brings the others on
    transfers[0].wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"no room for byte {refused}"):
            transfers[1].wait()
    transfers[1].wait_source()
    for number in (0, 2):
        assert torch.equal(memories[number], storages[number].values)
    assert torch.equal(memories[1][:refused], storages[1].values[:refused])
    assert all(storage.begun == list(range(0, NBYTES, CHUNK)) for storage in storages)
