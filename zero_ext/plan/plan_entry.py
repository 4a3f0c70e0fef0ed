"""One entry of a plan: a placement with its bytes, traffic, time, and what does not fit."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from zero_ext.config import UnitConfig, ZeroConfig
from zero_ext.config.optimizer_traits import OPTIMIZERS
from zero_ext.config.tiers import Tier, is_stored
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.run_memory import MemoryNeeds, Shortfall, excess, fits, memory_needs
from zero_ext.plan.simulation.simulate import StepEstimate, estimate_step
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, DEFAULT_OPTIMIZER, StateTiers, Training
from zero_ext.plan.simulation.transformer_cost import ModelCost


@dataclass(frozen=True)
class Candidate(StateTiers):
    """A stage and the tiers of its state kinds; ``label`` for tables."""

    stage: int
    label: str
    params: Tier = "device"
    grads: Tier = "device"
    optimizer: Tier = "device"

    @property
    def options(self) -> dict[str, Any]:
        """Return what :class:`Training` takes."""
        return {"stage": self.stage, **self.tiers}

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.label}"


CANDIDATES = (
    Candidate(0, "device"),
    Candidate(1, "device"),
    Candidate(1, "host", optimizer="host"),
    Candidate(1, "nvme", optimizer="nvme"),
    Candidate(2, "device"),
    Candidate(2, "host", grads="host", optimizer="host"),
    Candidate(2, "nvme", grads="host", optimizer="nvme"),
    Candidate(3, "device"),
    Candidate(3, "optimizer on host", grads="host", optimizer="host"),
    Candidate(3, "host", params="host", grads="host", optimizer="host"),
    Candidate(3, "optimizer on nvme", params="host", grads="host", optimizer="nvme"),
    Candidate(3, "nvme", params="nvme", grads="nvme", optimizer="nvme"),
)


KINDS = ("params", "grads", "optimizer", "activations", "buffers", "autograd", "NCCL")
DEFAULT_NVME_PATH = "/nvme"
MOST_GPUS = 1 << 16  # that a suggestion names
ACTIVATION_WORDS = {
    "saved": "activations are saved",
    "recomputed": "activations are recomputed (checkpoint the blocks)",
    "recomputed_host": "activations are recomputed, the outputs of blocks wait in host memory",
}
_LIVE_GRAIN = 100_000_000


@dataclass(frozen=True)
class PlanEntry:
    """A placement with the micro-batch it would run with.

    Attributes:
        training: what is simulated; its micro-batch and accumulation are the placement's own.
        largest_micro_batch: samples of a rank's forward that still fit; 0 if one sample does not.
        needs: bytes by tier, of this micro-batch.
        step: time and traffic of this micro-batch.
        shortfalls: what does not fit.
        sequence: tokens of a sample.
    """

    candidate: Candidate
    training: Training
    largest_micro_batch: int
    needs: MemoryNeeds
    step: StepEstimate
    shortfalls: tuple[Shortfall, ...]
    sequence: int

    @property
    def fits(self) -> bool:
        """Return whether every tier holds what is asked of it."""
        return not self.shortfalls

    @property
    def allows_one_bit(self) -> bool:
        """Return whether 1-bit Adam is for this placement."""
        training, one_bit = self.training, OPTIMIZERS["OneBitAdam"]
        return (
            training.stage in one_bit.one_bit_stages
            and training.optimizer == "device"
            and training.moments_dtype == "fp32"
            and training.optimizer_type in one_bit.resumes_from
        )

    @property
    def excess(self) -> tuple[float, float]:
        """See :func:`excess`."""
        return excess(self.shortfalls)

    @property
    def tokens(self) -> int:
        """Tokens that all ranks see in a step."""
        return self.training.samples * self.sequence

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens / self.step.seconds

    def by_kind(self, tier: Tier) -> dict[str, int]:
        """Return bytes of one GPU, or of all GPUs of a host (``host``, ``nvme``), by :data:`KINDS`."""
        found = dict.fromkeys(KINDS, 0)
        for name, nbytes in getattr(self.needs, tier).items():
            kind = "activations" if name == "outputs of blocks" else name if name in KINDS else "buffers"
            found[kind] += nbytes * (1 if tier == "device" else self.needs.ranks)
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


def make_plan_entry(
    model: ModelSpec, candidate: Candidate, base: Training, hardware: Hardware, batch: Batch
) -> PlanEntry:
    """Return the placement with the nearest way of keeping activations that fits: kept, else recomputed, else
    with the outputs of blocks in host memory; where none does, the one that lacks least.
    """
    tried = []
    for activations in ACTIVATIONS:
        training = replace(base, **candidate.options, activations=activations)
        training, largest = _with_micro_batch(model.full_cost, training, hardware, batch)
        needs = memory_needs(model.full_cost, training, hardware)
        tried.append((training, largest, needs, needs.shortfalls(hardware)))
        if not tried[-1][-1]:
            break
    training, largest, needs, shortfalls = min(tried, key=lambda one: excess(one[-1]))
    if not shortfalls:
        training = _with_look_ahead(model.full_cost, training, hardware)
        _, largest = _with_micro_batch(model.full_cost, training, hardware, batch)
        needs = memory_needs(model.full_cost, training, hardware)
    step = estimate_step(model.full_cost, training, hardware)
    return PlanEntry(candidate, training, largest, needs, step, shortfalls, model.shape.sequence)


def _with_look_ahead(model: ModelCost, training: Training, hardware: Hardware) -> Training:
    """Return ``training`` with a limit for the blocks ahead, the one in use and tied tables, if it fits.

    The default of ``units.max_live_elements`` leaves none where blocks have more than half a billion
    elements, so that every gather would be waited for.
    """
    if not training.placement.params:
        return training
    tied = sum(unit.parameters for unit in model.units if unit.tied)
    largest = max(unit.parameters for unit in model.units if not unit.tied)
    for ahead in (2, 1) if is_stored(training.params) else (1,):
        wanted = -(-(tied + (1 + ahead) * largest) // _LIVE_GRAIN) * _LIVE_GRAIN
        raised = replace(training, max_live_elements=max(wanted, training.max_live_elements))
        if fits(model, raised, hardware):
            return raised
    return training


def largest_micro_batch(model: ModelCost, training: Training, hardware: Hardware) -> int:
    """Return samples of a rank's forward that fit in every tier; 0 if one does not. Activations grow with it,
    all else stays.
    """

    def too_large(samples: int) -> bool:
        return not fits(model, replace(training, micro_batch=samples), hardware)

    high = 1
    while not too_large(high):
        high *= 2
    return bisect_left(range(1, high), True, lo=high // 2, key=too_large)


def _with_micro_batch(
    model: ModelCost, training: Training, hardware: Hardware, batch: Batch
) -> tuple[Training, int]:
    """``training`` with the micro-batch that was said, else the largest that fits and divides a rank's
    samples; and the largest that fits. Gradients of several micro-batches take more memory than those of
    one."""
    own, said = batch.samples // batch.ranks, batch.micro_batch
    largest = largest_micro_batch(model, training, hardware)
    if (said or min(own, largest)) < own:
        largest = largest_micro_batch(model, replace(training, accumulation_steps=2), hardware)
    micro_batch = said or next((size for size in range(min(own, largest), 1, -1) if own % size == 0), 1)
    return replace(training, micro_batch=micro_batch, accumulation_steps=own // micro_batch), largest


def gpus_in_words(gpus: int | None) -> str:
    """Return how many GPUs would do, None for more than :data:`MOST_GPUS`."""
    if gpus is None:
        return f"It would not fit {MOST_GPUS} GPUs of this kind either."
    return f"It would fit {gpus} GPUs of this kind."


def config_of(
    model: ModelSpec,
    training: Training,
    nvme_paths: tuple[str, ...] = (DEFAULT_NVME_PATH,),
    *,
    tiles: bool = True,
) -> ZeroConfig:
    """Return the configuration of ``training``: stage, precision, batch sizes, tiers, ``tiles`` of large
    layers, the limit under which large blocks are gathered ahead, and an optimizer other than AdamW.

    Where activations have to be recomputed, the model has to do it: no key of a configuration says so.
    """
    offload: dict[str, Any] = {kind: tier for kind, tier in training.tiers.items() if tier != "device"}
    if is_stored(*offload.values()):
        offload["nvme_paths"] = list(nvme_paths)
    units: dict[str, Any] = {}
    if tiles and training.stage == 3 and model.shape.tiles > 1:
        units["tiles"] = {"Linear": model.shape.matrix_tiles}
    if training.max_live_elements != UnitConfig().max_live_elements:
        units["max_live_elements"] = training.max_live_elements
    chosen = training.optimizer_type
    optimizer = {} if chosen == DEFAULT_OPTIMIZER else {"optimizer": {"type": chosen}}
    return ZeroConfig.from_mapping(
        {
            "stage": training.stage,
            "precision": {"dtype": "bf16", "moments_dtype": training.moments_dtype},
            "batch": {
                "train_batch_size": training.samples,
                "micro_batch_size": training.micro_batch,
                "gradient_accumulation_steps": training.accumulation_steps,
            },
            "gradient_clipping": 1.0,
            "offload": offload,
            "units": units,
            **optimizer,
        }
    )
