"""A step's time and traffic from the simulated schedule, for models of any depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_ext.config import CommunicationConfig
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.simulation.costs import Costs
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.planned_units import unit_elements
from zero_ext.plan.simulation.resources import READ, TO_DEVICE, TO_HOST, WRITE
from zero_ext.plan.simulation.simulated_staging import lengths_gathered_once
from zero_ext.plan.simulation.step_schedule import StepSchedule
from zero_ext.plan.simulation.task_timeline import Timeline
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES, Training
from zero_ext.plan.simulation.transformer_cost import ModelCost, UnitCost
from zero_ext.plan.zeropp_traffic import step_bytes

MOST_UNITS = 96  # that are simulated one by one; deeper models are continued from two shallower ones


@dataclass(frozen=True)
class StepEstimate:
    """One step of one rank.

    Attributes:
        seconds: of the step.
        busiest: the resource that works longest.
        sent: bytes that it sends.
        to_device, to_host: bytes that it copies from and to host memory.
        read, written: bytes from and to NVMe.
    """

    seconds: float
    busiest: str
    sent: int
    to_device: int
    to_host: int
    read: int
    written: int


def estimate_step(model: ModelSpec, training: Training, hardware: Hardware) -> StepEstimate:
    """Simulate a step of ``model``; one with many layers from two depths, as every further layer adds the
    same."""
    seconds, busy = simulated(model.full_cost, training, hardware)
    counted = busy
    if hardware.nvme_half_duplex:  # bytes read and written are told apart where each has its own rate
        _, counted = simulated(model.full_cost, training, hardware.replace(nvme_half_duplex=False))
    rates = hardware.for_rank(training.world_size)
    return StepEstimate(
        seconds=seconds,
        busiest=max(busy, key=lambda name: busy[name]),
        sent=_bytes_sent(model, training),
        to_device=round(counted.get(TO_DEVICE, 0.0) * rates.to_device),
        to_host=round(counted.get(TO_HOST, 0.0) * rates.to_host),
        read=round(counted.get(READ, 0.0) * rates.nvme_read),
        written=round(counted.get(WRITE, 0.0) * rates.nvme_write),
    )


def simulated(
    model: ModelCost, training: Training, hardware: Hardware, most_units: int = MOST_UNITS
) -> tuple[float, dict[str, float]]:
    """Return seconds of a step, and seconds by resource. Where the layers make more than ``most_units`` units
    they are continued from a sixth and a third of that.
    """

    def run(units: Sequence[UnitCost]) -> Timeline:
        return StepSchedule(units, Costs(hardware, training, model.sequence)).run()

    layers = [unit for unit in model.units if unit.recomputes]
    if len(layers) <= most_units:
        timeline = run(model.units)
        return timeline.end, dict(timeline.busy)
    tiles = round(1 / layers[0].share)
    few = max(1, most_units // (3 * tiles)) * tiles
    begin = model.units.index(layers[0])
    before, after = model.units[:begin], model.units[begin + len(layers) :]
    shallow, deep = (run((*before, *layers[:count], *after)) for count in (few, 2 * few))

    def continued(at_few: float, at_twice: float) -> float:
        return at_few + (at_twice - at_few) * (len(layers) - few) / few

    busy = {name: continued(shallow.busy.get(name, 0.0), time) for name, time in deep.busy.items()}
    return continued(shallow.end, deep.end), busy


def _bytes_sent(model: ModelSpec, training: Training) -> int:
    """By one rank in a step."""
    sent = step_bytes(
        training.stage,
        training.world_size,
        unit_elements(model.full_cost, training),
        CommunicationConfig(),
        bytes_per_element=PARAMETER_BYTES,
        gradient_bytes=training.gradient_bytes,
        accumulation_steps=training.accumulation_steps,
        gathered_once=lengths_gathered_once(model.full_cost, training),
    )
    return sum(each.all for each in sent.values())
