"""The benchmark of slow links: the search for a rate, its judgement, and the counters beside the kernel's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import compressed
from benchmarks.harness import slow_steps
from benchmarks.harness.slow_steps import Duel, Side, run_duel
from benchmarks.harness.token_bucket import ModeledNetwork
from examples.demo.corpus import Corpus
from tests.benchmarks.conftest import Concluded

# Of all ranks in a step; a node sends half of it.
CROSSING = {"adam": 4_000_000, "onebit_adam": 200_000, "zero3": 6_000_000, "zeropp": 1_500_000}
COMPUTE = {"adam": 1.0, "onebit_adam": 1.25, "zero3": 1.5, "zeropp": 2.0}
SECONDS_ALONE = {"half": 1.0, "engine_half": 1.3, "onebit": 0.08, "packed_onebit": 0.2}


class PretendedTeam:
    """Ranks whose step takes the mode's compute, and the bytes' time on the link beyond what hides in it."""

    link: ModeledNetwork
    hidden = 0.5

    def __init__(self, name: str, *_: Any, network: Any, **__: Any) -> None:
        self.mode, self.done, self.network = name, 0, network

    def __enter__(self) -> PretendedTeam:
        return self

    def __exit__(self, *error: object) -> None: ...

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        if command == "start":
            return [None] * 4
        steps, self.done = arguments["until"] - self.done, arguments["until"]
        seconds = COMPUTE[self.mode]
        if self.network.rate is not None:
            seconds += max(0.0, 8 * CROSSING[self.mode] / 2 / self.network.rate - self.hidden * seconds)
        count = CROSSING[self.mode] * steps // 4
        answer = {"sent": {"gather": 2 * count}, "crossing": {"gather": count}, "seconds": seconds * steps}
        return [answer] * 4


class PretendedNetwork(ModeledNetwork):
    rate: float | None = None

    def limit(self, bits_per_second: float | None) -> None:
        self.rate = bits_per_second


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedNetwork]:
    nothing = torch.zeros(1, dtype=torch.uint8)
    monkeypatch.setattr(slow_steps, "Team", PretendedTeam)
    monkeypatch.setattr(slow_steps, "gather_corpus", lambda: Corpus(nothing, nothing))
    with PretendedNetwork(2, 2, None, "a test") as made:
        yield made


def test_the_rate_is_found_by_measuring(network: PretendedNetwork) -> None:
    """Half of the compute hides communication, so the first guess is too fast a link."""
    duel = Duel(Side("adam"), Side("onebit_adam"), 3.0)
    run_duel(duel, network, "tiny", rounds=2, steps=3, times=2.0, console=Console(quiet=True))
    assert duel.plain.free == [1.0, 1.0] and duel.compressed.free == [1.25, 1.25]
    assert duel.plain.crossing == {"gather": 4_000_000} and duel.plain.crossing_of_a_node == 2e6
    assert 0.9 * 2.0 < duel.communication < 1.3 * 2.0
    assert 8 * 2e6 / duel.bits_per_second - 0.5 == pytest.approx(duel.communication)
    assert duel.speedup.median == pytest.approx((1 + duel.communication) / 1.25)
    (slow, slower) = duel.failures()  # 2 times compute is not 5, and so it is not 3 times faster
    assert "2.2 times compute, 5 wanted" in slow and "2.53 (2.53–2.53) times faster, 3 wanted" in slower
    fast = Duel(Side("zero3"), Side("zeropp"), 2.0)
    run_duel(fast, network, "tiny", rounds=1, steps=1, times=8.0, console=Console(quiet=True))
    assert fast.communication > 5 and fast.failures() == []


@pytest.mark.parametrize(("onebit", "status"), [(0.08, 0), (0.12, 1)])
def test_main(
    onebit: float,
    status: int,
    network: PretendedNetwork,
    concluded: Concluded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextlib.contextmanager
    def opened(nodes: int, ranks_per_node: int) -> Iterator[PretendedNetwork]:
        yield network

    def alone(*_: Any, **__: Any) -> dict[str, float]:
        return SECONDS_ALONE | {"onebit": onebit}

    monkeypatch.setattr(compressed, "open_network", opened)
    monkeypatch.setattr(compressed, "alone", alone)
    data, ended = concluded(compressed.main, "tiny", 1, 1, 8.0, 1000, "onebit_adam,zeropp")
    assert ended == status
    assert [one["met"] for one in data["results"]] == [True, True]
    assert data["links"].startswith("token bucket") and data["times_shorter_alone"] == pytest.approx(
        1 / onebit
    )
    rate = data["results"][0]["bits_per_second"]
    assert re.fullmatch(r"[\d.]+", str(rate)) and rate > 1e6
