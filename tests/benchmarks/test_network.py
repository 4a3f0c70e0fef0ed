"""Nodes on one machine: who speaks with whom how, rates that hold, and nothing left behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import network as network_module
from benchmarks.harness import token_bucket
from benchmarks.harness.network import EmulatedNetwork, NetworkRefused
from benchmarks.harness.ranks import Team
from benchmarks.harness.token_bucket import ModeledNetwork, open_network, slow_down

WORKER = "tests.benchmarks.node_rank"
MEGA = 10**6


@pytest.fixture
def emulated() -> Iterator[EmulatedNetwork]:
    """Two nodes of two ranks each, without a limit."""
    try:
        with EmulatedNetwork(2, 2) as made:
            yield made
    except NetworkRefused as refused:
        pytest.skip(f"no network namespaces here: {refused}")


def namespaces() -> set[str]:
    """Network and mount namespaces that processes are in now."""
    found = set()
    for kind in ("net", "mnt"):
        for path in Path("/proc").glob(f"[0-9]*/ns/{kind}"):
            try:
                found.add(str(path.readlink()))
            except OSError:
                continue  # has ended meanwhile, or is somebody else's
    return found


def test_nodes_share_no_memory_and_their_links_are_limited(emulated: EmulatedNetwork) -> None:
    with Team("nodes", 4, 1, timeout_seconds=120.0, worker=WORKER, network=emulated) as team:
        assert team.ask("join") == [{"world": "ProcessGroupTransport", "node": "CrossProcessTransport"}] * 4
        before = [emulated.bytes_sent(node) for node in range(2)]
        team.ask("send", source=0, target=1, nbytes=8 * MEGA)
        inside = [emulated.bytes_sent(node) - count for node, count in enumerate(before)]
        assert max(inside) < MEGA  # a barrier's worth: the loopback of a node is no link
        for rate in (40 * MEGA, 20 * MEGA):
            emulated.limit(rate)
            for source, target in ((0, 2), (3, 1)):
                node, count = source // 2, emulated.bytes_sent(source // 2)
                seconds = max(team.ask("send", source=source, target=target, nbytes=2 * MEGA))
                # The token bucket lets no more through than this, however fast or slow the machine is.
                assert seconds > (2 * MEGA - 2 * network_module.LEAST_BURST) * 8 / rate
                assert emulated.bytes_sent(node) - count > 2 * MEGA


def test_nothing_is_left_behind(emulated: EmulatedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    within = {str(Path(f"/proc/{holder.pid}/ns/net").readlink()) for holder in emulated._holders}
    assert len(within) == 3 and within <= namespaces()
    emulated.close()
    assert not within & namespaces()
    emulated.close()

    held: list[subprocess.Popen[bytes]] = []
    hold, run = network_module._hold, network_module._run

    def remember(*spaces: str) -> subprocess.Popen[bytes]:
        held.append(hold(*spaces))
        return held[-1]

    def refuse(command: list[str]) -> str:
        return run(["false"]) if "address" in command else run(command)

    monkeypatch.setattr(network_module, "_hold", remember)
    monkeypatch.setattr(network_module, "_run", refuse)
    with pytest.raises(NetworkRefused, match="false"), EmulatedNetwork(2, 2):
        pass
    assert len(held) == 3 and all(holder.returncode is not None for holder in held)
    network = open_network(2, 2)  # the next best, which says why
    assert isinstance(network, ModeledNetwork) and "(false" in network.name


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with (
        pytest.raises(NetworkRefused, match=r"unshare is not installed \(util-linux\)"),
        EmulatedNetwork(2, 2),
    ):
        pass


def test_modeled_links_are_shared_by_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(token_bucket.time, "monotonic", lambda: now[0])
    with ModeledNetwork(2, 2, 8 * MEGA, "a test") as modeled:
        links = [Path(modeled.environment(rank)[token_bucket.FILE]) for rank in range(4)]
        assert links[0] == links[1] != links[2] == links[3]
        assert [token_bucket.book(link, MEGA) for link in links] == [1.0, 2.0, 1.0, 2.0]
        now[0] += 1.5
        assert token_bucket.book(links[0], MEGA // 2) == pytest.approx(1.0)
        now[0] += 10
        assert token_bucket.book(links[0], MEGA) == pytest.approx(1.0)
        modeled.limit(None)
        assert token_bucket.book(links[0], MEGA) == 0.0
    assert not links[0].exists()


def test_crossing_bytes_cost_time_where_the_link_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Traffic:
        def record(self, *arguments: object) -> None:
            recorded.append(arguments)

    recorded: list[object] = []
    slept: list[float] = []
    monkeypatch.setattr(token_bucket.time, "sleep", slept.append)
    traffic = Traffic()
    slow_down(traffic)
    traffic.record("gather", 10, 20, 5)
    assert slept == []
    with ModeledNetwork(2, 2, 8 * MEGA, "a test") as modeled:
        monkeypatch.setenv(token_bucket.FILE, modeled.environment(3)[token_bucket.FILE])
        slow_down(traffic)
        traffic.record("gather", 10, 20, MEGA)
    assert recorded == [("gather", 10, 20, 5), ("gather", 10, 20, MEGA)]
    (seconds,) = slept
    assert 0.9 < seconds <= 1.0


def test_ranks_see_what_torchrun_would_set() -> None:
    with ModeledNetwork(2, 2, None, "a test") as modeled:
        variables = modeled.environment(3)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [variables[name] for name in names] == ["3", "1", "4", "2", "1"]
