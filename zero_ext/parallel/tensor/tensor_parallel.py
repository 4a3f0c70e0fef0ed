"""Splits the tensors of a model over ranks by its own plan or the caller's, with torch's styles and ours."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from zero_ext.parallel.tensor.auto_tp_plan import HEADS
from zero_ext.parallel.tensor.tp_plans import (
    EVEN,
    EXPERTS,
    MODULE_STYLES,
    PARAMETER_STYLES,
    REPLICATED,
    SUMMED,
    corrections,
    known_plan,
    module_problem,
    style_problem,
)
from zero_ext.parallel.tensor.tp_rng import split_randomness
from zero_ext.parallel.tensor.tp_styles import (
    KEY_HEADS,
    ParameterSplit,
    is_conv1d,
    parameter_split,
    split_parameter,
)
from zero_ext.zero.units.dtensor_local import is_distributed
from zero_ext.zero.units.parameter_marks import mark_tied, shared_names

Model = TypeVar("Model", bound=nn.Module)
Plan = Mapping[str, str | ParallelStyle]

# Last parts of the names of projections to keys.
_KEYS = {"k_proj", "key", "k", "wk", "to_k", "qkv_proj", "query_key_value"}
# What lies between projections whose outputs are split and one whose inputs are, in attention and in a gate.
_BETWEEN = ("q_norm", "k_norm", "v_norm", "q_layernorm", "k_layernorm", "act_fn")


class _Resolved(NamedTuple):
    """A plan with the names of a model in the place of patterns."""

    modules: dict[str, str | ParallelStyle]
    parameters: dict[str, str]


def apply_tensor_parallel(model: Model, mesh: DeviceMesh, plan: Plan | None = None) -> Model:
    """Split the parameters of `model` over mesh["tp"], in place, before `zero_ext.prepare`.

    Parameters that modules share stay shared. Dropout draws a rank's own random numbers where tensors are
    split, and the same ones elsewhere, so give the ranks along "tp" one seed. Nothing is split on one rank.

    Args:
        model: A model on every rank, with the same values.
        mesh: A mesh with the dimension "tp".
        plan: Styles by name of modules or parameters, with "*" for any part of a name. A style is one of
            transformers' or of ours (docs/reference/tensor_parallel.md lists them), or an object of
            torch's. By default, `tensor_plan`.

    Returns:
        `model`.

    Raises:
        ValueError: On several ranks for a model without a plan. For a pattern of `plan` that names
            nothing, unknown styles, and heads or widths that do not divide by the ranks. Nothing is changed
            then.

    Examples:
        On four ranks:

        ```python
        from zero_ext.parallel import apply_tensor_parallel, make_mesh

        mesh = make_mesh(tp=2)
        torch.manual_seed(0)  # the same values on all ranks
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        model = apply_tensor_parallel(model, mesh, {"0": "colwise", "2": "rowwise"})
        assert model[0].weight.to_local().shape == (4, 4)  # of [8, 4]
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3}, process_group=mesh)
        ```
    """
    ranks = mesh["tp"].size()
    if ranks == 1 and plan is None:
        return model
    chosen = _resolve(model, tensor_plan(model) if plan is None else plan)
    _check_modules(model, chosen.modules, ranks)
    splits = dict(_checked_splits(model, chosen, ranks))
    _check_shared(model, chosen)
    if ranks == 1:
        return model
    _leave_unsplit_experts(chosen, splits)
    shared = shared_names(model)
    for name, split in splits.items():
        split_parameter(_owner(model, name), name.rpartition(".")[2], mesh["tp"], split)
    styles = {
        name: MODULE_STYLES[style](model, name) if isinstance(style, str) else style
        for name, style in chosen.modules.items()
        if style not in (SUMMED, REPLICATED)
    }
    parallelize_module(model, mesh["tp"], styles)
    split_randomness(model, mesh["tp"], styles)
    for names in shared:
        parameters = [model.get_parameter(name) for name in names]
        first = next((each for each in parameters if is_distributed(each)), parameters[0])
        for name in names:
            setattr(_owner(model, name), name.rpartition(".")[2], first)
    held = _model_parallel_ranks(mesh)
    for name, parameter in _summed_parameters(model, chosen):
        mark_tied(parameter, name, held)
    return model


def tensor_plan(model: nn.Module) -> dict[str, str | ParallelStyle]:
    """Return the plan that `apply_tensor_parallel` uses for `model`, to be read or changed.

    It is the one that a model of transformers ships, or one of ours (docs/reference/tensor_parallel.md), with
    the vocabulary.

    Args:
        model: the full model.

    Returns:
        Styles by pattern of names from the root of `model`. Every pattern names something in it.

    Raises:
        ValueError: the model has no plan.
    """
    prefix = getattr(model, "base_model_prefix", "")
    dot = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    config = getattr(model, "config", None)
    known = {**known_plan(config), **(getattr(config, "base_model_tp_plan", None) or {})}
    plan: dict[str, str | ParallelStyle] = {dot + name: style for name, style in known.items()}
    plan.update(getattr(model, "_tp_plan", None) or {})  # with those of models inside of this one
    plan.update({dot + name: style for name, style in corrections(config).items()})
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    plan = {pattern: style for pattern, style in plan.items() if fnmatch.filter(names, pattern)}
    vocabulary = dict(_vocabulary(model))
    if not known and all(name in vocabulary for pattern in plan for name in fnmatch.filter(names, pattern)):
        raise ValueError(
            f"{type(model).__name__}: expected a plan for tensor parallelism, got none. Give one, such as "
            "{'blocks.*.wide': 'colwise', 'blocks.*.narrow': 'rowwise'}, or see automatic_plan."
        )
    for name, style in vocabulary.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in plan):
            plan[name] = style
    return plan


def _vocabulary(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the modules of a model of transformers with a row per word, and their styles."""
    weights = []
    for find in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found = getattr(model, find)() if hasattr(model, find) else None
        except NotImplementedError:  # transformers' word for a model without one
            found = None
        weights.append(getattr(found, "weight", None))
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and any(weight is each for each in weights):
            if isinstance(module, nn.Embedding):
                yield name, "embedding_rowwise"
            elif isinstance(module, nn.Linear):
                yield name, "colwise_gather_output"


def _owner(model: nn.Module, name: str) -> Any:
    """Return the module that has the module or parameter of that name."""
    return model.get_submodule(name.rpartition(".")[0])


def _resolve(model: nn.Module, plan: Plan) -> _Resolved:
    """Find the modules that the patterns of ``plan`` name, or else the parameters."""
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    found = _Resolved({}, {})
    for pattern, style in plan.items():
        problem = style_problem(style)
        if problem:
            raise ValueError(f"plan: style {style!r} of '{pattern}' cannot be applied. {problem}")
        named = fnmatch.filter(modules, pattern)
        found.modules.update(dict.fromkeys(named, style))
        own = [] if named else fnmatch.filter(parameters, pattern)
        if not (named or own):
            raise ValueError(
                f"plan: expected '{pattern}' to name a module or parameter of {type(model).__name__}, got "
                "none. See model.named_modules()."
            )
        if own and style not in (*PARAMETER_STYLES, SUMMED, REPLICATED):
            raise ValueError(
                f"plan: style of the parameter '{own[0]}': expected one of "
                f"{', '.join((*PARAMETER_STYLES, SUMMED, REPLICATED))}, got {style!r}. Use one of these."
            )
        found.parameters.update({name: str(style) for name in own})
    for name in [name for name, style in found.modules.items() if style == "colwise"]:
        dot = "".join(name.rpartition(".")[:2])
        for between in (dot + each for each in _BETWEEN if dot + each in modules):
            # Plans of transformers leave some of them out (Apertus, Qwen3-VL-MoE in version 5.23).
            found.modules.setdefault(between, SUMMED)
    return found


def _check_modules(model: nn.Module, chosen: Plan, ranks: int) -> None:
    """Raise ``ValueError`` for modules that cannot have their styles."""
    for name, style in chosen.items():
        if not isinstance(style, str):
            continue
        problem = module_problem(model, name, style)
        if problem:
            raise ValueError(
                f"plan: module '{name}' of the style {style!r}: {problem}. Leave it out of the plan."
            )
        module: Any = model.get_submodule(name)
        _check_heads(model, name, style, ranks)
        if style not in EVEN or not (isinstance(module, nn.Linear) or is_conv1d(module)):
            continue
        axis = int((style == "rowwise") != is_conv1d(module))
        _check_divides(f"'{name}.weight'", module.weight, ParameterSplit(axis, EVEN[style]), ranks)


def _check_heads(model: nn.Module, name: str, style: str, ranks: int) -> None:
    module: Any = model.get_submodule(name)
    counted: list[tuple[str, Any]] = []
    if style in ("local_heads", "local_query_heads"):
        skipped = KEY_HEADS if style == "local_query_heads" else ()
        counted = [(f"{name}.{each}", getattr(module, each, 0)) for each in HEADS if each not in skipped]
    elif style == "colwise" and ("attn" in name or "attention" in name):
        attention = _owner(model, name)
        config = getattr(attention, "config", None) or getattr(model, "config", None)
        keys = ["num_key_value_heads"] if name.rpartition(".")[2] in _KEYS else []
        counted = [(each, _number(config, each)) for each in ("num_attention_heads", *keys)]
        head_dim, outputs = getattr(attention, "head_dim", 0), getattr(module, "out_features", 0)
        if name.endswith((".k_proj", ".v_proj")) and head_dim and outputs % head_dim == 0:
            counted.append((f"heads of '{name}'", outputs // head_dim))
    for what, number in counted:
        if isinstance(number, int) and number % ranks:
            raise ValueError(
                f"{what}: expected a multiple of tp ({ranks}), got {number}. Use a divisor of the heads."
            )


def _number(config: Any, name: str) -> Any:
    """Return a setting of a configuration; 0 where layers have different ones, as their access transformers
    refuses.
    """
    try:
        return getattr(config, name, 0)
    except Exception as error:
        if type(error).__name__ != "AmbiguousGlobalPerLayerAttributeError":
            raise
        return 0


def _checked_splits(model: nn.Module, chosen: _Resolved, ranks: int) -> Iterator[tuple[str, ParameterSplit]]:
    """Yield how the parameters that a plan names are split. ``ValueError`` for those that cannot be."""
    for name, style in chosen.parameters.items():
        if style not in PARAMETER_STYLES:
            continue
        parameter, owner = model.get_parameter(name), _owner(model, name)
        split = parameter_split(parameter, name.rpartition(".")[2], style)
        if split is not None and name.endswith(".gate_up_proj") and hasattr(owner, "is_concatenated"):
            # Gate and up are halves, or every other row. Inkling's plan in transformers 5.23 mixes them up.
            split = split._replace(fused=2 if owner.is_concatenated else 1)
        if split is not None:
            _check_divides(f"'{name}'", parameter, split, ranks)
            yield name, split


def _check_divides(what: str, parameter: torch.Tensor, split: ParameterSplit, ranks: int) -> None:
    chunks = split.fused * ranks
    if parameter.shape[split.axis] % chunks:
        several = f" times {split.fused} side by side" if split.fused > 1 else ""
        raise ValueError(
            f"{what}: expected a multiple of tp ({ranks}{several}) in dimension {split.axis}, got shape "
            f"{tuple(parameter.shape)}. Use a divisor of it, or another style."
        )


def _summed_parameters(model: nn.Module, chosen: _Resolved) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the replicated parameters that every rank uses on a share, by name."""
    yield from (
        (name, model.get_parameter(name)) for name, style in chosen.parameters.items() if style == SUMMED
    )
    for name, style in chosen.modules.items():
        if style in (SUMMED, "colwise_multi_query", "embedding_rowwise"):
            for last, parameter in model.get_submodule(name).named_parameters():
                if not is_distributed(parameter):
                    yield f"{name}.{last}", parameter


def _check_shared(model: nn.Module, chosen: _Resolved) -> None:
    """Raise ``ValueError`` where a weight is split in one module and replicated in another that uses it."""
    for names in shared_names(model):
        owners = [name.rpartition(".")[0] for name in names]
        used = [each for each in owners if isinstance(model.get_submodule(each), nn.Linear | nn.Embedding)]
        unsplit = [each for each in used if chosen.modules.get(each, REPLICATED) in (SUMMED, REPLICATED)]
        if unsplit and len(unsplit) < len(used):
            raise ValueError(
                f"plan: expected '{unsplit[0]}' to be split as the modules that share its weight, "
                f"{', '.join(repr(each) for each in used if each not in unsplit)}, got no style. Give it one."
            )


def _leave_unsplit_experts(chosen: _Resolved, splits: Mapping[str, ParameterSplit]) -> None:
    """Take the styles from experts without split parameters of their own. They would sum equal outputs."""
    split = {name.rpartition(".")[0] for name in splits}
    unsplit = [name for name, style in chosen.modules.items() if style in EXPERTS and name not in split]
    for name in unsplit:
        del chosen.modules[name]
    for name in [name for name, style in chosen.modules.items() if style == "moe_identity_expert"]:
        if any(name.startswith(f"{each}.") for each in unsplit):
            del chosen.modules[name]


def _model_parallel_ranks(mesh: DeviceMesh) -> list[int]:
    """Return the ranks along "tp" with this one, as they count among the model-parallel ranks."""
    ranks = mesh["tp"].size()
    stage = mesh["pp"].get_local_rank() if "pp" in (mesh.mesh_dim_names or ()) else 0
    return [stage * ranks + rank for rank in range(ranks)]
