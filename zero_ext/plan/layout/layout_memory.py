"""Bytes of a rank in a layout: the planner's formulas, over what the rank's stage has of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from zero_ext.config.buffer_sizes import communicator_bytes
from zero_ext.plan.layout.parallel_layout import ParallelLayout
from zero_ext.plan.layout.stages import Stage, stages_of
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.run_memory import MemoryNeeds, Shortfall, memory_needs, state_needs
from zero_ext.plan.simulation.training_setup import Training
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
        return max((short.times for short in self.shortfalls), default=0.0)


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
