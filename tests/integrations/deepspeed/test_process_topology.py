"""Coordinates and ranks of a grid of parallelism, against a table built by plain loops."""

from __future__ import annotations

import itertools
import random
import secrets

import pytest

from zero_ext.integrations.deepspeed.process_topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


def grid(dims: list[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(length) for length in dims)))


def test_every_question_on_random_grids() -> None:
    seed = secrets.randbits(31)
    generator = random.Random(seed)
    for _ in range(30):
        axes = generator.sample(["pipe", "data", "model", "slice", "x"], generator.randint(1, 4))
        dims = [generator.randint(1, 4) for _ in axes]
        topology, table = ProcessTopology(axes, dims), grid(dims)
        assert topology.world_size() == len(table), seed
        for rank, at in enumerate(table):
            coord = dict(zip(axes, at, strict=True))
            assert topology.get_rank(**coord) == rank, seed
            assert topology.get_coord(rank)._asdict() == coord, seed
        for dim, axis in enumerate(axes):
            assert topology.get_dim(axis) == dims[dim]
            for index in range(dims[dim]):
                wanted = [rank for rank, at in enumerate(table) if at[dim] == index]
                assert topology.get_axis_list(axis, index) == wanted, seed
            lists = topology.get_axis_comm_lists(axis)
            assert sorted(itertools.chain(*lists)) == list(range(len(table))), seed
            for line in lists:
                rest = {tuple(v for i, v in enumerate(table[rank]) if i != dim) for rank in line}
                assert len(rest) == 1 and [table[rank][dim] for rank in line] == list(range(dims[dim])), seed
        some = generator.sample(axes, generator.randint(0, len(axes)))
        match = {axis: generator.randrange(dims[axes.index(axis)]) for axis in some}
        wanted = [
            rank for rank, at in enumerate(table) if all(at[axes.index(a)] == v for a, v in match.items())
        ]
        assert topology.filter_match(**match) == wanted, seed


def test_known_grids() -> None:
    three = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert three.get_axis_names() == ["pipe", "data", "model"]
    assert three.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert three.filter_match(pipe=0, data=1) == [2, 3]
    assert three.get_rank_repr(7) == "model_01"
    assert three.get_rank_repr(7, omit_axes=["model"], inner_sep=":", outer_sep="/") == "pipe:01/data:01"
    assert (three.get_dim("slice"), three.get_axis_comm_lists("slice")) == (0, [])
    two = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert two.mapping[two.ProcessCoord(pipe=1, data=2)] == 5
    assert two.get_rank(pipe=1, data=0) == 3


def test_bad_input() -> None:
    topology = ProcessTopology(["a", "b"], [2, 3])
    for wrong in ({"a": 1}, {"a": 1, "b": 0, "c": 0}):
        with pytest.raises(ValueError, match="Use filter_match for fewer"):
            topology.get_rank(**wrong)
    with pytest.raises(ValueError, match="axis 'b': expected a position of 0 to 2, got 3"):
        topology.get_rank(a=0, b=3)
    for rank in (-1, 6):
        with pytest.raises(ValueError, match=f"rank: expected 0 to 5, got {rank}"):
            topology.get_coord(rank)
    with pytest.raises(ValueError, match=r"axis: expected one of \['a', 'b'\], got 'c'"):
        topology.filter_match(c=0)
    for axes, dims in ((["a"], [1, 2]), (["a", "a"], [1, 2]), (["a"], [0])):
        with pytest.raises(ValueError, match="each with a length"):
            ProcessTopology(axes, dims)
