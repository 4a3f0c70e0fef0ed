"""Step time of a run on a machine that need not be there."""

from __future__ import annotations

from dataclasses import dataclass

from zero_ext.plan.simulation.costs import Costs
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.resources import COMPUTE
from zero_ext.plan.simulation.run_memory import MemoryNeeds, Shortfall, memory_needs
from zero_ext.plan.simulation.step_schedule import StepSchedule
from zero_ext.plan.simulation.task_timeline import Timeline
from zero_ext.plan.simulation.training_setup import Training
from zero_ext.plan.simulation.transformer_cost import ModelCost


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
    costs = Costs(hardware, training, model.sequence)
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
        busy=dict(timeline.busy),
        memory=needs,
        shortfalls=needs.shortfalls(hardware),
        timeline=timeline,
    )
