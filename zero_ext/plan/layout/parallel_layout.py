"""The divisions of a model over a cluster: pipeline stages, slices of tensors, replicas under ZeRO."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from zero_ext.parallel import split_stages
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.plan_entry import CANDIDATES, Candidate
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, Training
from zero_ext.plan.simulation.transformer_cost import ModelCost, TensorGroup, UnitCost
from zero_ext.plan.state_memory import check_count


@dataclass(frozen=True)
class ParallelLayout:
    """``pp`` pipeline stages, each of ``tp`` ranks that share its tensors, as often as ``training`` has
    ranks: those are the replicas that ZeRO shards over. Ranks count with ``tp`` fastest, then the replicas.

    ``training.accumulation_steps`` are the micro-batches of a step (1F1B). Stages 0 and 1 reduce gradients
    once per step, stages 2 and 3 after every micro-batch. ``ValueError`` for lengths below 1 and fewer
    micro-batches than stages.
    """

    pp: int
    tp: int
    training: Training

    def __post_init__(self) -> None:
        check_count("pp", self.pp, 1)
        check_count("tp", self.tp, 1)
        if self.training.accumulation_steps < self.pp:
            raise ValueError(
                f"accumulation_steps: expected at least {self.pp} micro-batches, one for each pipeline "
                f"stage, got {self.training.accumulation_steps}. Raise accumulation_steps, or lower pp."
            )

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.training.world_size

    @property
    def gpus(self) -> int:
        """In all."""
        return self.pp * self.dp * self.tp

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every axis, the slowest to count first."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}

    @property
    def placement(self) -> Candidate:
        """The ZeRO stage and tiers that the replicas shard over."""
        training = self.training
        return next(
            candidate
            for candidate in CANDIDATES
            if all(getattr(training, name) == value for name, value in candidate.options.items())
        )

    @property
    def micro_batches(self) -> int:
        """Of a replica's step."""
        return self.training.accumulation_steps

    @property
    def reduces_each(self) -> bool:
        """Return whether a pipeline reduces gradients after every micro-batch."""
        return self.pp > 1 and self.training.placement.grads

    def training_of(self, stage: int) -> Training:
        """Return what a rank of pipeline stage ``stage`` does: in 1F1B the first one starts as many
        micro-batches as there are stages before its first backward, the last one a single one (Narayanan
        et al. 2021, arXiv 2104.04473, section 2.2).
        """
        return replace(self.training, in_flight=min(self.pp - stage, self.micro_batches))

    def share_of(self, hardware: Hardware) -> Hardware:
        """Return what the replicas of one part have of each node of ``hardware``."""
        ranks = min(self.gpus, hardware.ranks_per_node)
        return hardware.shared(math.gcd(self.dp, max(1, ranks // self.tp)), ranks)

    def __str__(self) -> str:
        return f"pp={self.pp}, dp={self.dp}, tp={self.tp}"


@dataclass(frozen=True)
class LayoutRequest:
    """The request for a layout: ``model`` on ``gpus`` GPUs of nodes ``hardware``, ``samples`` a step over
    all of them, ``micro_batch`` samples of a replica's forward (None: any number).

    Raises ``ValueError`` for a number below 1.
    """

    model: ModelSpec
    hardware: Hardware
    gpus: int
    samples: int
    micro_batch: int | None = None
    moments_dtype: str = "fp32"

    def __post_init__(self) -> None:
        check_count("gpus", self.gpus, 1)
        check_count("samples", self.samples, 1)
        if self.micro_batch is not None:
            check_count("micro_batch", self.micro_batch, 1)


def layouts(wanted: LayoutRequest, beyond_nodes: bool = False) -> Iterator[ParallelLayout]:
    """Yield every layout of ``wanted``, whether it fits or not.

    ``tp`` divides heads, the width of the feed-forward part and the GPUs of a node, or is a multiple of
    these ``beyond_nodes``. A stage has at least one layer, a step at least as many micro-batches as stages.
    """
    for pp, dp, tp in _meshes(wanted, beyond_nodes):
        own, rest = divmod(wanted.samples, dp)
        if rest:
            continue
        base = Training(dp, moments_dtype=wanted.moments_dtype)
        for micro_batch in _divisors(own) if wanted.micro_batch is None else (wanted.micro_batch,):
            if own % micro_batch or own // micro_batch < pp:
                continue
            sized = replace(base, micro_batch=micro_batch, accumulation_steps=own // micro_batch)
            for candidate, activations in product(CANDIDATES, ACTIVATIONS):
                yield ParallelLayout(pp, tp, replace(sized, **candidate.options, activations=activations))


def _meshes(wanted: LayoutRequest, beyond_nodes: bool) -> Iterator[tuple[int, int, int]]:
    """Lengths of pp, dp and tp."""
    shape, gpus = wanted.model.shape, wanted.gpus
    node = min(gpus, wanted.hardware.ranks_per_node)
    split = (shape.heads, shape.key_value_heads or shape.heads, shape.feed_forward or 4 * shape.hidden)
    for tp in _divisors(gpus):
        outside = tp > node and tp % node == 0
        if any(size % tp for size in split) or not (outside if beyond_nodes else node % tp == 0):
            continue
        for pp in _divisors(gpus // tp):
            if pp <= shape.layers:
                yield pp, gpus // tp // pp, tp


def _divisors(number: int) -> list[int]:
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})


@dataclass(frozen=True)
class Stage:
    """Pipeline stages that are alike: their ``numbers``, their ``layers``, and what a rank has of them."""

    numbers: tuple[int, ...]
    layers: int
    cost: ModelCost

    @cached_property
    def units(self) -> Counter[UnitCost]:
        """Return how many of each kind of unit."""
        return Counter(self.cost.units)


def stages_of(model: ModelSpec, pp: int, tp: int) -> tuple[Stage, ...]:
    """Return the kinds of stages of ``model`` cut into ``pp``, by parameters as a ``PipelineModule`` does by
    default, its tensors shared by ``tp`` ranks. The embedding goes before the layers, the output matrix
    behind; a tied one is in both ends.

    Raises ``ValueError`` for more stages than layers.
    """
    if pp > model.shape.layers:
        raise ValueError(
            f"pp: expected at most {model.shape.layers} stages, one for each layer of {model.name}, got "
            f"{pp}. Lower pp."
        )
    known, key = model.full_cost.derived, ("stages", pp, tp)
    if key not in known:
        cost = model.cost(tp)
        known[key] = tuple(
            Stage(tuple(numbers), layers, _stage_cost(cost, model, first, layers, last))
            for (first, layers, last), numbers in _kinds(model, pp).items()
        )
    found: tuple[Stage, ...] = known[key]
    return found


def _kinds(model: ModelSpec, pp: int) -> dict[tuple[bool, int, bool], list[int]]:
    """Return the stages that have the embedding or not, so many layers, the output matrix or not."""
    known, key = model.full_cost.derived, ("kinds of stages", pp)
    if key not in known:
        kinds = known[key] = {}
        end = model.shape.layers + 1  # counting the embedding as 0
        for number, held in enumerate(_cut(model, pp)):
            layers = len(held) - (0 in held) - (end in held)
            kinds.setdefault((0 in held, layers, end in held), []).append(number)
    found: dict[tuple[bool, int, bool], list[int]] = known[key]
    return found


def _cut(model: ModelSpec, pp: int) -> list[range]:
    """Return the embedding, the layers and the output matrix, counted from 0, of each stage."""
    first, *units, last = model.full_cost.units
    tiles = len(units) // model.shape.layers
    layer = sum(unit.parameters for unit in units[:tiles])
    tied = first.parameters if model.shape.tied else 0
    return split_stages([first.parameters, *[layer] * model.shape.layers, last.parameters + tied], pp)


def _stage_cost(cost: ModelCost, model: ModelSpec, first: bool, layers: int, last: bool) -> ModelCost:
    begin, *units, end = cost.units
    groups = cost.tensor_groups
    blocks = [position for position, group in enumerate(groups) if group.block]
    before, after = groups[: blocks[0]], groups[blocks[-1] + 1 :]
    if model.shape.tied and not (first and last):
        table = before[0]
        before = (replace(table, tied=False, looked_up=True), *before[1:])
        begin = replace(begin, tied=False, looked_up=True)
        after = (*after, TensorGroup(table.matrices))
        end = replace(end, parameters=end.parameters + table.elements)
    tiles = len(units) // model.shape.layers
    return replace(
        cost,
        units=((begin,) if first else ()) + tuple(units[: layers * tiles]) + ((end,) if last else ()),
        groups=(before if first else ()) + groups[blocks[0] : blocks[0] + layers] + (after if last else ()),
    )
