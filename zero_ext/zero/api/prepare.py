"""``prepare``: a model and its optimizer become sharded, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.comm.process_group import join_world, make_collectives
from zero_ext.config import ZeroConfig, load_config
from zero_ext.config.offload import StatePlacement
from zero_ext.offload import Device, TierManager
from zero_ext.optim.elementwise_check import (
    check_elementwise,
    check_step_time,
    fusible,
    is_one_bit,
    was_stepped,
)
from zero_ext.optim.lamb import Lamb
from zero_ext.optim.one_bit import check_one_bit_optimizer
from zero_ext.zero.api.activation_hooks import activation_group_of, checkpointing_of
from zero_ext.zero.api.close_engine import close, engines_before
from zero_ext.zero.api.engine_lookup import CheckpointSources, attach_engine
from zero_ext.zero.api.engine_state import EngineState, TrainedState
from zero_ext.zero.api.misuse_guards import guard_module
from zero_ext.zero.api.model_parallel_state import ModelParallelState
from zero_ext.zero.api.zero_module import ZeroModule, unwrapped
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer, original_optimizer
from zero_ext.zero.construction.build_units import (
    build_unit,
    check_values,
    device_of,
    reserve_storage,
    with_init_strides,
)
from zero_ext.zero.construction.expert_checks import check_experts
from zero_ext.zero.construction.grouping import (
    DTYPES,
    OwnedParameter,
    mark_counted,
    owned_parameters,
    restrict_to_local_modules,
    updates_on_trial,
)
from zero_ext.zero.construction.input_cast import cast_inputs
from zero_ext.zero.construction.materialize import leave_meta
from zero_ext.zero.construction.model_checks import check_embeddings, check_modules
from zero_ext.zero.construction.module_buffers import broadcast_buffers, cast_running_statistics, move_buffers
from zero_ext.zero.construction.oom_report import MemoryEstimate
from zero_ext.zero.construction.parameter_aliases import find_aliases, renew
from zero_ext.zero.construction.rank_consistency import check_agreement
from zero_ext.zero.engine import Engine
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.memory.pool_plan import PoolPlan
from zero_ext.zero.tiling.replace_layers import apply_tiling, plan_tiling
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.dtensor_local import check_placement, is_distributed
from zero_ext.zero.units.parameter_marks import expert_ranks, tie_of
from zero_ext.zero.units.rank_groups import RankGroups, rank_groups
from zero_ext.zero.unshard.hook_installation import install, watch_reads

_UNPREPARED = "The weights are as they were. Mend it and prepare the model again."


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: ZeroConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    wrap: bool = True,
    elementwise: bool = False,
    init: Literal["broadcast", "skip"] = "broadcast",
    device: torch.device | str | None = None,
    activation_group: dist.ProcessGroup | None = None,
) -> tuple[Any, Any]:
    """Shard `model` and `optimizer` in place, as `config` says; a collective of all ranks.

    The loop stays as it was: call the model, `loss.backward()`, `optimizer.step()`,
    `optimizer.zero_grad()`. Rank 0's initial values count. Without an optimizer (inference) there are no
    gradients, master weights or optimizer state, whatever tier `config` names for them, and the returned
    optimizer is None.

    A model that is prepared already gets a new engine: its weights are kept, as the parameters have them,
    optimizer state and step counts start anew, and its earlier engine, wrapper and optimizer raise
    `RuntimeError` from then on. Sharded parameters are not gathered for it.

    Source: Rajbhandari et al., "ZeRO" (arXiv 1910.02054).

    Args:
        model: any module, built plainly or inside [`Init`][zero_ext.Init], or prepared before.
        optimizer: over the model's own parameters, not yet stepped. Adam, AdamW, Lamb and Lion run fused;
            torch's other element-wise optimizers run unchanged on the fp32 shards. One that `prepare`
            returned stands for the one it was made of.
        config: a [`ZeroConfig`][zero_ext.ZeroConfig], a mapping, or the path of a JSON file; default ZeRO-3.
        process_group: the data-parallel ranks; default all, or a single rank without a launcher. Or a mesh of
            [`make_mesh`][zero_ext.parallel.make_mesh], where `model` is this rank's part of the whole: ranks
            along "dp", "ep" and "cp" share its state, but for experts, which differ along "ep"; norms,
            clipping and overflow are those of the parts along "pp" and "tp", and of all experts, together.
        wrap: return the model inside [`ZeroModule`][zero_ext.ZeroModule]; False returns the user's own
            object.
        elementwise: declares an unknown optimizer class to be element-wise; it is checked by trial.
        init: "broadcast" copies rank 0's initial values to all ranks. "skip" skips them: parameters are zero
            until a checkpoint is loaded, and may be on the meta device.
        device: where the model trains. Default: where its parameters are, or, if they are nowhere yet (meta,
            Init), the accelerator if there is one. Parameters move there a unit at a time.
        activation_group: ranks that hold identical activations (tensor parallelism), for
            `activation_checkpointing.partition_activations`; they may not be data-parallel.

    Returns:
        The model and a [`ZeroOptimizer`][zero_ext.zero.ZeroOptimizer].

    Raises:
        ValueError: bad configuration, foreign optimizer parameters, an optimizer that needs full tensors,
            parameters on several devices, an activation group of data-parallel ranks.
        RuntimeError: the ranks hold different models, or the model is prepared again inside a forward,
            between forward and backward, inside `gathered` or during a save in the background (raised on
            all of them).

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3, "gradient_clipping": 1.0})
        >>> inputs, losses = torch.ones(16, 4), []
        >>> for _ in range(20):
        ...     loss = (model(inputs) - 1).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     losses.append(loss.item())
        >>> losses[-1] < losses[0]
        True
    """
    model, optimizer = unwrapped(model), original_optimizer(optimizer)
    settings = _settings(config, optimizer)
    check_modules(model)
    groups = rank_groups(process_group)
    activation_group = activation_group_of(settings.activation_checkpointing, activation_group, groups)
    owned = with_init_strides(owned_parameters(model, settings.precision.dtype))
    if not owned:
        raise ValueError(
            f"model: expected one with parameters, got {type(model).__name__} without any. "
            "Prepare the module that has them."
        )
    train_device = Device(device_of(owned, device))
    collectives = _join(groups, settings, train_device)
    collectives.shard_among(settings.communication.shard_group_size)
    settings = _resolved(settings, collectives)
    aliases = find_aliases(model, owned)
    before = engines_before(model, owned)
    _check_parameters(model, owned, optimizer, groups, collectives.world_size)
    own_settings = restrict_to_local_modules(model, settings, collectives.model)
    tiling = plan_tiling(model, own_settings.units.tiles)
    check_experts(owned, tiling, optimizer, settings, groups)
    _check_optimizer(optimizer, {item.parameter for item in owned}, elementwise, settings, groups)
    is_partial = collectives.model is not None or any(expert_ranks(item.parameter) for item in owned)
    check_one_bit_optimizer(optimizer, settings, is_partial)
    if init == "broadcast":
        check_values(owned)
    check_agreement(owned, settings, collectives, optimizer)
    if collectives.model is not None:
        check_agreement((), settings, collectives.model)
        settings = own_settings
    _see_to_swaps(settings, collectives)
    # The earlier engine is closed after every check, so that an error leaves it in use.
    close(before, model)
    if settings.stage == 3:
        apply_tiling(model, optimizer, tiling, collectives)
    if init == "skip":
        leave_meta(model)
    if any(item.parameter.device != train_device.device for item in owned):
        move_buffers(model, train_device.device)
    owned = with_init_strides(owned_parameters(model, settings.precision.dtype))
    owned = mark_counted(owned, collectives.model, groups.tensor_rank)
    estimate = MemoryEstimate(model, optimizer, owned, settings, collectives, train_device.device)
    with estimate.watching():
        engine = _shard(model, owned, optimizer, estimate, train_device, init, groups, activation_group)
        prepared = _prepared_optimizer(engine, optimizer, elementwise) if optimizer is not None else None
    renew(aliases, engine.index)
    engine.tiers.transfers.clear()
    return (ZeroModule(model) if wrap else model), prepared


def _checkpoint_sources(
    engine: Engine,
    optimizer: torch.optim.Optimizer | None,
    owned: Sequence[OwnedParameter],
    groups: RankGroups,
    data_group: dist.ProcessGroup | None,
) -> CheckpointSources:
    """Let checkpoints hold the full model. This engine may have only a slice of it."""
    full = EngineState(engine, data_group, optimizer)
    trained = TrainedState(engine, data_group, optimizer)
    everyone = groups.mesh
    is_partial = engine.collectives.model is not None or any(expert_ranks(item.parameter) for item in owned)
    if everyone is None or not is_partial:
        return CheckpointSources(full, trained)
    names = {item.spec.name: tie.name for item in owned if (tie := tie_of(item.parameter)) is not None}
    elsewhere = [item.spec.name for item in owned if not item.counted]
    states = [ModelParallelState(state, everyone, names, elsewhere) for state in (full, trained)]
    return CheckpointSources(*states)


def _join(groups: RankGroups, settings: ZeroConfig, device: Device) -> Collectives:
    """Return the ranks' collectives on tensors of ``device``."""
    join_world(settings.timeout_seconds)
    collectives = make_collectives(
        groups.data,
        settings.timeout_seconds,
        device.device,
        reduction=settings.precision.reduction,
        ranks_per_node=settings.communication.ranks_per_node,
    )
    if groups.model is not None:
        collectives.join_model(make_collectives(groups.model, settings.timeout_seconds, device.device))
    if groups.same_experts:
        collectives.join_experts(groups.same_experts)
    return collectives


def _resolved(settings: ZeroConfig, collectives: Collectives) -> ZeroConfig:
    """Return ``settings`` with what follows from the ranks."""
    batch = settings.batch.resolve(collectives.world_size)
    precision = settings.precision.replace(reduction=collectives.reduction)
    return settings.replace(batch=batch, precision=precision)


def _see_to_swaps(settings: ZeroConfig, collectives: Collectives) -> None:
    """Gathered units swap memory: what PyTorch lacks for that is compiled before anything changes."""
    placement = (
        StatePlacement.of_stage(settings.stage).on_tiers(settings.offload).on_ranks(collectives.world_size)
    )
    if placement.params and not ops.torch_swaps_storages():
        raise_on_all_ranks(
            collectives, ops.load_storage_swap, "compiling zero_ext._C_storage", "Nothing was changed."
        )


def _shard(
    model: nn.Module,
    owned: Sequence[OwnedParameter],
    optimizer: torch.optim.Optimizer | None,
    estimate: MemoryEstimate,
    device: Device,
    init: Literal["broadcast", "skip"],
    groups: RankGroups,
    activation_group: dist.ProcessGroup | None,
) -> Engine:
    """Turn the parameters ``owned`` into units, and the model into one that an engine moves."""
    plans, settings, collectives = estimate.plans, estimate.config, estimate.collectives
    tiers = _make_tiers(estimate, optimizer, device)
    pool = BufferPool(estimate.staging.pool, tiers.device)
    built = [
        build_unit(plan, collectives, pool, tiers, settings.communication, init == "broadcast")
        for plan in plans
    ]
    if settings.precision.dtype != "keep":
        cast_running_statistics(model, DTYPES[settings.precision.dtype])
    broadcast_buffers(model, collectives)
    gradient_staging = BufferPool(PoolPlan(estimate.staging.gradient_staging, {}), device, "host")
    data_group = (groups.data or dist.group.WORLD) if collectives.world_size > 1 else None
    units = [unit for unit, _ in built]
    checkpointing = checkpointing_of(settings, units, collectives, tiers, data_group, activation_group)
    engine = Engine(model, owned, built, settings, collectives, pool, gradient_staging, tiers, checkpointing)
    blocks = {
        parameter: (unit, plan.module)
        for (unit, _), plan in zip(built, plans, strict=True)
        for parameter in unit.parameters
        if unit.placement.params and plan.module is not None
    }
    install(model, engine.hooks, blocks)
    guard_module(model, blocks)
    if settings.precision.dtype != "keep":
        cast_inputs(model, DTYPES[settings.precision.dtype])
    sources = _checkpoint_sources(engine, optimizer, owned, groups, data_group)
    attach_engine(model, engine, sources)
    return engine


def _settings(
    config: ZeroConfig | Mapping[str, Any] | str | Path | None, optimizer: torch.optim.Optimizer | None
) -> ZeroConfig:
    settings = load_config(config)
    return settings if optimizer is not None else settings.replace(offload=settings.offload.of_params_alone())


def _prepared_optimizer(engine: Engine, optimizer: torch.optim.Optimizer, elementwise: bool) -> ZeroOptimizer:
    engine.collector.watch()
    if engine.config.offload.update_mode == "in_backward":
        trained = {parameter for master in engine.masters for parameter in master.unit.parameters}
        watch_reads(engine.model, trained, engine.parameter_read)
    prepared = ZeroOptimizer(engine, optimizer, elementwise)
    # A scheduler over the user's own optimizer would warn that it never steps: the prepared one does.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return prepared


def _check_parameters(
    model: nn.Module,
    owned: Sequence[OwnedParameter],
    optimizer: torch.optim.Optimizer | None,
    groups: RankGroups,
    world_size: int,
) -> None:
    check_embeddings(model, world_size)
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
        ranks = dist.get_process_group_ranks(groups.tensor) if groups.tensor is not None else []
        check_placement(name, parameter, ranks, dtype)
        value: Any = parameter
        if not is_distributed(parameter) and is_traceable_wrapper_subclass(value):
            raise ValueError(
                f"parameter '{name}': expected one flat memory to shard, got a "
                f"{type(value).__name__}, which is made of several tensors. Quantize with "
                "bitsandbytes, which stores 4-bit weights as bytes, keep packed weights in a uint8 "
                "parameter of your own, or prepare the model unquantized."
            )


def _make_tiers(
    estimate: MemoryEstimate, optimizer: torch.optim.Optimizer | None, device: Device
) -> TierManager:
    """Return the tiers with memory for everything, or an error on all ranks with nothing changed."""
    settings, plans, collectives = estimate.config, estimate.plans, estimate.collectives
    on_trial = updates_on_trial(settings, (plan.layout.dtype for plan in plans))

    def make() -> TierManager:
        staging = estimate.staging
        tiers = TierManager(
            settings.offload,
            settings.aio,
            staging.step_buffers,
            estimate.kinds,
            on_trial,
            device,
            staging.bounce_buffer,
            collectives.bus,
            is_one_bit(optimizer),
        )
        reserve_storage(plans, tiers, DTYPES[settings.precision.grad_accum_dtype])
        return tiers

    if not settings.offload.any_nvme:
        return make()
    return raise_on_all_ranks(collectives, make, "setting up storage on NVMe", _UNPREPARED)


def _check_optimizer(
    optimizer: torch.optim.Optimizer | None,
    known: set[nn.Parameter],
    elementwise: bool,
    settings: ZeroConfig,
    groups: RankGroups,
) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}. Build "
            "it from model.parameters()."
        )
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise ValueError(
                    "optimizer: expected parameters of the model given to zero_ext.prepare, got another "
                    f"in param group {number}, position {position}, of shape {tuple(parameter.shape)}. "
                    "Build the optimizer from model.parameters() of that same model, after any change to "
                    "it."
                )
    if was_stepped(optimizer):
        raise ValueError(
            "optimizer: expected one before its first step, got one with state. Call "
            "zero_ext.prepare before the first step, and restore training with "
            "zero_ext.load_checkpoint."
        )
    check_step_time(optimizer, settings.offload.update_mode)
    if groups.tensor is not None and isinstance(optimizer, Lamb):
        raise ValueError(
            "optimizer: expected another one than Lamb with a mesh with more than one rank along 'tp', "
            "as a trust ratio needs the norm of a whole parameter. Use torch.optim.AdamW, or "
            "'tp' 1."
        )
    if not fusible(optimizer):
        check_elementwise(optimizer, elementwise)
