"""Events of an engine for its subscribers: small frozen records, and the protocol of a subscriber."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Phase = Literal["forward", "backward", "step"]
Wait = Literal["storage", "update"]
ActivationWork = Literal["offload", "fetch", "recompute"]
CollectiveWait = Literal["gather", "reduce", "agreement"]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """An optimizer step ended, or was skipped for overflow.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss of the step's micro-batches on this rank: the sum of what went through
            `model.backward` or `model.scale_loss`, each divided by their number before, as loops do. None
            when the engine did not see it, and on an accelerator, see `DeviceStepEnd`.
        grad_norm: global gradient norm before clipping, None when nothing asked for it, and where the host
            does not have it yet, see `DeviceStepEnd`.
        lr: learning rate of each param group during the step. NaN if the optimizer computes its own.
        skipped: True when non-finite gradients made all ranks leave the parameters as they were.
        loss_scale: scale the losses were multiplied with (1.0 without loss scaling).
        seconds: wall time since the step before ended.
        rolled_back: True when updates made in backward were rolled back, because gradients were to be clipped
            or had overflowed.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: tuple[float, ...]
    skipped: bool
    loss_scale: float
    seconds: float
    rolled_back: bool = False


@dataclass(frozen=True, slots=True)
class GatherEvent:
    """A unit's full parameters became present.

    Attributes:
        unit: its name.
        elements: of the unit.
        prefetched: whether the gather began ahead of its use.
        seconds: time that a rank waited for it, 0.0 when prefetched.
    """

    unit: str
    elements: int
    prefetched: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class ReleaseEvent:
    """A unit's full parameters were dropped.

    Attributes:
        unit: its name.
        elements: of the unit.
    """

    unit: str
    elements: int


@dataclass(frozen=True, slots=True)
class ReduceEvent:
    """A unit's gradients were averaged over the ranks.

    Attributes:
        unit: its name.
        elements: of the unit.
        seconds: duration on the host.
    """

    unit: str
    elements: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceStepEnd:
    """An accelerator has finished a step.

    Published at the end of a later step, the next one as a rule, so that nothing waits for it.

    Attributes:
        step: its number.
        loss: as in `StepEnd`; None when the engine did not see it.
        grad_norm: as in `StepEnd`; None when nothing asked for it, and where that has it.
        seconds: duration of each of the phases in the device's stream.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    seconds: Mapping[Phase, float]


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """A phase of a step ended. Phases of one engine never overlap; what lies between them is the user's.

    Attributes:
        phase: a "forward" of the outermost module that was called, the "backward" pass from its first
            gradient on, or the optimizer's "step".
        began: reading of `time.perf_counter` at its beginning.
        seconds: duration on the host. An accelerator may still be at work on it, see `DeviceStepEnd`.
        trains: False for a forward without autograd.
    """

    phase: Phase
    began: float
    seconds: float
    trains: bool = True


@dataclass(frozen=True, slots=True)
class WaitEnd:
    """The thread that trains waited for transfers from or to "storage", or for a delayed "update".

    Waits never overlap, nor do they contain those of a `CollectiveEnd`. The waits of one pass of optimizer
    state through the ring come as one, of all of their seconds, from the beginning of the pass on.

    Attributes:
        what: "storage" or "update".
        began: reading of `time.perf_counter` at its beginning.
        seconds: duration.
    """

    what: Wait
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectiveEnd:
    """This rank is done with a collective.

    Attributes:
        kind: as the engine's `traffic` counts it.
        label: what was moved.
        ranks: number of ranks that took part.
        elements: of the full buffer.
        bytes_sent: bytes that this rank handed to the transport.
        began: reading of `time.perf_counter` when the wait for it began.
        seconds: duration of the wait on the host; 0 where an accelerator's stream waits instead.
    """

    kind: str
    label: str
    ranks: int
    elements: int
    bytes_sent: int
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectiveKind:
    """A kind of collective.

    Attributes:
        wait: wait of a step that it counts as.
        in_rows: whether a monitor's rows have its bytes.
    """

    wait: CollectiveWait = "agreement"
    in_rows: bool = False


_PERSISTENT = "_persistent"
COLLECTIVE_KINDS = {
    "gather": CollectiveKind("gather", True),  # parameters in forward and backward
    "gather_updated": CollectiveKind("gather", True),  # parameters after the step
    "gather_presharded": CollectiveKind("gather"),  # parameters that were initialized in shards
    "reduce_scatter": CollectiveKind("reduce", True),
    "gather_gradients": CollectiveKind("reduce", True),  # in stage 0
    "activations": CollectiveKind("gather", True),  # stored inputs in backward
    "scalars": CollectiveKind("agreement", True),  # norms, flags, comparisons
    "broadcast": CollectiveKind(),  # initial values
    "matrices": CollectiveKind("gather", True),  # directions of Muon to their owners, and results back
    "onebit_reduce_scatter": CollectiveKind(),
    "onebit_all_gather": CollectiveKind(),
    "sequence": CollectiveKind(),  # sequence shards for heads, around attention
    "ring": CollectiveKind(),  # keys and values in forward and backward, and their gradients
}


def persistent_kind(kind: str) -> str:
    """Return the name of a kind for units below the persistence threshold."""
    return kind + _PERSISTENT


def collective_wait(kind: str) -> CollectiveWait:
    """Return the wait of a step that a collective of this kind counts as, "agreement" if it is not listed."""
    return COLLECTIVE_KINDS.get(kind.removesuffix(_PERSISTENT), CollectiveKind()).wait


@dataclass(frozen=True, slots=True)
class ActivationEnd:
    """A checkpointed call was offloaded, fetched or recomputed.

    Published with `activation_checkpointing.profile`.

    Attributes:
        what: its inputs were packed and began to move ("offload"), were waited for in backward ("fetch"), or
            its function ran again ("recompute", which contains no "fetch" of its own inputs).
        name: of the function; empty for "fetch".
        began: reading of `time.perf_counter` at its beginning.
        seconds: duration on the host, inside the forward or backward phase.
        bytes: what this rank stores of the call's inputs; 0 for "recompute".
    """

    what: ActivationWork
    name: str
    began: float
    seconds: float
    bytes: int


Event = (
    StepEnd
    | DeviceStepEnd
    | GatherEvent
    | ReleaseEvent
    | ReduceEvent
    | PhaseEnd
    | WaitEnd
    | CollectiveEnd
    | ActivationEnd
)


class Subscriber(Protocol):
    """A subscriber to events. Called on the thread that trains: keep it short, never block."""

    def __call__(self, event: Event) -> None: ...


class Bus:
    """Whoever listens to one engine. False while nobody does, so that events need not be made, and on threads
    that work alongside the training."""

    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()
        self._thread = _Thread()

    @property
    def subscribers(self) -> tuple[Subscriber, ...]:
        """Whoever listens, in order."""
        return self._subscribers

    def __bool__(self) -> bool:
        return bool(self._subscribers) and not self._thread.in_background

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with every event from now on."""
        self._subscribers += (subscriber,)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop calling `subscriber`; do nothing if it is none."""
        self._subscribers = tuple(each for each in self._subscribers if each is not subscriber)

    def publish(self, event: Event) -> None:
        """Call all subscribers, in order of subscription."""
        for subscriber in self._subscribers:
            subscriber(event)

    def now(self) -> float | None:
        """Return a reading of the clock for an event's ``began``; None while nobody listens."""
        return time.perf_counter() if self else None

    def waited(self, what: Wait, began: float | None, seconds: float | None = None) -> None:
        """Publish a wait since ``began``, a reading of :meth:`now`, or of ``seconds`` if given."""
        if began is not None:
            self.publish(WaitEnd(what, began, time.perf_counter() - began if seconds is None else seconds))

    @contextlib.contextmanager
    def background(self) -> Iterator[None]:
        """Inside, this thread works alongside the one that trains: it publishes nothing."""
        self._thread.in_background = True
        try:
            yield
        finally:
            self._thread.in_background = False


class _Thread(threading.local):
    in_background = False
