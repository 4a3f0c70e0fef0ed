"""``prepare``: a model and its optimizer become sharded, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext import ops
from zero_ext.activation import ActivationCheckpointing
from zero_ext.activation.partitioned_activations import TransferCounters, check_group
from zero_ext.comm import Collectives
from zero_ext.comm.process_group import join_world, make_collectives
from zero_ext.config import ZeroConfig, load_config
from zero_ext.config.offload import StatePlacement
from zero_ext.offload import Device, TierManager
from zero_ext.optim.optimizer_registry import (
    declare_at_owners,
    is_one_bit,
    needs_whole_tensors,
)
from zero_ext.zero.api.engine_lookup import (
    CheckpointSources,
    attach_engine,
    close,
    engines_before,
    guard_module,
)
from zero_ext.zero.api.engine_state import EngineState, ModelParallelState, TrainedState
from zero_ext.zero.api.zero_module import ZeroModule, unwrapped
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer, original_optimizer
from zero_ext.zero.construction.build_units import build_unit, check_values, device_of, reserve_storage
from zero_ext.zero.construction.compiled_blocks import without_compiler
from zero_ext.zero.construction.grouping import (
    DTYPES,
    OwnedParameter,
    mark_counted,
    owned_parameters,
    restrict_to_local_modules,
    updates_on_trial,
)
from zero_ext.zero.construction.model_checks import (
    check_experts,
    check_modules,
    check_optimizer,
    check_parameters,
    is_partial,
)
from zero_ext.zero.construction.module_tensors import (
    broadcast_buffers,
    cast_inputs,
    cast_running_statistics,
    find_aliases,
    move_buffers,
    renew,
)
from zero_ext.zero.construction.oom_report import MemoryEstimate
from zero_ext.zero.construction.rank_consistency import check_agreement
from zero_ext.zero.construction.sharded_init import leave_meta
from zero_ext.zero.engine import Engine
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.memory.pool_plan import PoolPlan
from zero_ext.zero.tiling.replace_layers import apply_tiling, plan_tiling
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.parameter_marks import tie_of
from zero_ext.zero.units.rank_groups import RankGroups, rank_groups
from zero_ext.zero.unshard.hook_installation import install, watch_reads


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: ZeroConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    wrap: bool = True,
    elementwise: bool = False,
    whole_tensors: bool = False,
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
        config: as for [`load_config`][zero_ext.load_config]; default ZeRO-3.
        process_group: the data-parallel ranks; default all, or a single rank without a launcher. Or a mesh of
            [`make_mesh`][zero_ext.parallel.make_mesh], where `model` is this rank's part of the whole: ranks
            along "dp", "ep" and "cp" share its state, but for experts, which differ along "ep"; norms,
            clipping and overflow are those of the parts along "pp" and "tp", and of all experts, together.
        wrap: return the model inside [`ZeroModule`][zero_ext.ZeroModule]; False returns the user's own
            object.
        elementwise: declares an unknown optimizer class to be element-wise; it is checked by trial.
        whole_tensors: declares that `optimizer` needs full tensors and steps each by itself, as Shampoo and
            SOAP; it is checked by trial. Its own code then runs at one rank per tensor, its owner, which also
            keeps the tensor's state.
        init: "broadcast" copies rank 0's initial values to all ranks. "skip" skips them: parameters are zero
            until a checkpoint is loaded, and may be on the meta device.
        device: where the model trains. Default: where its parameters are, or, if they are nowhere yet (meta,
            Init), the accelerator if there is one. Parameters move there a unit at a time.
        activation_group: ranks that hold identical activations (tensor parallelism), for
            `activation_checkpointing.partition_activations`; they may not be data-parallel.

    Returns:
        The model and a [`ZeroOptimizer`][zero_ext.zero.ZeroOptimizer].

    Raises:
        TypeError: `model` is no module.
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
    settings, optimizer = load_config(config), declare_at_owners(original_optimizer(optimizer), whole_tensors)
    plain = without_compiler(unwrapped(model), settings)
    model = unwrapped(plain.model)
    if optimizer is None:
        settings = settings.replace(offload=settings.offload.of_params_alone())
    check_modules(model)
    groups = rank_groups(process_group)
    activation_group = _activation_group(settings, activation_group, groups)
    owned = owned_parameters(model, settings.precision.dtype)
    if not owned:
        raise ValueError(
            f"model: expected one with parameters, got {type(model).__name__} without any. "
            "Prepare the module that has them."
        )
    train_device = Device(device_of(owned, device))
    collectives, settings = _join(groups, settings, train_device, optimizer)
    aliases, before = find_aliases(model, owned), engines_before(model, owned)
    check_parameters(model, owned, optimizer, groups, collectives.world_size)
    own_settings = restrict_to_local_modules(model, settings, collectives.model)
    tiling = plan_tiling(model, own_settings.units.tiles)
    check_experts(model, owned, tiling, optimizer, settings, groups, plain.is_compiled, collectives.model)
    check_optimizer(model, optimizer, owned, tiling, elementwise, settings, groups)
    if init == "broadcast":
        check_values(owned)
    check_agreement(owned, settings, collectives, optimizer)
    if collectives.model is not None:
        check_agreement((), settings, collectives.model)
        settings = own_settings
    _load_storage_swap(settings, collectives)
    # The earlier engine is closed after every check, so that an error leaves it in use.
    close(before, model)
    plain.compile_blocks()
    if settings.stage == 3:
        apply_tiling(model, optimizer, tiling, collectives)
    if init == "skip":
        leave_meta(model)
    if any(item.parameter.device != train_device.device for item in owned):
        move_buffers(model, train_device.device)
    owned = owned_parameters(model, settings.precision.dtype)
    owned = mark_counted(owned, collectives.model, groups.tensor_rank)
    estimate = MemoryEstimate(model, optimizer, owned, settings, collectives, train_device.device)
    with estimate.watching():
        engine = _shard(model, owned, optimizer, estimate, train_device, init, groups, activation_group)
        prepared = _prepared_optimizer(engine, optimizer, elementwise) if optimizer is not None else None
    renew(aliases, engine.index)
    engine.tiers.transfers.clear()
    return (ZeroModule(model) if wrap else model), prepared


def _activation_group(
    settings: ZeroConfig, group: dist.ProcessGroup | None, groups: RankGroups
) -> dist.ProcessGroup | None:
    """Return the ranks to partition activations over: the ``group`` given, else those with other parts of the
    same tensors. ``ValueError`` for a group that nothing is partitioned over, or with ranks that see other
    samples."""
    partitions = settings.activation_checkpointing.partition_activations
    if group is None:
        return groups.tensor if partitions else None
    if not partitions:
        raise ValueError(
            "activation_group: expected None, as activation_checkpointing.partition_activations "
            "is false, got a group that would have no effect. Set partition_activations to true, "
            "or leave the group out."
        )
    if dist.is_initialized():
        check_group(group, groups.data or dist.group.WORLD)
    return group


def _join(
    groups: RankGroups, settings: ZeroConfig, device: Device, optimizer: torch.optim.Optimizer | None
) -> tuple[Collectives, ZeroConfig]:
    """Return the ranks' collectives on tensors of ``device``, and ``settings`` with what follows. Those
    of tensor-parallel slices are for an ``optimizer`` that needs tensors in full."""
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
    if groups.slices is not None and needs_whole_tensors(optimizer):
        slices = make_collectives(groups.slices, settings.timeout_seconds, device.device)
        collectives.join_slices(slices, groups.tensor_rank)
    if groups.same_experts:
        collectives.join_experts(groups.same_experts)
    collectives.shard_among(settings.communication.shard_group_size)
    batch = settings.batch.resolve(collectives.world_size)
    precision = settings.precision.replace(reduction=collectives.reduction)
    return collectives, settings.replace(batch=batch, precision=precision)


def _load_storage_swap(settings: ZeroConfig, collectives: Collectives) -> None:
    """Compile, before anything changes, what PyTorch may lack to swap the memory of gathered units."""
    placement = StatePlacement.of_stage(settings.stage).on_tiers(settings.offload)
    if placement.on_ranks(collectives.world_size).params and not ops.torch_swaps_storages():
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
    dtype = DTYPES.get(settings.precision.dtype)  # None keeps that of the model
    if dtype is not None:
        cast_running_statistics(model, dtype)
    broadcast_buffers(model, collectives)
    gradient_staging = BufferPool(PoolPlan(estimate.staging.gradient_staging, {}), device, "host")
    data_group = (groups.data or dist.group.WORLD) if collectives.world_size > 1 else None
    # Storage objects of gathered parameters stay the same for life while memory comes and goes.
    storages = frozenset(unit.flat.untyped_storage()._cdata for unit, _ in built)
    checkpointing = ActivationCheckpointing(
        settings.activation_checkpointing,
        activation_group,
        data_parallel_group=data_group,
        aio=settings.aio,
        stays=lambda tensor: tensor.untyped_storage()._cdata in storages,
        counters=TransferCounters(collectives.bus, collectives.traffic, tiers.transfers),
        timeout_seconds=settings.timeout_seconds,
    )
    engine = Engine(model, owned, built, settings, collectives, pool, gradient_staging, tiers, checkpointing)
    blocks = {
        parameter: (unit, plan.module)
        for (unit, _), plan in zip(built, plans, strict=True)
        for parameter in unit.parameters
        if unit.placement.params and plan.module is not None
    }
    install(model, engine.hooks, blocks, engine.optimizer_step.experts.units_by_module(model, engine.units))
    guard_module(model, blocks)
    if dtype is not None:
        cast_inputs(model, dtype)
    attach_engine(model, engine, _checkpoint_sources(engine, optimizer, owned, groups, data_group))
    return engine


def _make_tiers(
    estimate: MemoryEstimate, optimizer: torch.optim.Optimizer | None, device: Device
) -> TierManager:
    """Return the tiers with memory for everything, or an error on all ranks with nothing changed."""
    settings, plans, collectives = estimate.config, estimate.plans, estimate.collectives

    def make() -> TierManager:
        tiers = TierManager(
            settings.offload,
            settings.aio,
            estimate.staging.step_buffers,
            estimate.kinds,
            updates_on_trial(settings, (plan.layout.dtype for plan in plans)),
            device,
            estimate.staging.bounce_buffer,
            collectives.bus,
            is_one_bit(optimizer),
        )
        reserve_storage(plans, tiers, DTYPES[settings.precision.grad_accum_dtype])
        return tiers

    if not settings.offload.any_nvme:
        return make()
    advice = "The weights are as they were. Mend it and prepare the model again."
    return raise_on_all_ranks(collectives, make, "setting up storage on NVMe", advice)


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
    if everyone is None or not is_partial(owned, groups):
        return CheckpointSources(full, trained)
    names = {item.spec.name: tie.name for item in owned if (tie := tie_of(item.parameter)) is not None}
    # State is saved under the names of full tensors, not of their tiles.
    elsewhere = engine.full_tensors.names(item.spec.name for item in owned if not item.counted)
    states = [ModelParallelState(state, everyone, names, elsewhere) for state in (full, trained)]
    return CheckpointSources(*states)


def _prepared_optimizer(engine: Engine, optimizer: torch.optim.Optimizer, elementwise: bool) -> ZeroOptimizer:
    engine.collector.watch()
    if engine.config.offload.update_mode == "in_backward":
        trained = {parameter for master in engine.masters for parameter in master.unit.parameters}
        watch_reads(engine.model, trained, engine.parameter_read)
    prepared = ZeroOptimizer(engine, optimizer, elementwise)
    # A scheduler over the user's own optimizer would warn that it never steps: the prepared one does.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return prepared
