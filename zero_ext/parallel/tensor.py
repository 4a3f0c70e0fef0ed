"""Splits the tensors of a model over ranks as its own plan, or the caller's, says; torch's styles do it."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterator, Mapping
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

from zero_ext.zero.tie import tie

Model = TypeVar("Model", bound=nn.Module)

# Names as transformers' plans have them. A style is made anew for every module.
_STYLES = {
    "colwise": lambda: ColwiseParallel(),
    "rowwise": lambda: RowwiseParallel(),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
# Parameters that every rank has, used on its own heads: their gradients are added up.
_SUMMED = "replicated_with_grad_allreduce"


def split_tensors(
    model: Model, mesh: DeviceMesh, plan: Mapping[str, str | ParallelStyle] | None = None
) -> Model:
    """Splits the parameters of ``model`` over mesh["tp"], in place, before :func:`zero_ext.prepare`.

    ``plan`` names modules, "*" for any part of a name, and what becomes of them: "colwise", "rowwise",
    "colwise_gather_output", "embedding_rowwise" or a style of torch's. Without it, it is the model's own, as
    models of transformers have (``base_model_tp_plan`` of their configuration), with the vocabulary of their
    input embedding split too. Parameters that modules share stay shared.

    Raises ``ValueError``, with nothing changed, for a model without a plan, a plan that names no module or an
    unknown style, and heads or widths that do not divide by the ranks.
    """
    ranks = mesh["tp"].size()
    found = _own_plan(model) if plan is None else dict(plan)
    chosen = dict(_modules(model, found))
    _check(model, chosen, ranks)
    if ranks == 1:
        return model
    shared = _shared(model)
    styles = {
        name: _STYLES[style]() if isinstance(style, str) else style
        for name, style in chosen.items()
        if style != _SUMMED
    }
    parallelize_module(model, mesh["tp"], styles)
    for names in shared:
        first = model.get_parameter(names[0])
        for name in names[1:]:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, first)
    held = _ranks_with_parts(mesh)
    for name, style in chosen.items():
        if style == _SUMMED:
            for last, parameter in model.get_submodule(name).named_parameters():
                tie(parameter, f"{name}.{last}", held)
    return model


def _own_plan(model: nn.Module) -> dict[str, str | ParallelStyle]:
    """The plan that the model brings along, under names from its root."""
    config = getattr(model, "config", None)
    base: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    dot = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    plan: dict[str, str | ParallelStyle] = {dot + name: style for name, style in base.items()}
    plan.update(type(model).__dict__.get("_tp_plan") or {})
    if not plan:
        raise ValueError(
            f"{type(model).__name__} brings no plan for tensor parallelism along; give one, as "
            "{'blocks.*.wide': 'colwise', 'blocks.*.narrow': 'rowwise'}"
        )
    find: Any = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    for name, module in model.named_modules():
        if module is embedding and not any(fnmatch.fnmatch(name, pattern) for pattern in plan):
            plan[name] = "embedding_rowwise"
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
        module = model.get_submodule(name)
        split = {"colwise": 0, "rowwise": 1}.get(style if isinstance(style, str) else "")
        if split is not None and isinstance(module, nn.Linear) and module.weight.shape[split] % ranks:
            raise ValueError(
                f"'{name}' has a weight of {tuple(module.weight.shape)}, whose dimension {split} does not "
                f"divide by tp {ranks}"
            )


def _shared(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [each for each in names.values() if len(each) > 1]


def _ranks_with_parts(mesh: DeviceMesh) -> list[int]:
    """The ranks along "tp" with this one, as they count among those with the model's parts."""
    ranks = mesh["tp"].size()
    stage = mesh["pp"].get_local_rank() if "pp" in (mesh.mesh_dim_names or ()) else 0
    return [stage * ranks + rank for rank in range(ranks)]
