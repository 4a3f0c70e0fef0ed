"""Full parameters inside a block, to read or to edit them or to differentiate twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.zero.api.engine_lookup import engine_of, engine_of_parameter
from zero_ext.zero.engine import Engine
from zero_ext.zero.memory.gathered_unit import UnitState
from zero_ext.zero.units.collective_errors import DeferredError
from zero_ext.zero.units.dtensor_local import local_tensor, point_at
from zero_ext.zero.units.flat_layout import in_memory_order
from zero_ext.zero.units.master_weights import store_values
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.presharded import REBUILD, PreshardedParameter, presharded_of, set_presharded
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
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, nn.Parameter):
        parameters = [parameters]
    presharded: dict[nn.Parameter, PreshardedParameter] = {}
    units: dict[Unit, Engine] = {}
    for parameter in dict.fromkeys(parameters):
        found = presharded_of(parameter)
        if found is not None:
            presharded[parameter] = found
        else:
            engine = engine_of_parameter(parameter)
            units[engine.index[parameter][0]] = engine
    with _gathered_presharded(presharded, modifier_rank), _gathered_units(units, modifier_rank):
        yield


@contextlib.contextmanager
def _gathered_units(units: Mapping[Unit, Engine], modifier_rank: int | None) -> Iterator[None]:
    by_engine: dict[Engine, list[Unit]] = {}
    for unit, engine in units.items():
        engine.updates.refuse_pending("gathered")
        if modifier_rank is not None:
            engine.updates.refuse_drift("a write to parameters")
        _check_modifier(modifier_rank, engine.collectives, unit.parameters[0], unit.describe())
        by_engine.setdefault(engine, []).append(unit)
    if modifier_rank is not None:
        for engine in by_engine:
            engine.finish_updates()
    with contextlib.ExitStack() as holding:
        for engine, those in by_engine.items():
            holding.enter_context(held(engine, those))
        before = {unit: [parameter._version for parameter in unit.parameters] for unit in units}
        yield
        for unit, engine in units.items():
            if unit.state is not UnitState.GATHERED:
                raise RuntimeError(
                    f"{unit.describe()} was released inside 'with zero_ext.gathered(...)': a backward pass "
                    "ended there. Run backward outside the block."
                )
            if modifier_rank is None:
                for number in unit.written():
                    if unit.parameters[number]._version != before[unit][number]:
                        raise _write_to(f"parameter '{unit.layout.specs[number].name}'")
                continue
            engine.collectives.broadcast_(unit.flat, modifier_rank, f"edited {unit.describe()}")
            try:
                store_values(unit, engine.masters, engine.collectives)
            finally:
                # After an error, too, the release must not commit the writes once more.
                unit.accept_writes()


@contextlib.contextmanager
def _gathered_presharded(
    presharded: Mapping[nn.Parameter, PreshardedParameter], modifier_rank: int | None
) -> Iterator[None]:
    """Gather parameters of :class:`zero_ext.Init`, before there is an engine."""
    for parameter, found in presharded.items():
        _check_modifier(modifier_rank, found.everyone, parameter, f"parameter '{found.spec.name}'")
    try:
        # Meanwhile they are ordinary parameters, also to an Init that is still open around this block. It
        # watches torch functions, and must not take these here for a use.
        with torch._C.DisableTorchFunction():
            for parameter, found in presharded.items():
                found.detach_from(parameter)
                point_at(parameter, found.gather())
        before = {parameter: parameter._version for parameter in presharded}
        yield
        for parameter, found in presharded.items():
            if modifier_rank is not None:
                with torch._C.DisableTorchFunction():
                    _adopt_writes(parameter, found, modifier_rank)
            elif parameter._version != before[parameter]:
                raise _write_to(f"parameter of shape {tuple(parameter.shape)}")
    finally:
        with torch._C.DisableTorchFunction():
            for parameter, found in presharded.items():
                set_presharded(parameter, found)


def _check_modifier(
    modifier_rank: int | None, collectives: Collectives, parameter: nn.Parameter, described: str
) -> None:
    """Raise ``ValueError`` if a rank's values of ``parameter`` cannot become those of all ``collectives``."""
    if modifier_rank is None:
        return
    if modifier_rank not in range(collectives.world_size):
        raise ValueError(
            f"modifier_rank: expected 0 to {collectives.world_size - 1}, got {modifier_rank!r}. Pass a rank."
        )
    if expert_ranks(parameter):
        raise ValueError(
            f"modifier_rank: {described} holds experts, and rank {modifier_rank} has others than some ranks. "
            "Leave them out, or use zero_ext.load_full_state_dict(strict=False)."
        )


def _write_to(described: str) -> RuntimeError:
    return RuntimeError(
        f"{described}: it was written to inside 'with zero_ext.gathered(params):', which is for reading. "
        "Name the rank with the values that count: 'with zero_ext.gathered(params, modifier_rank=0):'."
    )


def _adopt_writes(parameter: nn.Parameter, presharded: PreshardedParameter, modifier_rank: int) -> None:
    """Store on every rank the shard of the modifier rank's value."""
    value = local_tensor(parameter).detach()
    if tuple(value.shape) != presharded.spec.shape:
        raise RuntimeError(
            f"parameter: expected shape {presharded.spec.shape} at the end of 'with "
            f"zero_ext.gathered(...)', got {tuple(value.shape)}. Change its values, not its shape."
        )
    collectives = presharded.everyone
    # The broadcast writes to this copy. ``value`` may share memory with a tensor of the user's.
    flat = in_memory_order(value.to(presharded.spec.dtype), presharded.spec).clone()
    collectives.broadcast_(flat, modifier_rank, "an edited parameter of zero_ext.Init")
    failures = DeferredError()
    failures.attempt(lambda: presharded.store_from_full(flat))
    failures.raise_deferred(collectives, "storing an edited parameter of zero_ext.Init", REBUILD)


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
            "changes parameters while backward may still need them. Set it to 'after_backward'."
        )
    # A unit's storage object stays the same while its memory comes and goes, so it identifies the unit.
    by_storage = {unit.flat.untyped_storage()._cdata: unit for unit in engine.units if unit.placement.params}
    holder = object()

    def pack(tensor: torch.Tensor) -> Any:
        unit = by_storage.get(tensor.untyped_storage()._cdata)
        if unit is None:
            return tensor
        return unit, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Any:
        if isinstance(packed, torch.Tensor):
            return packed
        unit, *view = packed
        engine.prefetcher.need(unit, holder, engine.prefetcher.backward_order)
        return unit.flat.as_strided(*view)

    engine.hooks.gathers_saved_tensors = True
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        engine.hooks.gathers_saved_tensors = False
        for unit in by_storage.values():
            engine.prefetcher.release(unit, holder)
