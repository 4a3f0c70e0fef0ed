"""Checks of a model, before anything is sharded, for what would train wrongly without an error."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import nn


def check_modules(model: nn.Module) -> None:
    """Refuse modules with parameters that cannot be followed.

    Raises:
        ValueError: The model is compiled as a whole, or has traced or scripted modules.
    """
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ValueError(
            "model: expected a plain one, got one that is compiled as a whole. Compile its "
            "blocks instead (for block in model.layers: torch.compile(block)) and prepare the "
            "plain model around them."
        )
    for name, module in model.named_modules():
        label = f"module '{name}'" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ValueError(
                f"{label}: expected an ordinary module, got {type(module).__name__}, a traced or "
                "scripted one, which uses its parameters outside Python. Prepare the original "
                "module. To trace or script it, use a copy that is filled from "
                "zero_ext.full_state_dict(model)."
            )


def check_embeddings(model: nn.Module, world_size: int) -> None:
    """Refuse embeddings that write to their weight in forward.

    Raises:
        ValueError: ``max_norm`` is set, and there are several ranks.
    """
    for name, module in model.named_modules():
        limit = getattr(module, "max_norm", None)
        if world_size > 1 and isinstance(module, nn.Embedding | nn.EmbeddingBag) and limit is not None:
            raise ValueError(
                f"module '{name}': expected max_norm=None on {world_size} ranks, got {limit}. Forward "
                "rescales the rows that this rank looks up, so the ranks' weights would differ. Rescale the "
                "rows after optimizer.step(), inside 'with zero_ext.gathered(embedding.weight, "
                "modifier_rank=0):'."
            )


def check_unchanged(
    model: nn.Module,
    owned: Sequence[tuple[nn.Parameter, str, weakref.ref[nn.Module]]],
    known: Mapping[nn.Parameter, object],
) -> None:
    """Refuse a forward of a prepared model if its parameters are not those that were prepared.

    Args:
        model: The prepared model.
        owned: Every parameter with each of its full names and the module that owns it under that name.
        known: The parameters that were prepared.

    Raises:
        RuntimeError: A parameter was replaced, removed or added, or the forward is being traced.
    """
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace of a prepared model: expected a plain model, as the engine's hooks and the "
            "memory that comes and goes are no part of a trace. Trace a copy that is filled from "
            "zero_ext.full_state_dict(model)."
        )
    for parameter, name, reference in owned:
        owner = reference()
        # Reading by ``[]`` would gather the unit (``GatheringParameters``).
        found = None if owner is None else dict.get(owner._parameters, name.rpartition(".")[2])
        # torch.func.functional_call puts tensors that are no parameters there for a while.
        if found is not parameter and (found is None or isinstance(found, nn.Parameter)):
            raise RuntimeError(
                f"parameter '{name}': expected the one that zero_ext.prepare saw, got another or "
                "none. Change the model before prepare, or values in place inside 'with "
                "zero_ext.gathered(params):'."
            )
    if _count_parameters(model) == len(known):
        return
    new = [
        name
        for name, parameter in model.named_parameters()
        if parameter not in known and isinstance(parameter, nn.Parameter)
    ]
    if new:
        raise RuntimeError(
            f"model: expected the parameters that zero_ext.prepare saw, got new ones: {new}. "
            "Build the whole model before prepare."
        )


def _count_parameters(model: nn.Module) -> int:
    """Return how many parameters there are in all modules, each of them once."""
    # This runs before every forward, in half the time of a walk by ``model.parameters()``.
    modules, found, left = {id(model)}, set[int](), [model]
    while left:
        module = left.pop()
        found.update([id(each) for each in module._parameters.values() if each is not None])
        for child in module._modules.values():
            if child is not None and id(child) not in modules:
                modules.add(id(child))
                left.append(child)
    return len(found)
