"""What a checkpoint needs from the object whose state it saves: the engine, seen through a protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

MASTER = "master"
BUFFER = "buffer"


@runtime_checkable
class StoredValues(Protocol):
    """``numel`` elements of one dtype that live outside memory, on NVMe for example.

    A save reads and a load writes ranges of about a MiB, one after another and in any order. A range begins
    and ends at any element; a write leaves every element outside its range as it was, or, where elements
    share the scale of a quantized block, within the rounding of that block.
    """

    @property
    def numel(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, begin: int, end: int) -> torch.Tensor:
        """A copy of elements [begin, end): 1-D, contiguous. Any exception if they cannot be read."""

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Replaces the elements from ``begin`` on by ``values`` (1-D, contiguous, CPU, same dtype).

        The memory of ``values`` is used again once this returns. Any exception if they cannot be written.
        """


class TensorSlice(Protocol):
    """A contiguous slice of one state tensor that this rank owns or needs: the live state, not a copy.

    ``kind``: "master" (the parameter's value, in float32 where master weights exist), "exp_avg" and so on;
    ``name``: the parameter's full name; ``start``: its first element in the parameter's memory order;
    ``tensor``: 1-D contiguous tensor over the slice, on the CPU or a device, or its values in a store.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def start(self) -> int: ...

    @property
    def tensor(self) -> torch.Tensor | StoredValues: ...


class ParameterDescription(Protocol):
    """A parameter as a whole: ``dtype`` is the compute precision's torch name, ``aliases`` its tied names."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def stride(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...

    @property
    def trainable(self) -> bool: ...


class Limits(Protocol):
    """The part of the configuration that a checkpoint reads."""

    @property
    def timeout_seconds(self) -> float: ...


class StateSource(Protocol):
    """A model and its optimizer on one rank of ``group``.

    The slices of all ranks' ``save_slices`` cover each (kind, name) exactly once. ``load_slices`` yields what
    this rank needs filled, with replication all of it. ``scalar_state`` is everything else that a resume
    needs, the same on all ranks; ``load_scalar_state`` takes it, or raises with nothing changed.
    ``finish_load`` runs after every slice is filled and may use collectives.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def config(self) -> Limits: ...

    def parameter_table(self) -> Mapping[str, ParameterDescription]: ...

    def save_slices(self) -> Iterator[TensorSlice]: ...

    def load_slices(self) -> Iterator[TensorSlice]: ...

    def scalar_state(self) -> dict[str, Any]: ...

    def load_scalar_state(self, state: dict[str, Any]) -> None: ...

    def buffers(self) -> Mapping[str, torch.Tensor]: ...

    def finish_load(self) -> None: ...


@runtime_checkable
class LazyStateSource(Protocol):
    """A source whose optimizer makes its state tensors late, in its first step.

    ``prepare_load`` is called before ``load_slices`` with the kinds of state that the checkpoint holds for
    each parameter, so that ``load_slices`` can yield them all.
    """

    def prepare_load(self, kinds: Mapping[str, tuple[str, ...]]) -> None: ...


@runtime_checkable
class SelectiveStateSource(Protocol):
    """A source that leaves some kinds of state in a checkpoint aside, as what only the ranks that wrote it
    could use; asked after :meth:`LazyStateSource.prepare_load`."""

    def leaves(self, kind: str) -> bool: ...


@runtime_checkable
class OptimizerlessStateSource(Protocol):
    """A source that may have no optimizer: while ``trains`` is False a load leaves optimizer state aside."""

    @property
    def trains(self) -> bool: ...
