"""Coordinates, ranks and groups of a grid, against numpy's own counting."""

from __future__ import annotations

import random

import numpy as np
import pytest

from zero_ext.parallel import RankGrid

SIZES = {"pp": 3, "dp": 2, "tp": 4}


def shuffled_grid() -> tuple[RankGrid, np.ndarray]:
    ranks = list(range(24))
    random.shuffle(ranks)
    return RankGrid(SIZES, tuple(ranks)), np.array(ranks).reshape(3, 2, 4)


def test_every_rank_stands_at_its_coordinate() -> None:
    grid, box = shuffled_grid()
    for (pp, dp, tp), rank in np.ndenumerate(box):
        assert grid.coordinate(int(rank)) == {"pp": pp, "dp": dp, "tp": tp}
        assert grid.rank(tp=tp, pp=pp, dp=dp) == rank


def test_groups_are_the_lines_of_the_box() -> None:
    grid, box = shuffled_grid()
    assert grid.groups("tp") == box.reshape(-1, 4).tolist()
    assert grid.groups("pp") == box.reshape(3, -1).T.tolist()
    assert grid.groups("pp", "tp") == [box[:, dp, :].reshape(-1).tolist() for dp in range(2)]
    assert grid.groups() == [[rank] for rank in grid.ranks]


def test_matching_filters() -> None:
    grid, box = shuffled_grid()
    assert grid.matching(dp=1) == box[:, 1, :].reshape(-1).tolist()
    assert grid.matching(dp=1, pp=2) == box[2, 1, :].tolist()
    assert grid.matching() == box.reshape(-1).tolist()


def test_counted_has_neighbors_on_the_last_axis() -> None:
    assert RankGrid.counted({"pp": 2, "tp": 3}).groups("tp") == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("sizes", "ranks", "named"),
    [
        ({"pp": 0}, (), "axis 'pp': expected a length of at least 1, got 0"),
        ({"pp": 2}, (0, 1, 2), "2 positions"),
        ({"pp": 2}, (0, 0), "1 different"),
        ({"pp": 2}, (0, 2), "the largest 2"),
    ],
)
def test_what_is_no_grid_is_refused(sizes: dict[str, int], ranks: tuple[int, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RankGrid(sizes, ranks)


def test_coordinates_outside_are_refused_by_name() -> None:
    grid = RankGrid.counted({"pp": 2, "tp": 2})
    with pytest.raises(ValueError, match="axis 'tp': expected a position of 0 to 1, got 2"):
        grid.rank(pp=0, tp=2)
    with pytest.raises(ValueError, match=r"coordinate: expected a position on each of .*, got \['pp'\]"):
        grid.rank(pp=0)
    with pytest.raises(ValueError, match="rank: expected 0 to 3, got 4"):
        grid.coordinate(4)
    with pytest.raises(ValueError, match=r"axis: expected one of \['pp', 'tp'\], got 'dp'"):
        grid.groups("dp")
    with pytest.raises(ValueError, match=r"axis: expected one of \['pp', 'tp'\], got 'dp'"):
        grid.matching(dp=0)
