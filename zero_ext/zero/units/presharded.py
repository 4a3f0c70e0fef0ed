"""Parameters that were sharded at birth, one by one, before any unit exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config import Tier
from zero_ext.offload import STORAGE_ALIGNMENT, Arrival, Birthplace, ShardHome, allocate
from zero_ext.zero.units.collective_errors import refuse_different_writes, together
from zero_ext.zero.units.deferred_errors import Postponed
from zero_ext.zero.units.dtensor_local import local_part, point_at
from zero_ext.zero.units.flat_layout import (
    ALIGNMENT_BYTES,
    FlatLayout,
    ParameterSpec,
    in_memory_order,
    memory_order,
)
from zero_ext.zero.units.placeholder import are_blank, placeholder
from zero_ext.zero.units.plain_torch import plain_torch
from zero_ext.zero.units.quantized_params import refuse_packed
from zero_ext.zero.units.released_params import ParameterFacts, release_to, restore_class

ATTRIBUTE = "_zero_ext_born_shard"
GUARDED = ("__reduce_ex__", "share_memory_")
# What is on its way at a time between the ranks, and between memory and storage, all ranks' parts together.
PIECE_BYTES = 16 << 20


class Lost:
    """The home of a shard that could not be stored."""

    def __init__(self, tier: Tier, reason: Exception | None) -> None:
        self.tier = tier
        self._reason = str(reason)

    def fetch(self, into: torch.Tensor, begin: int = 0) -> Arrival:
        """Raises ``RuntimeError``."""
        raise RuntimeError(f"a parameter's shard could not be stored when it was made: {self._reason}")


class BornShard:
    """What this rank has of one parameter, the elements from ``start`` on of a tensor that was cut at birth:
    ``home`` keeps its shard of that tensor, ``cut`` says how all of it lies.

    ``spec`` has shape, stride and dtype of the parameter, ``collectives`` are of the ranks that hold it.
    Parameters that are parts of one tensor share its home, which is freed with the last of them. Of an engine
    that was closed the tensor is a unit, and ``ranks`` are those that have the same value; None before there
    was one. ``device`` is where the parameter seems to be.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        cut: FlatLayout,
        home: ShardHome | Lost,
        collectives: Collectives,
        start: int = 0,
        ranks: tuple[int, ...] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = spec
        self.cut = cut
        self.home = home
        self.collectives = collectives
        self.ranks = ranks
        self._start = start
        self._memory = placeholder((), spec.dtype, device)

    @property
    def placeholder(self) -> torch.Tensor:
        """What the parameter's data is meanwhile: one NaN (0 for integers) in the true shape."""
        return self._memory.expand(self.spec.shape)

    def replaced_in(self, parameter: nn.Parameter) -> bool:
        """Whether somebody gave ``parameter`` a value while only shards of it existed."""
        if not self.spec.numel:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return (
                parameter.dtype != self._memory.dtype
                or local_part(parameter).data_ptr() != self._memory.data_ptr()
                or not bool(are_blank(self._memory).all())
            )

    def part(self, start: int, shape: tuple[int, ...]) -> BornShard:
        """The elements from ``start`` on, in memory order, as a parameter of ``shape``, row-major."""
        stride = torch.empty(shape, device="meta").stride()
        spec = replace(self.spec, shape=shape, stride=stride)
        place = (self._start + start, self.ranks, self._memory.device)
        return BornShard(spec, self.cut, self.home, self.collectives, *place)

    def pieces(self, collectives: Collectives, failures: Postponed) -> Iterator[tuple[int, torch.Tensor]]:
        """The parameter's elements in memory order a piece at a time, each with its first element's number;
        a collective. A piece is valid until the next one.

        They come in no order, and not at all once something failed on this rank, which ``failures`` tells.
        ``collectives`` count for parameters from :class:`zero_ext.Init`.
        """
        collectives = self._over(collectives)
        self._check_world(collectives)
        ranges = [self._part_of(rank) for rank in range(collectives.world_size)]
        # All ranks read whole blocks, from one place in their shards, as many as the longest part needs.
        grain = STORAGE_ALIGNMENT // self.spec.dtype.itemsize
        begin = min((low // grain * grain for low, high in ranges if low < high), default=0)
        end = max(high for _, high in ranges)
        step = max(PIECE_BYTES // STORAGE_ALIGNMENT // collectives.world_size, 1) * grain
        step = min(step, max(self.cut.shard_numel - begin, 1))
        room = allocate(step * collectives.world_size, self.spec.dtype)
        for first in range(begin, end, step):
            last = min(first + step, self.cut.shard_numel)
            flat = room[: (last - first) * collectives.world_size]
            parts = flat.view(collectives.world_size, last - first)
            failures.attempt(partial(self._fetch, parts[collectives.rank], first))
            collectives.gather(
                flat, parts[collectives.rank], "gather_born", "gather of a parameter from its shards"
            ).wait()
            for rank, (low, high) in enumerate(ranges):
                low, high = max(low, first), min(high, last)
                if low < high and not failures:
                    number = rank * self.cut.shard_numel + low - self._start
                    yield number, parts[rank, low - first : high - first]

    def whole(self, collectives: Collectives | None = None) -> torch.Tensor:
        """The parameter's value, in memory of its own; a collective. Raises ``RuntimeError`` on all ranks if
        one cannot read its shard."""
        collectives = self._over(collectives or self.collectives)
        failures = Postponed()
        flat = torch.empty(self.spec.numel, dtype=self.spec.dtype, device="cpu")
        for start, values in self.pieces(collectives, failures):
            flat[start : start + values.numel()].copy_(values)
        if self.home.tier == "nvme":
            failures.settle(collectives, "reading a parameter from its shards", REBUILD)
        return flat.as_strided(self.spec.shape, self.spec.stride, 0).to(self._memory.device)

    def replace_own(self, flat: torch.Tensor) -> None:
        """The shard becomes this rank's part of ``flat``, the parameter's elements in memory order. Raises
        ``RuntimeError`` where it cannot be stored."""
        if isinstance(self.home, Lost):
            self.home.fetch(flat)
            return
        begin, end = self.cut.shard_range(self.collectives.rank)
        _fill(self.home, flat[begin:end])

    def detach_from(self, parameter: nn.Parameter) -> None:
        """Leaves ``parameter`` to itself, until :func:`set_born` gives it back; the refusal of pickling
        stays."""
        restore_class(parameter)
        vars(parameter).pop(ATTRIBUTE, None)

    def _over(self, collectives: Collectives) -> Collectives:
        return collectives if self.ranks is None else self.collectives

    def _fetch(self, into: torch.Tensor, begin: int) -> None:
        self.home.fetch(into, begin).wait()

    def _part_of(self, rank: int) -> tuple[int, int]:
        """The parameter's elements within the shard of ``rank``, counted there; empty if there are none."""
        begin, end = self.cut.shard_range(rank)
        low, high = max(begin, self._start), min(end, self._start + self.spec.numel)
        return (low - begin, high - begin) if low < high else (0, 0)

    def _check_world(self, collectives: Collectives) -> None:
        if self.cut.world_size != collectives.world_size:
            raise RuntimeError(
                f"parameter of shape {self.spec.shape} was sharded by zero_ext.Init over "
                f"{self.cut.world_size} ranks, and is now prepared over {collectives.world_size}; pass both "
                "the same process group"
            )


def born_shard(parameter: nn.Parameter) -> BornShard | None:
    """The shard of a parameter made by ``zero_ext.Init``; None for one that is whole."""
    found = getattr(parameter, ATTRIBUTE, None)
    return found if isinstance(found, BornShard) else None


def shard_at_birth(
    parameter: nn.Parameter, collectives: Collectives, place: Birthplace, failures: Postponed
) -> None:
    """Keeps this rank's shard of ``parameter`` in ``place`` and makes its data a NaN placeholder of the same
    shape. A shard that cannot be stored, which ``failures`` tells, is lost."""
    spec = ParameterSpec("", tuple(parameter.shape), memory_order(parameter), parameter.dtype)
    alignment = STORAGE_ALIGNMENT if place.tier == "nvme" else ALIGNMENT_BYTES
    cut = FlatLayout.build([spec], collectives.world_size, alignment)
    begin, end = cut.shard_range(collectives.rank)
    homes: list[ShardHome] = []

    def keep() -> None:
        home = place.home(end - begin, spec.dtype)
        _fill(home, in_memory_order(parameter.data, spec)[begin:end])
        homes.append(home)

    failures.attempt(keep)
    home = homes[0] if homes else Lost(place.tier, failures.error)
    _mark_born(parameter, BornShard(spec, cut, home, collectives))


def _fill(home: ShardHome, own: torch.Tensor) -> None:
    step = PIECE_BYTES // own.dtype.itemsize
    for first in range(0, own.numel(), step):
        home.store(first, own[first : first + step], "device").let_go()


def _mark_born(parameter: nn.Parameter, born: BornShard) -> None:
    setattr(parameter, ATTRIBUTE, born)
    restore_class(parameter)
    point_at(parameter, born.placeholder)


def set_born(parameter: nn.Parameter, born: BornShard) -> None:
    """Makes ``born`` all that there is of ``parameter``; its value is fetched when it is used."""
    _mark_born(parameter, born)
    release_to(parameter, _BornAccess(born))


def leave_init(parameter: nn.Parameter) -> None:
    """Begin to fetch the value of ``parameter``, if it is sharded, when it is used; until then
    :class:`zero_ext.Init` sees to that."""
    born = born_shard(parameter)
    if born is not None:
        release_to(parameter, _BornAccess(born))
        refuse_pickling(parameter)


class _BornAccess:
    """Reads and writes a parameter of :class:`zero_ext.Init` before ``prepare``; see :class:`Access`."""

    def __init__(self, born: BornShard) -> None:
        self._born = born

    def facts(self, parameter: nn.Parameter) -> ParameterFacts:
        """See :class:`~zero_ext.zero.units.released_params.Access`."""
        spec = self._born.spec
        return ParameterFacts(spec.name or f"of shape {spec.shape} from zero_ext.Init", spec.stride)

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """See :class:`~zero_ext.zero.units.released_params.Access`."""
        refuse_packed(parameter, self.facts(parameter).name)
        with plain_torch():
            return self._born.whole()

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """See :class:`~zero_ext.zero.units.released_params.Access`."""
        born = self._born
        with plain_torch():
            flat = in_memory_order(value, born.spec)
            refuse_different_writes(born.collectives, self.facts(parameter).name, flat)
            together(
                born.collectives, lambda: born.replace_own(flat), "a write to a parameter of zero_ext.Init"
            )


def refuse_pickling(parameter: nn.Parameter) -> None:
    """Makes pickling and ``share_memory_`` of a parameter sharded at birth an error."""

    def refuse(*_: object) -> Any:
        raise RuntimeError(
            "a parameter from zero_ext.Init cannot be pickled: this rank holds only a part of it. Pickle "
            "copy.deepcopy(parameter), made on all ranks."
        )

    for name in GUARDED:
        setattr(parameter, name, refuse)


def forget_birth(parameter: nn.Parameter) -> None:
    """Drops the shard and the refusals that came with it."""
    restore_class(parameter)
    for name in (ATTRIBUTE, *GUARDED):
        vars(parameter).pop(name, None)


def full_value(parameter: nn.Parameter, collectives: Collectives) -> torch.Tensor:
    """The whole value of a parameter sharded at birth; a collective. Ends its being born-sharded.

    Raises ``RuntimeError`` on all ranks, with nothing changed, if one cannot read its shard.
    """
    born = born_shard(parameter)
    if born is None:
        raise AssertionError("full_value of a parameter that is whole")
    value = born.whole(collectives)
    forget_birth(parameter)
    return value


REBUILD = "Build the model again."
