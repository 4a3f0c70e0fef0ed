"""The protocol of optimizers that work on flat shards, what most of them share, the flag that they raise."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch

from zero_ext import ops
from zero_ext.config.config_errors import show
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import TIERS, Tier, is_stored
from zero_ext.offload import (
    MASTER,
    NvmeState,
    OptimizerStateStorage,
    ShardStorage,
    StateChunk,
    StepStaging,
    StorageRange,
    Values,
    put,
    visit_chunks,
)
from zero_ext.offload.step_buffers import StateChunkBuffers

MomentsDtype = torch.dtype | Literal["8bit"]
ElementRanges = Sequence[tuple[int, int]]  # first element, and the one after the last; ascending and disjoint


class NonFiniteFlag:
    """A flag that is raised when an update makes a master weight or moment NaN or infinite.

    There is one flag for each device that has state, so that an update never waits for another device.
    """

    def __init__(self) -> None:
        self._flags: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the flag, int32 [1], that kernels on ``device`` raise."""
        if device not in self._flags:
            self._flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._flags[device]

    def check(self, values: torch.Tensor) -> None:
        """Raise the flag if ``values`` [n] hold NaN or infinity. An accelerator is not waited for."""
        ops.flag_non_finite_(values, self.on(values.device))

    def is_raised_on(self, device: torch.device) -> bool:
        """Return whether it was raised by kernels on ``device``, which is waited for."""
        return device in self._flags and bool(self._flags[device])

    def is_raised(self) -> bool:
        """Return whether it was raised; every device that has state is waited for."""
        return any(map(bool, self._flags.values()))

    def lower(self) -> None:
        """Lower the flag."""
        for flag in self._flags.values():
            flag.zero_()


def flag_on(flag: NonFiniteFlag | None, device: torch.device) -> torch.Tensor | None:
    """Return what an op takes as its flag on ``device``, None where it is not read."""
    return None if flag is None else flag.on(device)


@dataclass(frozen=True)
class Segment:
    """One parameter's elements inside a range of a unit's flat buffer; possibly none of them."""

    name: str  # the parameter's full name
    start: int  # first element, counted in the parameter's memory order
    begin: int  # the same element, counted from the start of the range
    numel: int
    group: int = -1  # index of its param group, -1 outside an optimizer
    shape: tuple[int, ...] = ()  # of the full tensor, where an optimizer steps it
    stride: tuple[int, ...] = ()  # of the parameter

    @property
    def end(self) -> int:
        """The element after the last one, counted from the start of the range."""
        return self.begin + self.numel


@dataclass(eq=False)
class OwnedRange:
    """The part of a unit that a rank's optimizer owns: state [n] that begins as fp32 master weights, the
    parameters [n] that a step writes or None where it writes none, and the segments that it steps.
    """

    state: OptimizerStateStorage
    output: ShardStorage | None
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class Update:
    """A range to be stepped and its gradient [n], where it is stored.

    Of the elements only those in ``ranges`` are stepped, all if it is None. Steppers of optimizers without
    :attr:`OptimizerTraits.skips_experts` get None.
    """

    index: int
    gradient: ShardStorage
    ranges: ElementRanges | None = None


class Total(Protocol):
    """The sum over all ranks of int64 or float64 values in host memory that a call finds on each. What all
    ranks hold alike counts once, and without values nothing is summed. A collective that fails on all of them
    if the call fails on one, where it uses storage or is ``fallible``."""

    def __call__(self, own: Callable[[], torch.Tensor], fallible: bool = False) -> torch.Tensor:
        """Return the sum of what ``own`` returns."""


class UnshardedState(NamedTuple):
    """A state tensor that is not sharded, with a shape of its own, such as statistics of rows and columns.

    A checkpoint stores it once, by name. A load fills ``tensor`` in place, on every rank that yields it.
    """

    kind: str  # not one of the ranges' own
    name: str  # the parameter's full name
    tensor: torch.Tensor  # live, of any shape, strides and dtype
    # Equal on all ranks: each yields all such tensors, in the same order. Else it is on one rank alone.
    replicated: bool = False

    def flat(self) -> Values:
        """Return the live elements in row-major order."""
        tensor = self.tensor
        if tensor.is_contiguous():
            return tensor.view(-1)

        def write(begin: int, values: torch.Tensor) -> None:
            positions = torch.arange(begin, begin + values.numel(), device=tensor.device)
            tensor.put_(positions, values.to(tensor.device))

        return StorageRange(
            0,
            tensor.numel(),
            tensor.dtype,
            lambda begin, end: tensor.flatten()[begin:end],
            write,
        )


class PendingTransform(Protocol):
    """Tensors on their way to the ranks that have them whole, or back."""

    def apply(self, transform: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
        """Wait for those of this rank, and replace them by what ``transform`` makes of them by name."""

    def send_results(self) -> None:
        """Begin to send them back; a collective."""

    def finish(self) -> None:
        """Wait for the results, which replace the values."""

    def full_tensors(self) -> Mapping[str, torch.Tensor]:
        """Wait for them, and return those that this rank owns, by name. Nothing is sent back."""


class TensorExchange(Protocol):
    """Makes tensors whole at one rank each, in the middle of a step on shards."""

    @property
    def in_host_memory(self) -> bool:
        """Return whether the values have to be in host memory."""

    def related(self, owned: OwnedRange) -> Collection[OwnedRange]:
        """Return the ranges that have to be in ``values`` with ``owned``."""

    def start(self, values: Mapping[OwnedRange, torch.Tensor], used: Collection[str]) -> PendingTransform:
        """See :class:`zero_ext.zero.step.owner_exchange.OwnerExchange`."""

    def dealt_by(self, cost: Callable[[Sequence[int]], int]) -> TensorExchange:
        """Return the same with owners by another cost of a tensor's shape."""

    def own_tensors(self) -> Mapping[str, bool]:
        """Return the tensors that this rank owns, and whether all other ranks own them, too."""


class Stepper(Protocol):
    """Updates owned ranges. `index` counts the ranges given at construction.

    `reads_scale_on_device` says that `step` takes a `scale` in the device's memory, and changes
    nothing but its scalars where that is not finite. Else `scale` is finite and in host memory.
    """

    @property
    def reads_scale_on_device(self) -> bool:
        """See above."""

    def is_collective(self, index: int) -> bool:
        """Return whether a step on this range is a collective, which all ranks have to make at one time."""

    def read_settings(self) -> None:
        """Read the param groups' settings for the steps until the next call, where that takes a check or a
        wait. Raise ``ValueError``, before anything is stepped, for settings that have changed to what the
        optimizer refuses.
        """

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """One optimizer step on some ranges: gradients times `scale` (0-d float32), for the parameters
        named in `used` only; the others keep value and state, as torch's do without a gradient.

        Yields the index of a range as soon as its parameters are in place.
        """

    def watch(self, flag: NonFiniteFlag) -> None:
        """Raise `flag` from now on in every step that makes a master weight or moment NaN or infinite."""

    def snapshot(self, index: int) -> None:
        """Keep what a step on one range changes, so that it can be rolled back.

        Parameters that follow the master weights are left out. Every such step ends by `commit` or
        `rollback`.
        """

    def commit(self, index: int) -> None:
        """Accept the step on a range since `snapshot`. Do nothing if there is none."""

    def rollback(self, index: int) -> None:
        """Restore state and scalars of a range as they were at `snapshot`, bit for bit."""

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """State of a range besides the master weights, by segment: torch's name for it, segment, its values
        where they are stored."""

    def unsharded_values(self) -> Iterator[UnshardedState]:
        """State that this rank keeps besides the ranges, as tensors with shapes of their own.

        A load calls `make_state` first. Then each rank yields all that it keeps, with the shapes and dtypes
        that it must have.
        """

    def scalars(self) -> dict[str, Any]:
        """JSON-able per-parameter state, equal on all ranks."""

    def check_scalars(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError``, with the parameter's name, if `state` is not what `load_scalars` restores."""

    def load_scalars(self, state: dict[str, Any]) -> None:
        """Restore `scalars`."""

    def make_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """Make state tensors exist that are created late, for the kinds named for each parameter, as far as
        this optimizer has such a kind. Returns what undoes it."""

    def state_bytes(self) -> Mapping[Tier, int]:
        """Return bytes of memory of the state that this stepper keeps besides the ranges' own, by their
        tier.
        """


@dataclass(frozen=True)
class StepperInputs:
    """The arguments of all steppers: the user's optimizer, the ranges to step, and what the engine has."""

    optimizer: Any
    ranges: Sequence[OwnedRange]
    staging: StepStaging
    moments_dtype: MomentsDtype = torch.float32
    total: Total | None = None
    exchange: TensorExchange | None = None


class RangeStepper:
    """A :class:`Stepper` with all its state in the ranges, from the start. Hyper-parameters are read from the
    live param groups at each step.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        self._groups: list[dict[str, Any]] = inputs.optimizer.param_groups
        self._ranges = tuple(inputs.ranges)
        self._staging = inputs.staging
        self._flag: NonFiniteFlag | None = None

    @property
    def reads_scale_on_device(self) -> bool:
        """See :class:`Stepper`."""
        return False

    def is_collective(self, index: int) -> bool:
        """See :class:`Stepper`."""
        return False

    def read_settings(self) -> None:
        """See :class:`Stepper`: steps read the live param groups."""

    def watch(self, flag: NonFiniteFlag) -> None:
        """Raise ``flag`` for results that are not finite. See :meth:`Stepper.watch`."""
        self._flag = flag

    def snapshot(self, index: int) -> None:
        """See :class:`Stepper`."""
        self._ranges[index].state.snapshot()

    def commit(self, index: int) -> None:
        """See :class:`Stepper`."""
        self._ranges[index].state.commit()

    def rollback(self, index: int) -> None:
        """See :class:`Stepper`."""
        self._ranges[index].state.rollback()

    def check_scalars(self, state: Mapping[str, Any]) -> None:
        """See :class:`Stepper`; there are none."""

    def make_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """See :class:`Stepper`; the state exists from the start."""
        return lambda: None

    def unsharded_values(self) -> Iterator[UnshardedState]:
        """See :class:`Stepper`: none."""
        return iter(())

    def state_bytes(self) -> Mapping[Tier, int]:
        """See :class:`Stepper`: none."""
        return {}


class CountingStepper(RangeStepper):
    """A stepper with a count of its own steps for every parameter, as torch's have."""

    def __init__(self, inputs: StepperInputs, *more: Any) -> None:
        super().__init__(inputs, *more)
        self._steps = {segment.name: 0 for owned in inputs.ranges for segment in owned.segments}
        self._step_snapshots: dict[int, dict[str, int]] = {}

    def snapshot(self, index: int) -> None:
        """See :class:`Stepper`."""
        owned = self._ranges[index]
        self._step_snapshots[index] = {each.name: self._steps[each.name] for each in owned.segments}
        super().snapshot(index)

    def rollback(self, index: int) -> None:
        """See :class:`Stepper`."""
        self._steps.update(self._step_snapshots[index])
        super().rollback(index)

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`: the number of steps of every parameter."""
        return {"step": dict(self._steps)}

    def check_scalars(self, state: Mapping[str, Any]) -> None:
        """See :class:`Stepper`."""
        check_saved(
            state.get("step"),
            self._steps,
            "a number of steps, an integer of at least 0 and below 2**62",
            lambda found: type(found) is int and 0 <= found < 1 << 62,
        )

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""
        for name in self._steps:
            self._steps[name] = int(state["step"][name])


def segments_to_step(
    segments: Iterable[Segment], used: Collection[str], ranges: ElementRanges | None
) -> Iterator[Segment]:
    """Yield the ``segments`` of parameters in ``used``, cut to ``ranges`` unless these are None."""
    for segment in segments:
        if segment.name not in used:
            continue
        if ranges is None:
            yield segment
            continue
        for first, last in ranges[bisect_right(ranges, segment.begin, key=lambda each: each[1]) :]:
            begin, end = max(first, segment.begin), min(last, segment.end)
            if begin >= end:
                break
            start = segment.start + begin - segment.begin
            yield replace(segment, start=start, begin=begin, numel=end - begin)


class StoredChunk(NamedTuple):
    """A chunk of state in storage, its gradient where that is read, and buffers for both in host memory."""

    state: StateChunk
    gradient: torch.Tensor
    staging: StateChunkBuffers


def check_saved(saved: Any, names: Iterable[str], wanted: str, fits: Callable[[Any], bool]) -> None:
    """Raise ``ValueError``, with the name and what is ``wanted``, for the first parameter of ``names`` with
    an entry in ``saved`` that is missing or does not fit."""
    for name in names:
        found = saved.get(name) if isinstance(saved, Mapping) else None
        if not fits(found):
            raise ValueError(
                f"optimizer state of '{name}': expected {wanted}, got {show(found)}. Load another checkpoint."
            )


def stored_chunks(
    staging: StepStaging, ranges: Sequence[OwnedRange], updates: Sequence[Update], kind: str | None = None
) -> Generator[StoredChunk]:
    """Yield the chunks of the ranges in ``updates``, with state in storage; one is valid until the next. See
    :func:`visit_chunks` for ``kind``."""
    if not updates:
        return
    gradients = {update.index: update.gradient for update in updates}
    touched = {update.index: update.ranges for update in updates if update.ranges is not None}
    states = [(index, stored_state(ranges[index])) for index in gradients]
    stream = states[0][1].stream
    buffers = staging.state_chunk_buffers(stream.chunk_bytes, stream.chunk_elements)
    with contextlib.closing(visit_chunks(stream, states, buffers.buffers, kind, touched)) as chunks:
        for chunk in chunks:
            shard = gradients[chunk.index]
            gradient = staging.fetch_gradient(shard, chunk.begin, chunk.end, TIERS[shard.tier].near)
            if gradient.device != buffers.gradient.device:
                stream.transfers.record("device", "host", gradient.nbytes)
            yield StoredChunk(chunk, gradient, buffers)


def stored_state(owned: OwnedRange) -> NvmeState:
    """Return the state of a range that is in storage."""
    if not isinstance(owned.state, NvmeState):
        raise zero_ext_bug(f"state in tier '{owned.state.tier}' does not stream")
    return owned.state


def send_parameters(staging: StepStaging, owned: OwnedRange, stepped: Sequence[tuple[int, int]]) -> None:
    """Send the master weights of a range in memory to its parameters. Ranges in ``stepped`` changed."""
    if owned.output is None:
        return
    master = owned.state.read(MASTER, 0, owned.state.numel)
    if is_stored(owned.output.tier):
        # All of it, else the rest of a block would have to be read. Unchanged values are written again.
        staging.send(master, owned.output, owned.state.tier)
        return
    for first, last in stepped:
        put(owned.output, first, master[first:last], owned.state.tier)


def send_chunk(output: ShardStorage | None, chunk: StoredChunk, stepped: Sequence[tuple[int, int]]) -> None:
    """Send the master weights of ``chunk`` to the parameters ``output``. Ranges in ``stepped`` changed."""
    if output is None:
        return
    begin, master = chunk.state.begin, chunk.state.values[MASTER]
    if is_stored(output.tier):
        # Parameters in storage follow the masters everywhere: one write, of whole blocks.
        values = chunk.staging.output[: master.numel() * output.dtype.itemsize].view(output.dtype)
        output.store(begin, values.copy_(master), "host")
        return
    for first, last in stepped:
        put(output, begin + first, master[first:last], "host")
