"""Who is compared with whom, against which bar, and who can be in memory at the same time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.shapes import SEQUENCE_LENGTH, Shape
from benchmarks.harness.workload import DEFAULT_WORKLOAD, Workload
from benchmarks.peers import contender_named

LIBRARIES_BYTES = 600 * 2**20
# Of the machine's memory, what contenders that are in memory simultaneously may need by `expected_bytes`.
MEMORY_SHARE = 0.85


@dataclass(frozen=True)
class Match:
    """One subject and its peers; a bar is the highest ratio subject / peer that passes, None to only show."""

    subject: str
    bars: tuple[tuple[str, float | None], ...]

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(peer for peer, _ in self.bars)


# Bars of two ranks and one micro-batch of SEQUENCE_LENGTH tokens per step.
STEP_MATCHES = (
    Match("stage3", (("fsdp2", 0.50), ("deepspeed3", 0.50))),
    Match("stage2", (("fsdp2-keep", 0.60), ("deepspeed2", 0.60))),
    Match("stage1", (("ddp", 0.85), ("deepspeed1", None))),
    Match("stage3-gloo", (("fsdp2", 0.70), ("deepspeed3", 0.70))),
    Match("stage2-gloo", (("fsdp2-keep", None), ("deepspeed2", None))),
    Match("stage1-gloo", (("ddp", None), ("deepspeed1", None))),
    Match("stage0", (("ddp", None),)),
    Match("stage3@1", (("plain@1", 1.02),)),
    Match("stage2@1", (("plain@1", 1.02),)),
    Match("stage1@1", (("plain@1", 1.02),)),
)

# Bars of two ranks and one micro-batch per step, by model, tokens and subject, for all its peers.
LONG_STEP_BARS = {
    ("34m", 1024): {"stage3": 0.80, "stage3-gloo": 0.90},
}

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
    Match("trainer3", (("stage3", 1.02), ("trainer-deepspeed3", None))),
    Match("trainer2", (("stage2", 1.02), ("trainer-deepspeed2", None))),
    Match("accelerate3", (("stage3", 1.02),)),
    Match("accelerate2", (("stage2", 1.02),)),
)

MEMORY_MATCHES = (
    Match("stage3", (("fsdp2", None), ("deepspeed3", None))),
    Match("stage2", (("fsdp2-keep", None), ("deepspeed2", None))),
    Match("stage1", (("ddp", None), ("deepspeed1", None))),
    Match("stage0", (("ddp", None),)),
)


def step_matches(model: str, workload: Workload) -> list[Match]:
    """STEP_MATCHES of the workload's ranks, with the bars that it has on a model.

    One rank is compared with the plain loop, too, and has no transport. Bars of one rank are those of every
    workload. With more ranks than two or several micro-batches, ratios are only shown.
    """
    ranks, found = workload.ranks, []
    for match in STEP_MATCHES:
        fixed = match.subject.endswith("@1")
        if (fixed and ranks not in (None, 1)) or (ranks == 1 and match.subject.endswith("-gloo")):
            continue
        if not fixed:
            match = replace(match, bars=_bars(match, model, workload))
        found.append(match)
    return found


def _bars(match: Match, model: str, workload: Workload) -> tuple[tuple[str, float | None], ...]:
    if workload.ranks not in (None, 2) or workload.accumulation > 1:
        return tuple((peer, None) for peer in match.peers)
    if workload.tokens == SEQUENCE_LENGTH:
        return match.bars
    bar = LONG_STEP_BARS.get((model, workload.tokens), {}).get(match.subject)
    return tuple((peer, bar) for peer in match.peers)


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


def expected_bytes(keys: Sequence[str], shape: Shape, workload: Workload = DEFAULT_WORKLOAD) -> int:
    """Rough bytes that these contenders' ranks need together."""
    contenders = [workload.applied_to(contender_named(key)) for key in keys]
    activations = workload.activation_bytes(shape)
    return sum(
        contender.ranks
        * (LIBRARIES_BYTES + activations + int(contender.bytes_per_parameter * shape.parameters))
        for contender in contenders
    )


def contenders_of(matches: Sequence[Match]) -> tuple[str, ...]:
    """Every contender of the matches once, in order of appearance."""
    return tuple(dict.fromkeys(key for match in matches for key in (match.subject, *match.peers)))


def split_to_fit(
    matches: Sequence[Match], shape: Shape, limit_bytes: int, workload: Workload = DEFAULT_WORKLOAD
) -> list[list[Match]]:
    """The matches in groups that are timed together: those with a peer in common, so that it is timed once.

    Groups whose ranks do not fit in `limit_bytes` are divided, see `smaller_groups`.
    """

    def fitting(group: list[Match]) -> list[list[Match]]:
        smaller = smaller_groups(group)
        if not smaller or expected_bytes(contenders_of(group), shape, workload) <= limit_bytes:
            return [group]
        return [each for one in smaller for each in fitting(one)]

    groups: list[list[Match]] = []
    for match in matches:
        known = [each for each in groups if set(contenders_of(each)) & set(match.peers)]
        if known:
            known[0].append(match)
        else:
            groups.append([match])
    return [each for group in groups for each in fitting(group)]


def smaller_groups(group: Sequence[Match]) -> list[list[Match]]:
    """Each match by itself, of a single one each pair of its subject and a peer; none of a pair."""
    if len(group) > 1:
        return [[match] for match in group]
    pairs = [[replace(group[0], bars=(bar,))] for bar in group[0].bars]
    return pairs if len(pairs) > 1 else []


def order_of_round(keys: Sequence[str], round_number: int) -> list[str]:
    """Turns of one round: forwards and backwards alternately, so that a steady drift cancels out."""
    return list(keys) if round_number % 2 == 0 else list(reversed(keys))
