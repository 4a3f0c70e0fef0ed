"""Step time of a run on a machine that need not be there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from zero_ext.config import CommunicationConfig
from zero_ext.config.tiers import CAPACITIES
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.planned_units import lengths_gathered_once, matrix_step, unit_elements
from zero_ext.plan.simulation.run_memory import MemoryNeeds, Shortfall, fits, memory_needs
from zero_ext.plan.simulation.step_schedule import StepSchedule
from zero_ext.plan.simulation.task_timeline import COMPUTE, READ, TO_DEVICE, TO_HOST, WRITE, Costs, Timeline
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, PARAMETER_BYTES, Training
from zero_ext.plan.simulation.transformer_cost import ModelCost, UnitCost
from zero_ext.plan.step_traffic import (
    Sent,
    expert_exchange_bytes,
    lines_sent,
    matrices_sent,
    step_bytes,
)


@dataclass(frozen=True)
class Simulation:
    """One step of any rank; all are alike, and none is ever late.

    Attributes:
        model: as simulated.
        training: as simulated.
        hardware: as simulated.
        seconds: of the step.
        tokens: that one rank sees in it.
        flops: of one rank, recomputed ones included.
        model_flops: the same without these.
        optimizer_flops: of the rank that orthogonalizes most, in neither of the two.
        busy: seconds by resource.
        memory: bytes by tier.
        shortfalls: what does not fit; the other figures then are those of a machine on which it would.
        timeline: every task.
    """

    model: ModelCost
    training: Training
    hardware: Hardware
    seconds: float
    tokens: int
    flops: float
    model_flops: float
    optimizer_flops: int
    busy: dict[str, float]
    memory: MemoryNeeds
    shortfalls: tuple[Shortfall, ...]
    timeline: Timeline

    @property
    def fits(self) -> bool:
        """Return whether all tiers hold what is asked of them."""
        return not self.shortfalls

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one rank."""
        return self.tokens / self.seconds

    @property
    def flops_per_second(self) -> float:
        """Operations per second of one rank, recomputed ones included, as ZeRO's papers count."""
        return self.flops / self.seconds

    @property
    def bound_by(self) -> str:
        """The resource that works longest."""
        return max(self.busy, key=lambda resource: self.busy[resource])

    @property
    def hidden(self) -> float:
        """The share of all work alongside computing that ran while something else did, 0 to 1."""
        serial = sum(self.busy.values())
        beside = serial - self.busy[COMPUTE]
        return max(0.0, min(1.0, (serial - self.seconds) / beside)) if beside > 0 else 1.0


def simulate(model: ModelCost, training: Training, hardware: Hardware) -> Simulation:
    """Simulate one step of a model on a machine.

    Every unit's gathers, computing, reductions, copies, reads, writes and updates run on streams that work
    simultaneously (docs/explanation/simulation.md has the formulas). Not modeled: stragglers and other ranks'
    noise, contention between streams for one memory, allocation, the data loader.

    Args:
        model: the cost of its units.
        training: how it is trained.
        hardware: the machine.

    Returns:
        The step.

    Examples:
        >>> from zero_ext.plan.simulation import Training, machine_named, simulate, transformer_named
        >>> model, machine = transformer_named("llama-7b").cost(), machine_named("dgx-a100")
        >>> simulation = simulate(model, Training(8, stage=3, micro_batch=4), machine)
        >>> simulation.fits, simulation.bound_by
        (True, 'compute')
    """
    matrices = matrix_step(model, training)
    costs = Costs(hardware, training, model.sequence, matrices)
    timeline = StepSchedule(model.units, costs).run()
    micro = training.accumulation_steps
    forward = sum(costs.flops(unit) for unit in model.units)
    again = sum(costs.flops(unit) for unit in model.units if costs.recomputes(unit))
    needs = memory_needs(model, training, hardware)
    return Simulation(
        model=model,
        training=training,
        hardware=hardware,
        seconds=timeline.end,
        tokens=micro * training.micro_batch * model.sequence,
        flops=micro * (3 * forward + again),
        model_flops=micro * 3 * forward,
        optimizer_flops=matrices.flops,
        busy=timeline.busy,
        memory=needs,
        shortfalls=needs.shortfalls(hardware),
        timeline=timeline,
    )


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


def estimate_step(model: ModelCost, training: Training, hardware: Hardware) -> StepEstimate:
    """Simulate a step of ``model``; one with many layers from two depths, as every further layer adds the
    same."""
    seconds, busy = simulated(model, training, hardware)
    counted = busy
    if hardware.nvme_half_duplex:  # bytes read and written are counted separately where each has its own rate
        _, counted = simulated(model, training, hardware.replace(nvme_half_duplex=False))
    rates = hardware.for_rank(training.world_size)
    return StepEstimate(
        seconds=seconds,
        busiest=max(busy, key=lambda name: busy[name]),
        sent=sent_in_step(model, training, CommunicationConfig()).all,
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

    matrices = matrix_step(model, training)

    def run(units: Sequence[UnitCost]) -> Timeline:
        return StepSchedule(units, Costs(hardware, training, model.sequence, matrices)).run()

    layers = [unit for unit in model.units if unit.recomputes]
    if len(layers) <= most_units:
        timeline = run(model.units)
        return timeline.end, timeline.busy
    tiles = round(1 / layers[-1].share) if layers[-1].spread == 1 else 2  # units of the last layer
    few = max(1, most_units // (3 * tiles)) * tiles
    # Dense layers before those with experts are in both depths, and units of a layer are not separated.
    few += next((number for number, unit in enumerate(layers) if unit.share < 1), 0) % tiles
    begin = model.units.index(layers[0])
    before, after = model.units[:begin], model.units[begin + len(layers) :]
    shallow, deep = (run((*before, *layers[:count], *after)) for count in (few, 2 * few))

    def continued(at_few: float, at_twice: float) -> float:
        return at_few + (at_twice - at_few) * (len(layers) - few) / few

    busy = {name: continued(shallow.busy.get(name, 0.0), time) for name, time in deep.busy.items()}
    return continued(shallow.end, deep.end), busy


def sent_in_step(model: ModelCost, training: Training, policy: CommunicationConfig) -> Sent:
    """Return what one rank sends in a step."""
    sent = Sent()
    for spread in model.spreads:
        by_kind = step_bytes(
            training.stage,
            training.among(spread).world_size,
            unit_elements(model, training, spread),
            among_ranks(policy, spread),
            bytes_per_element=PARAMETER_BYTES,
            gradient_bytes=training.gradient_bytes,
            accumulation_steps=training.accumulation_steps,
            gathered_once=lengths_gathered_once(model, training, spread),
        )
        sent = sum(by_kind.values(), sent)
    sent += tokens_sent(model, training, policy.ranks_per_node)
    matrices = matrix_step(model, training)
    ranks, per_node = training.world_size, policy.ranks_per_node
    sums = lines_sent(matrices.lines if training.placement.optimizer else 0, ranks, per_node)
    return sent + sums + matrices_sent(matrices.sent, ranks, per_node, training.ns_dtype)


def among_ranks(policy: CommunicationConfig, spread: int) -> CommunicationConfig:
    """Return ``policy`` as it holds among ranks with the same experts, every ``spread``-th one."""
    per_node = policy.ranks_per_node
    if spread == 1 or per_node is None:
        return policy
    return policy.replace(ranks_per_node=per_node // spread if per_node % spread == 0 else 1)


def tokens_sent(model: ModelCost, training: Training, ranks_per_node: int | None = None) -> Sent:
    """Return what one rank sends of tokens to experts on other ranks in a step, on average over the ranks."""
    samples = training.micro_batch * training.accumulation_steps
    found = Sent()
    for unit in model.units:
        if unit.exchanged:
            found += expert_exchange_bytes(
                samples * model.sequence,
                unit.exchanged,
                unit.spread,
                recomputed=unit.recomputes and training.activations != "saved",
                ranks_per_node=ranks_per_node,
            )
    return found


ALIKE = 1.01


def fastest_placements(model: ModelCost, training: Training, hardware: Hardware) -> list[Simulation]:
    """Return the placements that fit, the fastest first.

    Tried are every stage, tier of each state kind and strategy for activations. What takes at most a
    hundredth longer than the fastest and moves less comes before it: nearer tiers, activations nearer, a
    lower stage.

    Args:
        model: the cost of its units.
        training: everything else, such as the world size.
        hardware: the machine.

    Returns:
        Simulations; none if nothing fits.
    """
    found = [simulate(model, one, hardware) for one in _candidates(training) if fits(model, one, hardware)]
    quickest = min((one.seconds for one in found), default=0.0)

    def order(one: Simulation) -> tuple[float, ...]:
        if one.seconds > ALIKE * quickest:
            return (one.seconds,)
        nearness = ACTIVATIONS.index(one.training.activations)
        return 0.0, one.training.distance, nearness, one.training.stage

    return sorted(found, key=order)


def nearest_to_fit(model: ModelCost, training: Training, hardware: Hardware) -> Simulation:
    """Return the placement that lacks the fewest bytes, for messages where nothing fits.

    Args:
        model: the cost of its units.
        training: everything else, such as the world size.
        hardware: the machine.

    Returns:
        Its simulation.
    """

    def missing(one: Training) -> int:
        short = memory_needs(model, one, hardware).shortfalls(hardware)
        return sum(tier.needed - tier.available for tier in short)

    return simulate(model, min(_candidates(training), key=missing), hardware)


def _candidates(training: Training) -> Iterator[Training]:
    for stage, params, grads, optimizer, activations in product(
        range(4), CAPACITIES, CAPACITIES, CAPACITIES, ACTIVATIONS
    ):
        # Tiers that the stage does not shard, and delayed updates on the device, are refused.
        with suppress(ValueError):
            yield replace(
                training,
                stage=stage,
                activations=activations,
                params=params,
                grads=grads,
                optimizer=optimizer,
            )


def calibrated(
    hardware: Hardware,
    key: str,
    bounds: tuple[float, float],
    model: ModelCost,
    training: Training,
    seconds: float,
) -> Hardware:
    """Return `hardware` with one figure such that a simulated step takes a measured time.

    Args:
        hardware: the machine.
        key: the figure.
        bounds: positive numbers between which it is searched.
        model: as measured.
        training: as measured.
        seconds: of the measured step.

    Returns:
        The machine with the figure.

    Raises:
        ValueError: no value between the bounds gives that time; names the times at both ends.
    """
    low, high = bounds
    if not 0 < low < high:
        raise ValueError(
            f"bounds: expected two positive numbers in rising order, got {bounds}. Pass the lower bound "
            "first."
        )

    def simulated_seconds(value: float) -> float:
        return simulate(model, training, hardware.replace(**{key: value})).seconds

    at_low, at_high = simulated_seconds(low), simulated_seconds(high)
    if not min(at_low, at_high) <= seconds <= max(at_low, at_high):
        raise ValueError(
            f"{key}: no value between {low:g} and {high:g} makes a step take {seconds:.4g} s. At these "
            f"bounds it takes {at_low:.4g} and {at_high:.4g} s. Widen the bounds, or correct the other "
            "keys of the machine."
        )
    for _ in range(60):
        middle = math.sqrt(low * high)
        if (simulated_seconds(middle) < seconds) == (at_high > at_low):
            low = middle
        else:
            high = middle
    return hardware.replace(**{key: math.sqrt(low * high)})
