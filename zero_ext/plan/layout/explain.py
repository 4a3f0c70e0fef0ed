"""Why a layout is as fast as it is, or why there is none, in words."""

from __future__ import annotations

from zero_ext.plan.layout.layout_candidates import LayoutRequest
from zero_ext.plan.layout.layout_search import MOST_GPUS, FoundLayout, fewest_gpus, nearest_layout
from zero_ext.plan.parse_sizes import short_bytes
from zero_ext.plan.plan_entry import TIERS, activation_words
from zero_ext.plan.simulation.hardware import Hardware

_WHERE = {"device": "a GPU", "host": "a host", "nvme": "its NVMe"}
_WORTH_SAYING = 0.005  # of a step


def reasons_of(found: FoundLayout, hardware: Hardware) -> str:
    """Return what bounds the step, what else it waits for, and the memory of its fullest rank."""
    components, seconds = found.time.components, found.time.seconds
    ordered = sorted(components, key=lambda name: -components[name])
    shares = [
        f"{name} {components[name] / seconds:.0%}"
        for name in ordered
        if components[name] > _WORTH_SAYING * seconds
    ]
    clauses = [f"bound by {', then '.join(shares)}"]
    layout, needs = found.layout, found.fullest.needs
    used = (
        f"{short_bytes(needs.total(tier))} of {_WHERE[tier]}'s "
        f"{short_bytes(getattr(hardware, f'{tier}_bytes'))}"
        for tier in TIERS
        if needs.total(tier)
    )
    where = f"stage {found.fullest.stage} of {layout.pp}" if layout.pp > 1 else "a rank"
    clauses.append(f"{where} takes {', '.join(used)}")
    clauses.append(activation_words(layout.training.activations))
    return "; ".join(clauses)


def why_no_layout(wanted: LayoutRequest) -> str:
    """Return what the nearest layout lacks, and how many GPUs would do."""
    nearest = nearest_layout(wanted)
    lacks = "; ".join(map(str, nearest.fullest.shortfalls))
    gpus = fewest_gpus(wanted)
    return (
        f"{wanted.model.name} fits no layout on {wanted.gpus} GPUs of {wanted.hardware.name}. The nearest, "
        f"{nearest.layout} in {nearest.layout.placement} with micro-batch "
        f"{nearest.layout.training.micro_batch}, lacks {lacks}. "
        + (
            f"It would fit {gpus} GPUs of this kind."
            if gpus is not None
            else f"It would not fit {MOST_GPUS} GPUs of this kind either."
        )
    )
