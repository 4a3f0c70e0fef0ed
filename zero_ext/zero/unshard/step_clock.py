"""Events of a step's phases and of its loss: immediately those of the host, later those of a device."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

from zero_ext.config.events import Bus, DeviceStepEnd, Phase, PhaseEnd
from zero_ext.offload import Device
from zero_ext.offload.side_stream import Readback

_STEPS_AHEAD = 16  # that the host may be before a device, before somebody waits


class Beginning(NamedTuple):
    """Of a phase: a reading of the host's clock, and of an accelerator's stream."""

    host: float
    device: torch.Event | None


class _Spans(NamedTuple):
    """A step that is over on the host: its phases on the device, where and when its loss and norm come."""

    step: int
    phases: list[tuple[Phase, torch.Event, torch.Event]]
    slot: int | None
    norm: Readback | None
    end: torch.Event


class StepClock:
    """Publishes phases to ``bus``, and adds up the losses of a step's micro-batches. On an accelerator nobody
    waits for either: events in its stream mark the phases, the loss is copied behind them, and both are read
    at the end of the first step that finds them passed. Nothing happens while nobody listens."""

    def __init__(self, bus: Bus, device: Device) -> None:
        self._bus, self.device = bus, device
        self._loss: torch.Tensor | None = None
        self._phases: list[tuple[Phase, torch.Event, torch.Event]] = []
        self._coming: deque[_Spans] = deque()
        self._loss_slots: torch.Tensor | None = None  # the host's, for losses on their way
        self._next_slot = 0

    def begin(self) -> Beginning | None:
        """Begin a phase; return None while nobody listens."""
        return Beginning(time.perf_counter(), self._mark()) if self._bus else None

    def end(self, phase: Phase, beginning: Beginning | None, trains: bool = True) -> None:
        """End a phase that began then."""
        if beginning is None:
            return
        end = self._mark()
        if beginning.device is not None and end is not None:
            self._phases.append((phase, beginning.device, end))
        began = beginning.host
        self._bus.publish(PhaseEnd(phase, began, time.perf_counter() - began, trains))

    def see(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch; one that is no single number is left out."""
        if self._bus and loss.numel() == 1:
            value = loss.detach().reshape(1).float()
            self._loss = value if self._loss is None else self._loss + value

    def end_step(self, step: int, norm: torch.Tensor | None = None) -> float | None:
        """Publish what came from the device of the steps before; return the loss of ``step``, if there is one
        and the host has it. ``norm`` (0-d float64) is the step's if the device has it alone."""
        loss, self._loss = self._loss, None
        phases, self._phases = self._phases, []
        if not self._bus:
            self._coming.clear()
            return None
        # The step 16 before may still use the slot of this loss, so it is published first.
        while self._coming and (len(self._coming) >= _STEPS_AHEAD or self._coming[0].end.query()):
            self._publish(self._coming.popleft())
        on_host = loss is None or loss.device.type == "cpu"
        slot = None if on_host else self._next_slot
        if loss is not None and slot is not None:
            if self._loss_slots is None:
                self._loss_slots = self.device.allocate("host", _STEPS_AHEAD, torch.float32)
            # The number of the step goes back when a step is undone, so it cannot select the slot.
            self._next_slot = (slot + 1) % _STEPS_AHEAD
            self._loss_slots[slot : slot + 1].copy_(loss, non_blocking=True)
        coming = None if norm is None else Readback(norm.view(1))
        # Recorded behind both copies, so that they have arrived when this event has passed.
        end = self._mark()
        if end is not None and (phases or slot is not None or coming is not None):
            self._coming.append(_Spans(step, phases, slot, coming, end))
        return float(loss) if loss is not None and on_host else None

    def _mark(self) -> torch.Event | None:
        if not self.device.is_accelerator:
            return None
        event = torch.Event(self.device.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device.device))
        return event

    def _publish(self, spans: _Spans) -> None:
        spans.end.synchronize()
        seconds: dict[Phase, float] = {}
        for phase, began, ended in spans.phases:
            seconds[phase] = seconds.get(phase, 0.0) + began.elapsed_time(ended) * 1e-3
        slot_value = None if spans.slot is None or self._loss_slots is None else self._loss_slots[spans.slot]
        loss = None if slot_value is None else float(slot_value)
        norm = None if spans.norm is None else float(spans.norm.read())
        self._bus.publish(DeviceStepEnd(spans.step, loss, norm, seconds))
