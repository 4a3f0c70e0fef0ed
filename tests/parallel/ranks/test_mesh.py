"""Meshes of torch over all ranks, seen from every rank of a pretended world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_ext.parallel import RankMapping, make_mesh, naive_mapping


@contextmanager
def pretended(rank: int, world_size: int) -> Iterator[None]:
    """This process is one rank of a world whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_every_rank_finds_its_groups() -> None:
    for rank in range(8):
        with pretended(rank, 8):
            mesh = make_mesh(pp=2, tp=2, device_type="cpu")
            assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
            assert mesh.mesh.shape == (2, 2, 1, 2)
            grid = naive_mapping({"pp": 2, "dp": 2, "cp": 1, "tp": 2}).grid()
            for axis in mesh.mesh_dim_names:
                group = next(each for each in grid.groups(axis) if rank in each)
                assert dist.get_process_group_ranks(mesh[axis].get_group()) == group
                assert mesh[axis].get_local_rank() == group.index(rank)


def test_a_mapping_orders_the_ranks() -> None:
    mapping = RankMapping(("pp", "tp"), (("tp", 2), ("pp", 4)))
    with pretended(3, 8):
        mesh = make_mesh({"pp": 4, "tp": 2}, mapping=mapping, device_type="cpu")
        assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [3, 7]
        assert dist.get_process_group_ranks(mesh["pp"].get_group()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("lengths", "named"),
    [
        ({"pp": 3}, "a product of 8, .* got pp 3 × dp 2 × cp 1 × tp 1 = 6"),
        ({"pp": 16}, "a product of 8, .* = 16"),
        ({"dp": 2, "tp": 2}, "a product of 8, .* = 4"),
        ({"tp": 0}, "axis 'tp': expected an integer of at least 1, got 0"),
        ({"tp": True}, "axis 'tp': expected an integer of at least 1, got True"),
        ({"sp": 2}, "axis: expected one of .*, got 'sp'"),
        ({"ep": 3}, "a product of 8, .* got pp 1 × dp 2 × ep 3 × cp 1 × tp 1 = 6"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths: dict[str, int], named: str) -> None:
    with pretended(0, 8), pytest.raises(ValueError, match=named):
        make_mesh(lengths, device_type="cpu")


def test_a_mapping_of_other_lengths_is_refused() -> None:
    with (
        pretended(0, 8),
        pytest.raises(
            ValueError, match=r"mapping: expected one of the lengths .*'pp': 4.*, got one of .*'pp': 2"
        ),
    ):
        make_mesh(pp=4, mapping=naive_mapping({"pp": 2, "dp": 4}), device_type="cpu")


def test_without_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        make_mesh(pp=1)
