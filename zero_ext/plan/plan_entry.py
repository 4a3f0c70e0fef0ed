"""One entry of a plan: a placement's bytes, traffic, time, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_ext.config import Tier
from zero_ext.plan.estimate import StepEstimate, estimate_step
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.placement_candidates import Candidate
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.run_memory import MemoryNeeds, Shortfall, fits, memory_needs
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, Activations, Training

TIERS: tuple[Tier, ...] = ("device", "host", "nvme")
KINDS = ("params", "grads", "optimizer", "activations", "buffers", "autograd", "NCCL")
_LIVE_GRAIN = 100_000_000
_ACTIVATION_KEYS = ("activations", "outputs of blocks")


@dataclass(frozen=True)
class PlanEntry:
    """A placement with the micro-batch it would run with.

    Attributes:
        training: what is simulated; its micro-batch and accumulation are the placement's own.
        largest_micro_batch: samples of a rank's forward that still fit; 0 if one sample does not.
        needs: bytes by tier, of this micro-batch.
        step: time and traffic of this micro-batch.
        shortfalls: what does not fit.
        samples: that all ranks see in a step.
        sequence: tokens of a sample.
    """

    candidate: Candidate
    training: Training
    largest_micro_batch: int
    needs: MemoryNeeds
    step: StepEstimate
    shortfalls: tuple[Shortfall, ...]
    samples: int
    sequence: int

    @property
    def fits(self) -> bool:
        """Return whether every tier holds what is asked of it."""
        return not self.shortfalls

    @property
    def allows_one_bit(self) -> bool:
        """Return whether 1-bit Adam is for this placement."""
        training = self.training
        return training.stage <= 1 and training.optimizer == "device" and training.moments_dtype == "fp32"

    @property
    def excess(self) -> tuple[float, float]:
        """Return what is asked of the tier that is shortest of memory, over what it has; and all such
        ratios.
        """
        return _excess(self.shortfalls)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.samples * self.sequence / self.step.seconds

    def by_kind(self, tier: Tier) -> dict[str, int]:
        """Return bytes of one GPU (``device``), or of all GPUs of a host (``host``, ``nvme``), by
        :data:`KINDS`.
        """
        bytes_by_use: dict[str, int] = getattr(self.needs, tier)
        ranks = 1 if tier == "device" else self.needs.ranks
        found = dict.fromkeys(KINDS, 0)
        for name, nbytes in bytes_by_use.items():
            kind = "activations" if name in _ACTIVATION_KEYS else name if name in KINDS else "buffers"
            found[kind] += nbytes * ranks
        return found


@dataclass(frozen=True)
class Batch:
    """Samples of a step, and of a rank's forward if that is said (else the most that fit are taken)."""

    samples: int
    micro_batch: int | None
    ranks: int

    def __post_init__(self) -> None:
        multiple = self.ranks * (self.micro_batch or 1)
        if self.samples < 1 or self.samples % multiple:
            expected = f"a multiple of {self.ranks} GPUs"
            expected += f" x {self.micro_batch} samples per micro-batch" if self.micro_batch else ""
            raise ValueError(
                f"--batch: expected {expected}, got {self.samples} samples per step. Pass a multiple of "
                f"{multiple}."
            )

    @property
    def of_rank(self) -> int:
        """Samples of a rank's step."""
        return self.samples // self.ranks


def make_plan_entry(
    model: ModelSpec, candidate: Candidate, base: Training, hardware: Hardware, batch: Batch
) -> PlanEntry:
    """Return the placement with the nearest way of keeping activations that fits: kept, else recomputed, else
    with the outputs of blocks in host memory; where none does, the one that lacks least.
    """
    tried = []
    for activations in ACTIVATIONS:
        training = replace(base, **candidate.options, activations=activations)
        training, largest = _with_micro_batch(model, training, hardware, batch)
        needs = memory_needs(model.full_cost, training, hardware)
        shortfalls = needs.shortfalls(hardware)
        tried.append((_excess(shortfalls), training, largest, needs, shortfalls))
        if not shortfalls:
            break
    _, training, largest, needs, shortfalls = min(tried, key=lambda one: one[0])
    if not shortfalls:
        training = _with_look_ahead(model, training, hardware)
        _, largest = _with_micro_batch(model, training, hardware, batch)
        needs = memory_needs(model.full_cost, training, hardware)
    return PlanEntry(
        candidate=candidate,
        training=training,
        largest_micro_batch=largest,
        needs=needs,
        step=estimate_step(model, training, hardware),
        shortfalls=shortfalls,
        samples=batch.samples,
        sequence=model.shape.sequence,
    )


def _with_look_ahead(model: ModelSpec, training: Training, hardware: Hardware) -> Training:
    """Return ``training`` with a limit for the blocks ahead, the one in use and tied tables, if it fits.

    The default of ``units.max_live_elements`` leaves none where blocks have more than half a billion
    elements, so that every gather would be waited for.
    """
    if not training.placement.params:
        return training
    units = model.full_cost.units
    tied = sum(unit.parameters for unit in units if unit.tied)
    largest = max(unit.parameters for unit in units if not unit.tied)
    for ahead in (2, 1) if training.params == "nvme" else (1,):
        wanted = -(-(tied + (1 + ahead) * largest) // _LIVE_GRAIN) * _LIVE_GRAIN
        raised = replace(training, max_live_elements=max(wanted, training.max_live_elements))
        if fits(model.full_cost, raised, hardware):
            return raised
    return training


def largest_micro_batch(model: ModelSpec, training: Training, hardware: Hardware) -> int:
    """Return samples of a rank's forward that fit in every tier; 0 if one does not. Activations grow with it,
    all else stays.
    """

    def possible(samples: int) -> bool:
        return fits(model.full_cost, replace(training, micro_batch=samples), hardware)

    if not possible(1):
        return 0
    low, high = 1, 2
    while possible(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def _with_micro_batch(
    model: ModelSpec, training: Training, hardware: Hardware, batch: Batch
) -> tuple[Training, int]:
    """``training`` with the micro-batch that was said, else the largest that fits and divides a rank's
    samples; and the largest that fits. Gradients of several micro-batches take more memory than those of
    one."""
    own, said = batch.of_rank, batch.micro_batch
    largest = largest_micro_batch(model, training, hardware)
    if (said or min(own, largest)) < own:
        largest = largest_micro_batch(model, replace(training, accumulation_steps=2), hardware)
    micro_batch = said or next((size for size in range(min(own, largest), 1, -1) if own % size == 0), 1)
    return replace(training, micro_batch=micro_batch, accumulation_steps=own // micro_batch), largest


def _excess(shortfalls: Sequence[Shortfall]) -> tuple[float, float]:
    times = [short.times for short in shortfalls]
    return max(times, default=0.0), sum(times)


def activation_words(activations: Activations) -> str:
    """Return what a user has to do in his model."""
    return {
        "saved": "activations are saved",
        "recomputed": "activations are recomputed (checkpoint the blocks)",
        "recomputed_host": "activations are recomputed, the outputs of blocks wait in host memory",
    }[activations]
