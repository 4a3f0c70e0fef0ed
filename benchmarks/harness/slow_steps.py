"""Two ways to train, in turn over links of a rate at which the first one waits for most of its time."""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.harness.ranks import Team
from benchmarks.harness.statistics import Ratio, ratio_of_rounds
from benchmarks.harness.token_bucket import AnyNetwork, ModeledNetwork
from examples.demo.corpus import gather_corpus

NODES, RANKS_PER_NODE = 2, 2
RANKS = NODES * RANKS_PER_NODE
COMMUNICATION_BAR = 5.0  # times compute that uncompressed communication must take at least
SETTLING_STEPS = 3  # one in full precision, then two as all that follow
SHORT_RUN = 7  # a run of so few steps is compressed from its second on
ATTEMPTS = 3  # to find a rate


@dataclass
class Side:
    """One mode: seconds a step without a limit and at the rate, bytes of a step by kind, over all ranks.

    `on_links` are the bytes a step that left a node by the kernel's count, None where links are modeled.
    """

    mode: str
    free: list[float] = field(default_factory=list)
    limited: list[float] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    crossing: dict[str, int] = field(default_factory=dict)
    on_links: float | None = None

    @property
    def crossing_of_a_node(self) -> float:
        """Bytes that a node sends to others in a step."""
        return sum(self.crossing.values()) / NODES


@dataclass
class Duel:
    """An uncompressed way and its compressed one, in turn over the same links."""

    plain: Side
    compressed: Side
    bar: float
    bits_per_second: float = 0.0

    @property
    def communication(self) -> float:
        """Times the compute that the uncompressed way's communication takes: what the limit adds to a step,
        over what a step takes without a limit, which is all compute and communication that costs nothing."""
        free = statistics.median(self.plain.free)
        return statistics.median(self.plain.limited) / free - 1

    @property
    def speedup(self) -> Ratio:
        """Time of the uncompressed step over the compressed one's."""
        return ratio_of_rounds(self.plain.limited, self.compressed.limited)

    def failures(self) -> list[str]:
        """What is wrong with it, in words."""
        found, names = [], f"{self.compressed.mode} against {self.plain.mode}"
        if self.communication < COMMUNICATION_BAR:
            found.append(
                f"{names}: uncompressed communication takes {self.communication:.1f} times compute, "
                f"{COMMUNICATION_BAR:g} wanted: raise --times"
            )
        if not self.speedup.at_least(self.bar):
            found.append(f"{names}: {self.speedup.text()} times faster, {self.bar:g} wanted")
        return found


class Steps:
    """A team that trains in one mode, and how far it is."""

    def __init__(self, side: Side, team: Team, network: AnyNetwork) -> None:
        self.side = side
        self._team = team
        self._network = network
        self._done = 0

    def start(self, what: str, text: str) -> None:
        settings = {"what": what, "mode": self.side.mode, "seed": 0, "dtype": "bf16", "steps": SHORT_RUN}
        self._team.ask("start", **settings, text=text, folder=f"{text}/none")
        self.run(SETTLING_STEPS)

    def run(self, steps: int) -> float:
        """Trains; seconds a step, and the bytes of a step are those of these steps."""
        before, self._done = _on_links(self._network), self._done + steps
        answers = self._team.ask("train", until=self._done)
        after = _on_links(self._network)
        for name in ("sent", "crossing"):
            total = Counter[str]()
            for answer in answers:
                total.update(answer[name])
            setattr(self.side, name, {kind: count // steps for kind, count in sorted(total.items())})
        if before is not None and after is not None:
            self.side.on_links = (after - before) / NODES / steps
        return max(answer["seconds"] for answer in answers) / steps


def _on_links(network: AnyNetwork) -> int | None:
    if isinstance(network, ModeledNetwork):
        return None
    return sum(network.bytes_sent(node) for node in range(NODES))


def run_duel(
    duel: Duel, network: AnyNetwork, what: str, rounds: int, steps: int, times: float, console: Console
) -> None:
    """Measures both sides in turn: without a limit, then at a rate at which uncompressed communication takes
    about `times` compute."""
    network.limit(None)
    with (
        tempfile.TemporaryDirectory(prefix="zero_ext_text_") as text,
        team_on(duel.plain.mode, network) as plain_team,
        team_on(duel.compressed.mode, network) as compressed_team,
    ):
        gather_corpus().write(Path(text))
        plain = Steps(duel.plain, plain_team, network)
        compressed = Steps(duel.compressed, compressed_team, network)
        for each in (plain, compressed):
            each.start(what, text)
        for _ in range(rounds):
            for each in (plain, compressed):
                each.side.free.append(each.run(steps))
        compute = statistics.median(duel.plain.free)
        rate = 8 * duel.plain.crossing_of_a_node / (times * compute)
        for _ in range(ATTEMPTS):
            network.limit(rate)
            plain.run(1)  # what the change of the rate does to connections is over
            found = plain.run(steps) / compute - 1
            console.print(
                f"{rate / 1e6:,.1f} Mbit/s: {duel.plain.mode} communicates {found:.1f} times as long as it "
                "computes",
                highlight=False,
            )
            if 0.9 * times < found < 1.3 * times:
                break
            rate *= found / times
        duel.bits_per_second = rate
        for _ in range(rounds):
            for each in (plain, compressed):
                each.side.limited.append(each.run(steps))


def team_on(name: str, network: AnyNetwork, worker: str = "benchmarks.harness.convergence_rank") -> Team:
    """Ranks on all nodes."""
    return Team(name, RANKS, 1, worker=worker, network=network)
