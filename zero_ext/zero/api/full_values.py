"""One parameter's state as whole tensors: master weights, optimizer state and gradient, read and replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from zero_ext.offload import Values, copy_of, count, replace, subrange_of
from zero_ext.zero.api.engine_lookup import engine_of_parameter
from zero_ext.zero.api.full_parameters import fill_unit, refuse_different_values
from zero_ext.zero.engine import Engine
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.dtensor_local import full_tensor_of, local_value
from zero_ext.zero.units.flat_layout import in_memory_order
from zero_ext.zero.units.parameter_marks import expert_ranks

MASTER = "master"


class OwnedSlice(NamedTuple):
    """Elements of a parameter that this rank owns: ``start`` counts in memory order."""

    start: int
    values: Values


def owned_slices(parameter: nn.Parameter, kind: str = MASTER) -> list[OwnedSlice]:
    """Return what this rank owns of a parameter's master weights (``kind`` "master") or optimizer state
    ("exp_avg", ...), where it lies; replicated state is owned by all. ``ValueError`` for a parameter of no
    prepared model.
    """
    engine = engine_of_parameter(parameter)
    engine.finish_updates()
    engine.follow_writes()
    return list(_owned_slices(engine, parameter, kind))


def full_state(parameter: nn.Parameter, kind: str = MASTER) -> torch.Tensor | None:
    """Return a parameter's master weights or optimizer state of ``kind``, whole, in float32 on the CPU, on
    every rank; a collective. None where no rank has such state: frozen parameters, and state before the
    first step of optimizers that make it then.
    """
    engine = engine_of_parameter(parameter)
    unit, number = engine.index[parameter]
    spec = unit.layout.specs[number]
    flat = torch.zeros(spec.numel, dtype=torch.float32, device="cpu")
    # Of replicated state every rank gives its shard range, so that each element comes from one rank.
    first, last = unit.layout.shard_range(unit.collectives.rank)
    offset = unit.layout.offsets[number]
    found = torch.zeros(1, dtype=torch.float32, device="cpu")

    def read() -> None:
        for start, values in owned_slices(parameter, kind):
            found.fill_(1)
            low, high = max(start, first - offset), min(start + count(values), last - offset)
            if low < high:
                flat[low:high] = copy_of(subrange_of(values, low - start, high - start)).to(
                    "cpu", torch.float32
                )

    engine.finish_updates()
    if any(master.state.tier == "nvme" for master in engine.masters):
        everyone = engine.collectives.holders(bool(expert_ranks(parameter)))
        raise_on_all_ranks(everyone, read, f"reading {kind} of '{spec.name}'")
    else:
        read()
    unit.collectives.sum_(found, f"whether '{spec.name}' has state {kind}")
    if not found.item():
        return None
    unit.collectives.sum_(flat, f"{kind} of '{spec.name}'")
    return full_tensor_of(parameter, flat.as_strided(spec.shape, spec.stride))


def replace_master(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Make ``value``, whole and the same on every rank, the parameter's master weights, without rounding,
    and its rounding the parameter; a collective. ``ValueError`` for another shape."""
    engine = engine_of_parameter(parameter)
    unit, number = engine.index[parameter]
    _check_shape(engine, parameter, value)
    engine.finish_updates()
    values: list[torch.Tensor | None] = [None] * len(unit.parameters)
    values[number] = value
    with torch.no_grad():
        refuse_different_values(engine, unit, values)
        fill_unit(engine, unit, values)


def replace_state(parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
    """Make ``value``, whole and the same on every rank, the parameter's optimizer state of ``kind``; a
    collective. ``ValueError`` for another shape, or where there is no such state."""
    engine = engine_of_parameter(parameter)
    unit, number = engine.index[parameter]
    _check_shape(engine, parameter, value)
    flat = in_memory_order(local_value(parameter, value.detach()), unit.layout.specs[number])
    slices = owned_slices(parameter, kind)
    known = torch.full((1,), float(len(slices)), dtype=torch.float32, device="cpu")
    engine.collectives.sum_(known, "whether there is state to replace")
    if not known.item():
        raise ValueError(
            f"optimizer state {kind!r} of '{unit.layout.specs[number].name}': expected some to "
            "replace, got none. Make a step first."
        )

    def write() -> None:
        for start, values in slices:
            replace(values, flat[start : start + count(values)].float())

    raise_on_all_ranks(engine.collectives, write, f"replacing {kind} of '{unit.layout.specs[number].name}'")


def replace_gradient(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Make ``value``, whole and the same on every rank, the parameter's averaged gradient; a collective,
    between backward and the step.

    ``ValueError`` for another shape, or if the parameter has no gradient.
    """
    engine = engine_of_parameter(parameter)
    engine.updates.refuse_pending("replacing a gradient")
    _check_shape(engine, parameter, value)
    engine.synchronize_gradients()
    unit, number = engine.index[parameter]
    spec = unit.layout.specs[number]
    gradients = engine.gradients_of(unit) if unit in {master.unit for master in engine.masters} else None
    if gradients is None or number not in gradients.contributed:
        raise ValueError(
            f"gradient of '{spec.name}': expected one to replace, got none. Call backward first."
        )
    engine.views.replace(gradients, number, value)


def _owned_slices(engine: Engine, parameter: nn.Parameter, kind: str) -> Iterator[OwnedSlice]:
    unit, number = engine.index[parameter]
    name = unit.layout.specs[number].name
    stepper = engine.optimizer_step.stepper
    for position, master in enumerate(engine.masters):
        if master.unit is not unit:
            continue
        if kind == MASTER:
            if name in master.owned:
                yield OwnedSlice(master.owned[name].start, master.values_of(master.owned[name]))
        elif stepper is not None:
            for found, segment, values in stepper.values(position):
                if found == kind and segment.name == name and count(values):
                    yield OwnedSlice(segment.start, values)


def _check_shape(engine: Engine, parameter: nn.Parameter, value: torch.Tensor) -> None:
    if tuple(value.shape) != tuple(parameter.shape):
        raise ValueError(
            f"parameter '{engine.names[parameter][0]}': expected a value of shape "
            f"{tuple(parameter.shape)}, got {tuple(value.shape)}. Pass the whole value."
        )
