"""The positions of a parameter's elements in the flat partitions of DeepSpeed's ranks.

Stages 1 and 2 lay the parameters of a group end to end (with gaps where the start of each is aligned), and
cut the whole into one partition a rank. Stage 3 cuts every parameter into equal parts, the last one padded,
and lays the parts of a sub-group's parameters end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_pickle_scan import UnfitContent

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of a parameter are elements [begin, begin + numel) of flat partition
    ``flat`` of ``rank``."""

    rank: int
    flat: int
    begin: int
    start: int
    numel: int


def stage1_and_2_layout(
    flat: int, shapes: Shapes, gaps: Sequence[int], sizes: Sequence[int]
) -> dict[str, list[Fragment]]:
    """Fragments at stages 1 and 2: ``gaps`` are the elements left free after each parameter, ``sizes`` the
    elements of every rank's partition. ValueError if they do not add up."""
    if len(gaps) != len(shapes):
        raise UnfitContent(f"group {flat} has {len(shapes)} parameters and {len(gaps)} alignment paddings")
    partition, ranks = sizes[0], len(sizes)
    for rank, size in enumerate(sizes):
        if size > partition or (size < partition and rank < ranks - 1):
            raise UnfitContent(
                f"group {flat}: the partitions have {list(sizes)[:8]} elements; all ranks before the last "
                "have the same number, the last no more"
            )
    needed = sum(math.prod(shape) for shape in shapes.values()) + sum(gaps)
    stored, unit = sum(sizes), 2 * ranks
    if stored < needed or stored > -(-needed // unit) * unit:
        raise UnfitContent(
            f"group {flat}: its {len(shapes)} parameters take {needed} elements, the partitions of {ranks} "
            f"ranks hold {stored}"
        )
    found: dict[str, list[Fragment]] = {}
    offset = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        numel = math.prod(shape)
        found[name] = []
        first = offset // partition if partition else 0
        for rank in range(first, ranks):
            low, high = max(offset, rank * partition), min(offset + numel, rank * partition + sizes[rank])
            if low >= offset + numel:
                break
            if low < high:
                found[name].append(Fragment(rank, flat, low - rank * partition, low - offset, high - low))
        offset += numel + gap
    return found


def stage3_layout(flat: int, shapes: Shapes, sizes: Sequence[int]) -> dict[str, list[Fragment]]:
    """Fragments at stage 3, of sub-group ``flat``. ValueError if the sizes do not add up."""
    ranks = len(sizes)
    needed = sum(-(-math.prod(shape) // ranks) for shape in shapes.values())
    for rank, size in enumerate(sizes):
        if size != needed:
            raise UnfitContent(
                f"sub-group {flat}: its {len(shapes)} parameters take {needed} elements per rank, rank "
                f"{rank} "
                f"holds {size}"
            )
    found: dict[str, list[Fragment]] = {}
    begin = 0
    for name, shape in shapes.items():
        found[name] = even_fragments(math.prod(shape), ranks, flat, begin)
        begin += -(-math.prod(shape) // ranks)
    return found


def even_fragments(numel: int, ranks: int, flat: int = 0, begin: int = 0) -> list[Fragment]:
    """``numel`` elements in equal parts, each at ``begin`` of its rank's flat partition; padding left out."""
    size = -(-numel // ranks)
    return [
        Fragment(rank, flat, begin, rank * size, min(size, numel - rank * size))
        for rank in range(ranks)
        if rank * size < numel
    ]
