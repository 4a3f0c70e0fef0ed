"""Pipelines, split tensors, sequences and experts: how full a pipeline is, what the engine costs over torch's
own parts, and what ZeRO sends inside a pipeline.

Run from the repository root: python -m benchmarks.parallel [--width 512] [--blocks 12] [--rounds 5]
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.parallel_trainers import Shape
from benchmarks.harness.ranks import Team
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import Ratio, ratio_of_rounds
from benchmarks.harness.token_trainers import CHOICES, EXPERTS
from zero_ext.parallel.pipeline import Slot, bubble_bound, busy_fraction, replay

WORKER = "benchmarks.harness.parallel_rank"
PIPELINE = "zero-pp-2"
EFFICIENCY_BAR, OVERHEAD_BAR = 0.95, 1.05
STAGE_ROUNDS = 3  # in which a stage's seconds are measured, for every micro-batch
# Of all processes: where their memory comes to lie makes some percent, in all of a start's rounds. As many as
# contenders, so that each is made first once.
STARTS = 4
# The contenders of two ranks: torch's own, and zero_ext's under ZeRO's stages.
AGAINST = {
    "torch-pp": ("zero-pp-0", "zero-pp-2", "zero-pp-3"),
    "torch-tp": ("zero-tp-0", "zero-tp-2", "zero-tp-3"),
    "torch-cp": ("zero-cp-0", "zero-cp-2", "zero-cp-3"),
    "torch-ep": ("zero-ep-0", "zero-ep-2", "zero-ep-3"),
}
TRAFFIC = (
    (0, "per_step"),
    (1, "per_step"),
    (2, "per_step"),
    (2, "per_micro_batch"),
    (3, "per_step"),
    (3, "per_micro_batch"),
)


@dataclass(frozen=True)
class Fullness:
    """The part of a step that ranks compute, and what the order of the schedule allows."""

    what: str
    ranks: int
    micro_batches: int
    busy: float
    bound: float

    @property
    def reached(self) -> float:
        """Of the bound."""
        return self.busy / self.bound


def middle(runs: list[Fullness]) -> Fullness:
    """That of the median, the lower of two."""
    return sorted(runs, key=lambda run: run.reached)[(len(runs) - 1) // 2]


def slots_of(team: Team) -> list[list[Slot]]:
    """What every rank ran in its last step."""
    return [[Slot(**slot) for slot in slots] for slots in team.ask("slots", kind=PIPELINE)]


def simulated(shape: Shape) -> tuple[list[Fullness], float]:
    """Four stages: the order that four ranks ran, with the seconds that each stage takes alone (its median),
    then with those of every micro-batch; and the measured seconds of an exchange."""
    with Team("four stages", 4, 1, worker=WORKER) as team:
        team.ask("start", shape=asdict(shape))
        team.ask("make", kind=PIPELINE)
        team.ask("steps", kind=PIPELINE, count=2)
        order = slots_of(team)
        exchange = max(team.ask("exchange_seconds", repeats=21)[:2])
        # The first passes are those of ranks that were idle.
        rounds = [team.ask("stage_seconds", kind=PIPELINE) for _ in range(1 + STAGE_ROUNDS)][1:]
    usual = [
        {what: statistics.median(time for each in rounds for time in each[stage][what]) for what in kinds}
        for stage, kinds in enumerate(rounds[0])
    ]
    comparisons = {
        "4 stages, simulated": lambda slot: usual[slot.stage][slot.what],
        "the same, each pass as it came": lambda slot: rounds[-1][slot.stage][slot.what][slot.micro_batch],
    }
    found = []
    for what, seconds in comparisons.items():
        placed = replay(order, seconds, exchange)
        found.append(Fullness(what, 4, shape.micro_batches, busy_fraction(placed), bubble_bound(placed)))
    return found, exchange


def real(team: Team, micro_batches: int, rounds: int) -> list[Fullness]:
    """Two ranks as they ran, a step a round."""
    found = []
    for _ in range(rounds):
        team.ask("steps", kind=PIPELINE, count=1)
        slots = slots_of(team)
        found.append(Fullness("2 stages, real", 2, micro_batches, busy_fraction(slots), bubble_bound(slots)))
    return found


def measured(shape: Shape, rounds: int) -> tuple[list[Fullness], dict[str, list[float]]]:
    """Two ranks, started afresh several times for every peer and those against it: how full zero_ext's
    pipelines are, and seconds by contender."""
    runs: list[Fullness] = []
    durations: dict[str, list[float]] = {}
    for start in range(STARTS):
        for peer, own in AGAINST.items():
            kinds = (peer, *own)
            with Team("two ranks", 2, 1, worker=WORKER) as team:
                team.ask("start", shape=asdict(shape))
                for kind, seconds in in_turn(team, rounds, (*kinds[start:], *kinds[:start])).items():
                    durations.setdefault(kind, []).extend(seconds)
                if PIPELINE in kinds:
                    runs += real(team, shape.micro_batches, rounds)
    return runs, durations


def in_turn(team: Team, rounds: int, kinds: tuple[str, ...]) -> dict[str, list[float]]:
    """Seconds of steps of the contenders ``kinds`` in turn, made in this order."""
    durations: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds:
        team.ask("make", kind=kind)
        team.ask("steps", kind=kind, count=2)
    for number in range(rounds):
        # To and fro: a machine that gets slower does so for all alike.
        for kind in kinds[:: -1 if number % 2 else 1]:
            durations[kind].append(max(team.ask("steps", kind=kind, count=1)))
    return durations


def overheads(durations: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Seconds of every contender, and their ratio to its peer's."""
    return {
        kind: {
            "seconds": durations[kind],
            "peer": peer,
            "ratio": ratio_of_rounds(durations[kind], durations[peer]),
        }
        for peer, own in AGAINST.items()
        for kind in own
    } | {peer: {"seconds": durations[peer]} for peer in AGAINST}


def traffic(shape: Shape) -> list[dict[str, Any]]:
    """What two replicas of two stages send."""
    found = []
    with Team("two stages, two replicas", 4, 1, worker=WORKER) as team:
        team.ask("start", shape=asdict(shape))
        for stage, grad_reduction in TRAFFIC:
            sent = team.ask("traffic", stage=stage, grad_reduction=grad_reduction)
            kinds = sorted({kind for each in sent for kind in each})
            total = {kind: sum(each.get(kind, 0) for each in sent) for kind in kinds}
            found.append({"stage": stage, "grad_reduction": grad_reduction, "sent": total})
    return found


def fullness_table(simulations: list[Fullness], runs: list[Fullness], exchange: float) -> Table:
    """How full the pipelines are."""
    table = Table(
        "How full a pipeline is (1F1B)",
        ("pipeline", "micro-batches", "busy", "the schedule allows", "of that", "at least"),
        note="Busy: the part of a step, from the first slot to the end of the last, that ranks spend in "
        "forward and backward passes, mean over ranks. The schedule allows: the same order of slots of "
        "equal length and exchanges in no time. Simulated: the order that four ranks ran, each slot as "
        "long as its stage takes with the other ranks asleep, the stages in turn (medians; below, passes as "
        f"they came on a machine whose speed changes), and {1e3 * exchange:.2f} ms an exchange, as "
        f"measured; the median of {STARTS} starts, the lower of two. Real: the median over the rounds of "
        f"{STARTS} starts.",
    )
    simulation, as_it_came = simulations
    for each in (simulation, as_it_came, middle(runs)):
        row = [f"{value:.3f}" for value in (each.busy, each.bound, each.reached)]
        bar = "" if each is as_it_came else f"{EFFICIENCY_BAR}"
        table.rows.append([each.what, str(each.micro_batches), *row, bar])
    return table


def overhead_table(found: dict[str, dict[str, Any]]) -> Table:
    """What the engine costs."""
    table = Table(
        "A step of zero_ext against torch's own parts, two ranks",
        ("contender", "ms a step", "against", "ratio", "at most"),
        note=f"Medians of rounds in turn, in {STARTS} starts of processes that hold one of torch's and those "
        "against it; ratios are medians of the rounds' ratios, with their 95% interval. The same layers, "
        "schedule, "
        "splits and batches. torch-pp: its schedule with its fused AdamW. torch-tp: parallelize_module with "
        "its AdamW as it comes, as the fused one refuses split tensors beside others. torch-cp: heads "
        "exchanged around attention by its all-to-all with autograd, DDP and its fused AdamW. All tokens of "
        f"a step are one sequence. torch-ep: the same with {EXPERTS} experts in each block, {CHOICES} for a "
        "token. Its context_parallel has no attention for CPUs. The number is ZeRO's stage. It shards "
        "over both ranks with cp and ep, and has one replica with pp and tp. Torch sends through gloo. "
        "zero_ext sends activations of stages, partial sums of split tensors and tokens of experts in the "
        "same way, and all else directly.",
    )
    for kind, each in found.items():
        row = ["", "", ""]
        if "peer" in each:
            ratio: Ratio = each["ratio"]
            row = [each["peer"], ratio.text(3), f"{OVERHEAD_BAR}"]
        table.rows.append([kind, f"{1e3 * statistics.median(each['seconds']):.1f}", *row])
    return table


def traffic_table(found: list[dict[str, Any]]) -> Table:
    """What ZeRO sends."""
    table = Table(
        "ZeRO inside a pipeline: bytes of a step, MB, 2 stages of 2 replicas, all ranks",
        ("ZeRO", "gradients reduced", "by kind", "together"),
    )
    for each in found:
        kinds = ", ".join(f"{kind} {count / 1e6:.2f}" for kind, count in each["sent"].items())
        all_sent = f"{sum(each['sent'].values()) / 1e6:.2f}"
        when = "once a step" if each["grad_reduction"] == "per_step" else "after every micro-batch"
        table.rows.append([str(each["stage"]), when, kinds, all_sent])
    return table


def main(
    width: Annotated[int, typer.Option(help="Of the model.")] = 512,
    blocks: Annotated[int, typer.Option(help="Of the model; a multiple of 4.")] = 12,
    window: Annotated[int, typer.Option(help="Bytes in a sample.")] = 128,
    micro_batches: Annotated[int, typer.Option(help="A step.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Measured after each start.")] = 5,
) -> None:
    """Measure; write the result."""
    console = terminal()
    shape = Shape(width, blocks, 8, window, micro_batches, samples=1)
    starts = sorted((simulated(shape) for _ in range(STARTS)), key=lambda start: start[0][0].reached)
    simulations, exchange = starts[(STARTS - 1) // 2]
    runs, durations = measured(shape, rounds)
    costs = overheads(durations)
    sent = traffic(shape)
    failures = [
        f"{each.what}: {each.reached:.3f} of the schedule's bound, {EFFICIENCY_BAR} wanted"
        for each in (simulations[0], middle(runs))
        if each.reached < EFFICIENCY_BAR
    ]
    failures += [
        f"{kind}: {each['ratio'].text(3)} times a step of {each['peer']}, at most {OVERHEAD_BAR} wanted"
        for kind, each in costs.items()
        if "peer" in each and not each["ratio"].at_most(OVERHEAD_BAR)
    ]
    data: dict[str, Any] = {"environment": describe(), "shape": asdict(shape), "exchange_seconds": exchange}
    data["fullness"] = [asdict(each) for start, _ in starts for each in start]
    data["fullness"] += [asdict(each) for each in runs]
    data["overheads"] = {
        kind: each | ({"ratio": asdict(each["ratio"])} if "ratio" in each else {})
        for kind, each in costs.items()
    }
    data["traffic"] = sent
    tables = [fullness_table(simulations, runs, exchange), overhead_table(costs), traffic_table(sent)]
    conclude(console, "parallel", "Pipelines, split tensors, sequences, experts", tables, data, failures)


if __name__ == "__main__":
    typer.run(main)
