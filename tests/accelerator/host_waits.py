"""Finds where the host would wait for a device. The stand-in computes at once, so its streams do not tell."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
_UPDATES = {"adam_step_", "adam_step_8bit_", "lion_step_"}


class HostWaits(TorchDispatchMode):
    """A context manager that lists in ``found`` every wait that this thread's code asks for, and backward's:
    values read, copies to the host that are not asked for as non-blocking, streams and events synchronized.
    ``log`` has these and, as "update", each kernel of an optimizer, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self._active = False

    @property
    def found(self) -> list[str]:
        """The waits."""
        return [each for each in self.log if each != "update"]

    def __enter__(self) -> HostWaits:
        self._active = True
        sys.setprofile(self._note)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._active = False
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._active:
            sys.setprofile(None)  # on a thread of autograd, which nobody else tells
            return
        # Streams and events are classes of C, which take no other method.
        name = getattr(argument, "__qualname__", "")
        if event == "c_call" and "synchronize" in name.lower():
            self.log.append(name)

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if self._active and sys.getprofile() is None:
            sys.setprofile(self._note)
        result = op(*arguments, **(named or {}))
        if op._schema.name.removeprefix("zero_ext::") in _UPDATES:
            self.log.append("update")
        there = [each for each in arguments if isinstance(each, torch.Tensor) and each.device.type != "cpu"]
        to_host = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        blocking = not (named or {}).get("non_blocking", False) and not (
            op is aten.copy_.default and len(arguments) > 2 and arguments[2]
        )
        copies = op in {aten._to_copy.default, aten.copy_.default} and to_host
        if there and (op in _READS or (copies and blocking)):
            self.log.append(str(op))
        return result
