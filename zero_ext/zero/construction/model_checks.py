"""Checks before anything is sharded, for what would train wrongly without an error, and before a forward."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.config_errors import show
from zero_ext.optim.elementwise import was_stepped
from zero_ext.optim.full_tensors.owner_trial import check_owner_steps
from zero_ext.optim.one_bit import check_one_bit_optimizer
from zero_ext.optim.optimizer_registry import (
    check_elementwise,
    check_groups,
    check_skipped_experts,
    check_step_time,
    factors_state,
    fusible,
    needs_norms,
    needs_whole_tensors,
    steps_at_owners,
    steps_full_tensors,
    update_rule,
)
from zero_ext.zero.construction.grouping import (
    DTYPES,
    OwnedParameter,
    has_listed_experts,
    routed_experts,
)
from zero_ext.zero.tiling import FullTensorMap
from zero_ext.zero.units.dtensor_local import check_placement, is_distributed, is_split
from zero_ext.zero.units.parameter_marks import adapted_parameters, expert_ranks, is_packed
from zero_ext.zero.units.presharded import presharded_of
from zero_ext.zero.units.rank_groups import RankGroups, sum_over_model
from zero_ext.zero.unshard.expert_routing import described_experts
from zero_ext.zero.unshard.hook_installation import modules_inside_compiled


def check_modules(model: nn.Module) -> None:
    """Refuse traced or scripted modules, which use their parameters outside Python, by ``ValueError``.
    ``TypeError`` is for anything but a module, such as what ``torch.compile`` makes of a compiled one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {show(model)}. Pass the module to train.")
    for name, module in model.named_modules():
        label = f"module '{name}'" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ValueError(
                f"{label}: expected an ordinary module, got {type(module).__name__}, a traced or scripted "
                "one, which uses its parameters outside Python. Prepare the original module. To trace or "
                "script it, use a copy that is filled from zero_ext.full_state_dict(model)."
            )


def check_parameters(
    model: nn.Module,
    owned: Sequence[OwnedParameter],
    optimizer: torch.optim.Optimizer | None,
    groups: RankGroups,
    world_size: int,
) -> None:
    """Refuse parameters that cannot be trained, split or sharded, and embeddings that write to their weight
    in forward. Raises ``ValueError``."""
    for name, module in model.named_modules():
        limit = getattr(module, "max_norm", None)
        if world_size > 1 and isinstance(module, nn.Embedding | nn.EmbeddingBag) and limit is not None:
            raise ValueError(
                f"module '{name}': expected max_norm=None on {world_size} ranks, got {limit}. Forward "
                "rescales the rows that this rank looks up, so the ranks' weights would differ. Rescale the "
                "rows after optimizer.step(), inside 'with zero_ext.gathered(embedding.weight, "
                "modifier_rank=0):'."
            )
    for item in owned:
        name, parameter, dtype = item.spec.name, item.parameter, item.spec.dtype
        if optimizer is not None and parameter.requires_grad and dtype.is_complex:
            raise ValueError(
                f"parameter '{name}': expected real numbers, as optimizer state, clipping and "
                f"reduction are in float32, got {dtype}. Keep it as real numbers with a last axis of "
                "2, and use torch.view_as_complex(parameter) in forward, or freeze it."
            )
        if optimizer is not None and parameter.requires_grad and dtype not in DTYPES.values():
            raise ValueError(
                f"parameter '{name}': expected a trainable one in float32, bfloat16 or float16, got "
                f"{dtype}. Convert the model, set 'precision.dtype', or freeze the parameter."
            )
        tensor = dist.get_process_group_ranks(groups.tensor) if groups.tensor is not None else []
        ranks = list(expert_ranks(parameter)) or tensor
        check_placement(name, parameter, ranks)
        value: Any = parameter
        if not is_distributed(parameter) and is_traceable_wrapper_subclass(value):
            raise ValueError(
                f"parameter '{name}': expected one flat memory to shard, got a "
                f"{type(value).__name__}, which is made of several tensors. Quantize with "
                "bitsandbytes, which stores 4-bit weights as bytes, keep packed weights in a uint8 "
                "parameter of your own, or prepare the model unquantized."
            )


def is_partial(owned: Sequence[OwnedParameter], groups: RankGroups) -> bool:
    """Return whether ranks of ``groups`` have different parameters."""
    return groups.model is not None or any(expert_ranks(item.parameter) for item in owned)


def check_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    owned: Sequence[OwnedParameter],
    tiling: Mapping[str, int],
    elementwise: bool,
    settings: ZeroConfig,
    groups: RankGroups,
) -> None:
    """Refuse an optimizer of other parameters than those ``owned``, one that was stepped, and one that needs
    tensors in full. Raises ``TypeError`` and ``ValueError``."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}. Build "
            "it from model.parameters()."
        )
    known = {item.parameter for item in owned}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise ValueError(
                    "optimizer: expected parameters of the model given to zero_ext.prepare, got another in "
                    f"param group {number}, position {position}, of shape {tuple(parameter.shape)}. Build "
                    "the optimizer from model.parameters() of that same model, after any change to it."
                )
    if was_stepped(optimizer):
        raise ValueError(
            "optimizer: expected one before its first step, got one with state. Call zero_ext.prepare "
            "before the first step, and restore training with zero_ext.load_checkpoint."
        )
    check_groups(optimizer)
    check_step_time(optimizer, settings.offload.update_mode)
    check_skipped_experts(optimizer, settings.units.update_experts)
    if groups.tensor is not None and needs_norms(optimizer):
        raise ValueError(
            f"optimizer: expected another one than {type(optimizer).__name__} with a mesh with more than one "
            "rank along 'tp', as its step needs whole parameters. Use torch.optim.AdamW, or 'tp' 1."
        )
    if factors_state(optimizer) and settings.units.tiles:
        raise ValueError(
            f"units.tiles: expected none with {type(optimizer).__name__}, which needs whole matrices, got "
            f"{dict(settings.units.tiles)}. Remove the key."
        )
    if steps_at_owners(optimizer):
        _check_at_owners(optimizer, elementwise, settings, groups)
    elif needs_whole_tensors(optimizer):
        _check_full_tensors(model, optimizer, owned, tiling, settings)
    elif not fusible(optimizer):
        check_elementwise(optimizer, elementwise)
    check_one_bit_optimizer(optimizer, settings, is_partial(owned, groups))


def _check_at_owners(
    optimizer: torch.optim.Optimizer, elementwise: bool, settings: ZeroConfig, groups: RankGroups
) -> None:
    if elementwise:
        raise ValueError(
            "prepare: expected elementwise=True or whole_tensors=True, got both. Pass whole_tensors=True "
            "only if the update of an element depends on others."
        )
    if settings.offload.optimizer == "nvme":
        raise ValueError(
            "offload.optimizer: expected 'device' or 'host' with whole_tensors=True, got 'nvme'. State at "
            "the owners of tensors has shapes of its own and is kept in memory. Use 'host'."
        )
    if groups.tensor is not None or settings.units.tiles:
        raise ValueError(
            "whole_tensors: expected False with a mesh with more than one rank along 'tp' and with "
            "units.tiles, which slice tensors, got True. Use 'tp' 1 and no tiles."
        )
    check_owner_steps(optimizer)


def _check_full_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    owned: Sequence[OwnedParameter],
    tiling: Mapping[str, int],
    settings: ZeroConfig,
) -> None:
    """Refuse slices of tensors that ``optimizer`` needs in full and that nothing assembles. Raises
    ``ValueError``."""
    name = type(optimizer).__name__
    groups = [set(group["params"]) for group in optimizer.param_groups]
    needed = [steps_full_tensors(update_rule(optimizer, group)) for group in optimizer.param_groups]
    full_tensors, found = FullTensorMap(model), defaultdict[str, set[int | None]](set)
    for item in owned:
        parameter: Any = item.parameter
        number = next((number for number, group in enumerate(groups) if parameter in group), None)
        found[full_tensors.name(item.spec.name)].add(number)
        if number is None or not needed[number] or not is_split(parameter):
            continue
        rows, ranks = parameter.shape[parameter.placements[0].dim], parameter.device_mesh.size()
        if rows % ranks:
            raise ValueError(
                f"parameter '{item.spec.name}': expected a size that divides by the {ranks} tensor-parallel "
                f"ranks where {name} steps it, as it needs equal slices, got {rows}. Leave it unsplit, or "
                "set its attribute use_muon to False, so that zero_ext.Muon steps it as AdamW does."
            )
    stepped = {
        tensor: numbers
        for tensor, numbers in found.items()
        if any(number is not None and needed[number] for number in numbers)
    }
    for tensor, numbers in stepped.items():
        if len(numbers) > 1:
            raise ValueError(
                f"tiles of '{tensor}': expected all of them in one param group, as {name} needs the tensor "
                f"in full, got groups {sorted(map(str, numbers))}. Move them to one."
            )
    layers = tiling if settings.stage == 3 else ()
    tiles = full_tensors.shapes()
    tiled = [tensor for tensor in stepped if tensor in tiles or tensor.rpartition(".")[0] in layers]
    if tiled and settings.offload.update_mode == "in_backward":
        raise ValueError(
            f"units.tiles: expected none with {name} and offload.update_mode 'in_backward', as the update "
            f"of a tile needs the gradients of all tiles of its tensor, got {tiled}. Leave these layers "
            "untiled, or set offload.update_mode to 'after_backward'."
        )


def check_experts(
    model: nn.Module,
    owned: Sequence[OwnedParameter],
    tiling: Mapping[str, int],
    optimizer: torch.optim.Optimizer | None,
    settings: ZeroConfig,
    groups: RankGroups,
    is_compiled: bool,
    model_ranks: Collectives | None,
) -> None:
    """Refuse experts on other ranks than those of the mesh, features that need equal parameters, and what
    :func:`check_routed_experts` does. Raises ``ValueError`` on all ranks."""
    check_routed_experts(model, settings, is_compiled, model_ranks)
    experts = [item for item in owned if expert_ranks(item.parameter)]
    if not experts:
        return
    ranks = tuple(dist.get_process_group_ranks(groups.experts)) if groups.experts is not None else ()
    holders = [dist.get_process_group_ranks(groups.data)[at] for at in groups.same_experts]
    for item in experts:
        problem = _expert_problem(item, tiling, ranks, holders)
        if problem:
            raise ValueError(f"expert parameter '{item.spec.name}': {problem}")
    adapted = [name for name, each in adapted_parameters(model).items() if expert_ranks(each)]
    if adapted:
        raise ValueError(
            f"expert parameter '{adapted[0]}': expected no adapters where experts are spread over ranks, got "
            "PEFT's of target_parameters. Set target_modules to other modules, or leave "
            "apply_expert_parallel out."
        )
    if settings.communication.shard_group_size is not None:
        raise ValueError(
            "communication.shard_group_size: expected None, as experts on several ranks are sharded over "
            f"those with the same ones, got {settings.communication.shard_group_size}. Leave it out."
        )
    stacked = [item for item in experts if is_split(item.parameter)]
    if stacked and steps_at_owners(optimizer):
        raise ValueError(
            f"optimizer: expected one that updates elements or matrices by themselves with experts that "
            f"apply_expert_parallel spread, got {type(optimizer).__name__}, which needs full tensors. Use "
            "torch.optim.AdamW or zero_ext.Muon."
        )
    if optimizer is not None and needs_whole_tensors(optimizer):
        _check_stacks(stacked, optimizer)
    if needs_norms(optimizer):
        raise ValueError(
            f"optimizer: expected another one than {type(optimizer).__name__} with experts on several ranks, "
            "as it needs the norms of parameters and the ranks have different ones. Use torch.optim.AdamW."
        )


def check_routed_experts(
    model: nn.Module, settings: ZeroConfig, is_compiled: bool, model_ranks: Collectives | None
) -> None:
    """Refuse units.experts "routed" for experts that cannot be gathered one by one, and without any. Raises
    ``ValueError`` on all ranks, those of ``model_ranks`` included. A collective of these."""
    if settings.units.experts == "all":
        return
    found = routed_experts(model)
    problem = _routing_problem(model, found, settings, is_compiled)
    counts = torch.tensor([len(found), problem is not None], dtype=torch.int64, device="cpu")
    mixtures, problems = sum_over_model(model_ranks, counts, "agreement on routed experts").tolist()
    if not (mixtures or problems):
        problem = (
            "mixtures with stacked weights [experts, m, n] that are called with each token's experts",
            described_experts(model) or "none",
        )
    elif problems and problem is None:
        problem = "mixtures that can be gathered by expert", "others on another model-parallel rank"
    if problem is not None:
        expected, got = problem
        raise ValueError(
            f"units.experts: expected for 'routed' {expected}, got {got}. Set units.experts to 'all'."
        )


def _routing_problem(
    model: nn.Module, found: Mapping[str, nn.Module], settings: ZeroConfig, is_compiled: bool
) -> tuple[str, str] | None:
    """Return what is expected of the mixtures ``found`` and what there is instead, None if all is well."""
    inside_compiled, leaves = modules_inside_compiled(model), set(settings.units.leaf_modules)
    for name, module in model.named_modules():
        inner = set(module.modules()).intersection(found.values())
        if has_listed_experts(module):
            return (
                "stacked weights [experts, m, n] and calls with the experts of all tokens",
                f"'{name}' with experts in a list, which each rank calls as its own tokens need them",
            )
        if leaves & {name, type(module).__name__} and inner:
            return "no mixture in units.leaf_modules", f"'{name}'"
    for name, module in found.items():
        if any(expert_ranks(each) or is_distributed(each) for each in module.parameters()):
            return "the same experts on all ranks", f"'{name}' with experts split or spread over ranks"
        if is_compiled or module in inside_compiled:
            return "mixtures outside compiled modules", f"'{name}' inside one"
    return None


def _check_stacks(stacked: Sequence[OwnedParameter], optimizer: torch.optim.Optimizer) -> None:
    """Refuse slices of one matrix with a row for each expert, such as biases, where the optimizer steps full
    matrices. Raises ``ValueError``."""
    full = {
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if steps_full_tensors(update_rule(optimizer, group))
    }
    for item in stacked:
        if item.parameter in full and item.parameter.dim() < 3:
            raise ValueError(
                f"parameter '{item.spec.name}': expected a stack [experts, m, n] of matrices where "
                f"{type(optimizer).__name__} steps experts that apply_expert_parallel spread, got shape "
                f"{tuple(item.parameter.shape)}. Set its attribute use_muon to False."
            )


def _expert_problem(
    item: OwnedParameter, tiling: Mapping[str, int], ranks: tuple[int, ...], holders: Sequence[int]
) -> str | None:
    """Return why an expert of those that are spread over ``ranks`` is refused. ``holders`` have it."""
    spread = expert_ranks(item.parameter)
    if spread != ranks:
        return (
            f"expected a mesh with the 'ep' ranks {list(spread)} that have the experts, got {list(ranks)}. "
            "Pass zero_ext.prepare, as its process_group, the mesh that the experts were spread over."
        )
    presharded = presharded_of(item.parameter)
    if presharded is not None and list(presharded.everyone.ranks) != list(holders):
        return (
            "expected one that was built outside of zero_ext.Init, which shards over all ranks and gives "
            "them one rank's values. Build experts outside of it."
        )
    if any(name.rpartition(".")[0] in tiling for name in item.names):
        return "expected no tiles of experts on several ranks, got units.tiles. Name other layers."
    if is_packed(item.parameter):
        return "expected no quantized experts on several ranks, got some. Build them unquantized."
    return None


def check_unchanged(
    model: nn.Module,
    owned: Sequence[tuple[nn.Parameter, str, weakref.ref[nn.Module]]],
    known: Mapping[nn.Parameter, object],
) -> None:
    """Refuse a forward of a prepared model if its parameters are not those ``known``, which were prepared,
    each ``owned`` under all its full names by a module, or if it is being traced. Raises ``RuntimeError``."""
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
