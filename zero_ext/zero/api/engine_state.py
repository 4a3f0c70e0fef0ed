"""A model's state as checkpoints see it, of one engine or of several ranks with slices of one model."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero_ext.comm import Collectives
from zero_ext.comm.process_group import make_collectives
from zero_ext.config import ZeroConfig
from zero_ext.offload import Values, asleep_error, copy_of, count, subrange_of
from zero_ext.optim import Segment, UnshardedState
from zero_ext.optim.optimizer_registry import resumes_from
from zero_ext.zero.construction.module_tensors import persistent_buffers
from zero_ext.zero.construction.rank_consistency import bytes_of_all_ranks
from zero_ext.zero.engine import Engine
from zero_ext.zero.step.update_schedule import Ownership
from zero_ext.zero.units.dtensor_local import is_split
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.parameter_marks import packed_tensors
from zero_ext.zero.units.unit import Unit


class StateSlice(NamedTuple):
    """A run of one state tensor: ``start`` counts elements in the parameter's memory order."""

    kind: str
    name: str
    start: int
    tensor: Values  # [numel], where it lies on this rank
    shape: tuple[int, ...] | None = (
        None  # of all of a state tensor, None for elements of the parameter's shape
    )


class ParameterInfo(NamedTuple):
    """A parameter as a whole, the same on all ranks."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...]
    trainable: bool


def owned_state(
    engine: Engine, unit: Unit | None = None
) -> Iterator[tuple[str, MasterShard, Segment, Values]]:
    """Yield this rank's master weights and optimizer state, of one ``unit`` or of all, where they lie: their
    kind, master shard, and segment of it."""
    if engine.asleep:
        raise asleep_error("optimizer state")
    stepper = engine.optimizer_step.stepper
    for number, master in enumerate(engine.masters):
        if unit is None or master.unit is unit:
            for segment in master.owned.values():
                yield "master", master, segment, master.values_of(segment)
            for kind, segment, values in stepper.values(number) if stepper is not None else ():
                yield kind, master, segment, values


def unsharded_state(engine: Engine) -> Iterator[UnshardedState]:
    """Yield this rank's optimizer state that is not sharded."""
    if engine.asleep:
        raise asleep_error("optimizer state")
    stepper = engine.optimizer_step.stepper
    yield from stepper.unsharded_values() if stepper is not None else ()


class EngineState:
    """Implements the checkpoint's ``StateSource`` for one engine.

    Every rank saves the part of its own shard range, whatever is replicated, so that writing is shared;
    at load a rank fills all that it owns.
    """

    def __init__(
        self, engine: Engine, group: dist.ProcessGroup | None, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """``group`` is the engine's, None for a single rank; ``optimizer`` is the user's."""
        self._engine = weakref.proxy(engine)
        self.group = group
        self.rank, self.world_size = engine.rank, engine.world_size
        self.config: ZeroConfig = engine.config
        self.everyone: Collectives = engine.collectives  # of all ranks that save and load together
        self.optimizer_class = None if optimizer is None else type(optimizer).__qualname__
        self._loaded_kinds: Mapping[str, tuple[str, ...]] = {}  # by parameter, in the checkpoint of a load
        self._undo: tuple[Callable[[], None], ...] = ()  # what a load made that has not changed anything yet

    @property
    def trains(self) -> bool:
        """Return whether there is an optimizer with state that a checkpoint has to restore."""
        return self._engine.optimizer_step.stepper is not None

    def parameter_table(self) -> Mapping[str, ParameterInfo]:
        """Return every parameter by its first name."""
        engine, table = self._engine, {}
        for unit in engine.units:
            for spec, parameter in zip(unit.layout.specs, unit.parameters, strict=True):
                dtype = str(spec.dtype).removeprefix("torch.")
                name, *aliases = engine.full_tensors.names(engine.names[parameter])
                source = engine.full_tensors.tile_slice(spec.name) or spec
                shape, stride = source.shape, source.stride
                if is_split(parameter):
                    shape, stride = tuple(parameter.shape), tuple(parameter.stride())
                table[name] = ParameterInfo(shape, stride, dtype, tuple(aliases), parameter.requires_grad)
        return table

    def save_slices(self) -> Iterator[StateSlice]:
        """Yield what this rank saves: exactly its shard range of every unit, unless it is a replica of an
        earlier rank's."""
        self._engine.follow_writes()
        if self._engine.collectives.replicas is not None and self._engine.collectives.replicas.rank:
            return
        for state_slice, unit, begin in self._slices():
            first, last = unit.layout.shard_range(unit.collectives.rank)
            low, high = max(begin, first), min(begin + count(state_slice.tensor), last)
            if low < high:
                values = subrange_of(state_slice.tensor, low - begin, high - begin)
                yield from self._of_full_tensors(
                    state_slice._replace(start=state_slice.start + low - begin, tensor=values)
                )
        yield from self._auxiliary_slices(saves=True)
        yield from self._unsharded_slices(saves=True)

    def load_slices(self) -> Iterator[StateSlice]:
        """Yield what this rank needs filled: everything it owns. Nothing of it is under way any more.

        ``RuntimeError`` inside ``unsharded_for_generation``, where full parameters would stay the old ones.
        """
        if self._engine.hooks.paused:
            raise RuntimeError(
                "load_checkpoint: expected a call outside 'with zero_ext.unsharded_for_generation(...)', as "
                "parameters stay the old ones there, got one inside. Leave the block first."
            )
        self._engine.prefetcher.forget_values()
        for state_slice, _, _ in self._slices():
            if count(state_slice.tensor):
                yield from self._of_full_tensors(state_slice)
        yield from self._auxiliary_slices(saves=False)
        yield from self._unsharded_slices(saves=False)

    def _auxiliary_slices(self, saves: bool) -> Iterator[StateSlice]:
        """Yield the auxiliary state of the updates. Of what is the same on all ranks each saves a range."""
        for auxiliary in self._engine.updates.auxiliary_state():
            layout = self._engine.masters[auxiliary.number].unit.layout
            if saves and auxiliary.ownership is Ownership.SHARED:
                begin, end = layout.shard_range(self.rank)
                auxiliary = auxiliary._replace(begin=begin, values=auxiliary.values[begin:end])
            for name, start, values in auxiliary.by_parameter(layout):
                yield StateSlice(auxiliary.kind, name, start, values)

    def _unsharded_slices(self, saves: bool) -> Iterator[StateSlice]:
        """Yield the state that is not sharded. Of what is the same on all ranks each saves some tensors."""
        masters = self._engine.masters
        units = {spec.name: master.unit for master in masters for spec in master.unit.layout.specs}
        shared = 0
        for state in unsharded_state(self._engine):
            collectives, values = units[state.name].collectives, state.flat()
            shared += state.replicated
            if saves and state.replicated and shared % collectives.world_size != collectives.rank:
                continue
            if saves and not isinstance(values, torch.Tensor):
                values = copy_of(values)  # which an asynchronous save can stage
            yield StateSlice(state.kind, state.name, 0, values, tuple(state.tensor.shape))

    def _of_full_tensors(self, state_slice: StateSlice) -> Iterator[StateSlice]:
        """Yield ``state_slice``, or the ranges of the full tensor that it has if it belongs to a tile."""
        tile_slice = self._engine.full_tensors.tile_slice(state_slice.name)
        if tile_slice is None:
            yield state_slice
            return
        for begin, start, numel in tile_slice.ranges(state_slice.start, count(state_slice.tensor)):
            values = subrange_of(state_slice.tensor, begin, begin + numel)
            yield StateSlice(state_slice.kind, tile_slice.name, start, values)

    def _slices(self) -> Iterator[tuple[StateSlice, Unit, int]]:
        """Yield every owned slice with its unit and its first element's place in the unit's flat buffer."""
        engine = self._engine
        mastered = {master.unit for master in engine.masters}
        for unit in engine.units:
            if unit in mastered:
                continue
            sharded = unit.placement.params
            begin, end = unit.layout.shard_range(unit.collectives.rank) if sharded else (0, unit.layout.numel)
            storage = unit.storage if sharded else engine.tiers.wrap_memory(unit.flat)
            for segment in unit.layout.segments(begin, end):
                values = storage.view(segment.begin, segment.end)
                state_slice = StateSlice("master", segment.name, segment.start, values)
                yield state_slice, unit, begin + segment.begin
        for kind, master, segment, values in owned_state(engine):
            state_slice = StateSlice(kind, segment.name, segment.start, values)
            yield state_slice, master.unit, master.begin + segment.begin

    def scalar_state(self) -> dict[str, Any]:
        """Return steps, loss scaler, param groups and the optimizer's scalars."""
        engine, step = self._engine, self._engine.optimizer_step
        groups = []
        for group in step.groups:
            plain = {key: _plain(value) for key, value in group.items() if key != "params"}
            names = engine.full_tensors.names(engine.names[parameter][0] for parameter in group["params"])
            groups.append({"settings": plain, "params": names})
        return {
            "steps": step.steps,
            "skipped_steps": step.skipped_steps,
            "loss_scaler": step.scaler.state_dict(),
            "param_groups": groups,
            "optimizer_class": self.optimizer_class,
            "optimizer": engine.full_tensors.to_full(step.stepper.scalars()) if step.stepper else None,
        }

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """Restore :meth:`scalar_state`. ``ValueError``, with nothing changed, if it is of another optimizer
        or its param groups hold other parameters."""
        engine, step = self._engine, self._engine.optimizer_step
        stepper = step.stepper
        if stepper is not None:
            self._check_optimizer(state)
            stepper.check_scalars(scalars := engine.full_tensors.to_tiles(state["optimizer"]))
        step.scaler.load_state_dict(state["loss_scaler"])
        # From here on the load uses what ``prepare_load`` made, so nothing may remove it any more.
        self._undo = ()
        if stepper is not None:
            stepper.load_scalars(scalars)
            for live, group in zip(step.groups, state["param_groups"], strict=True):
                for key, value in group["settings"].items():
                    if key not in live and state["optimizer_class"] != self.optimizer_class:
                        continue  # a setting that only the other class has
                    live[key] = _as_before(live.get(key), value)
        step.steps = int(state["steps"])
        step.skipped_steps = int(state["skipped_steps"])

    def _check_optimizer(self, state: dict[str, Any]) -> None:
        own = self.scalar_state()
        if state["optimizer"] is None:
            raise ValueError(
                "checkpoint: expected one with optimizer state, as this model has an optimizer, got "
                "one that was saved without. Load its weights by load_checkpoint(..., optimizer=False)."
            )
        if not resumes_from(own["optimizer_class"], state["optimizer_class"]):
            raise ValueError(
                f"checkpoint: expected state of {own['optimizer_class']}, got that of "
                f"{state['optimizer_class']}. Prepare with the optimizer that it was saved with, or load the "
                "weights alone by load_checkpoint(..., optimizer=False)."
            )
        same = state["optimizer_class"] == own["optimizer_class"]
        if same and state["optimizer"].keys() != own["optimizer"].keys():
            raise ValueError(
                f"checkpoint: expected state of {own['optimizer_class']} as this model has it, got another "
                "form. Give the optimizer the settings that it was saved with, such as amsgrad."
            )
        for name, entry in state["optimizer"].items():
            stored = set(self._loaded_kinds.get(name, ())) - {"master"}
            if isinstance(entry, dict) and entry.get("has_state") and not stored:
                raise ValueError(
                    f"checkpoint: expected the optimizer's state of '{name}', got none. Load another "
                    "checkpoint, or the weights alone by load_checkpoint(..., optimizer=False)."
                )
        # Within a group the order says nothing: all state goes by name.
        groups, saved = ([set(group["params"]) for group in each["param_groups"]] for each in (own, state))
        if groups != saved:
            different = sorted(set().union(*groups) ^ set().union(*saved))
            raise ValueError(
                f"checkpoint: expected param groups of {[len(group) for group in groups]} parameters, "
                f"got groups of {[len(group) for group in saved]}, with other ones "
                f"({', '.join(different[:5]) or 'none in one alone, they are grouped otherwise'}). "
                "Build the param groups as when it was saved."
            )

    def prepare_load(self, kinds: Mapping[str, tuple[str, ...]]) -> None:
        """Make lazily created optimizer state exist for the kinds of state a checkpoint holds."""
        step = self._engine.optimizer_step
        if step.stepper is not None:
            self._loaded_kinds = kinds
            tiles = self._engine.full_tensors.to_tiles(kinds)
            self._undo = step.stepper.make_state(tiles), step.updates.prepare_auxiliary_state(tiles)

    def leaves(self, kind: str) -> bool:
        """Return whether state of this kind in a checkpoint has no place here and is left aside."""
        return self._engine.updates.leaves(kind)

    def abandon_load(self) -> None:
        """Undo :meth:`prepare_load` after a load that was refused."""
        for undo in self._undo:
            undo()
        self._undo = ()

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the module's persistent buffers."""
        return persistent_buffers(self._engine.model)

    def finish_load(self, optimizer: bool = True) -> None:
        """Parameters follow the loaded master weights, on all ranks, and after a load with the ``optimizer``
        also what its updates keep besides them."""
        self._engine.optimizer_step.forget_damage()
        self._engine.clear_gradients()
        self._engine.refresh_parameters()
        if optimizer:
            self._engine.updates.restore()


class TrainedState(EngineState):
    """The same without the parameters that nothing trains, as the base model under adapters, and without
    what is attached to them: a checkpoint of it is loaded into a model that has their values already."""

    def parameter_table(self) -> Mapping[str, ParameterInfo]:
        """Return every trained parameter by its first name."""
        engine = self._engine
        specs = (spec for master in engine.masters for spec in master.unit.layout.specs)
        trained = {engine.full_tensors.name(spec.name) for spec in specs}
        return {name: entry for name, entry in super().parameter_table().items() if name in trained}

    def _slices(self) -> Iterator[tuple[StateSlice, Unit, int]]:
        trained = {master.unit for master in self._engine.masters}
        return (each for each in super()._slices() if each[1] in trained)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the module's persistent buffers."""
        attached = packed_tensors(self._engine.model)
        return {name: buffer for name, buffer in super().buffers().items() if name not in attached}


class ModelParallelState:
    """Implements the checkpoint's ``StateSource`` for all ranks of ``group``, each with its part, ``own``, of
    one model.

    Names are the whole model's; ``whole_names`` are those of parameters that have another one here. Those
    that are saved ``elsewhere``, as several parts have them, are filled in all. :meth:`meet`, a collective of
    all ranks before every save and load, gives each of them what the others have.
    """

    def __init__(
        self,
        own: EngineState,
        group: dist.ProcessGroup,
        full_names: Mapping[str, str],
        elsewhere: Collection[str],
    ) -> None:
        self.own = own
        self._full_names, self._elsewhere = dict(full_names), frozenset(elsewhere)
        self.group, self.config = group, own.config
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.leaves, self.abandon_load, self.finish_load = own.leaves, own.abandon_load, own.finish_load
        self._table: dict[str, ParameterInfo] = {}
        self._scalars: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    # -- what the ranks tell each other -------------------------------------------------------------------

    @functools.cached_property
    def everyone(self) -> Collectives:
        """The collectives of all ranks; made by all of them together at first use."""
        return make_collectives(self.group, self.config.timeout_seconds)

    def meet(self) -> None:
        """Take in what all ranks have. Raises ``RuntimeError`` where parts do not make one model."""
        own = self.own
        table = {self._full_name(name): entry for name, entry in own.parameter_table().items()}
        buffers = {name: (list(each.shape), str(each.dtype)) for name, each in own.buffers().items()}
        message = {"table": table, "scalars": self._renamed(own.scalar_state()), "buffers": buffers}
        own_bytes = json.dumps(message).encode()
        gathered = bytes_of_all_ranks(self.everyone, own_bytes, "the parts' tables")
        states = [json.loads(text) for text in gathered]
        self._table, self._scalars = {}, {}
        for stage_state in states:
            for name, entry in stage_state["table"].items():
                shape, stride, dtype, aliases, trainable = entry
                self._add(name, ParameterInfo(tuple(shape), tuple(stride), dtype, tuple(aliases), trainable))
            self._scalars = _united(self._scalars, stage_state["scalars"])
        self._buffers = {}
        for rank, stage_state in enumerate(states):
            for name, (shape, dtype) in stage_state["buffers"].items():
                if name not in self._buffers:
                    self._buffers[name] = self._buffer_from(rank, name, shape, dtype)

    def _add(self, name: str, entry: ParameterInfo) -> None:
        """Add a parameter; what is tied has all names that any part gives it."""
        known = self._table.get(name, entry)
        if known._replace(aliases=()) != entry._replace(aliases=()):
            raise RuntimeError(
                f"parameter '{name}': expected the same in all parts of the model, got {known} in one "
                f"and {entry} in another. Build all parts from one model."
            )
        aliases = tuple(sorted({*known.aliases, *entry.aliases} - {name}))
        self._table[name] = entry._replace(aliases=aliases)

    def _buffer_from(self, rank: int, name: str, shape: list[int], dtype: str) -> torch.Tensor:
        """Return the live buffer if this rank has it, else a copy of that of ``rank``."""
        live = self.own.buffers().get(name)
        value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="cpu")
        if live is not None:
            value.copy_(live)
        if value.numel():
            self.everyone.broadcast_(value.view(-1).view(torch.uint8), rank, f"buffer '{name}'")
        return value if live is None else live

    # -- names --------------------------------------------------------------------------------------------

    def _full_name(self, name: str) -> str:
        return self._full_names.get(name, name)

    def _renamed(self, value: Any) -> Any:
        """JSON-like ``value`` with the whole model's names for this part's, among keys and in lists."""
        if isinstance(value, Mapping):
            return {self._full_name(name): self._renamed(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._renamed(item) for item in value]
        return self._full_name(value) if isinstance(value, str) else value

    def _own_subset(self, value: Any) -> Any:
        """Undo :meth:`_renamed` of the full model's ``value``, without what only other ranks have."""
        own_names = {self._full_name(name): name for name in self.own.parameter_table()}
        elsewhere = self._table.keys() - own_names.keys()

        def subset(item: Any) -> Any:
            if isinstance(item, Mapping):
                return {own_names.get(key, key): subset(v) for key, v in item.items() if key not in elsewhere}
            if isinstance(item, list):
                return [subset(v) for v in item if not (isinstance(v, str) and v in elsewhere)]
            return own_names.get(item, item) if isinstance(item, str) else item

        return subset(value)

    # -- the source ---------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """See :class:`EngineState`."""
        return self.own.trains

    def parameter_table(self) -> Mapping[str, ParameterInfo]:
        """Return every parameter of the model by its first name."""
        return self._table

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers of all parts: live ones here, copies of the others."""
        return self._buffers

    def save_slices(self) -> Iterator[StateSlice]:
        """See :class:`EngineState`; each parameter in one of the parts that have it."""
        for state_slice in self.own.save_slices():
            if state_slice.name not in self._elsewhere:
                yield state_slice._replace(name=self._full_name(state_slice.name))

    def load_slices(self) -> Iterator[StateSlice]:
        """See :class:`EngineState`."""
        for state_slice in self.own.load_slices():
            yield state_slice._replace(name=self._full_name(state_slice.name))

    def scalar_state(self) -> dict[str, Any]:
        """See :class:`EngineState`: of all parts."""
        return self._scalars

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """See :class:`EngineState`."""
        self.own.load_scalar_state(self._own_subset(state))

    def prepare_load(self, kinds: Mapping[str, tuple[str, ...]]) -> None:
        """See :class:`EngineState`."""
        own_names = {self._full_name(name): name for name in self.own.parameter_table()}
        self.own.prepare_load({own_names[name]: each for name, each in kinds.items() if name in own_names})


def _united(one: Any, other: Any, key: str = "state") -> Any:
    """JSON-like values of two parts as one: the entries of both, the names that lists have. Raises
    ``RuntimeError`` where they have different numbers for one thing."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        both = {**other, **one}
        return {k: _united(one[k], other[k], k) if k in one and k in other else both[k] for k in both}
    if isinstance(one, list) and isinstance(other, list):
        if all(isinstance(each, str) for each in (*one, *other)):
            return list(dict.fromkeys([*one, *other]))
        if len(one) == len(other):
            return [_united(*pair, key) for pair in zip(one, other, strict=True)]
    if one != other:
        raise RuntimeError(
            f"state of '{key}': expected the same on all parts of the model, got {one} and "
            f"{other}. Give their optimizers the same param groups and settings."
        )
    return one


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _as_before(live: Any, saved: Any) -> Any:
    if isinstance(live, torch.Tensor):
        return live.fill_(saved)
    return tuple(saved) if isinstance(live, tuple) else saved
