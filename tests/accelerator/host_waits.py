"""Finds where the host would wait for a device. The stand-in computes at once, so its streams do not tell."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class HostWaits(TorchDispatchMode):
    """A context manager that lists in ``found`` every wait that this thread's code asks for: values read,
    copies to the host that are not asked for as non-blocking, streams and events synchronized."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> HostWaits:
        sys.setprofile(self._note)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        # Streams and events are classes of C, which take no other method.
        name = getattr(argument, "__qualname__", "")
        if event == "c_call" and "synchronize" in name.lower():
            self.found.append(name)

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = op(*arguments, **(named or {}))
        there = [each for each in arguments if isinstance(each, torch.Tensor) and each.device.type != "cpu"]
        to_host = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        blocking = not (named or {}).get("non_blocking", False) and not (
            op is torch.ops.aten.copy_.default and len(arguments) > 2 and arguments[2]
        )
        copies = op in {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default} and to_host
        if there and (op in _READS or (copies and blocking)):
            self.found.append(str(op))
        return result
