"""Counts the allocations of memory for tensors that a package's own code makes."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGE = 64 * 1024
_TORCH = str(Path(torch.__file__).parent)
# Frames of torch that only pass a call on; in any other one it is torch that allocates.
_THROUGH = tuple(
    f"{_TORCH}/{name}"
    for name in ("_ops.py", "_tensor.py", "_compile.py", "_dynamo/", "utils/_contextlib.py")
)


class AllocationCounter(TorchDispatchMode):
    """Inside, every operator whose result has `LARGE` bytes or more of new memory and that code of `package`
    calls is counted, by file, line and operator.

    Allocations belong to the innermost Python frame: what autograd, torch.optim or a layer's forward
    allocates is theirs, also below a call of the package. Paths of `package` in `exempt` are not counted:
    code that takes part in the model's forward makes activations.
    """

    def __init__(self, package: Path, exempt: Sequence[str] = ()) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._package = str(package)
        self._exempt = tuple(str(package / path) for path in exempt)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs the operator and looks at its result."""
        result = func(*args, **(kwargs or {}))
        large = [leaf for leaf in tree_leaves(result) if _address(leaf) and _nbytes(leaf) >= LARGE]
        if large:
            known = {_address(leaf) for leaf in tree_leaves((args, kwargs or {}))}
            for leaf in large:
                caller = self._caller(sys._getframe(1)) if _address(leaf) not in known else None
                if caller is not None:
                    self.found[f"{caller} {func}"] += 1
        return result

    def _caller(self, frame: FrameType | None) -> str | None:
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(self._package):
                return (
                    None
                    if path.startswith(self._exempt)
                    else f"{path[len(self._package) :]}:{frame.f_lineno}"
                )
            if path.startswith(_TORCH) and not path.startswith(_THROUGH):
                return None
            frame = frame.f_back
        return None


def _address(leaf: object) -> int | None:
    """Where a tensor's memory begins; None for what has none."""
    if not isinstance(leaf, torch.Tensor):
        return None
    try:
        return leaf.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # wrapper tensors have no storage
        return None


def _nbytes(leaf: torch.Tensor) -> int:
    return leaf.untyped_storage().nbytes()
