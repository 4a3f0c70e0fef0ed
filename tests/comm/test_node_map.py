"""The ranks that share a node, and those that form groups."""

from __future__ import annotations

import time

import pytest

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.comm import NodeMap
from zero_ext.comm.hierarchical import nodes_of, ranks_of_a_node
from zero_ext.comm.process_group import make_collectives


def test_local_ranks_and_counterparts() -> None:
    nodes = NodeMap(5, 8, 4)
    assert (nodes.nodes, nodes.node, nodes.local_rank, nodes.remote_ranks) == (2, 1, 1, 4)
    assert list(nodes.neighbors) == [4, 5, 6, 7]
    assert list(nodes.counterparts) == [1, 5]


def test_a_group_has_the_nodes_of_its_ranks() -> None:
    world_map = NodeMap(5, 8, 4)
    assert world_map.among(range(4, 6)) == NodeMap(1, 2, 2)
    assert world_map.among(range(8)) == world_map
    assert world_map.among(range(1, 8, 4)) == NodeMap(1, 2, 1)
    assert world_map.among(range(1, 8, 2)) == NodeMap(2, 4, 2)
    assert world_map.among((1, 5, 7)) == NodeMap(1, 3, 3)


def test_nodes_that_the_ranks_do_not_fill_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks_per_node: expected a divisor of the 4 ranks.*, got 3"):
        NodeMap(0, 4, 3)


def test_the_launcher_says_how_many_ranks_a_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_of_a_node(4, None) == 2
    assert ranks_of_a_node(3, None) == 3
    assert ranks_of_a_node(4, 4) == 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert ranks_of_a_node(4, None) == 4


def test_a_group_has_the_nodes_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert nodes_of(range(0, 16, 2), 5, 16, None) == NodeMap(5, 8, 4)
    assert nodes_of((3, 11), 1, 16, None) == NodeMap(1, 2, 1)
    assert nodes_of(range(16), 9, 16, None) == NodeMap(9, 16, 8)
    assert nodes_of((11, 3), 0, 16, None) == NodeMap(0, 2, 2)
    assert nodes_of((3, 11), 1, 16, 2) == NodeMap(1, 2, 2)


@on_ranks(4)
def test_ranks_with_different_node_sizes_form_one_node(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        assert make_collectives(world.group, 20.0).nodes.nodes == 2
        patch.setenv("LOCAL_WORLD_SIZE", "1" if world.rank else "2")
        assert make_collectives(world.group, 20.0).nodes.nodes == 1


def test_the_map_of_a_large_group_is_made_in_linear_time() -> None:
    began = time.process_time()
    found = NodeMap(0, 65536, 8).among(range(32768))
    assert found == NodeMap(0, 32768, 8)
    assert (
        time.process_time() - began < 2
    )  # counting the ranks of each node one by one takes twenty times that
