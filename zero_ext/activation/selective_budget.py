"""Choose the results of a call to save under a budget of bytes, by measuring its first run op by op."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zero_ext.activation.selective_policy import COLLECTIVES, Step, draws, tensors_of


@dataclass(frozen=True)
class MeasuredOp:
    """An op of a call: the bytes of its results, and the seconds of recomputation that saving them avoids."""

    step: Step
    nbytes: int
    seconds: float


def choose(steps: Sequence[MeasuredOp], budget: int) -> frozenset[Step]:
    """Return the steps to save in ``budget`` bytes, by seconds saved per byte.

    It is the best single step if that saves more. The choice saves at least half of what the best one would.
    """
    fitting = [each for each in steps if 0 < each.nbytes <= budget and each.seconds > 0]
    chosen, left = [], budget
    for each in sorted(fitting, key=lambda each: each.nbytes / each.seconds):
        if each.nbytes <= left:
            chosen.append(each)
            left -= each.nbytes
    best = max(fitting, key=lambda each: each.seconds, default=None)
    if best is not None and best.seconds > sum(each.seconds for each in chosen):
        chosen = [best]
    return frozenset(each.step for each in chosen)


class MeasuringMode(TorchDispatchMode):
    """Inside, the ops that run are measured by ``clock``; on an accelerator each is waited for."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._steps: dict[Step, tuple[MeasuredOp, list[StorageWeakRef]]] = {}
        self._count: Counter[Any] = Counter()
        self._synchronizes = device.type != "cpu"

    @property
    def steps(self) -> list[MeasuredOp]:
        """The ops with results that can be saved: no view, nothing random, nothing that was changed later."""
        return [measured for measured, _ in self._steps.values()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op and note it."""
        kwargs = kwargs or {}
        self._synchronize()
        began = self._clock()
        out = func(*args, **kwargs)
        self._synchronize()
        seconds = self._clock() - began
        step = (func, self._count[func])
        self._count[func] += 1
        self._forget_changed(func, args, kwargs)
        if _can_stay(func, args, kwargs, out):
            storages = [each.untyped_storage() for each in tensors_of(out)]
            nbytes = sum(storage.nbytes() for storage in storages)
            # Weak references keep the objects' addresses from being used again.
            weak = [StorageWeakRef(storage) for storage in storages]
            self._steps[step] = (MeasuredOp(step, nbytes, seconds), weak)
        return out

    def _forget_changed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not (isinstance(func, OpOverload) and _changes(func)):
            return
        inputs = {each.untyped_storage()._cdata for each in tensors_of((args, dict(kwargs)))}
        self._steps = {
            step: found
            for step, found in self._steps.items()
            if all(storage.cdata not in inputs for storage in found[1])
        }

    def _synchronize(self) -> None:
        if self._synchronizes:
            torch.accelerator.synchronize()


def _changes(op: OpOverload) -> bool:
    """Return whether ``op`` changes its input tensors, or may do so."""
    return op._schema.is_mutable or op.namespace in COLLECTIVES


def _can_stay(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:
    """Return whether an output may stay.

    Views cost nothing to compute again, and what draws random numbers, changes its arguments or waits for
    other ranks, with plans of their own, has to run.
    """
    if not isinstance(func, OpOverload) or func.is_view or _changes(func):
        return False
    if draws(func, args, kwargs):
        return False
    inputs = {each.untyped_storage()._cdata for each in tensors_of((args, dict(kwargs)))}
    return all(each.untyped_storage()._cdata not in inputs for each in tensors_of(out))
