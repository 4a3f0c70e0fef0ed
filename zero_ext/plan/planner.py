"""A plan: every placement of a model on a cluster, which of them fits, which to use, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from zero_ext.config import CommunicationConfig
from zero_ext.config.tiers import TIERS
from zero_ext.plan.models import ModelSpec, model_named
from zero_ext.plan.parse_sizes import COUNTS, short_bytes, short_number
from zero_ext.plan.plan_entry import (
    ACTIVATION_WORDS,
    CANDIDATES,
    MOST_GPUS,
    Batch,
    PlanEntry,
    gpus_in_words,
    make_plan_entry,
)
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.planned_units import unit_elements
from zero_ext.plan.simulation.run_memory import fits
from zero_ext.plan.simulation.simulate import sent_in_step, tokens_sent
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, DEFAULT_OPTIMIZER, Training
from zero_ext.plan.step_traffic import onebit_state_bytes, onebit_step_bytes

Objective = Literal["memory", "speed"]
OBJECTIVES = ("memory", "speed")
ALIKE = 1.05  # placements whose speeds differ by less are taken for equally fast
SLOWEST = 2.0  # times the fastest step, that is the most that saving memory may cost
_UNNOTICED = 0.0005  # of a step
_HALVINGS = 12


@dataclass(frozen=True)
class Recommendation:
    """The placement to use, and the reasons, each a sentence."""

    entry: PlanEntry
    reasons: tuple[str, ...]


def recommend(rows: Sequence[PlanEntry], objective: Objective) -> Recommendation | None:
    """Return the placement of ``rows`` that fits and serves the objective best, or None if none fits.

    ``speed``: the most tokens per second. Among those within 5% of it: the nearest tiers, then the least GPU
    memory. ``memory``: the least GPU memory among those at most twice as slow as the fastest. Ties go to the
    lower stage.
    """
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    fastest = max(fitting, key=lambda row: row.tokens_per_second)
    slack = ALIKE if objective == "speed" else SLOWEST
    near = [row for row in fitting if row.tokens_per_second * slack >= fastest.tokens_per_second]

    def worth(row: PlanEntry) -> tuple[int, ...]:
        distance, nbytes = row.candidate.distance, row.needs.total("device")
        if objective == "memory":
            return nbytes, distance, row.candidate.stage
        return distance, ACTIVATIONS.index(row.training.activations), nbytes, row.candidate.stage

    best = min(near, key=worth)
    found = _why_not_simpler(best, rows)
    if objective == "memory":
        found.append("It needs the least GPU memory of all that are at most twice as slow as the fastest.")
    elif best is fastest:
        found.append("No other placement that fits is faster.")
    else:
        slower = 1 - best.tokens_per_second / fastest.tokens_per_second
        speed = f"{slower:.1%} slower than" if slower > _UNNOTICED else "as fast as"
        found.append(
            f"It is {speed} the fastest that fits ({fastest.candidate}), and {_advantage(best, fastest)}."
        )
    found += _about_traffic(best, rows, near)
    training = best.training
    batch = f"The micro-batch is {training.micro_batch}"
    if training.accumulation_steps > 1:
        batch += f", {training.accumulation_steps} of them per step"
    found.append(f"{_capitalized(ACTIVATION_WORDS[training.activations])}. {batch}.")
    return Recommendation(best, tuple(found))


def _why_not_simpler(best: PlanEntry, rows: Sequence[PlanEntry]) -> list[str]:
    """Return the simpler placements that do not fit, with what the last of them lacks."""
    order = best.candidate.distance, best.candidate.stage
    simpler = [row for row in rows if not row.fits and (row.candidate.distance, row.candidate.stage) < order]
    if not simpler:
        return []
    last = simpler[-1]
    lacks = " and ".join(
        f"{short_bytes(short.needed - short.available)} of {TIERS[short.tier].words}"
        for short in last.shortfalls
    )
    others = f" {len(simpler) - 1} other simpler placements do not fit either." if len(simpler) > 2 else ""
    if len(simpler) == 2:
        others = f" Nor does {simpler[0].candidate}."
    return [f"{_capitalized(str(last.candidate))} does not fit: it lacks {lacks}.{others}"]


def _advantage(best: PlanEntry, other: PlanEntry) -> str:
    if best.candidate.distance < other.candidate.distance:
        return "stores its state closer to the GPU"
    saved = other.needs.total("device") - best.needs.total("device")
    return f"needs {short_bytes(saved)} less GPU memory" if saved > 0 else "is simpler"


def _about_traffic(best: PlanEntry, rows: Sequence[PlanEntry], near: Sequence[PlanEntry]) -> list[str]:
    """Return the traffic of stage 3 against that of stage 2, where both fit in the same tiers."""
    other = next(
        (
            row
            for row in rows
            if row.fits
            and {row.candidate.stage, best.candidate.stage} == {2, 3}
            and row.candidate.tiers == best.candidate.tiers
        ),
        None,
    )
    if other is None or not other.step.sent:
        return []
    second, third = (best, other) if best.candidate.stage == 2 else (other, best)
    sent = short_bytes(third.step.sent), short_bytes(second.step.sent)
    traffic = f"Stage 3 sends {sent[0]} per step where stage 2 sends {sent[1]}"
    slower = third.step.seconds / second.step.seconds - 1
    if best is third:
        cost = f"{slower:.1%} of a step" if slower > _UNNOTICED else "no time"
        return [f"{traffic}. The difference costs {cost} on this link."]
    return [] if other in near else [f"{traffic}, and a step would be {slower:.0%} longer on this link."]


def _capitalized(words: str) -> str:
    return words[0].upper() + words[1:]


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
        return -(-self.tokens // row.tokens) * row.step.seconds

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
        if compressed and self._allows_one_bit(row):
            units = unit_elements(self.model.full_cost, training)
            sent = onebit_step_bytes(self.gpus, units, ranks_per_node=per_host)
            return sum(each.crossing for each in sent.values())
        codes: dict[str, object] = {"quantized_gradients": "int4"} if compressed else {}
        if compressed and training.stage == 3:
            codes |= {"quantized_weights": "int8", "hierarchical_partition": True}
        policy = CommunicationConfig(ranks_per_node=per_host).replace(**codes)
        return sent_in_step(self.model.full_cost, training, policy).crossing

    def _allows_one_bit(self, row: PlanEntry) -> bool:
        # Experts on some of the ranks are refused with it.
        return row.allows_one_bit and self.model.ep_size == 1

    def fits_one_bit(self, row: PlanEntry) -> bool:
        """Return whether 1-bit Adam runs in the placement of ``row``, with what it keeps besides Adam's
        state.
        """
        if not self._allows_one_bit(row):
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
    optimizer_type: str = DEFAULT_OPTIMIZER,
    tokens: int | None = None,
) -> Plan:
    """Plan mixed-precision training of ``model`` on ``gpus`` GPUs of machines ``hardware``.

    ``tokens`` are those of the whole training. Raises ValueError for figures that cannot be.
    """
    base = Training(gpus, moments_dtype=moments_dtype, optimizer_type=optimizer_type)
    rows = tuple(make_plan_entry(model, candidate, base, hardware, batch) for candidate in CANDIDATES)
    found = recommend(rows, objective)
    if found is not None and model.ep_size > 1:
        found = replace(found, reasons=(*found.reasons, _about_experts(model, found.entry)))
    return Plan(model, hardware, gpus, batch, objective, rows, found, tokens)


def _about_experts(model: ModelSpec, row: PlanEntry) -> str:
    sent = short_bytes(tokens_sent(model.full_cost, row.training).all)
    return (
        f"The experts of each layer are spread over {model.ep_size} ranks (apply_expert_parallel), and a "
        f"rank sends {sent} of tokens per step."
    )


def why_nothing_fits(plan: Plan) -> str:
    """Return what the nearest placement lacks, how many GPUs would do, and how large a model would fit."""
    row = plan.nearest
    lacks = "; ".join(map(str, row.shortfalls))
    text = (
        f"{plan.model.name} fits no placement on {plan.gpus} GPUs of {plan.hardware.name}. The nearest, "
        f"{row.candidate} with micro-batch {row.training.micro_batch}, lacks {lacks}. "
        f"{gpus_in_words(fewest_gpus(plan))}"
    )
    largest = largest_model(plan)
    if largest is not None:
        text += f" The largest GPT that fits {plan.gpus} has about {largest.name} parameters."
    return text


def fewest_gpus(plan: Plan) -> int | None:
    """Return of whole hosts the fewest on which anything fits, to a sixteenth; one sample a GPU at a time.
    None beyond :data:`MOST_GPUS`.
    """
    host = math.lcm(plan.hardware.ranks_per_node, plan.model.ep_size)
    least, gpus = plan.gpus, max(host, -(-2 * plan.gpus // host) * host)
    while not _fits(plan, plan.model, gpus):
        least, gpus = gpus, 2 * gpus
        if gpus > MOST_GPUS:
            return None
    while gpus - least > max(host, gpus // 16):
        middle = -(-(least + gpus) // 2 // host) * host
        if middle in (least, gpus):
            break
        least, gpus = (least, middle) if _fits(plan, plan.model, middle) else (middle, gpus)
    return gpus


def largest_model(plan: Plan) -> ModelSpec | None:
    """Return the largest number of parameters, as a GPT, with which one sample per GPU fits, if any."""
    low, high = 1_000_000, plan.model.parameters
    fitting = None
    for _ in range(_HALVINGS):
        middle = round((low * high) ** 0.5)
        two_digits = short_number(float(f"{middle:.1e}"), tuple(COUNTS)).replace(" ", "")
        model = model_named(two_digits, plan.model.shape.sequence)
        if _fits(plan, model, plan.gpus):
            fitting, low = model, middle
        else:
            high = middle
    return fitting


def _fits(plan: Plan, model: ModelSpec, gpus: int) -> bool:
    planned = plan.entries[0].training
    base = Training(gpus, moments_dtype=planned.moments_dtype, optimizer_type=planned.optimizer_type)
    trainings = (
        replace(base, **candidate.options, activations=activations)
        for candidate, activations in product(CANDIDATES, ACTIVATIONS)
    )
    return any(fits(model.full_cost, training, plan.hardware) for training in trainings)
