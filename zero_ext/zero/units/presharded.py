"""Presharded parameters: sharded one by one while the model is built, before any unit exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config.config_errors import clause_of
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import TIERS, Tier
from zero_ext.offload import STORAGE_ALIGNMENT, CopyHandle, InitStorage, ShardStorage, allocate
from zero_ext.zero.units.collective_errors import DeferredError, raise_on_all_ranks, refuse_different_writes
from zero_ext.zero.units.dtensor_local import like_parameter, local_tensor, point_at
from zero_ext.zero.units.flat_layout import (
    FlatLayout,
    ParameterSpec,
    in_memory_order,
    memory_order,
)
from zero_ext.zero.units.parameter_marks import refuse_packed
from zero_ext.zero.units.placeholder import are_blank, placeholder
from zero_ext.zero.units.plain_torch import plain_torch
from zero_ext.zero.units.released_params import ParameterFacts, release_to, restore_class

ATTRIBUTE = "_zero_ext_presharded"
GUARDED = ("__reduce_ex__", "share_memory_")
# Bytes in transfer at a time between the ranks, and between memory and storage, in sum over all ranks.
INIT_CHUNK_BYTES = 16 << 20


class FailedStorage:
    """Stands for the storage of a shard that could not be stored."""

    def __init__(self, tier: Tier, reason: Exception | None) -> None:
        self.tier = tier
        self._reason = str(reason)

    def fetch(self, into: torch.Tensor, begin: int = 0) -> CopyHandle:
        """Raise ``RuntimeError``."""
        raise RuntimeError(
            f"shard of a parameter: it was not stored when it was made: {clause_of(self._reason)}. Fix this, "
            "then construct the model again."
        )


class PreshardedParameter:
    """This rank's shard of one parameter, which is a slice of a flat tensor that was sharded.

    Parameters that are slices of one tensor share its storage, which is freed with the last of them.

    Attributes:
        spec: Shape, stride and dtype of the parameter.
        layout: Layout and shards of the flat tensor.
        storage: Storage of this rank's shard of that tensor.
        collectives: The ranks that have shards.
        replicas: After an engine was closed, the ranks that have the same values; None before there was one.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        layout: FlatLayout,
        storage: ShardStorage | FailedStorage,
        collectives: Collectives,
        start: int = 0,
        replicas: Collectives | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec, self.layout, self.storage, self.collectives = spec, layout, storage, collectives
        self.replicas, self._start = replicas, start
        self._memory = placeholder((), spec.dtype, device)

    @property
    def everyone(self) -> Collectives:
        """The ranks that have the same values."""
        return self.collectives if self.replicas is None else self.replicas

    @property
    def placeholder(self) -> torch.Tensor:
        """The parameter's data while it is sharded: one NaN (0 for integers) in the true shape."""
        return self._memory.expand(self.spec.shape)

    def was_replaced(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` was given a value while only shards of it existed."""
        if not self.spec.numel:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return (
                # Assigned data has another address. A write in place changes the one element that
                # the placeholder is expanded from.
                parameter.dtype != self._memory.dtype
                or local_tensor(parameter).data_ptr() != self._memory.data_ptr()
                or not bool(are_blank(self._memory).all())
            )

    def slice(self, start: int, shape: tuple[int, ...]) -> PreshardedParameter:
        """Return the elements from ``start`` on, in memory order, as a parameter of ``shape``, row-major."""
        stride = torch.empty(shape, device="meta").stride()
        spec = replace(self.spec, shape=shape, stride=stride)
        position = (self._start + start, self.replicas, self._memory.device)
        return PreshardedParameter(spec, self.layout, self.storage, self.collectives, *position)

    def chunks(self, collectives: Collectives, failures: DeferredError) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the parameter's elements in chunks, each with the number of its first element; a collective.

        A chunk is contiguous in memory order and valid until the next one. Chunks come in any order, and no
        more once ``failures`` has an error. ``collectives`` are used for parameters from
        :class:`zero_ext.Init`.
        """
        collectives = self._holders(collectives)
        if self.layout.world_size != collectives.world_size:
            raise RuntimeError(
                f"parameter of shape {self.spec.shape}: expected the {self.layout.world_size} ranks of "
                f"zero_ext.Init in prepare, got {collectives.world_size}. Pass both the same process group."
            )
        ranges = [self._range_in_shard(rank) for rank in range(collectives.world_size)]
        # All ranks read full blocks from the same offset in their shards, as many as the longest range needs.
        grain = STORAGE_ALIGNMENT // self.spec.dtype.itemsize
        begin = min((low // grain * grain for low, high in ranges if low < high), default=0)
        end = max(high for _, high in ranges)
        step = max(INIT_CHUNK_BYTES // STORAGE_ALIGNMENT // collectives.world_size, 1) * grain
        step = min(step, max(self.layout.shard_numel - begin, 1))
        buffer = allocate(step * collectives.world_size, self.spec.dtype)
        for first in range(begin, end, step):
            last = min(first + step, self.layout.shard_numel)
            flat = buffer[: (last - first) * collectives.world_size]
            rows = flat.view(collectives.world_size, last - first)
            # A rank that cannot read still takes part in the gather, for which the others wait. All
            # ranks raise its error later.
            failures.attempt(partial(self._fetch, rows[collectives.rank], first))
            collectives.gather(
                flat, rows[collectives.rank], "gather_presharded", "gather of a parameter from its shards"
            ).wait()
            for rank, (low, high) in enumerate(ranges):
                low, high = max(low, first), min(high, last)
                if low < high and not failures:
                    number = rank * self.layout.shard_numel + low - self._start
                    yield number, rows[rank, low - first : high - first]

    def gather(self, collectives: Collectives | None = None) -> torch.Tensor:
        """Return the parameter's full value, in memory of its own; a collective. Raises ``RuntimeError`` on
        all ranks if one cannot read its shard."""
        collectives = self._holders(collectives or self.collectives)
        failures = DeferredError()
        flat = torch.empty(self.spec.numel, dtype=self.spec.dtype, device="cpu")
        for start, values in self.chunks(collectives, failures):
            flat[start : start + values.numel()].copy_(values)
        failures.raise_deferred(collectives, "reading a parameter from its shards", REBUILD)
        return flat.as_strided(self.spec.shape, self.spec.stride, 0).to(self._memory.device)

    def store_from_full(self, flat: torch.Tensor) -> None:
        """Store this rank's slice of ``flat``, the parameter's elements in memory order, as the shard. Raises
        ``RuntimeError`` if it cannot be stored."""
        if isinstance(self.storage, FailedStorage):
            self.storage.fetch(flat)
            return
        rank = self.collectives.rank
        low, high = self._range_in_shard(rank)
        first = rank * self.layout.shard_numel + low - self._start
        _fill(self.storage, low, flat[first : first + high - low])

    # The access of the parameter, see ``released_params.Access``, before ``prepare`` and after a close.

    def facts(self, parameter: nn.Parameter) -> ParameterFacts:
        name = self.spec.name or f"of shape {self.spec.shape} from zero_ext.Init"
        return ParameterFacts(name, self.spec.stride)

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        refuse_packed(parameter, self.facts(parameter).name)
        with plain_torch():
            return like_parameter(parameter, self.gather())

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        with plain_torch():
            flat = in_memory_order(local_tensor(value), self.spec)
            refuse_different_writes(self.everyone, self.facts(parameter).name, flat)
            what = "a write to a parameter of zero_ext.Init"
            raise_on_all_ranks(self.everyone, lambda: self.store_from_full(flat), what)

    def detach_from(self, parameter: nn.Parameter) -> None:
        """Make ``parameter`` an ordinary one until :func:`set_presharded`. Pickling stays refused."""
        restore_class(parameter)
        vars(parameter).pop(ATTRIBUTE, None)

    def _holders(self, collectives: Collectives) -> Collectives:
        return collectives if self.replicas is None else self.collectives

    def _fetch(self, into: torch.Tensor, begin: int) -> None:
        self.storage.fetch(into, begin).wait()

    def _range_in_shard(self, rank: int) -> tuple[int, int]:
        """Return the range of the parameter's elements in the shard of ``rank``, which may be empty."""
        begin, end = self.layout.shard_range(rank)
        low, high = max(begin, self._start), min(end, self._start + self.spec.numel)
        return (low - begin, high - begin) if low < high else (0, 0)


def presharded_of(parameter: nn.Parameter) -> PreshardedParameter | None:
    """Return the shard of a parameter made by ``zero_ext.Init``; None for an ordinary one."""
    found = getattr(parameter, ATTRIBUTE, None)
    return found if isinstance(found, PreshardedParameter) else None


def shard_on_init(
    parameter: nn.Parameter, collectives: Collectives, storage: InitStorage, failures: DeferredError
) -> None:
    """Store this rank's shard of ``parameter`` and make its data a NaN placeholder of the same shape. If it
    cannot be stored, the error goes to ``failures``."""
    spec = ParameterSpec("", tuple(parameter.shape), memory_order(parameter), parameter.dtype)
    alignment = TIERS[storage.tier].alignment
    layout = FlatLayout.build([spec], collectives.world_size, alignment)
    begin, end = layout.shard_range(collectives.rank)
    stored: list[ShardStorage] = []

    def store() -> None:
        shard = storage.allocate(end - begin, spec.dtype)
        _fill(shard, 0, in_memory_order(parameter.data, spec)[begin:end])
        stored.append(shard)

    failures.attempt(store)
    shard = stored[0] if stored else FailedStorage(storage.tier, failures.error)
    _mark_presharded(parameter, PreshardedParameter(spec, layout, shard, collectives))


def _fill(storage: ShardStorage, begin: int, own: torch.Tensor) -> None:
    step = INIT_CHUNK_BYTES // own.dtype.itemsize
    for first in range(0, own.numel(), step):
        storage.store(begin + first, own[first : first + step], "device").wait_source()


def _mark_presharded(parameter: nn.Parameter, presharded: PreshardedParameter) -> None:
    setattr(parameter, ATTRIBUTE, presharded)
    restore_class(parameter)
    point_at(parameter, presharded.placeholder)


def set_presharded(parameter: nn.Parameter, presharded: PreshardedParameter) -> None:
    """Make ``parameter`` a presharded one. Its value is gathered when it is used."""
    _mark_presharded(parameter, presharded)
    release_to(parameter, presharded)


def leave_init(parameter: nn.Parameter) -> None:
    """Gather the value of ``parameter`` whenever it is used, if it is presharded. Inside the block of
    :class:`zero_ext.Init` that class does so."""
    presharded = presharded_of(parameter)
    if presharded is not None:
        release_to(parameter, presharded)
        refuse_pickling(parameter)


def refuse_pickling(parameter: nn.Parameter) -> None:
    """Make pickling and ``share_memory_`` of a presharded parameter an error."""

    def refuse(*_: object) -> Any:
        raise RuntimeError(
            "a parameter from zero_ext.Init cannot be pickled: this rank holds only a shard of it. Pickle "
            "copy.deepcopy(parameter), made on all ranks."
        )

    for name in GUARDED:
        setattr(parameter, name, refuse)


def clear_presharded(parameter: nn.Parameter) -> None:
    """Remove the shard and the refusals of :func:`refuse_pickling`."""
    restore_class(parameter)
    for name in (ATTRIBUTE, *GUARDED):
        vars(parameter).pop(name, None)


def unshard_presharded(parameter: nn.Parameter, collectives: Collectives) -> torch.Tensor:
    """Return the full value of a presharded parameter, which becomes an ordinary one; a collective. Raises
    ``RuntimeError`` on all ranks, with nothing changed, if one cannot read its shard."""
    presharded = presharded_of(parameter)
    if presharded is None:
        raise zero_ext_bug("unshard_presharded of an ordinary parameter")
    value = presharded.gather(collectives)
    clear_presharded(parameter)
    return value


REBUILD = "Build the model again."
