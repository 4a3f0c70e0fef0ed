"""Why a layout is as fast as it is, or why there is none, in words."""

from __future__ import annotations

from zero_ext.config.parse_sizes import short_bytes
from zero_ext.plan.layout.layout_candidates import Wanted
from zero_ext.plan.layout.layout_search import MOST_GPUS, Found, fewest_gpus, nearest_layout
from zero_ext.plan.plan_entry import TIERS, activation_words
from zero_ext.plan.simulation.hardware import Hardware

_WHERE = {"device": "a GPU", "host": "a host", "nvme": "its NVMe"}
_WORTH_SAYING = 0.005  # of a step


def reasons_of(found: Found, hardware: Hardware) -> str:
    """What bounds the step, what else it waits for, and the memory of its fullest rank."""
    parts, seconds = found.time.parts, found.time.seconds
    ordered = sorted(parts, key=lambda part: -parts[part])
    shares = [
        f"{part} {parts[part] / seconds:.0%}" for part in ordered if parts[part] > _WORTH_SAYING * seconds
    ]
    told = [f"bound by {', then '.join(shares)}"]
    layout, needs = found.layout, found.fullest.needs
    used = (
        f"{short_bytes(needs.total(tier))} of {_WHERE[tier]}'s "
        f"{short_bytes(getattr(hardware, f'{tier}_bytes'))}"
        for tier in TIERS
        if needs.total(tier)
    )
    where = f"stage {found.fullest.stage} of {layout.pp}" if layout.pp > 1 else "a rank"
    told.append(f"{where} takes {', '.join(used)}")
    told.append(activation_words(layout.training.activations))
    return "; ".join(told)


def why_no_layout(wanted: Wanted) -> str:
    """What the nearest layout lacks, and how many GPUs would do."""
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
