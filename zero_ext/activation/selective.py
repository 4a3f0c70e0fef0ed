"""Which results of a checkpointed call stay and are not computed again: those of named ops, or a plan's."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
# An op of a call: the overload, and how many of it ran before.
Step = tuple[Any, int]
# Names that schemas have for the probability with which an op draws random numbers.
_PROBABILITIES = ("dropout_p", "p", "dropout")


def named_ops(names: Sequence[str]) -> frozenset[OpOverload]:
    """The ops that ``names`` mean, such as "aten.mm" or "aten.mm.default".

    Raises ``ValueError`` for a name that torch does not know.
    """
    found: set[OpOverload] = set()
    for name in names:
        op: Any = torch.ops
        try:
            for part in name.split("."):
                op = getattr(op, part)
        except AttributeError:
            op = None
        if isinstance(op, OpOverloadPacket):
            found.update(getattr(op, overload) for overload in op.overloads())
        elif isinstance(op, OpOverload):
            found.add(op)
        else:
            raise ValueError(
                f"activation_checkpointing.keep has {name!r}, which torch does not know as an op; write "
                "namespace and name, such as 'aten.mm' or 'aten._scaled_dot_product_flash_attention'"
            )
    return frozenset(found)


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``op`` takes random numbers: skipping it would shift those of the ops after it."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for place, argument in enumerate(op._schema.arguments):
        if argument.name in _PROBABILITIES:
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return given is None or float(given) > 0.0
    return True


def keeping_ops(ops: frozenset[OpOverload]) -> Contexts:
    """Contexts of a call and of its recomputation that keep the results of ``ops``."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in ops:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if draws(op, args, kwargs):
            raise ValueError(
                f"activation_checkpointing.keep has '{op}', which draws random numbers here: if it were not "
                "run again, the ops after it would get other numbers than in forward. Remove it from keep."
            )
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def keeping_steps(kept: frozenset[Step]) -> Contexts:
    """Contexts that keep the results of the steps of a plan."""
    seen: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        count = seen[bool(context.is_recompute)]
        step = (op, count[op])
        count[op] += 1
        if step in kept and not draws(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
