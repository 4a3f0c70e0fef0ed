"""Contenders run in turn, all resident, only one awake: the measurement itself."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.harness.environment import available_bytes
from benchmarks.harness.matches import order_of_round
from benchmarks.harness.ranks import Team
from benchmarks.harness.statistics import mean_over_ranks
from benchmarks.harness.workload import DEFAULT_WORKLOAD, Workload
from benchmarks.peers import Contender, contender_named

SPARE_BYTES = 2**30


@dataclass
class Record:
    """What one contender did in one match; `seconds` holds the time of one step, per round."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    idle_processor_seconds: float = 0.0


def _train(team: Team, record: Record, unmeasured: int, measured: int, workload: Workload) -> None:
    sizes = {"length": workload.tokens, "accumulation": workload.accumulation}
    answers = team.ask("steps", unmeasured=unmeasured, measured=measured, **sizes)
    record.losses += mean_over_ranks([answer["losses"] for answer in answers])
    record.norms.append(team.ask("gradient_norm")[0])
    if measured:
        record.seconds.append(max(answer["seconds"] for answer in answers) / measured)


def _start(
    contender: Contender, shape: str, warm_up: int, stack: ExitStack, record: Record, workload: Workload
) -> Team:
    team = stack.enter_context(Team(contender.title, contender.ranks, contender.threads))
    team.start(contender, shape)
    _train(team, record, warm_up, 0, workload)
    if available_bytes() < SPARE_BYTES:
        raise MemoryError(
            f"less than {SPARE_BYTES >> 20} MiB are left with {contender.title} resident; timings would be"
            " those of a machine short of memory. Free some, or name fewer contenders with --only"
        )
    return team


def run_in_turn(
    keys: Sequence[str],
    shape: str,
    rounds: int,
    steps: int,
    warm_up: int,
    progress: Callable[[str], None],
    contenders: Mapping[str, Contender] | None = None,
    workload: Workload = DEFAULT_WORKLOAD,
) -> dict[str, Record]:
    """Time `keys` against each other on one shape and workload; `contenders` by key, if not those of that
    name.

    All teams are started and warmed up first. In each round every team in turn makes one unmeasured step,
    which brings its data back into the caches, and `steps` measured ones, while the other teams' ranks sleep
    in a read; their processor time is recorded as proof. TeamFailure if a rank fails.
    """
    records = {key: Record() for key in keys}
    with ExitStack() as stack:
        teams: dict[str, Team] = {}
        for key in keys:
            progress(f"{shape}: starting {key}")
            contender = contenders[key] if contenders else contender_named(key, shape)
            applied = workload.applied_to(contender)
            teams[key] = _start(applied, shape, warm_up, stack, records[key], workload)
        for round_number in range(rounds):
            for key in order_of_round(keys, round_number):
                progress(f"{shape}: round {round_number + 1}/{rounds}, {key}")
                asleep = {other: teams[other].ask("processor_seconds") for other in keys if other != key}
                _train(teams[key], records[key], 1, steps, workload)
                for other, before in asleep.items():
                    used = zip(teams[other].ask("processor_seconds"), before, strict=True)
                    records[other].idle_processor_seconds += sum(after - then for after, then in used)
    return records
