"""Running the engine's own tensor code inside the user's forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


def without_modes() -> contextlib.AbstractContextManager[object]:
    """Return a context that dispatch modes do not see into. Those of selective checkpointing would take the
    engine's copies, which differ when a block is run again, for operations of the block."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Hide what runs inside from autograd, inference mode and dispatch modes."""
    with torch.inference_mode(False), torch.no_grad(), without_modes():
        yield


def in_transform() -> bool:
    """Return whether a torch.func transform is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None
