"""A plan: every placement of a model on a cluster, which of them fits, and which to take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero_ext.config import CommunicationPolicy
from zero_ext.plan.models import PlannedModel
from zero_ext.plan.onebit_traffic import sign_bytes, sign_state_bytes
from zero_ext.plan.placement_candidates import CANDIDATES
from zero_ext.plan.plan_entry import Batch, PlanRow, plan_row
from zero_ext.plan.recommendation import Advice, Objective, advise
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.planned_units import unit_elements
from zero_ext.plan.simulation.simulated_staging import lengths_gathered_once
from zero_ext.plan.simulation.training_setup import Training
from zero_ext.plan.zeropp_traffic import step_bytes


@dataclass(frozen=True)
class Plan:
    """What :func:`make_plan` found.

    Attributes:
        rows: every placement, those that do not fit as well.
        advice: the one to take and why; None if none fits.
        tokens: that the whole training sees; None if that was not said.
    """

    model: PlannedModel
    hardware: Hardware
    gpus: int
    batch: Batch
    objective: Objective
    rows: tuple[PlanRow, ...]
    advice: Advice | None
    tokens: int | None = None

    @property
    def hosts(self) -> int:
        """Hosts that the GPUs lie in."""
        return -(-self.gpus // self.hardware.ranks_per_node)

    def total_seconds(self, row: PlanRow) -> float | None:
        """Of the whole training: steps, the last one whole, times seconds of a step."""
        if self.tokens is None:
            return None
        return -(-self.tokens // (row.samples * row.sequence)) * row.step.seconds

    def crossing(self, row: PlanRow, compressed: bool) -> int:
        """Bytes that a GPU sends to other hosts in a step of ``row``; ``compressed``: with all of ZeRO++ that
        acts in its stage, in stages 0 and 1 as signs (1-bit Adam after its warm-up). 0 where hosts are not
        full."""
        training, per_host = row.training, self.hardware.ranks_per_node
        if self.gpus % per_host:
            return 0
        policy = CommunicationPolicy(ranks_per_node=per_host)
        units = unit_elements(self.model.whole, training)
        if compressed and row.sends_signs:
            sent = sign_bytes(self.gpus, units, ranks_per_node=per_host)
        else:
            if compressed:
                whole = {"quantized_weights": "int8", "secondary_shards": True} if training.stage == 3 else {}
                policy = policy.replace(quantized_gradients="int4", **whole)
            sent = step_bytes(
                training.stage,
                self.gpus,
                units,
                policy,
                gradient_bytes=training.gradient_bytes,
                accumulation_steps=training.accumulation_steps,
                gathered_once=lengths_gathered_once(self.model.whole, training),
            )
        return sum(each.crossing for each in sent.values())

    def fits_signs(self, row: PlanRow) -> bool:
        """Whether 1-bit Adam runs in the placement of ``row``, with what it keeps beside Adam's state."""
        if not row.sends_signs:
            return False
        units = unit_elements(self.model.whole, row.training)
        kept = {"errors of signs": sign_state_bytes(row.training.stage, self.gpus, units)}
        needs = replace(row.needs, device={**row.needs.device, **kept})
        return not needs.shortfalls(self.hardware)

    @property
    def nearest(self) -> PlanRow:
        """The placement that asks least too much."""
        return min(self.rows, key=lambda row: row.excess)


def make_plan(
    model: PlannedModel,
    hardware: Hardware,
    gpus: int,
    batch: Batch,
    objective: Objective = "speed",
    *,
    moments_dtype: str = "fp32",
    tokens: int | None = None,
) -> Plan:
    """Plans mixed-precision training of ``model`` with Adam on ``gpus`` GPUs of machines ``hardware``.

    ``tokens`` are those of the whole training. Raises ValueError for figures that cannot be.
    """
    base = Training(gpus, moments_dtype=moments_dtype)
    rows = tuple(plan_row(model, candidate, base, hardware, batch) for candidate in CANDIDATES)
    return Plan(model, hardware, gpus, batch, objective, rows, advise(rows, objective), tokens)
