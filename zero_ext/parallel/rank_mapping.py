"""Map ranks to coordinates of the grid by the cost of the links between them.

Axes are laid into the counting order of the ranks as digits of a number are, the fastest last. An axis may be
cut into several digits, so that a part of it lies inside a node and the rest between nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping as Sizes
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise, permutations, product
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from zero_ext.parallel.link_topology import AxisTraffic, LinkLevel, LinkTopology
from zero_ext.parallel.rank_grid import RankGrid

Digit = tuple[str, int]  # axis, length
_Ranks = npt.NDArray[np.int64]
_INNERMOST_FIRST = ("tp", "cp", "ep", "dp", "pp")
_MOST_ORDERS = 10_000


@dataclass(frozen=True)
class RankMapping:
    """An order of ranks as digits of a number, from the slowest to the fastest.

    Attributes:
        axes: names, in the order of the mesh.
        digits: pairs of axis and length. The lengths multiply to the number of ranks.
    """

    axes: tuple[str, ...]
    digits: tuple[Digit, ...]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Length of every axis."""
        found = dict.fromkeys(self.axes, 1)
        for axis, length in self.digits:
            found[axis] *= length
        return found

    def strides(self, axis: str) -> tuple[tuple[int, int], ...]:
        """Return the digits of an axis.

        Args:
            axis: its name.

        Returns:
            Pairs of length and distance in ranks, from the slowest.
        """
        found, stride = [], 1
        for name, length in reversed(self.digits):
            if name == axis:
                found.append((length, stride))
            stride *= length
        return tuple(reversed(found))

    def grid(self) -> RankGrid:
        """Return the grid of the ranks, with the axes in their order.

        Returns:
            The grid.
        """
        ranks = np.zeros((1,), dtype=np.int64)
        for axis in self.axes:
            ranks = (ranks[:, None] + _offsets(self.strides(axis))[None, :]).reshape(-1)
        return RankGrid(self.sizes, tuple(int(rank) for rank in ranks))

    def seconds(self, topology: LinkTopology, traffic: Sizes[str, AxisTraffic]) -> dict[str, float]:
        """Return the time that the exchanges of each axis take in a step, one axis after another.

        Args:
            topology: the links.
            traffic: what is exchanged by axis; axes without take no time.

        Returns:
            Seconds by axis.
        """
        return {
            axis: _seconds(topology, traffic[axis], self.strides(axis)) if axis in traffic else 0.0
            for axis in self.axes
        }

    def __str__(self) -> str:
        return " × ".join(f"{axis}{length}" for axis, length in self.digits) or "one rank"


def naive_mapping(sizes: Sizes[str, int], *order: str) -> RankMapping:
    """Return the mapping of undivided axes.

    Args:
        sizes: length of each axis.
        *order: the axes from the slowest to the fastest; default as `sizes` lists them.

    Returns:
        The mapping.

    Raises:
        ValueError: `order` does not name every axis once.
    """
    names = order or tuple(sizes)
    if set(names) != set(sizes):
        raise ValueError(f"order: expected each of {sorted(sizes)}, got {list(names)}. Name every axis once.")
    return RankMapping(tuple(sizes), tuple((axis, sizes[axis]) for axis in names if sizes[axis] > 1))


def best_mapping(
    sizes: Sizes[str, int], topology: LinkTopology, traffic: Sizes[str, AxisTraffic]
) -> tuple[RankMapping, float]:
    """Return the cheapest mapping found.

    Among equals tensor parallelism is innermost, then sequence, data and pipeline parallelism. Every order of
    prime digits is tried where there are up to some thousand. Beyond that each level's width is divided among
    the axes in every way that fills it, and undivided axes are laid out in every order.

    Args:
        sizes: length of each axis.
        topology: the links.
        traffic: what is exchanged by axis, as
            [`transformer_traffic`][zero_ext.parallel.transformer_traffic] returns it.

    Returns:
        The mapping and its seconds per step.

    Raises:
        ValueError: `sizes` do not multiply to the number of ranks.

    Examples:
        >>> from zero_ext.parallel import LinkTopology, TransformerStep, best_mapping, transformer_traffic
        >>> sizes = {"pp": 2, "dp": 2, "tp": 4}
        >>> step = TransformerStep(parameters=1e9, layers=24, hidden=2048, sequence=1024, micro_batches=4)
        >>> topology = LinkTopology.of_nodes(16, ranks_per_node=4, inside=200e9, between=20e9)
        >>> mapping, seconds = best_mapping(sizes, topology, transformer_traffic(sizes, step, stage=1))
        >>> str(mapping)
        'pp2 × dp2 × tp4'
    """
    volume = math.prod(sizes.values())
    if any(length < 1 for length in sizes.values()) or volume != topology.world_size:
        lengths = " × ".join(f"{axis} {length}" for axis, length in sizes.items())
        raise ValueError(
            f"lengths of the axes: expected a product of {topology.world_size}, the ranks of the topology, "
            f"got {lengths} = {volume}. Change one of them or the number of ranks."
        )
    if _orders(sizes) <= _MOST_ORDERS:
        candidates = list(all_mappings(sizes))
    else:
        naive = (naive_mapping(sizes, *each) for each in permutations(sizes))
        candidates = [*_filling(sizes, topology), *naive]
    best = min(candidates, key=lambda mapping: (_total(mapping, topology, traffic), _looks(mapping)))
    return best, _total(best, topology, traffic)


def all_mappings(sizes: Sizes[str, int]) -> Iterator[RankMapping]:
    """Yield every order of the prime digits of all axes: exhaustive, for worlds of up to some hundred ranks.

    Args:
        sizes: length of each axis.

    Yields:
        The mappings.
    """

    def orders(left: Counter[Digit], digits: tuple[Digit, ...]) -> Iterator[tuple[Digit, ...]]:
        if not left:
            yield digits
        for digit in left:
            yield from orders(left - Counter([digit]), (*digits, digit))

    primes = [(axis, prime) for axis, length in sizes.items() for prime in _primes(length)]
    for digits in orders(Counter(primes), ()):
        by_axis = ((axis, [*some]) for axis, some in groupby(digits, key=itemgetter(0)))
        merged = tuple((axis, math.prod(length for _, length in some)) for axis, some in by_axis)
        yield RankMapping(tuple(sizes), merged)


def _orders(sizes: Sizes[str, int]) -> int:
    """Return how many :func:`all_mappings` gives."""
    primes = [(axis, prime) for axis, length in sizes.items() for prime in _primes(length)]
    repeats = math.prod(math.factorial(count) for count in Counter(primes).values())
    return math.factorial(len(primes)) // repeats


def _filling(sizes: Sizes[str, int], topology: LinkTopology) -> Iterator[RankMapping]:
    """Yield mappings with digits that fill each level exactly, from the innermost outwards."""
    widths = [
        min(outer.ranks, topology.world_size) // inner.ranks for inner, outer in pairwise(topology.levels)
    ]
    filled = math.prod(widths)
    if topology.world_size % filled:
        return
    widths.append(topology.world_size // filled)

    def fill(left: dict[str, int], widths: list[int], digits: tuple[Digit, ...]) -> Iterator[RankMapping]:
        if not widths:
            yield RankMapping(tuple(sizes), digits)
            return
        for lengths in product(*map(_divisors, left.values())):
            if math.prod(lengths) != widths[0]:
                continue
            shares = dict(zip(left, lengths, strict=True))
            rest = {axis: left[axis] // share for axis, share in shares.items()}
            for order in permutations(digit for digit in shares.items() if digit[1] > 1):
                yield from fill(rest, widths[1:], (*order, *digits))

    yield from fill(dict(sizes), widths, ())


def _total(mapping: RankMapping, topology: LinkTopology, traffic: Sizes[str, AxisTraffic]) -> float:
    # Rounded, so that equals are equal whatever the order of their sum.
    return float(f"{math.fsum(mapping.seconds(topology, traffic).values()):.9e}")


def _looks(mapping: RankMapping) -> list[tuple[int, int]]:
    """Smaller for mappings that people would draw: the chattiest axes innermost, in few digits."""
    ranking = {axis: position for position, axis in enumerate(_INNERMOST_FIRST)}
    return [(len(mapping.digits), 0)] + [
        (ranking.get(axis, len(ranking)), -length) for axis, length in reversed(mapping.digits)
    ]


@lru_cache(maxsize=65536)
def _seconds(topology: LinkTopology, traffic: AxisTraffic, strides: tuple[tuple[int, int], ...]) -> float:
    """Return seconds of one axis's exchanges: at every level the busiest link, one level after another.

    Collectives are hierarchical: whatever the number of a group's ranks below a link, its bytes come through
    it once (as :mod:`zero_ext.comm` sends them).
    """
    count = math.prod(length for length, _ in strides)
    if count == 1:
        return 0.0
    ranks = np.arange(topology.world_size)
    # Each rank's position on the axis, and the rank at the first position of its group.
    position, first = np.zeros_like(ranks), ranks.copy()
    for length, stride in strides:
        digit = ranks // stride % length
        position = position * length + digit
        first -= digit * stride
    senders = position < count - 1
    receiving = first[senders] + _offsets(strides)[position[senders] + 1]
    total = 0.0
    for level in topology.levels:
        if traffic.pattern == "collective":
            load = _collective_load(topology, level, first, count) * traffic.nbytes
        else:
            load = _chain_load(topology, level, ranks[senders], receiving) * traffic.nbytes
        if load:
            total += load / level.bandwidth + level.latency * traffic.messages
    return total


def _collective_load(topology: LinkTopology, level: LinkLevel, first: _Ranks, count: int) -> float:
    """Buffers that the busiest link of ``level`` carries inwards, as fractions of a full one."""
    if level.ranks == 1:
        return 1.0 - 1.0 / count
    domain = np.arange(topology.world_size) // level.ranks
    domains = int(domain[-1]) + 1
    _, group = np.unique(first, return_inverse=True)
    members = np.bincount(group * domains + domain, minlength=topology.world_size // count * domains)
    missing = np.where(members > 0, 1.0 - members / count, 0.0)
    return float(missing.reshape(-1, domains).sum(axis=0).max())


def _chain_load(topology: LinkTopology, level: LinkLevel, sending: _Ranks, receiving: _Ranks) -> float:
    """Payloads that the busiest link of ``level`` carries in either direction."""
    source, target = sending // level.ranks, receiving // level.ranks
    crossing = np.concatenate([domains[source != target] for domains in (source, target)])
    # Forward goes one way and backward the other: what leaves a link in forward enters it in backward.
    return float(np.bincount(crossing, minlength=-(-topology.world_size // level.ranks)).max(initial=0))


def _offsets(strides: tuple[tuple[int, int], ...]) -> _Ranks:
    """Return the distance in ranks from an axis's first position to each of its positions."""
    found = np.zeros((1,), dtype=np.int64)
    for length, stride in strides:
        found = (found[:, None] + np.arange(length)[None, :] * stride).reshape(-1)
    return found


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _primes(number: int) -> tuple[int, ...]:
    found, prime = [], 2
    while number > 1:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return tuple(found)
