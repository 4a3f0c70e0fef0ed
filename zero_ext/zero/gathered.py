"""Full parameters outside forward: reading and editing them, whole state dicts, double backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zero_ext.zero.buffers import persistent_buffers
from zero_ext.zero.engine import Engine
from zero_ext.zero.lookup import engine_of, engine_of_parameter
from zero_ext.zero.unit import Unit


@contextlib.contextmanager
def gathered(
    parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None
) -> Iterator[None]:
    """Makes ``parameters`` (of prepared models) whole inside the block, on every rank; a collective.

    With ``modifier_rank`` None the values are for reading and a write raises ``RuntimeError`` at the end;
    with a rank, that rank's values become everybody's, shards and fp32 master weights included (elements
    that were not changed keep their master's full precision). Works for every stage. Raises ``ValueError``
    for a parameter of no prepared model.
    """
    units = _units_of(parameters)
    for engine, _ in units:
        if modifier_rank is not None and not 0 <= modifier_rank < engine.world_size:
            raise ValueError(
                f"modifier_rank: {modifier_rank} given, a rank from 0 to {engine.world_size - 1} wanted"
            )
    holder = object()
    for engine, unit in units:
        engine.residency.need(unit, holder, engine.residency.forward_order)
    try:
        yield
        for engine, unit in units:
            if modifier_rank is not None:
                _take_over(engine, unit, modifier_rank)
    finally:
        for engine, unit in units:
            engine.residency.let_go(unit, holder)


def _units_of(parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> list[tuple[Engine, Unit]]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, nn.Parameter):
        parameters = [parameters]
    found: dict[Unit, Engine] = {}
    for parameter in parameters:
        engine = engine_of_parameter(parameter)
        found[engine.index[parameter][0]] = engine
    return [(engine, unit) for unit, engine in found.items()]


def _take_over(engine: Engine, unit: Unit, modifier_rank: int) -> None:
    engine.collectives.broadcast_(unit.flat, modifier_rank, f"edited {unit.describe()}")
    unit.store_shard()
    unit.accept_writes()
    for master in engine.masters:
        if master.unit is unit:
            master.follow_output()


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, whole, as independent CPU tensors under the module's own keys; a
    collective.

    Parameters are in compute precision. With ``rank0_only`` the other ranks get an empty dict. Units are
    gathered one at a time.
    """
    engine = engine_of(model)
    inner = engine.model
    keep = not rank0_only or engine.rank == 0
    values: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        with gathered(unit.parameters):
            for number, parameter in enumerate(unit.parameters):
                if keep:
                    value = unit.view_of(number).detach().clone()
                    values.update(dict.fromkeys(engine.names[parameter], value))
    if not keep:
        return {}
    persistent = persistent_buffers(inner)
    values.update({name: buffer.detach().cpu().clone() for name, buffer in persistent.items()})
    order = [name for name, _ in inner.named_parameters(remove_duplicate=False)] + list(persistent)
    return {name: values[name] for name in order}


def load_full_state_dict(model: nn.Module, state: dict[str, torch.Tensor], *, strict: bool = True) -> None:
    """Loads whole tensors, present on every rank, into a prepared model of any stage; a collective.

    fp32 values reach the master weights without rounding. ``strict`` raises ``ValueError``, before anything
    changes, for missing or unexpected keys; wrong shapes always do.
    """
    engine = engine_of(model)
    buffers = persistent_buffers(engine.model)
    known = {name for names in engine.names.values() for name in names} | set(buffers)
    primary = {names[0] for names in engine.names.values()}
    missing = sorted((primary | set(buffers)) - set(state))
    unexpected = sorted(set(state) - known)
    if strict and (missing or unexpected):
        raise ValueError(
            f"state dict: missing {missing}, unexpected {unexpected}; pass strict=False to ignore them"
        )
    for unit in engine.units:
        for spec in unit.layout.specs:
            if spec.name in state and tuple(state[spec.name].shape) != spec.shape:
                raise ValueError(
                    f"state dict: '{spec.name}' has shape {tuple(state[spec.name].shape)}, {spec.shape} "
                    f"wanted"
                )
    with torch.no_grad():
        for unit in engine.units:
            with gathered(unit.parameters):
                specs = unit.layout.specs
                values = [state.get(spec.name, unit.view_of(i).clone()) for i, spec in enumerate(specs)]
                present = [spec.name in state for spec in specs]
                unit.fill(values)
                for master in engine.masters:
                    if master.unit is unit:
                        master.fill(values, present)
        for name, buffer in buffers.items():
            if name in state:
                buffer.copy_(state[name])


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The whole averaged gradient of one parameter, on every rank, before scaling and clipping; a collective.

    None if no rank has one. Shape and memory order of the parameter, dtype of the reduced gradient.
    """
    engine = engine_of_parameter(parameter)
    engine.settle_gradients()
    unit, number = engine.index[parameter]
    gradients = engine.gradients_of(unit)
    if number not in gradients.contributed:
        return None
    layout = unit.layout
    flat = torch.empty(layout.numel, dtype=gradients.reduced.dtype)
    if engine.world_size == 1:
        flat.copy_(gradients.reduced)
    else:
        label = f"gradient of '{layout.specs[number].name}'"
        engine.collectives.gather(flat, gradients.reduced, "gather_gradients", label).wait()
    spec = layout.specs[number]
    return flat.as_strided(spec.shape, spec.stride, layout.offsets[number]).clone()


@contextlib.contextmanager
def double_backward(model: nn.Module) -> Iterator[None]:
    """Around forward and backward of a step that differentiates twice (``create_graph=True``), or whose
    blocks return objects in which no tensor can be found: saved parameters are gathered when autograd
    unpacks them, whatever the order. About 10% slower on a small model."""
    engine = engine_of(model)
    by_storage = {unit.flat.untyped_storage()._cdata: unit for unit in engine.units if unit.placement.params}
    holder = object()

    def pack(tensor: torch.Tensor) -> Any:
        unit = by_storage.get(tensor.untyped_storage()._cdata)
        if unit is None:
            return tensor
        return unit, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        unit, size, stride, offset = packed
        engine.residency.need(unit, holder, engine.residency.backward_order)
        view: torch.Tensor = unit.flat.as_strided(size, stride, offset)
        return view

    engine.hooks.gathers_saved_tensors = True
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        engine.hooks.gathers_saved_tensors = False
        for unit in by_storage.values():
            engine.residency.let_go(unit, holder)
