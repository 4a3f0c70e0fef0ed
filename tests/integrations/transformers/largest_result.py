"""The largest tensor that a model computes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestResult(TorchDispatchMode):
    """Records the most elements of a result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in torch.utils._pytree.tree_leaves(found) if torch.is_tensor(each)]
        self.elements = max(self.elements, *sizes, 0)
        return found
