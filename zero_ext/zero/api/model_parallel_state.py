"""The state of a model whose parts are on several ranks, as one model's: what they save and load together."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from zero_ext.comm import Collectives
from zero_ext.comm.process_group import make_collectives
from zero_ext.config import ZeroConfig
from zero_ext.zero.api.engine_state import EngineState, ParameterInfo, ShardPiece


class PartsState:
    """Implements the checkpoint's ``StateSource`` for all ranks of ``group``, each with its part, ``own``, of
    one model.

    Names are the whole model's; ``whole_names`` are those of parameters that have another one here. Those
    that are saved ``elsewhere``, as several parts have them, are filled in all. :meth:`meet`, a collective of
    all ranks before every save and load, tells each of them what the others have.
    """

    def __init__(
        self,
        own: EngineState,
        group: dist.ProcessGroup,
        whole_names: Mapping[str, str],
        elsewhere: Collection[str],
    ) -> None:
        self._own = own
        self._whole_names, self._elsewhere = dict(whole_names), frozenset(elsewhere)
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
        """Takes in what all ranks have. Raises ``RuntimeError`` where parts do not make one model."""
        own = self._own
        table = {self._whole(name): entry for name, entry in own.parameter_table().items()}
        buffers = {name: (list(each.shape), str(each.dtype)) for name, each in own.buffers().items()}
        told = {"table": table, "scalars": self._renamed(own.scalar_state()), "buffers": buffers}
        parts = [json.loads(text) for text in self._exchanged(json.dumps(told).encode())]
        self._table, self._scalars = {}, {}
        for part in parts:
            for name, entry in part["table"].items():
                self._add(name, ParameterInfo(*map(_hashable, entry)))
            self._scalars = _united(self._scalars, part["scalars"])
        self._buffers = {}
        for rank, part in enumerate(parts):
            for name, (shape, dtype) in part["buffers"].items():
                if name not in self._buffers:
                    self._buffers[name] = self._buffer_from(rank, name, shape, dtype)

    def _add(self, name: str, entry: ParameterInfo) -> None:
        """A parameter; what is tied has all names that any part gives it."""
        known = self._table.get(name, entry)
        if known._replace(aliases=()) != entry._replace(aliases=()):
            raise RuntimeError(
                f"parameter '{name}' is {known} in one part of the model and {entry} in another"
            )
        aliases = tuple(sorted({*known.aliases, *entry.aliases} - {name}))
        self._table[name] = entry._replace(aliases=aliases)

    def _buffer_from(self, rank: int, name: str, shape: list[int], dtype: str) -> torch.Tensor:
        """The live buffer if this rank has it, else a copy of that of ``rank``."""
        live = self._own.buffers().get(name)
        value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="cpu")
        if live is not None:
            value.copy_(live)
        if value.numel():
            self.everyone.broadcast_(value.view(-1).view(torch.uint8), rank, f"buffer '{name}'")
        return value if live is None else live

    def _exchanged(self, own: bytes) -> list[bytes]:
        """What every rank gives, in rank order."""
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

    def _whole(self, name: str) -> str:
        return self._whole_names.get(name, name)

    def _renamed(self, value: Any) -> Any:
        """JSON-like ``value`` with the whole model's names for this part's, among keys and in lists."""
        if isinstance(value, Mapping):
            return {self._whole(name): self._renamed(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._renamed(item) for item in value]
        return self._whole(value) if isinstance(value, str) else value

    def _own_part(self, value: Any) -> Any:
        """Takes back :meth:`_renamed` of all parts' ``value``, without what only others have."""
        here = {self._whole(name): name for name in self._own.parameter_table()}

        def part(item: Any) -> Any:
            if isinstance(item, Mapping):
                return {here.get(k, k): part(v) for k, v in item.items() if k in here or k not in self._table}
            if isinstance(item, list):
                return [
                    part(v) for v in item if not (isinstance(v, str) and v in self._table and v not in here)
                ]
            return here.get(item, item) if isinstance(item, str) else item

        return part(value)

    # -- the source ---------------------------------------------------------------------------------------

    @property
    def config(self) -> ZeroConfig:
        """See :class:`EngineState`."""
        return self._own.config

    @property
    def trains(self) -> bool:
        """See :class:`EngineState`."""
        return self._own.trains

    def parameter_table(self) -> Mapping[str, ParameterInfo]:
        """Every parameter of the model by its first name."""
        return self._table

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The persistent buffers of all parts: live ones here, copies of the others."""
        return self._buffers

    def save_pieces(self) -> Iterator[ShardPiece]:
        """See :class:`EngineState`; each parameter in one of the parts that have it."""
        for piece in self._own.save_pieces():
            if piece.name not in self._elsewhere:
                yield piece._replace(name=self._whole(piece.name))

    def load_pieces(self) -> Iterator[ShardPiece]:
        """See :class:`EngineState`."""
        for piece in self._own.load_pieces():
            yield piece._replace(name=self._whole(piece.name))

    def scalar_state(self) -> dict[str, Any]:
        """See :class:`EngineState`: of all parts."""
        return self._scalars

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """See :class:`EngineState`."""
        self._own.load_scalar_state(self._own_part(state))

    def prepare_load(self, kinds: Mapping[str, tuple[str, ...]]) -> None:
        """See :class:`EngineState`."""
        here = {self._whole(name): name for name in self._own.parameter_table()}
        self._own.prepare_load({here[name]: each for name, each in kinds.items() if name in here})

    def leaves(self, kind: str) -> bool:
        """See :class:`EngineState`."""
        return self._own.leaves(kind)

    def abandon_load(self) -> None:
        """See :class:`EngineState`."""
        self._own.abandon_load()

    def finish_load(self) -> None:
        """See :class:`EngineState`."""
        self._own.finish_load()


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
            f"the parts of the model on different ranks have different values of '{key}': {one} and {other}; "
            "give their optimizers the same param groups and settings"
        )
    return one
