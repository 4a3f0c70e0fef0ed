"""The fastest layouts that fit: every one is looked at, most only at the time that computing takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from zero_ext.config.tiers import CAPACITIES
from zero_ext.plan.layout.layout_costs import RankNeeds, StepTime, fullest_rank, least_seconds, step_time
from zero_ext.plan.layout.parallel_layout import LayoutRequest, ParallelLayout, layouts
from zero_ext.plan.parse_sizes import short_bytes
from zero_ext.plan.plan_entry import ACTIVATION_WORDS, MOST_GPUS, gpus_in_words
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.training_setup import ACTIVATIONS

SHOWN = 5
_WHERE = {"device": "a GPU", "host": "a host", "nvme": "its NVMe"}
_WORTH_SAYING = 0.005  # of a step
_ROUNDING = 1 - 1e-9  # of sums of the same seconds in another order


@dataclass(frozen=True)
class FoundLayout:
    """A layout, the time of its step, and its fullest rank."""

    layout: ParallelLayout
    time: StepTime
    fullest: RankNeeds


def best_layouts(wanted: LayoutRequest, count: int = SHOWN) -> list[FoundLayout]:
    """Return the ``count`` fastest lengths of pp, dp and tp, the fastest first, each with the ZeRO stage,
    tiers, micro-batch and activations that are fastest of those that fit; of equals the nearer tiers,
    activations that are kept, the lower stage.

    Tensors are shared between nodes only if nothing else fits. Empty if nothing fits. Layouts are taken up in
    the order of a time that they cannot fall short of, until none can be among the best any more: the result
    is that of simulating all. Raises ``ValueError`` if the samples of a step cannot be shared out at all.
    """
    offered = False
    for beyond_nodes in (False, True):
        bounded = sorted(
            (
                (least_seconds(wanted.model, layout, wanted.hardware) * _ROUNDING, _plainness(layout), layout)
                for layout in layouts(wanted, beyond_nodes)
            ),
            key=lambda one: one[:2],
        )
        offered = offered or bool(bounded)
        best: dict[tuple[int, ...], FoundLayout] = {}
        for least, _, layout in bounded:
            ranking = sorted(best.values(), key=_order)
            if len(ranking) >= count and least > ranking[count - 1].time.seconds:
                break
            lengths = tuple(layout.sizes.values())
            known = best.get(lengths)
            if known is not None and least > known.time.seconds:
                continue
            fullest = fullest_rank(wanted.model, layout, wanted.hardware)
            if fullest.shortfalls:
                continue
            found = FoundLayout(layout, step_time(wanted.model, layout, wanted.hardware), fullest)
            if known is None or _order(found) < _order(known):
                best[lengths] = found
        if best:
            return sorted(best.values(), key=_order)[:count]
    if not offered:
        raise ValueError(_why_none_offered(wanted))
    return []


def nearest_layout(wanted: LayoutRequest) -> FoundLayout:
    """For where nothing fits: the layout that asks least too much of the tier it lacks most of."""
    needs = ((layout, fullest_rank(wanted.model, layout, wanted.hardware)) for layout in _smallest(wanted))
    layout, fullest = min(needs, key=lambda one: one[1].excess)
    return FoundLayout(layout, step_time(wanted.model, layout, wanted.hardware), fullest)


def fewest_gpus(wanted: LayoutRequest) -> int | None:
    """Twice, four times, ... as many GPUs with as many samples each, until a layout fits; None beyond
    :data:`MOST_GPUS`."""
    more = wanted
    while more.gpus <= MOST_GPUS // 2:
        more = replace(more, gpus=2 * more.gpus, samples=2 * more.samples)
        if any(not fullest_rank(more.model, one, more.hardware).shortfalls for one in _smallest(more)):
            return more.gpus
    return None


def _smallest(wanted: LayoutRequest) -> Iterator[ParallelLayout]:
    """Return the layouts with the fewest samples at a time, which need least memory."""
    least = replace(wanted, micro_batch=wanted.micro_batch or 1)
    return chain(layouts(least), layouts(least, beyond_nodes=True))


def _order(found: FoundLayout) -> tuple[float, tuple[int, ...]]:
    return found.time.seconds, _plainness(found.layout)


def _plainness(layout: ParallelLayout) -> tuple[int, ...]:
    training = layout.training
    activations = ACTIVATIONS.index(training.activations)
    return (
        training.distance,
        activations,
        training.stage,
        layout.pp * layout.tp,
        layout.pp,
        training.micro_batch,
    )


def _why_none_offered(wanted: LayoutRequest) -> str:
    size = f" in micro-batches of {wanted.micro_batch}" if wanted.micro_batch else ""
    return (
        f"samples: {wanted.samples} per step{size} cannot be divided over {wanted.gpus} GPUs. The replicas "
        "of every layout get different numbers of samples, or fewer micro-batches than it has pipeline "
        f"stages. Pass a multiple of {wanted.gpus * (wanted.micro_batch or 1)} samples."
    )


def reasons_of(found: FoundLayout, hardware: Hardware) -> str:
    """Return what bounds the step, what else it waits for, and the memory of its fullest rank."""
    shares = [
        f"{name} {seconds / found.time.seconds:.0%}"
        for name, seconds in sorted(found.time.components.items(), key=lambda item: -item[1])
        if seconds > _WORTH_SAYING * found.time.seconds
    ]
    layout, needs = found.layout, found.fullest.needs
    used = (
        f"{short_bytes(needs.total(tier))} of {_WHERE[tier]}'s "
        f"{short_bytes(getattr(hardware, f'{tier}_bytes'))}"
        for tier in CAPACITIES
        if needs.total(tier)
    )
    where = f"stage {found.fullest.stage} of {layout.pp}" if layout.pp > 1 else "a rank"
    memory = f"{where} takes {', '.join(used)}"
    return "; ".join(
        (f"bound by {', then '.join(shares)}", memory, ACTIVATION_WORDS[layout.training.activations])
    )


def why_no_layout(wanted: LayoutRequest) -> str:
    """Return what the nearest layout lacks, and how many GPUs would do."""
    nearest = nearest_layout(wanted)
    layout, lacks = nearest.layout, "; ".join(map(str, nearest.fullest.shortfalls))
    return (
        f"{wanted.model.name} fits no layout on {wanted.gpus} GPUs of {wanted.hardware.name}. The nearest, "
        f"{layout} in {layout.placement} with micro-batch {layout.training.micro_batch}, lacks {lacks}. "
        f"{gpus_in_words(fewest_gpus(wanted))}"
    )
