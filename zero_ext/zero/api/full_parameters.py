"""Parameters and their state as whole tensors: state dicts, and one parameter's values, read and replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import is_stored
from zero_ext.offload import Values, copy_of, count, replace, subrange_of
from zero_ext.zero.api.engine_lookup import engine_of, engine_of_parameter
from zero_ext.zero.api.engine_state import owned_state
from zero_ext.zero.api.gathered import gathered
from zero_ext.zero.construction.module_tensors import persistent_buffers
from zero_ext.zero.engine import Engine
from zero_ext.zero.units.collective_errors import raise_on_all_ranks, refuse_different
from zero_ext.zero.units.dtensor_local import full_tensor_of, is_split, local_value
from zero_ext.zero.units.flat_layout import in_memory_order
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.unit import Unit

MASTER = "master"


def _names_of(engine: Engine) -> dict[nn.Parameter, list[str]]:
    """Return every name of every parameter in the state dict, those of modules that occur twice included."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = False, key_filter: Callable[[str], bool] | None = None
) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer in full, as independent CPU tensors; a collective.

    Units are gathered one at a time. With `key_filter` only units with a selected key are gathered.

    Args:
        model: what [`prepare`][zero_ext.prepare] returned.
        rank0_only: the other ranks get an empty dict.
        key_filter: selects keys; must return the same on all ranks.

    Returns:
        Tensors under the module's own keys. Parameters are in compute precision. Tied ones are one tensor
        under each of their names.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `model` is not prepared.

    Examples:
        >>> model, _ = zero_ext.prepare(torch.nn.Linear(4, 2), None, {"stage": 3})
        >>> {name: tuple(value.shape) for name, value in zero_ext.full_state_dict(model).items()}
        {'weight': (2, 4), 'bias': (2,)}
    """
    engine = engine_of(model)
    engine.finish_updates()
    selects = key_filter or (lambda _: True)
    keep = not rank0_only or engine.rank == 0
    chosen = [each for each in full_sources(engine) if any(map(selects, each.names))]
    full: dict[str, torch.Tensor] = {}
    for source, value in zip(chosen, full_values(engine, chosen), strict=True):
        if keep:
            full.update(dict.fromkeys(source.names, value.to("cpu", copy=True)))
    if not keep:
        return {}
    named = engine.model.named_parameters(remove_duplicate=False)
    names = map(engine.full_tensors.name, (name for name, _ in named))
    values = {name: full[name] for name in names if selects(name)}
    for name, buffer in persistent_buffers(engine.model).items():
        if selects(name):
            values[name] = buffer.detach().to("cpu", copy=True)
    return values


class FullSource(NamedTuple):
    """The parameter that has one full tensor of the state dict, or those of all its tiles."""

    names: tuple[str, ...]
    shape: torch.Size
    parameters: list[nn.Parameter]


def full_sources(engine: Engine) -> list[FullSource]:
    """Return a source for every parameter, with all its names, in the order of the units."""
    found: dict[str, FullSource] = {}
    own = _names_of(engine)
    for unit in engine.units:
        for parameter in unit.parameters:
            names = tuple(dict.fromkeys(map(engine.full_tensors.name, own.get(parameter, ()))))
            if not names:
                continue  # its module was removed from the model
            if names[0] not in found:
                tile = engine.full_tensors.tile_slice(engine.names[parameter][0])
                shape = parameter.shape if tile is None or is_split(parameter) else torch.Size(tile.shape)
                found[names[0]] = FullSource(names, shape, [])
            found[names[0]].parameters.append(parameter)
    return list(found.values())


def full_values(engine: Engine, sources: Iterable[FullSource]) -> Iterator[torch.Tensor]:
    """Yield the value of each of ``sources``, valid until the next one; a collective.

    The units of parameters are gathered one at a time, once for sources of one unit that follow each other.
    """
    with contextlib.ExitStack() as gathering:
        current: Unit | None = None
        for source in sources:
            full: torch.Tensor | None = None
            for parameter in source.parameters:
                unit, number = engine.index[parameter]
                if unit is not current:
                    gathering.close()
                    gathering.enter_context(gathered(unit.parameters))
                    current = unit
                value = unit.view_of(number).detach()
                tile = engine.full_tensors.tile_slice(engine.names[parameter][0])
                if tile is None or is_split(parameter):
                    full = full_tensor_of(parameter, value)
                    continue
                if full is None:
                    full = value.new_empty(tile.shape, device="cpu")
                tile.view_in(full).copy_(value)
            if full is None:
                raise zero_ext_bug(f"{source.names[0]}: no parameter makes it up")
            yield full


def named_values(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and persistent buffer under the first of its names, valid until the next one; a
    collective."""
    sources = full_sources(engine)
    for source, value in zip(sources, full_values(engine, sources), strict=True):
        yield source.names[0], value
    for name, buffer in first_buffers(engine.model).items():
        yield name, buffer.detach()


def first_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of ``model``, each under the first of its names."""
    first: dict[int, str] = {}
    buffers = persistent_buffers(model)
    return {name: value for name, value in buffers.items() if first.setdefault(id(value), name) == name}


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load full tensors, present on every rank, into a prepared model of any stage; a collective.

    fp32 values reach the master weights without rounding. A tied parameter may come under any of its names.

    Args:
        model: what [`prepare`][zero_ext.prepare] returned.
        state: full tensors by the module's own keys, the same on all ranks.
        strict: raise for missing and unexpected keys, instead of leaving them.

    Returns:
        The missing and the unexpected keys.

    Raises:
        ValueError: keys are missing or unexpected while `strict`, or a shape is wrong; nothing was changed.
        TypeError: a value is not a tensor.
        RuntimeError: ranks have different values; nothing was changed.

    Examples:
        >>> model, _ = zero_ext.prepare(torch.nn.Linear(4, 2), None, {"stage": 3})
        >>> zero_ext.load_full_state_dict(model, {"bias": torch.ones(2)}, strict=False)
        (['weight'], [])
    """
    engine = engine_of(model)
    _check_shapes(state, engine.full_tensors.shapes())
    engine.finish_updates()
    engine.updates.refuse_drift("a write to parameters")
    state = engine.full_tensors.cut(state)
    names, buffers = _names_of(engine), persistent_buffers(engine.model)
    found = {parameter: [name for name in own if name in state] for parameter, own in names.items()}
    missing = engine.full_tensors.names(own[0] for parameter, own in names.items() if not found[parameter])
    missing += [name for name in buffers if name not in state]
    known = {name for own in names.values() for name in own} | set(buffers)
    unexpected = [name for name in state if name not in known]
    if strict and (missing or unexpected):
        raise ValueError(
            f"state dict: missing {missing}, unexpected {unexpected}. Pass strict=False to ignore them."
        )
    shapes = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    shapes |= {name: tuple(parameter.shape) for parameter, own in names.items() for name in own}
    _check_shapes(state, shapes)
    with torch.no_grad():
        # The last of several names counts, as it does for torch.
        lasts = [[found[parameter][-1:] for parameter in unit.parameters] for unit in engine.units]
        values = [[state[name[0]] if name else None for name in names] for names in lasts]
        # All units are compared before the first one is filled, so that an error changes nothing.
        for step in (_refuse_different_values, _fill_unit):
            for unit, own in zip(engine.units, values, strict=True):
                step(engine, unit, own)
        for name, buffer in buffers.items():
            if name in state:
                buffer.copy_(state[name])
    return missing, unexpected


def _check_shapes(state: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, value in state.items():
        if name not in shapes:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"state dict: '{name}': expected a tensor, got {type(value).__name__}. Remove or convert it."
            )
        if tuple(value.shape) != shapes[name]:
            raise ValueError(
                f"state dict: '{name}': expected shape {shapes[name]}, got {tuple(value.shape)}. Load the "
                "weights of this model. Nothing was loaded."
            )


def _refuse_different_values(engine: Engine, unit: Unit, values: Sequence[torch.Tensor | None]) -> None:
    """Raise ``RuntimeError`` on all ranks if theirs are to give a parameter of ``unit`` different whole
    ``values``; a collective. None stands for a parameter that stays."""
    for value, parameter, spec in zip(values, unit.parameters, unit.layout.specs, strict=True):
        if value is not None:
            refuse_different(
                engine.collectives.holders(bool(expert_ranks(parameter))),
                f"parameter '{spec.name}' was given a whole value",
                in_memory_order(local_value(parameter, value.detach()), spec),
                "Load the same file on all ranks, or broadcast its values.",
            )


def _fill_unit(engine: Engine, unit: Unit, values: Sequence[torch.Tensor | None]) -> None:
    """Store in the parameters of ``unit`` whole ``values`` that every rank has, those that are not None, in
    master weights without rounding; a collective."""
    masters = (master for master in engine.masters if master.unit is unit)
    targets: list[Unit | MasterShard] = [unit, *masters]
    with gathered(unit.parameters):
        for number, (value, spec) in enumerate(zip(values, unit.layout.specs, strict=True)):
            if value is not None:
                flattened = in_memory_order(local_value(unit.parameters[number], value), spec)
                for target in targets:
                    target.put(number, 0, flattened)
        unit.publish()


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the full averaged gradient of one parameter, before the step clips it; a collective.

    Args:
        parameter: of a prepared model.

    Returns:
        The gradient on every rank, with the shape, device and memory order of the parameter and the dtype of
        the reduced gradient. None if no rank has one. Of fp16 parameters it is still multiplied by the loss
        scale.

    Raises:
        ValueError: the parameter belongs to no prepared model.
        RuntimeError: updates in backward are pending, or the optimizer's next step leaves gradients
            unreduced.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3})
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> zero_ext.full_gradient(model.bias)
        tensor([3., 3.])
    """
    engine = engine_of_parameter(parameter)
    engine.updates.refuse_pending("full_gradient")
    engine.synchronize_gradients()
    unit, number = engine.index[parameter]
    if unit not in {master.unit for master in engine.masters}:
        return None
    return engine.views.full_average(engine.gradients_of(unit), number)


def owned_slices(parameter: nn.Parameter, kind: str = MASTER) -> list[tuple[int, Values]]:
    """Return what this rank owns of a parameter's master weights (``kind`` "master") or optimizer state
    ("exp_avg", ...), where it lies, each with its first element in memory order. Replicated state is owned by
    all. ``ValueError`` for a parameter of no prepared model."""
    engine = engine_of_parameter(parameter)
    engine.finish_updates()
    engine.follow_writes()
    unit, number = engine.index[parameter]
    name = unit.layout.specs[number].name
    return [
        (segment.start, values)
        for found, _, segment, values in owned_state(engine, unit)
        if found == kind and segment.name == name and (kind == MASTER or count(values))
    ]


def full_state(parameter: nn.Parameter, kind: str = MASTER) -> torch.Tensor | None:
    """Return a parameter's master weights or optimizer state of ``kind``, whole, in float32 on the CPU, on
    every rank; a collective. None where no rank has such state: frozen parameters, and state before the
    first step of optimizers that make it then."""
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
                own = copy_of(subrange_of(values, low - start, high - start))
                flat[low:high] = own.to("cpu", torch.float32)

    engine.finish_updates()
    if is_stored(*(master.state.tier for master in engine.masters)):
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
    values = [value if each == number else None for each in range(len(unit.parameters))]
    with torch.no_grad():
        _refuse_different_values(engine, unit, values)
        _fill_unit(engine, unit, values)


def replace_state(parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
    """Make ``value``, whole and the same on every rank, the parameter's optimizer state of ``kind``; a
    collective. ``ValueError`` for another shape, or where there is no such state."""
    engine = engine_of_parameter(parameter)
    unit, number = engine.index[parameter]
    spec = unit.layout.specs[number]
    _check_shape(engine, parameter, value)
    flat = in_memory_order(local_value(parameter, value.detach()), spec)
    slices = owned_slices(parameter, kind)
    known = torch.full((1,), float(len(slices)), dtype=torch.float32, device="cpu")
    engine.collectives.sum_(known, "whether there is state to replace")
    if not known.item():
        raise ValueError(
            f"optimizer state {kind!r} of '{spec.name}': expected some to replace, got none. "
            "Make a step first."
        )

    def write() -> None:
        for start, values in slices:
            replace(values, flat[start : start + count(values)].float())

    raise_on_all_ranks(engine.collectives, write, f"replacing {kind} of '{spec.name}'")


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


def _check_shape(engine: Engine, parameter: nn.Parameter, value: torch.Tensor) -> None:
    if tuple(value.shape) != tuple(parameter.shape):
        raise ValueError(
            f"parameter '{engine.names[parameter][0]}': expected a value of shape "
            f"{tuple(parameter.shape)}, got {tuple(value.shape)}. Pass the whole value."
        )
