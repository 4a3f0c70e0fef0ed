"""The protocol of the object with the state to save, which the engine implements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

MASTER = "master"
BUFFER = "buffer"


@runtime_checkable
class StoredValues(Protocol):
    """Elements of one dtype that are stored outside memory, on NVMe for example.

    A save reads and a load writes ranges of about a MiB, one after another and in any order. A range begins
    and ends at any element. A write leaves every element outside its range as it was, or, where elements
    share the scale of a quantized block, within the rounding of that block.
    """

    @property
    def numel(self) -> int:
        """Number of elements."""

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a copy of elements [begin, end), or raise any exception if they cannot be read.

        Args:
            begin: first element.
            end: end of the range.

        Returns:
            1-D, contiguous.
        """

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Replace the elements from `begin` on, or raise any exception if they cannot be written.

        The memory of `values` is used again once this returns.

        Args:
            begin: first element.
            values: 1-D, contiguous, CPU, same dtype.
        """


class TensorSlice(Protocol):
    """A contiguous slice of one state tensor that this rank owns or needs: the live state, not a copy.

    ``kind``: "master" (the parameter's value, in float32 where master weights exist), "exp_avg" and so on;
    ``name``: the parameter's full name; ``start``: its first element in the parameter's memory order;
    ``tensor``: 1-D contiguous tensor over the slice, on the CPU or a device, or its values in a store;
    ``shape``: None for elements of a tensor with the parameter's shape, else this is all of a state tensor
    with this shape, in row-major order.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def start(self) -> int: ...

    @property
    def tensor(self) -> torch.Tensor | StoredValues: ...

    @property
    def shape(self) -> tuple[int, ...] | None: ...


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
    """A model and its optimizer on one rank of `group`, as a checkpoint sees them.

    The slices of all ranks' `save_slices` cover each (kind, name) exactly once.
    """

    @property
    def rank(self) -> int:
        """Rank of this process in `group`."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that save and load together; None for one rank."""

    @property
    def config(self) -> Limits:
        """Limits that a checkpoint obeys."""

    def parameter_table(self) -> Mapping[str, ParameterDescription]:
        """Return the parameters.

        Returns:
            Descriptions by name.
        """

    def save_slices(self) -> Iterator[TensorSlice]:
        """Return the slices that this rank writes.

        Returns:
            The live state, not copies.
        """

    def load_slices(self) -> Iterator[TensorSlice]:
        """Return the slices that this rank needs filled, with replication all of the state.

        Returns:
            The live state, not copies.
        """

    def scalar_state(self) -> dict[str, Any]:
        """Return everything else that a resume needs, the same on all ranks.

        Returns:
            Values by name.
        """

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """Restore what `scalar_state` returned, or raise with nothing changed.

        Args:
            state: values by name.
        """

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers.

        Returns:
            Tensors by name.
        """

    def finish_load(self, optimizer: bool = True) -> None:
        """Run after every slice is filled; may use collectives.

        Args:
            optimizer: False if only weights and buffers were loaded.
        """


@runtime_checkable
class LazyStateSource(Protocol):
    """A source with an optimizer that makes its state tensors late, in its first step."""

    def prepare_load(self, kinds: Mapping[str, tuple[str, ...]]) -> None:
        """Make the state tensors of a checkpoint, so that `load_slices` can yield them all.

        Args:
            kinds: kinds of state that the checkpoint holds for each parameter.
        """


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
