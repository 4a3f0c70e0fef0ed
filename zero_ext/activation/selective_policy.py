"""Selective checkpointing: save the results of named ops, or those that a plan chose within a budget."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
# An op of a call: the overload, and how many of it ran before.
Step = tuple[Any, int]
# Names that schemas have for the probability with which an op draws random numbers.
_PROBABILITIES = ("dropout_p", "p", "dropout")
# Namespaces of ops between ranks: c10d's change tensors that their schemas do not mark as changed, and all
# of them wait for other ranks, which have to run them too.
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


def named_ops(names: Sequence[str]) -> frozenset[OpOverload]:
    """Return the ops that ``names`` mean, such as "aten.mm" or "aten.mm.default".

    Raises ``ValueError`` for a name that torch does not have, and for collectives.
    """
    found: set[OpOverload] = set()
    for name in names:
        op: Any = torch.ops
        try:
            for attribute in name.split("."):
                op = getattr(op, attribute)
        except AttributeError:
            op = None
        if isinstance(op, OpOverloadPacket):
            found.update(getattr(op, overload) for overload in op.overloads())
        elif isinstance(op, OpOverload):
            found.add(op)
        else:
            raise ValueError(
                f"activation_checkpointing.save_ops: expected names of torch ops, got {name!r}. Write "
                "namespace and name, such as 'aten.mm' or 'aten._scaled_dot_product_flash_attention'."
            )
    for each in sorted(found, key=str):
        if each.namespace in _COLLECTIVES:
            does = "changes its input tensors" if each.namespace == "c10d" else "other ranks wait for"
            raise ValueError(
                "activation_checkpointing.save_ops: expected ops with results that can be saved, got "
                f"'{each}', which {does}, so backward has to run it again. Remove it, or save an op after it."
            )
    return frozenset(found)


def _draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of ``op`` takes random numbers: skipping it would shift those of the ops after
    it.
    """
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for index, argument in enumerate(op._schema.arguments):
        if argument.name in _PROBABILITIES:
            default = kwargs.get(argument.name, argument.default_value)
            probability = args[index] if index < len(args) else default
            return probability is None or float(probability) > 0.0
    return True


def _tensors_of(tree: Any) -> Iterable[torch.Tensor]:
    """Return the tensors among the arguments or results of an op."""
    return (each for each in tree_iter(tree) if isinstance(each, torch.Tensor))


def _storages(tree: Any) -> Iterable[torch.UntypedStorage]:
    return (each.untyped_storage() for each in _tensors_of(tree) if each.layout is torch.strided)


def _inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Return what the memory of the tensors among an op's arguments is known by."""
    return {each.untyped_storage()._cdata for each in _tensors_of((args, dict(kwargs)))}


class _SavedResults:
    """The memory of a call's saved results, which no collective may change: torch would not notice."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        # Weak references keep the objects' addresses from being used again.
        self._makers: dict[int, tuple[StorageWeakRef, Any]] = {}

    def add(self, op: Any, out: Any) -> None:
        """Note what ``op`` returned."""
        for storage in _storages(out):
            self._makers[storage._cdata] = StorageWeakRef(storage), op

    def check(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """``ValueError`` if ``op``, which runs now, is a collective of c10d and gets one of them."""
        if not (self._makers and isinstance(op, OpOverload) and op.namespace == "c10d"):
            return
        for storage in _storages((args, dict(kwargs))):
            _, maker = self._makers.get(storage._cdata, (None, None))
            if maker is not None:
                raise ValueError(
                    f"{self._setting}: it saves the result of '{maker}', which '{op}' overwrites. "
                    "Recomputed in backward, the collective would start from its own result. Pass it a "
                    f"copy (tensor.clone()), or do not save '{maker}'."
                )


def contexts_saving_ops(ops: frozenset[OpOverload]) -> Contexts:
    """Contexts of a call and of its recomputation that save the results of ``ops``."""
    saved = _SavedResults("activation_checkpointing.save_ops")

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved.check(op, args, kwargs)
        if op not in ops:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if _draws(op, args, kwargs):
            raise ValueError(
                f"activation_checkpointing.save_ops: '{op}' draws random numbers here. If backward did not "
                "run it again, the ops after it would get other numbers than in forward. Remove it from "
                "save_ops."
            )
        saved.add(op, context.op_output)
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def contexts_saving_steps(steps: frozenset[Step], budget: int) -> Contexts:
    """Contexts that save the results of a plan's steps, those that fit into ``budget`` bytes: the call may be
    another one than the one that was measured."""
    count: Counter[Any] = Counter()
    saved, left = _SavedResults("activation_checkpointing.save_budget_bytes"), budget

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal left
        saved.check(op, args, kwargs)
        step = (op, count[op])
        count[op] += 1
        if step not in steps or _draws(op, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        nbytes = sum(storage.nbytes() for storage in _storages(context.op_output))
        if nbytes > left:
            return CheckpointPolicy.PREFER_RECOMPUTE
        left -= nbytes
        saved.add(op, context.op_output)
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


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
        began = self._now()
        out = func(*args, **kwargs)
        seconds = self._now() - began
        step = (func, self._count[func])
        self._count[func] += 1
        if isinstance(func, OpOverload) and _changes(func):
            inputs = _inputs(args, kwargs)
            self._steps = {
                step: (measured, storages)
                for step, (measured, storages) in self._steps.items()
                if all(storage.cdata not in inputs for storage in storages)
            }
        if _can_stay(func, args, kwargs, out):
            made = [each.untyped_storage() for each in _tensors_of(out)]
            nbytes = sum(storage.nbytes() for storage in made)
            # Weak references keep the objects' addresses from being used again.
            self._steps[step] = (MeasuredOp(step, nbytes, seconds), [*map(StorageWeakRef, made)])
        return out

    def _now(self) -> float:
        if self._synchronizes:
            torch.accelerator.synchronize()
        return self._clock()


def _changes(op: OpOverload) -> bool:
    """Return whether ``op`` changes its input tensors, or may do so."""
    return op._schema.is_mutable or op.namespace in _COLLECTIVES


def _can_stay(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:
    """Return whether an output may stay: views cost nothing to compute again, and what draws random numbers,
    changes its arguments or waits for other ranks, with plans of their own, has to run."""
    if not isinstance(func, OpOverload) or func.is_view or _changes(func) or _draws(func, args, kwargs):
        return False
    inputs = _inputs(args, kwargs)
    return all(each.untyped_storage()._cdata not in inputs for each in _tensors_of(out))
