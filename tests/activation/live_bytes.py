"""The most bytes of tensors that were alive simultaneously, counted at every operation."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the storages of results as long as they are alive; those made before do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        for each in _tensors(found):
            storage = each.untyped_storage()
            if storage._cdata not in inputs:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return found


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
