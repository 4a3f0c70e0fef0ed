"""Who is compared with whom, against which bar, and who can be in memory at the same time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.shapes import Shape
from benchmarks.peers import contender_named

LIBRARIES_BYTES = 600 * 2**20


@dataclass(frozen=True)
class Match:
    """One subject and its peers; a bar is the highest ratio subject / peer that passes, None to only show."""

    subject: str
    bars: tuple[tuple[str, float | None], ...]

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(peer for peer, _ in self.bars)


STEP_MATCHES = (
    Match("stage3", (("fsdp2", 0.70), ("deepspeed3", 0.70))),
    Match("stage2", (("fsdp2-keep", 0.75), ("deepspeed2", 0.75))),
    Match("stage1", (("ddp", 1.10), ("deepspeed1", None))),
    Match("stage3-gloo", (("fsdp2", None), ("deepspeed3", None))),
    Match("stage2-gloo", (("fsdp2-keep", None), ("deepspeed2", None))),
    Match("stage1-gloo", (("ddp", None),)),
    Match("stage0", (("ddp", None),)),
    Match("stage3@1", (("plain@1", 1.02),)),
    Match("stage2@1", (("plain@1", 1.02),)),
    Match("stage1@1", (("plain@1", 1.02),)),
)

OFFLOAD_MATCHES = (
    Match("stage3-host", (("deepspeed3-host", None),)),
    Match("stage3-nvme", (("deepspeed3-nvme", 0.70),)),
    Match("stage3-stored", (("deepspeed3-nvme", None),)),
)

MUON_MATCHES = (
    Match("stage3-muon", (("fsdp2-muon", 0.70),)),
    Match("stage2-muon", (("deepspeed2-muon", 0.70),)),
    Match("stage1-muon", (("deepspeed1-muon", 0.70),)),
)

TRAINER_MATCHES = (
    Match("trainer3", (("stage3", 1.02),)),
    Match("trainer2", (("stage2", 1.02),)),
    Match("accelerate3", (("stage3", 1.02),)),
    Match("accelerate2", (("stage2", 1.02),)),
)

MEMORY_MATCHES = (
    Match("stage3", (("fsdp2", None), ("deepspeed3", None))),
    Match("stage2", (("fsdp2-keep", None), ("deepspeed2", None))),
    Match("stage1", (("ddp", None), ("deepspeed1", None))),
    Match("stage0", (("ddp", None),)),
)


def select(matches: Sequence[Match], only: Sequence[str]) -> list[Match]:
    """The matches left when just the contenders in `only` take part; empty `only` keeps all.

    A match whose subject is left out is dropped; one whose peers are all left out times its subject alone.
    ValueError for a key that names no contender.
    """
    for key in only:
        contender_named(key)
    if not only:
        return list(matches)
    return [
        replace(match, bars=tuple(bar for bar in match.bars if bar[0] in only))
        for match in matches
        if match.subject in only
    ]


def expected_bytes(keys: Sequence[str], shape: Shape) -> int:
    """Rough bytes that these contenders' ranks need together."""
    contenders = [contender_named(key) for key in keys]
    return sum(
        contender.ranks * (LIBRARIES_BYTES + int(contender.bytes_per_parameter * shape.parameters))
        for contender in contenders
    )


def split_to_fit(match: Match, shape: Shape, limit_bytes: int) -> list[Match]:
    """The match whole if all its ranks fit in `limit_bytes`, else one match of the subject per peer."""
    if expected_bytes((match.subject, *match.peers), shape) <= limit_bytes:
        return [match]
    return [replace(match, bars=(bar,)) for bar in match.bars]


def order_of_round(keys: Sequence[str], round_number: int) -> list[str]:
    """Turns of one round: forwards and backwards alternately, so that a steady drift cancels out."""
    return list(keys) if round_number % 2 == 0 else list(reversed(keys))
