"""Full parameters outside forward: reading and editing them, whole state dicts, double backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zero_ext.zero.api.engine_lookup import engine_of, engine_of_parameter
from zero_ext.zero.construction.gathered_presharded import check_modifier, gathered_presharded
from zero_ext.zero.construction.module_buffers import persistent_buffers
from zero_ext.zero.engine import Engine
from zero_ext.zero.memory.gathered_unit import UnitState
from zero_ext.zero.units.collective_errors import refuse_different
from zero_ext.zero.units.dtensor_local import full_tensor_of, is_split, local_value
from zero_ext.zero.units.flat_layout import in_memory_order
from zero_ext.zero.units.master_weights import MasterShard, store_values
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.presharded import presharded_of
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.on_demand import held


@contextlib.contextmanager
def gathered(
    parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None
) -> Iterator[None]:
    """Gather `parameters` on every rank inside the block, to read or to edit them; a collective.

    Works for every stage. If the block raises, or writes what it may only read, edits of sharded parameters
    are dropped. Those of replicated ones (stages 0 to 2) stay on this rank. Values for reading are those that
    forward uses. Before an edit delayed updates are finished.

    Args:
        parameters: a module, a parameter or several, of prepared models or made inside
            [`Init`][zero_ext.Init].
        modifier_rank: None for reading. With a rank, that rank's values become everybody's at the end of the
            block, shards and fp32 master weights included. Elements that were not changed keep the full
            precision of their master.

    Yields:
        Nothing.

    Raises:
        ValueError: a parameter is of neither kind, the rank does not exist, or experts that differ between
            ranks are to be edited.
        RuntimeError: a parameter was written to with `modifier_rank` None, or a backward pass ended inside
            the block.

    Examples:
        >>> model, _ = zero_ext.prepare(torch.nn.Linear(4, 2), None, {"stage": 3})
        >>> with zero_ext.gathered(model.parameters(), modifier_rank=0), torch.no_grad():
        ...     _ = model.bias.fill_(1.0)
        >>> with zero_ext.gathered(model.bias):
        ...     model.bias.sum().item()
        2.0
    """
    listed = _listed(parameters)
    presharded = [parameter for parameter in listed if presharded_of(parameter) is not None]
    units = _units_of(parameter for parameter in listed if presharded_of(parameter) is None)
    with gathered_presharded(presharded, modifier_rank), _gathered_units(units, modifier_rank):
        yield


@contextlib.contextmanager
def _gathered_units(units: list[tuple[Engine, Unit]], modifier_rank: int | None) -> Iterator[None]:
    for engine, unit in units:
        engine.updates.refuse_pending("gathered")
        if modifier_rank is not None:
            engine.updates.refuse_drift("a write to parameters")
        check_modifier(modifier_rank, engine.collectives, unit.parameters[0], unit.describe())
    if modifier_rank is not None:
        for engine in dict.fromkeys(engine for engine, _ in units):
            engine.finish_updates()
    by_engine: dict[Engine, list[Unit]] = {}
    for engine, unit in units:
        by_engine.setdefault(engine, []).append(unit)
    with contextlib.ExitStack() as holding:
        for engine, those in by_engine.items():
            holding.enter_context(held(engine, those))
        before = {unit: [parameter._version for parameter in unit.parameters] for _, unit in units}
        yield
        for engine, unit in units:
            _check_present(unit)
            if modifier_rank is None:
                _check_only_read(unit, before[unit])
            else:
                _adopt_writes(engine, unit, modifier_rank)


def _listed(parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, nn.Parameter):
        parameters = [parameters]
    return list(dict.fromkeys(parameters))


def _units_of(parameters: Iterable[nn.Parameter]) -> list[tuple[Engine, Unit]]:
    found: dict[Unit, Engine] = {}
    for parameter in parameters:
        engine = engine_of_parameter(parameter)
        found[engine.index[parameter][0]] = engine
    return [(engine, unit) for unit, engine in found.items()]


def _check_present(unit: Unit) -> None:
    if unit.state is not UnitState.GATHERED:
        raise RuntimeError(
            f"{unit.describe()} was released inside 'with zero_ext.gathered(...)': a backward pass ended "
            "there. Run backward outside the block."
        )


def _check_only_read(unit: Unit, before: list[int]) -> None:
    for number in unit.written():
        if unit.parameters[number]._version != before[number]:
            raise RuntimeError(
                f"parameter '{unit.layout.specs[number].name}': it was written to inside 'with "
                "zero_ext.gathered(params):', which is for reading. Name the rank with the values that "
                "count: "
                "'with zero_ext.gathered(params, modifier_rank=0):'."
            )


def _adopt_writes(engine: Engine, unit: Unit, modifier_rank: int) -> None:
    engine.collectives.broadcast_(unit.flat, modifier_rank, f"edited {unit.describe()}")
    try:
        store_values(unit, engine.masters, engine.collectives)
    finally:
        # After an error, too, the release must not commit the writes once more.
        unit.accept_writes()


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
    chosen = {
        parameter
        for parameter, names in _names_of(engine).items()
        if any(selects(engine.full_tensors.name(name)) for name in names)
    }
    keep = not rank0_only or engine.rank == 0
    full: dict[nn.Parameter, torch.Tensor] = {}
    tiled: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        if chosen.isdisjoint(unit.parameters):
            continue
        with gathered(unit.parameters):
            for number, parameter in enumerate(unit.parameters if keep else ()):
                if parameter not in chosen:
                    continue
                tile_slice, value = (
                    engine.full_tensors.tile_slice(engine.names[parameter][0]),
                    unit.view_of(number).detach(),
                )
                if tile_slice is None or is_split(parameter):
                    value = full_tensor_of(parameter, value)
                    full[parameter] = value.to("cpu", copy=True)
                    continue
                if tile_slice.name not in tiled:
                    tiled[tile_slice.name] = value.new_empty(tile_slice.shape, device="cpu")
                tile_slice.view_in(tiled[tile_slice.name]).copy_(value)
                full[parameter] = tiled[tile_slice.name]
    if not keep:
        return {}
    named = engine.model.named_parameters(remove_duplicate=False)
    values = {
        engine.full_tensors.name(name): full[parameter] for name, parameter in named if parameter in chosen
    }
    for name, buffer in persistent_buffers(engine.model).items():
        if selects(name):
            values[name] = buffer.detach().to("cpu", copy=True)
    return {name: value for name, value in values.items() if selects(name)}


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
        for step in (refuse_different_values, fill_unit):
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
                "weights of "
                "this model. Nothing was loaded."
            )


def refuse_different_values(engine: Engine, unit: Unit, values: list[torch.Tensor | None]) -> None:
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


def fill_unit(engine: Engine, unit: Unit, values: list[torch.Tensor | None]) -> None:
    """Give the parameters of ``unit`` whole ``values`` that every rank has, those that are not None, master
    weights without rounding; a collective."""
    with gathered(unit.parameters):
        targets: list[Unit | MasterShard] = [
            unit,
            *(master for master in engine.masters if master.unit is unit),
        ]
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


@contextlib.contextmanager
def double_backward(model: nn.Module) -> Iterator[None]:
    """Gather saved parameters when autograd unpacks them, around a step that differentiates twice.

    Use it around forward and backward of a step with `create_graph=True`, or if blocks return objects in
    which no tensor can be found. The order of the passes does not matter. About 10% slower on a small model.

    Args:
        model: what [`prepare`][zero_ext.prepare] returned.

    Yields:
        Nothing.

    Raises:
        RuntimeError: `offload.update_mode` is "in_backward", where parameters change during backward.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3})
        >>> inputs = torch.ones(3, 4, requires_grad=True)
        >>> with zero_ext.double_backward(model):
        ...     (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        ...     gradient.square().sum().backward()
        >>> optimizer.step()
    """
    engine = engine_of(model)
    if engine.config.offload.update_mode == "in_backward":
        raise RuntimeError(
            "double_backward: expected offload.update_mode 'after_backward', got 'in_backward', which "
            "changes "
            "parameters while backward may still need them. Set it to 'after_backward'."
        )
    # A unit's storage object stays the same while its memory comes and goes, so it identifies the
    # unit.
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
        engine.prefetcher.need(unit, holder, engine.prefetcher.backward_order)
        view: torch.Tensor = unit.flat.as_strided(size, stride, offset)
        return view

    engine.hooks.gathers_saved_tensors = True
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        engine.hooks.gathers_saved_tensors = False
        for unit in by_storage.values():
            engine.prefetcher.release(unit, holder)
