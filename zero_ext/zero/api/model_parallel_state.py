"""The state of a model with slices on several ranks, as that of one model, to save and load."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from zero_ext.comm import Collectives
from zero_ext.comm.process_group import make_collectives
from zero_ext.config import ZeroConfig
from zero_ext.zero.api.engine_state import EngineState, ParameterInfo, StateSlice


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
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._everyone: Collectives | None = None
        self._table: dict[str, ParameterInfo] = {}
        self._scalars: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    # -- what the ranks tell each other -------------------------------------------------------------------

    @property
    def everyone(self) -> Collectives:
        """The collectives of all ranks; made by all of them together at first use."""
        if self._everyone is None:
            self._everyone = make_collectives(self.group, self.config.timeout_seconds)
        return self._everyone

    def meet(self) -> None:
        """Take in what all ranks have. Raises ``RuntimeError`` where parts do not make one model."""
        own = self.own
        table = {self._full_name(name): entry for name, entry in own.parameter_table().items()}
        buffers = {name: (list(each.shape), str(each.dtype)) for name, each in own.buffers().items()}
        message = {"table": table, "scalars": self._renamed(own.scalar_state()), "buffers": buffers}
        states = [json.loads(text) for text in self._exchanged(json.dumps(message).encode())]
        self._table, self._scalars = {}, {}
        for stage_state in states:
            for name, entry in stage_state["table"].items():
                self._add(name, ParameterInfo(*map(_hashable, entry)))
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

    def _exchanged(self, own: bytes) -> list[bytes]:
        """Return what every rank gives, in rank order."""
        ranks = self.world_size
        lengths = torch.zeros(ranks, dtype=torch.int64, device="cpu")
        lengths[self.rank] = len(own)
        lengths = self.everyone.sum_(lengths, "lengths of the parts' tables")
        longest = int(lengths.max())
        flat = torch.zeros(ranks, longest, dtype=torch.uint8, device="cpu")
        flat[self.rank, : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self.everyone.gather(flat.view(-1), flat[self.rank], "scalars", "the parts' tables").wait()
        return [bytes(row[:length].tolist()) for row, length in zip(flat, lengths.tolist(), strict=True)]

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
    def config(self) -> ZeroConfig:
        """See :class:`EngineState`."""
        return self.own.config

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

    def leaves(self, kind: str) -> bool:
        """See :class:`EngineState`."""
        return self.own.leaves(kind)

    def abandon_load(self) -> None:
        """See :class:`EngineState`."""
        self.own.abandon_load()

    def finish_load(self) -> None:
        """See :class:`EngineState`."""
        self.own.finish_load()


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


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
