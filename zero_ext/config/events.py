"""What an engine tells its subscribers: small frozen records, and the protocol of who may listen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepEnd:
    """An optimizer step ended (or was skipped for overflow).

    Attributes:
        step: number of the step, from 1.
        loss: mean loss of the step's micro-batches on this rank, None when the engine did not see it.
        grad_norm: global gradient norm before clipping, None when nothing asked for it.
        lr: learning rate of each param group during the step.
        skipped: True when non-finite gradients made all ranks leave the parameters as they were.
        loss_scale: scale the losses were multiplied with (1.0 without loss scaling).
        seconds: wall time since the step before ended.
        taken_back: True when updates made in backward were taken back, because gradients were to be clipped
            or had overflowed.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: tuple[float, ...]
    skipped: bool
    loss_scale: float
    seconds: float
    taken_back: bool = False


@dataclass(frozen=True, slots=True)
class GatherEvent:
    """A unit's full parameters became present. `seconds` is the time a rank waited for it, 0.0 when
    prefetched."""

    unit: str
    elements: int
    prefetched: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class ReleaseEvent:
    """A unit's full parameters were dropped."""

    unit: str
    elements: int


@dataclass(frozen=True, slots=True)
class ReduceEvent:
    """A unit's gradients were averaged over the ranks."""

    unit: str
    elements: int
    seconds: float


Event = StepEnd | GatherEvent | ReleaseEvent | ReduceEvent


class Subscriber(Protocol):
    """Anything that wants to hear of events. Called on the thread that trains: keep it short, never block."""

    def __call__(self, event: Event) -> None: ...


class Bus:
    """Whoever listens to one engine. False while nobody does, so that events need not be made."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def __bool__(self) -> bool:
        return bool(self._subscribers)

    def subscribe(self, subscriber: Subscriber) -> None:
        """From now on `subscriber` hears of every event."""
        self._subscribers.append(subscriber)

    def publish(self, event: Event) -> None:
        """Tell everybody, in order of subscription."""
        for subscriber in self._subscribers:
            subscriber(event)
