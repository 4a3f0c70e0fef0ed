"""Sequences and experts over ranks, as a configuration or Accelerate's ``ParallelismConfig`` says."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zero_ext.config import ConfigError, ParallelConfig, ZeroConfig
from zero_ext.config.config_errors import Problem
from zero_ext.integrations.prepare_with_features import outermost_models
from zero_ext.integrations.sequence_parallel import apply_sequence_parallel
from zero_ext.zero.units.parameter_marks import expert_ranks

_SOURCE = "the configuration and ParallelismConfig"


def with_parallelism(config: ZeroConfig, parallelism: Any) -> ZeroConfig:
    """Return a configuration with the sequence parallelism that `parallelism` requests.

    Args:
        config: the configuration.
        parallelism: accelerate's `ParallelismConfig`, or None. `cp_size` is ring attention, `sp_size` the
            exchange of heads.

    Returns:
        `config`, its section `parallel` completed.

    Raises:
        ConfigError: both set `cp`, and differ.
    """
    if parallelism is None or max(parallelism.cp_size, parallelism.sp_size) == 1:
        return config
    ranks, ring = max(parallelism.cp_size, parallelism.sp_size), parallelism.cp_size
    own = config.parallel
    if (own.cp, own.ring) not in ((1, 1), (ranks, ring)) or own.ep > 1:
        name = "cp_size" if ring > 1 else "sp_size"
        raise ConfigError(
            Problem(
                "parallel",
                f"config has cp={own.cp}, ring={own.ring}, ep={own.ep}, ParallelismConfig has "
                f"{name}={ranks}, which is cp={ranks}, ring={ring}. Make them agree, or leave one out.",
            ),
            _SOURCE,
        )
    return config.replace(parallel=ParallelConfig(cp=ranks, ring=ring))


def parallelism_problems(parallelism: Any, ranks: int) -> list[str]:
    """Return why a `ParallelismConfig` is refused, a sentence with its fix for each reason.

    Args:
        parallelism: accelerate's `ParallelismConfig`, or None.
        ranks: number of ranks.
    """
    if parallelism is None:
        return []
    found = []
    if parallelism.tp_size > 1:
        found.append(
            f"parallelism_config: expected tp_size 1, got {parallelism.tp_size}. Call apply_tensor_parallel "
            "in a loop of your own."
        )
    if parallelism.dp_replicate_size > 1:
        found.append(
            f"parallelism_config: expected dp_replicate_size 1, got {parallelism.dp_replicate_size}. Set "
            "communication.shard_group_size in the configuration, which replicates groups of shards."
        )
    sequence = parallelism.cp_size * parallelism.sp_size
    if parallelism.dp_shard_size not in (1, ranks // sequence):
        found.append(
            f"parallelism_config: expected dp_shard_size {ranks // sequence} or 1, the rest of the ranks, "
            f"got {parallelism.dp_shard_size}. Leave it out."
        )
    return found


def layout_mesh(config: ZeroConfig, ranks: int, device_type: str) -> DeviceMesh | None:
    """Return the mesh of the section `parallel`; a collective of all ranks.

    Args:
        config: the configuration.
        ranks: number of ranks.
        device_type: of the devices that train.

    Returns:
        The mesh, None without such parallelism.

    Raises:
        ConfigError: the ranks do not divide.
    """
    section = config.parallel
    if section == ParallelConfig():
        return None
    for name in ("cp", "ep"):
        length = getattr(section, name)
        if ranks % length:
            text = f"expected a divisor of the {ranks} ranks, got {length}. Start a multiple of it."
            raise ConfigError(Problem(f"parallel.{name}", text))
    from zero_ext.parallel import make_mesh

    lengths = {"ep": section.ep} if section.ep > 1 else {"cp": section.cp}
    return make_mesh(lengths, device_type=device_type)


def apply_layout(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: ZeroConfig, mesh: DeviceMesh | None
) -> DeviceMesh | None:
    """Shard the sequences or spread the experts of a model, in place; a collective of all ranks.

    Args:
        model: a model of transformers, or PEFT's adapters on one, not prepared yet.
        optimizer: of its parameters, if it is made already. It gets those of this rank.
        config: has the section `parallel`.
        mesh: of [`layout_mesh`][zero_ext.integrations.requested_layout.layout_mesh].

    Returns:
        The mesh that [`prepare`][zero_ext.prepare] needs: `mesh`, or the one over which the experts of
        `model` were spread before.

    Raises:
        ValueError: the model does not support it. Nothing was changed.
    """
    spread = spread_mesh(model)
    if spread is not None:
        length = spread["ep"].size()
        if config.parallel.ep not in (1, length) or config.parallel.cp > 1:
            raise ValueError(
                f"{type(model).__name__}: expected parallel.ep {length} or 1 and parallel.cp 1, as its "
                f"experts are over {length} ranks, got ep {config.parallel.ep} and cp {config.parallel.cp}. "
                "Remove the section, or leave apply_expert_parallel out."
            )
        return spread
    if "transformers" in sys.modules and _is_called_with_full_batches(model):
        return mesh
    refuse_applied_sequences(model)
    if mesh is None:
        return None
    if config.parallel.ep > 1:
        _spread_experts(model, optimizer, mesh)
    else:
        _shard_sequences(model, config, mesh)
    return mesh


def refuse_applied_sequences(model: nn.Module) -> None:
    """Raise ``ValueError`` for a model that expects shards, which nobody would cut."""
    if any(hasattr(module, "sequence_exchange") for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__}: expected a model with full sequences, got one that "
            "apply_sequence_parallel has changed. Leave that call out, and set parallel.cp in the "
            "configuration or cp_size in ParallelismConfig."
        )


def spread_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which `apply_expert_parallel` has spread experts of a model, None without any."""
    for parameter in model.parameters():
        if expert_ranks(parameter) and isinstance(parameter, DTensor):
            mesh: DeviceMesh = parameter.device_mesh._get_root_mesh()
            return mesh
    return None


def _is_called_with_full_batches(model: nn.Module) -> bool:
    from zero_ext.integrations.transformers.full_batches import accepts_full_batches

    return accepts_full_batches(model)


def _shard_sequences(model: nn.Module, config: ZeroConfig, mesh: DeviceMesh) -> None:
    found = outermost_models(model)
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__}: expected one model of transformers for parallel.cp, got {len(found)}. "
            "Call apply_sequence_parallel and shard_batch in a loop of your own."
        )
    from zero_ext.integrations.transformers.full_batches import accept_full_batches

    exchange = apply_sequence_parallel(
        model, mesh, ring=config.parallel.ring, timeout_seconds=config.timeout_seconds
    )
    accept_full_batches(model, next(iter(found.values())), exchange, mesh)


def _spread_experts(model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: DeviceMesh) -> None:
    from zero_ext.parallel import apply_expert_parallel

    before = dict(model.named_parameters(remove_duplicate=False))
    apply_expert_parallel(model, mesh)
    after = dict(model.named_parameters(remove_duplicate=False))
    replaced = {id(value): after[name] for name, value in before.items() if after[name] is not value}
    for group in () if optimizer is None else optimizer.param_groups:
        group["params"] = [replaced.get(id(each), each) for each in group["params"]]
