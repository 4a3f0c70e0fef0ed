"""Splits the tensors of a model over ranks as its own plan, or the caller's, says; torch's styles do it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from zero_ext.parallel.automatic import HEADS
from zero_ext.parallel.plans import known_plan
from zero_ext.parallel.randomness import split_randomness
from zero_ext.parallel.styles import InputsParallel, LocalHeads, OutputsParallel, is_conv1d
from zero_ext.zero.local_part import is_distributed
from zero_ext.zero.tie import shared_names, tie

Model = TypeVar("Model", bound=nn.Module)

# Names as transformers' plans have them, and some of our own. A style is made anew for every module.
_STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "colwise": lambda module: OutputsParallel() if is_conv1d(module) else ColwiseParallel(),
    "rowwise": lambda module: InputsParallel() if is_conv1d(module) else RowwiseParallel(),
    "colwise_halves": lambda module: OutputsParallel(2),
    "colwise_thirds": lambda module: OutputsParallel(3),
    "colwise_gather_output": lambda module: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda module: ColwiseParallel(output_layouts=Replicate()),
    "colwise_split_logits": lambda module: ColwiseParallel(use_local_output=False),
    "embedding_rowwise": lambda module: RowwiseParallel(input_layouts=Replicate()),
    "local_heads": lambda module: LocalHeads(),
}
# Styles whose ranks have shares of one size, and of how many projections.
_EVEN = {"colwise": 1, "rowwise": 1, "colwise_halves": 2, "colwise_thirds": 3}
# Parameters that every rank has, used on its own heads: their gradients are added up.
_SUMMED = "replicated_with_grad_allreduce"


def split_tensors(
    model: Model, mesh: DeviceMesh, plan: Mapping[str, str | ParallelStyle] | None = None
) -> Model:
    """Splits the parameters of ``model`` over mesh["tp"], in place, before :func:`zero_ext.prepare`.

    ``plan`` names modules, "*" for any part of a name, and what becomes of them: "colwise" (outputs are
    split), "rowwise" (inputs are), "colwise_halves" and "colwise_thirds" (of projections side by side),
    "colwise_gather_output", "colwise_split_logits" (see :func:`vocabulary_cross_entropy`),
    "embedding_rowwise", "local_heads" (an attention module that counts its heads) or a style of torch's.
    Without it, it is :func:`tensor_plan`. Parameters that modules share stay shared. Dropout draws a rank's
    own random numbers where tensors are split, and the same ones elsewhere: give the ranks along "tp" one
    seed.

    On one rank nothing is split. Raises ``ValueError``, with nothing changed, for a model without a plan on
    several, a plan that names no module or an unknown style, and heads or widths that do not divide by the
    ranks.
    """
    ranks = mesh["tp"].size()
    if ranks == 1 and plan is None:
        return model
    found = tensor_plan(model) if plan is None else dict(plan)
    chosen = dict(_modules(model, found))
    _check(model, chosen, ranks)
    if ranks == 1:
        return model
    shared = shared_names(model)
    styles = {
        name: _STYLES[style](model.get_submodule(name)) if isinstance(style, str) else style
        for name, style in chosen.items()
        if style != _SUMMED
    }
    parallelize_module(model, mesh["tp"], styles)
    split_randomness(model, mesh["tp"], styles)
    for names in shared:
        parameters = [model.get_parameter(name) for name in names]
        first = next((each for each in parameters if is_distributed(each)), parameters[0])
        for name in names:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, first)
    held = _ranks_with_parts(mesh)
    for name, style in chosen.items():
        if style == _SUMMED:
            for last, parameter in model.get_submodule(name).named_parameters():
                tie(parameter, f"{name}.{last}", held)
    return model


def tensor_plan(model: nn.Module) -> dict[str, str | ParallelStyle]:
    """The plan that ``model`` of transformers brings along, or that is known of it (GPT-2, BLOOM, BERT), by
    names from its root and with its vocabulary: what :func:`split_tensors` uses, to be read or changed.
    ``ValueError`` without one."""
    config = getattr(model, "config", None)
    base: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or known_plan(config)
    prefix = getattr(model, "base_model_prefix", "")
    dot = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    plan: dict[str, str | ParallelStyle] = {dot + name: style for name, style in base.items()}
    plan.update(type(model).__dict__.get("_tp_plan") or {})
    if not plan:
        raise ValueError(
            f"{type(model).__name__} brings no plan for tensor parallelism along; give one, as "
            "{'blocks.*.wide': 'colwise', 'blocks.*.narrow': 'rowwise'}, or see automatic_plan"
        )
    for find, style in (
        ("get_input_embeddings", "embedding_rowwise"),
        ("get_output_embeddings", "colwise_gather_output"),
    ):
        vocabulary = getattr(model, find)() if hasattr(model, find) else None
        for name, module in model.named_modules():
            if module is vocabulary and not any(fnmatch.fnmatch(name, pattern) for pattern in plan):
                plan[name] = style
    return plan


def _modules(
    model: nn.Module, plan: Mapping[str, str | ParallelStyle]
) -> Iterator[tuple[str, str | ParallelStyle]]:
    """Every module that the plan names, with its style."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in _STYLES and style != _SUMMED:
            known = ", ".join([*_STYLES, _SUMMED])
            raise ValueError(f"plan: style {style!r} of '{pattern}' is unknown; known: {known}")
        matching = [name for name in names if fnmatch.fnmatch(name, pattern)]
        if not matching:
            raise ValueError(f"plan: '{pattern}' names no module of {type(model).__name__}")
        yield from ((name, style) for name in matching)


def _check(model: nn.Module, chosen: Mapping[str, str | ParallelStyle], ranks: int) -> None:
    config: Any = getattr(model, "config", None)
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(
                f"{what} is {heads}, which does not divide by tp {ranks}; use a divisor of the heads"
            )
    for name, style in chosen.items():
        module: Any = model.get_submodule(name)
        for heads in HEADS if style == "local_heads" else ():
            if getattr(module, heads, 0) % ranks:
                raise ValueError(
                    f"'{name}' has {heads} {getattr(module, heads)}, which does not divide by tp {ranks}"
                )
        if style not in _EVEN or not (isinstance(module, nn.Linear) or is_conv1d(module)):
            continue
        axis = int((style == "rowwise") != is_conv1d(module))
        parts = _EVEN[style] * ranks
        if module.weight.shape[axis] % parts:
            raise ValueError(
                f"'{name}' has a weight of {tuple(module.weight.shape)}, whose dimension {axis} does not "
                f"divide by tp {parts if parts == ranks else f'{ranks} × {parts // ranks} side by side'}"
            )


def _ranks_with_parts(mesh: DeviceMesh) -> list[int]:
    """The ranks along "tp" with this one, as they count among those with the model's parts."""
    ranks = mesh["tp"].size()
    stage = mesh["pp"].get_local_rank() if "pp" in (mesh.mesh_dim_names or ()) else 0
    return [stage * ranks + rank for rank in range(ranks)]
