"""Bytes of a rank in a layout, the time of a step, and what it is spent on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from zero_ext.config.buffer_sizes import communicator_bytes
from zero_ext.config.tiers import is_stored
from zero_ext.parallel import LinkLevel, LinkTopology, TransformerStep, naive_mapping, transformer_traffic
from zero_ext.plan.layout.parallel_layout import ParallelLayout, Stage, stages_of
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.run_memory import MemoryNeeds, Shortfall, excess, memory_needs, state_needs
from zero_ext.plan.simulation.simulate import simulated
from zero_ext.plan.simulation.task_timeline import COMPUTE, LINK, Costs
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES, Training
from zero_ext.plan.simulation.transformer_cost import ModelCost

Needs = Callable[[ModelCost, Training, Hardware], MemoryNeeds]


@dataclass(frozen=True)
class RankNeeds:
    """Bytes by tier of a rank of pipeline stage ``stage``, and what a node of such ranks lacks."""

    stage: int
    needs: MemoryNeeds
    shortfalls: tuple[Shortfall, ...]

    @property
    def excess(self) -> float:
        """Return what is asked of the tier that is shortest of memory, over what it has; 0 if all fits."""
        return excess(self.shortfalls)[0]


def rank_needs(model: ModelSpec, layout: ParallelLayout, hardware: Hardware, stage: int) -> RankNeeds:
    """Return what a rank of pipeline stage ``stage`` keeps: parameters, gradients and optimizer state of its
    part of the tensors of its layers, sharded over the replicas as ZeRO's stage says, what passes through,
    the activations of the micro-batches under way, and what autograd and NCCL hold.

    Raises ``ValueError`` for a stage that there is not.
    """
    for kind in stages_of(model, layout.pp, layout.tp):
        if stage in kind.numbers:
            return _needs_of(kind, stage, layout, hardware, memory_needs)
    raise ValueError(
        f"stage: expected a pipeline stage from 0 to {layout.pp - 1}, got {stage}. Pass a stage of the "
        "layout."
    )


def fullest_rank(model: ModelSpec, layout: ParallelLayout, hardware: Hardware) -> RankNeeds:
    """Return the rank that lacks most, else the one that takes most of its device. Where model state and
    activations do not fit, nothing else is counted.

    Ranks of a node count as if all were like this one.
    """
    kinds = stages_of(model, layout.pp, layout.tp)
    for needs in (state_needs, memory_needs):
        # Of stages that are alike the first has the most micro-batches under way.
        found = [_needs_of(kind, kind.numbers[0], layout, hardware, needs) for kind in kinds]
        worst = max(found, key=lambda one: (one.excess, one.needs.total("device")))
        if worst.shortfalls:
            break
    return worst


def _needs_of(kind: Stage, stage: int, layout: ParallelLayout, hardware: Hardware, needs: Needs) -> RankNeeds:
    ranks = min(layout.gpus, hardware.ranks_per_node)
    found = replace(needs(kind.cost, layout.training_of(stage), hardware), ranks=ranks)
    if not hardware.device_is_host:
        found.device["NCCL"] = _communicators_bytes(layout, hardware)
    return RankNeeds(stage, found, found.shortfalls(hardware))


def _communicators_bytes(layout: ParallelLayout, hardware: Hardware) -> int:
    """Of one communicator for each axis; ranks of an axis are as far apart as the faster ones are long."""
    total, apart = 0, 1
    for length in (layout.tp, layout.dp, layout.pp):
        total += communicator_bytes(length, max(1, hardware.ranks_per_node // apart), {})
        apart *= length
    return total


COMPONENTS = ("compute", "bubble", "tp exchange", "pp exchange", "dp exchange", "offload")
_MOST_UNITS = 12  # that are simulated one by one; deeper stages are continued


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by :data:`COMPONENTS`; exchanges and offload count where computing waits for them."""

    components: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.components.values())

    @property
    def bound_by(self) -> str:
        """Return what takes longest."""
        return max(self.components, key=lambda name: self.components[name])


@dataclass(frozen=True)
class _StageRun:
    """One stage by itself: seconds of a further micro-batch, of that its computing, and of what is left of a
    step; seconds of the step by resource."""

    slot: float
    computing: float
    rest: float
    busy: dict[str, float]


def step_time(model: ModelSpec, layout: ParallelLayout, hardware: Hardware) -> StepTime:
    """Return a step's time under 1F1B: a slot for every micro-batch and for every stage but one, as long as
    the slowest stage takes for a micro-batch, and what reductions, updates and offload leave over.

    A stage's micro-batch is the simulated step of its part of the model on the replicas' share of the nodes.
    Exchanges of tensors' parts and between stages are not overlapped with anything.
    """
    runs = [_run(kind, layout, hardware) for kind in stages_of(model, layout.pp, layout.tp)]
    slowest = max(runs, key=lambda run: run.slot)
    longest = max(runs, key=lambda run: run.rest)
    exchanges, steps = _exchanges(model, layout, hardware), layout.micro_batches
    waited = longest.rest + steps * (slowest.slot - slowest.computing)
    updates = min(waited, max(0.0, longest.busy.get(COMPUTE, 0.0) - steps * longest.computing))
    link = longest.busy.get(LINK, 0.0)
    moved = sum(seconds for name, seconds in longest.busy.items() if name not in (COMPUTE, LINK))
    exchanged = (waited - updates) * (link / (link + moved) if link + moved else 1.0)
    return StepTime(
        {
            "compute": steps * slowest.computing + updates,
            "bubble": (layout.pp - 1) * (slowest.slot + sum(exchanges.values())),
            "tp exchange": steps * exchanges["tp"],
            "pp exchange": steps * exchanges["pp"],
            "dp exchange": exchanged,
            "offload": waited - updates - exchanged,
        }
    )


def least_seconds(model: ModelSpec, layout: ParallelLayout, hardware: Hardware) -> float:
    """No step of ``layout`` takes less: computing or the link in every slot, exchanges that nothing hides,
    and the slowest resource of the updates."""
    turns = layout.micro_batches + layout.pp - 1
    kinds = stages_of(model, layout.pp, layout.tp)
    share, least = layout.share_of(hardware), 0.0
    for kind in kinds:
        costs = Costs(share, layout.training, kind.cost.sequence)
        least = max(least, turns * max(_busy_slot(kind, costs)) + _updates(kind, costs))
    return least + turns * sum(_exchanges(model, layout, hardware).values())


def _run(kind: Stage, layout: ParallelLayout, hardware: Hardware) -> _StageRun:
    share, steps = layout.share_of(hardware), layout.micro_batches
    computing, link = _busy_slot(kind, Costs(share, layout.training, kind.cost.sequence))

    def run(count: int) -> tuple[float, dict[str, float]]:
        training = replace(layout.training, accumulation_steps=count)
        return simulated(kind.cost, training, share, _MOST_UNITS)

    if steps == 1:
        seconds, busy = run(1)
        slot = max(computing, link)
        return _StageRun(slot, computing, max(0.0, seconds - slot), busy)
    (twice, busy_twice), (thrice, busy_thrice) = run(2), run(3)
    slot = max(computing, link, thrice - twice)
    busy = {
        name: busy_twice[name] + (steps - 2) * (seconds - busy_twice[name])
        for name, seconds in busy_thrice.items()
    }
    return _StageRun(slot, computing, max(0.0, twice - 2 * slot), busy)


def _busy_slot(kind: Stage, costs: Costs) -> tuple[float, float]:
    """Return seconds of computing, and of the link, in a micro-batch's forward and backward."""
    computing = link = 0.0
    for unit, count in kind.units.items():
        computing += count * (costs.forward(unit) + costs.backward(unit))
        if costs.placement.params:
            link += count * 2 * costs.collective(unit.parameters, PARAMETER_BYTES)
        if costs.placement.grads:
            link += count * costs.reduce(unit.parameters, PARAMETER_BYTES)
    return computing, link


def _updates(kind: Stage, costs: Costs) -> float:
    """Return seconds of the updates after a step's last backward at least: of the resource that is
    busiest.
    """
    placement, training = costs.placement, costs.training
    owned = {unit: training.owned(unit.parameters, placement.optimizer) for unit in kind.units}
    state = sum(count * owned[unit] for unit, count in kind.units.items())
    found = [costs.update(state)]
    if is_stored(training.optimizer):
        found += costs.stored_state(state)
    if placement.optimizer and not placement.params:
        published = (
            count * costs.collective(unit.parameters, PARAMETER_BYTES) for unit, count in kind.units.items()
        )
        found.append(sum(published))
    return max(found)


def _exchanges(model: ModelSpec, layout: ParallelLayout, hardware: Hardware) -> dict[str, float]:
    """Return seconds of a micro-batch on the axes with exchanges that computing waits for."""
    shape, training = model.shape, layout.training
    layers = layout.pp * max(kind.layers for kind in stages_of(model, layout.pp, layout.tp))
    step = TransformerStep(
        model.parameters,
        layers,
        shape.hidden,
        shape.sequence,
        training.micro_batch,
        recomputes=training.activations != "saved",
    )
    traffic = transformer_traffic(layout.sizes, step, training.stage)
    del traffic["dp"]  # simulated with the computing that it hides behind
    return naive_mapping(layout.sizes).seconds(_topology(layout.gpus, hardware), traffic)


def _topology(gpus: int, hardware: Hardware) -> LinkTopology:
    inside, between = hardware.intra_bandwidth, hardware.inter_bandwidth
    latency, per_node = hardware.collective_seconds, hardware.per_node_seconds
    if hardware.ranks_per_node == 1:
        return LinkTopology(gpus, (LinkLevel("rank", 1, min(inside, between), latency + per_node),))
    node = LinkLevel("node", hardware.ranks_per_node, between, per_node)
    return LinkTopology(gpus, (LinkLevel("rank", 1, inside, latency), node))
