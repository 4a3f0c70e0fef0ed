"""A plan: every placement of a model on a cluster, which of them fits, and which to take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero_ext.config import CommunicationConfig
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.onebit_traffic import onebit_state_bytes, onebit_step_bytes
from zero_ext.plan.placement_candidates import CANDIDATES
from zero_ext.plan.plan_entry import Batch, PlanEntry, make_plan_entry
from zero_ext.plan.recommendation import Objective, Recommendation, recommend
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.planned_units import unit_elements
from zero_ext.plan.simulation.simulated_staging import lengths_gathered_once
from zero_ext.plan.simulation.training_setup import Training
from zero_ext.plan.zeropp_traffic import step_bytes


@dataclass(frozen=True)
class Plan:
    """The result of :func:`make_plan`.

    Attributes:
        entries: every placement, those that do not fit as well.
        recommendation: the one to take and why; None if none fits.
        tokens: that the whole training sees; None if that was not said.
    """

    model: ModelSpec
    hardware: Hardware
    gpus: int
    batch: Batch
    objective: Objective
    entries: tuple[PlanEntry, ...]
    recommendation: Recommendation | None
    tokens: int | None = None

    @property
    def hosts(self) -> int:
        """Hosts that the GPUs are in."""
        return -(-self.gpus // self.hardware.ranks_per_node)

    def total_seconds(self, row: PlanEntry) -> float | None:
        """Of the whole training: steps, the last one whole, times seconds of a step."""
        if self.tokens is None:
            return None
        return -(-self.tokens // (row.samples * row.sequence)) * row.step.seconds

    def recommends(self, row: PlanEntry) -> bool:
        """Return whether ``row`` is the placement to take."""
        return self.recommendation is not None and self.recommendation.entry is row

    def crossing(self, row: PlanEntry, compressed: bool) -> int:
        """Return bytes that a GPU sends to other hosts in a step of ``row``; ``compressed``: with all of
        ZeRO++ that acts in its stage, in stages 0 and 1 as signs (1-bit Adam after its warm-up). 0 where
        hosts are not full.
        """
        training, per_host = row.training, self.hardware.ranks_per_node
        if self.gpus % per_host:
            return 0
        policy = CommunicationConfig(ranks_per_node=per_host)
        units = unit_elements(self.model.full_cost, training)
        if compressed and row.allows_one_bit:
            sent = onebit_step_bytes(self.gpus, units, ranks_per_node=per_host)
        else:
            if compressed:
                stage3 = (
                    {"quantized_weights": "int8", "hierarchical_partition": True}
                    if training.stage == 3
                    else {}
                )
                policy = policy.replace(quantized_gradients="int4", **stage3)
            sent = step_bytes(
                training.stage,
                self.gpus,
                units,
                policy,
                gradient_bytes=training.gradient_bytes,
                accumulation_steps=training.accumulation_steps,
                gathered_once=lengths_gathered_once(self.model.full_cost, training),
            )
        return sum(each.crossing for each in sent.values())

    def fits_one_bit(self, row: PlanEntry) -> bool:
        """Return whether 1-bit Adam runs in the placement of ``row``, with what it keeps besides Adam's
        state.
        """
        if not row.allows_one_bit:
            return False
        units = unit_elements(self.model.full_cost, row.training)
        errors = {"errors of signs": onebit_state_bytes(row.training.stage, self.gpus, units)}
        needs = replace(row.needs, device={**row.needs.device, **errors})
        return not needs.shortfalls(self.hardware)

    @property
    def nearest(self) -> PlanEntry:
        """The placement that asks least too much."""
        return min(self.entries, key=lambda row: row.excess)


def make_plan(
    model: ModelSpec,
    hardware: Hardware,
    gpus: int,
    batch: Batch,
    objective: Objective = "speed",
    *,
    moments_dtype: str = "fp32",
    tokens: int | None = None,
) -> Plan:
    """Plan mixed-precision training of ``model`` with Adam on ``gpus`` GPUs of machines ``hardware``.

    ``tokens`` are those of the whole training. Raises ValueError for figures that cannot be.
    """
    base = Training(gpus, moments_dtype=moments_dtype)
    rows = tuple(make_plan_entry(model, candidate, base, hardware, batch) for candidate in CANDIDATES)
    return Plan(model, hardware, gpus, batch, objective, rows, recommend(rows, objective), tokens)
