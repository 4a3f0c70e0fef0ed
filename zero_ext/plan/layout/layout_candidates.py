"""The layouts that a search looks at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from zero_ext.plan.layout.parallel_layout import ParallelLayout
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.placement_candidates import CANDIDATES
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, Training
from zero_ext.plan.state_memory import check_count


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
