"""The placement of the ranks of a pipelined and split model, and the time of its exchanges there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_ext.parallel import (
    LinkTopology,
    RankMapping,
    TransformerStep,
    best_mapping,
    naive_mapping,
    transformer_traffic,
)
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.simulation.hardware import Hardware

_AXES = ("pp", "dp", "cp", "tp")
_COUNTED = ("dp", "pp", "cp", "tp")  # an order that does not look at the machine, tensors innermost


@dataclass(frozen=True)
class RankPlacement:
    """A mapping of the ranks onto hosts with the seconds of a step that each axis' exchanges take, and the
    same of ranks counted through without looking at the machine."""

    mapping: RankMapping
    seconds: dict[str, float]
    naive: RankMapping
    naive_seconds: dict[str, float]

    @property
    def gain(self) -> float:
        """Return how many times less the exchanges take than counted through."""
        own, counted = sum(self.seconds.values()), sum(self.naive_seconds.values())
        return counted / own if own else 1.0


def lengths_of(text: str, ranks: int) -> dict[str, int]:
    """Return the lengths of all axes from "pp=4,tp=2", where "dp" takes what is left over of ``ranks``.
    Raises ``ValueError`` naming --3d for anything else.
    """
    found: dict[str, int] = {}
    for item in text.split(","):
        axis, _, number = (each.strip() for each in item.partition("="))
        if axis not in _AXES or axis in found or not number.isdigit() or int(number) < 1:
            raise ValueError(
                f"--3d: expected lengths of {', '.join(_AXES)}, each once, got {text!r}. Write them like "
                "pp=4,tp=2."
            )
        found[axis] = int(number)
    others = math.prod(length for axis, length in found.items() if axis != "dp")
    found.setdefault("dp", max(1, ranks // others))
    sizes = {axis: found.get(axis, 1) for axis in _AXES}
    if math.prod(sizes.values()) != ranks:
        raise ValueError(
            f"--3d: expected lengths with a product equal to the number of GPUs, {ranks}, got {text!r}, "
            "which "
            f"makes {math.prod(sizes.values())} ranks with dp={sizes['dp']}. Change the lengths, or the "
            "number of GPUs."
        )
    return sizes


def best_rank_placement(
    model: ModelSpec, hardware: Hardware, sizes: dict[str, int], samples: int, micro_batch: int, stage: int
) -> RankPlacement:
    """Return the best places for ``samples`` a step, shared out over the replicas in micro-batches of
    ``micro_batch``, with ZeRO's ``stage``.

    Raises ``ValueError`` for more stages than layers.
    """
    shape = model.shape
    samples_per_slot = sizes["dp"] * micro_batch
    if sizes["pp"] > shape.layers:
        raise ValueError(
            f"--3d: expected at most {shape.layers} stages, one for each layer of {model.name}, got "
            f"pp={sizes['pp']}. Lower pp."
        )
    step = TransformerStep(
        model.parameters, shape.layers, shape.hidden, shape.sequence, micro_batch, samples // samples_per_slot
    )
    traffic = transformer_traffic(sizes, step, stage)
    topology = LinkTopology.of_nodes(
        math.prod(sizes.values()),
        hardware.ranks_per_node,
        hardware.intra_bandwidth,
        hardware.inter_bandwidth,
        hardware.collective_seconds,
    )
    mapping, _ = best_mapping(sizes, topology, traffic)
    naive = naive_mapping(sizes, *_COUNTED)
    return RankPlacement(mapping, mapping.seconds(topology, traffic), naive, naive.seconds(topology, traffic))
