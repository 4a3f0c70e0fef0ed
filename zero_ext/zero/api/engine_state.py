"""The engine's state as checkpoints see it: 1-D slices of live memory, and JSON-able scalars."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from zero_ext.config import ZeroConfig
from zero_ext.offload import Values, count, subrange_of
from zero_ext.optim.elementwise_check import resumes_from
from zero_ext.zero.construction.module_buffers import persistent_buffers
from zero_ext.zero.step.update_schedule import Ownership
from zero_ext.zero.units.dtensor_local import is_split
from zero_ext.zero.units.parameter_marks import packed_tensors
from zero_ext.zero.units.unit import Unit

if TYPE_CHECKING:
    from zero_ext.comm import Collectives
    from zero_ext.zero.engine import Engine


class StateSlice(NamedTuple):
    """A run of one state tensor: ``start`` counts elements in the parameter's memory order."""

    kind: str
    name: str
    start: int
    tensor: Values  # [numel], where it lies on this rank


class ParameterInfo(NamedTuple):
    """A parameter as a whole, the same on all ranks."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...]
    trainable: bool


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
        self.optimizer_class = None if optimizer is None else type(optimizer).__qualname__
        self._undo: Callable[[], None] | None = None  # what a load made that has not changed anything yet

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(self._engine.rank)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self._engine.world_size)

    @property
    def everyone(self) -> Collectives:
        """The collectives of all ranks that save and load together."""
        collectives: Collectives = self._engine.collectives
        return collectives

    @property
    def trains(self) -> bool:
        """Return whether there is an optimizer with state that a checkpoint has to restore."""
        return self._engine.optimizer_step.stepper is not None

    @property
    def config(self) -> ZeroConfig:
        """The engine's configuration."""
        config: ZeroConfig = self._engine.config
        return config

    def parameter_table(self) -> Mapping[str, ParameterInfo]:
        """Return every parameter by its first name."""
        table = {}
        for unit in self._engine.units:
            for spec, parameter in zip(unit.layout.specs, unit.parameters, strict=True):
                dtype = str(spec.dtype).removeprefix("torch.")
                name, *aliases = self._engine.full_tensors.names(self._engine.names[parameter])
                tile_slice = self._engine.full_tensors.tile_slice(spec.name)
                source = spec if tile_slice is None else tile_slice
                shape, stride = source.shape, source.stride
                if is_split(parameter):
                    shape, stride = tuple(parameter.shape), tuple(parameter.stride())
                table[name] = ParameterInfo(shape, stride, dtype, tuple(aliases), parameter.requires_grad)
        return table

    def save_slices(self) -> Iterator[StateSlice]:
        """Yield what this rank saves: exactly its shard range of every unit, unless it is a replica of an
        earlier rank's.
        """
        self._engine.follow_writes()
        if self._engine.collectives.replicas is not None and self._engine.collectives.replicas.rank:
            return
        for state_slice, unit, begin in self._slices():
            first, last = unit.layout.shard_range(unit.collectives.rank)
            low, high = max(begin, first), min(begin + count(state_slice.tensor), last)
            if low < high:
                values = subrange_of(state_slice.tensor, low - begin, high - begin)
                yield from self._of_full_tensors(
                    StateSlice(state_slice.kind, state_slice.name, state_slice.start + low - begin, values)
                )

        yield from self._auxiliary_slices(saves=True)

    def load_slices(self) -> Iterator[StateSlice]:
        """Yield what this rank needs filled: everything it owns. Nothing of it is under way any more."""
        self._engine.prefetcher.forget_values()
        for state_slice, _, _ in self._slices():
            if count(state_slice.tensor):
                yield from self._of_full_tensors(state_slice)
        yield from self._auxiliary_slices(saves=False)

    def _auxiliary_slices(self, saves: bool) -> Iterator[StateSlice]:
        """Yield the auxiliary state of the updates: what is the same on all ranks is shared
        out over them where it is saved.
        """
        updates = self._engine.updates
        for auxiliary in updates.auxiliary_state():
            layout = self._engine.masters[auxiliary.number].unit.layout
            if saves and auxiliary.ownership is Ownership.SHARED:
                begin, end = layout.shard_range(self.rank)
                auxiliary = auxiliary._replace(begin=begin, values=auxiliary.values[begin:end])
            for name, start, values in auxiliary.by_parameter(layout):
                yield StateSlice(auxiliary.kind, name, start, values)

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
            rank, sharded = unit.collectives.rank, unit.placement.params
            begin, end = unit.layout.shard_range(rank) if sharded else (0, unit.layout.numel)
            storage = unit.storage if unit.placement.params else engine.tiers.wrap_memory(unit.flat)
            for segment in unit.layout.segments(begin, end):
                values = storage.view(segment.begin, segment.end)
                state_slice = StateSlice("master", segment.name, segment.start, values)
                yield state_slice, unit, begin + segment.begin
        stepper = engine.optimizer_step.stepper
        for number, master in enumerate(engine.masters):
            for segment in master.owned.values():
                values = master.values_of(segment)
                state_slice = StateSlice("master", segment.name, segment.start, values)
                yield state_slice, master.unit, master.begin + segment.begin
            if stepper is not None:
                for kind, segment, values in stepper.values(number):
                    yield (
                        StateSlice(kind, segment.name, segment.start, values),
                        master.unit,
                        master.begin + segment.begin,
                    )

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
        step.scaler.load_state_dict(state["loss_scaler"])
        # From here on the load uses what ``prepare_load`` made, so nothing may remove it any more.
        self._undo = None
        if stepper is not None:
            stepper.load_scalars(engine.full_tensors.to_tiles(state["optimizer"]))
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
                "one that was saved without. Load its weights by zero_ext.load_safetensors after "
                "zero-ext export, or prepare without an optimizer."
            )
        if not resumes_from(own["optimizer_class"], state["optimizer_class"]):
            raise ValueError(
                f"checkpoint: expected state of {own['optimizer_class']}, got that of "
                f"{state['optimizer_class']}. Prepare with the optimizer that it was saved with."
            )
        same = state["optimizer_class"] == own["optimizer_class"]
        if same and state["optimizer"].keys() != own["optimizer"].keys():
            raise ValueError(
                f"checkpoint: expected state of {own['optimizer_class']} as this model has it, got "
                "another form. Give the optimizer the settings that it was saved with, such as "
                "amsgrad."
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
            tiles = self._engine.full_tensors.to_tiles(kinds)
            undo = step.stepper.make_state(tiles), step.updates.prepare_auxiliary_state(tiles)

            def undo_all() -> None:
                for each in undo:
                    each()

            self._undo = undo_all

    def leaves(self, kind: str) -> bool:
        """Return whether state of this kind in a checkpoint has no place here and is left aside."""
        return self._engine.updates.leaves(kind)

    def abandon_load(self) -> None:
        """Undo :meth:`prepare_load` after a load that was refused."""
        if self._undo is not None:
            self._undo()
        self._undo = None

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the module's persistent buffers."""
        return persistent_buffers(self._engine.model)

    def finish_load(self) -> None:
        """Parameters follow the loaded master weights, on all ranks."""
        self._engine.optimizer_step.forget_damage()
        self._engine.clear_gradients()
        self._engine.refresh_parameters()
        self._engine.updates.restore()


class TrainedState(EngineState):
    """The same without the parameters that nothing trains, as the base model under adapters, and without
    what is attached to them: a checkpoint of it is loaded into a model that has their values already."""

    def parameter_table(self) -> Mapping[str, ParameterInfo]:
        """Return every trained parameter by its first name."""
        engine = self._engine
        trained = {
            engine.full_tensors.name(spec.name)
            for master in engine.masters
            for spec in master.unit.layout.specs
        }
        return {name: entry for name, entry in super().parameter_table().items() if name in trained}

    def _slices(self) -> Iterator[tuple[StateSlice, Unit, int]]:
        trained = {master.unit for master in self._engine.masters}
        return (each for each in super()._slices() if each[1] in trained)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the module's persistent buffers."""
        attached = packed_tensors(self._engine.model)
        return {name: buffer for name, buffer in super().buffers().items() if name not in attached}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _as_before(live: Any, saved: Any) -> Any:
    if isinstance(live, torch.Tensor):
        return live.fill_(saved)
    return tuple(saved) if isinstance(live, tuple) else saved
