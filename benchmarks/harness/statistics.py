"""Pure arithmetic of the reports: ratios per round, bars, agreement of losses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy

BFLOAT16_EPSILON = 2.0**-7
CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 0


@dataclass(frozen=True)
class Ratio:
    """Time of one contender over another's: median of the rounds' ratios, and its 95% bootstrap interval.

    A bar is met only where the interval is entirely on its good side.
    """

    median: float
    low: float
    high: float
    rounds: int

    def at_most(self, bar: float) -> bool:
        """Whether the interval is entirely at or below `bar`."""
        return self.high <= bar

    def at_least(self, bar: float) -> bool:
        """Whether the interval is entirely at or above `bar`."""
        return self.low >= bar

    def interval(self, digits: int = 2) -> str:
        """The interval as a cell of a table."""
        return f"{self.low:.{digits}f}–{self.high:.{digits}f}"

    def text(self, digits: int = 2, unit: str = "") -> str:
        """The median with `unit`, and the interval in parentheses."""
        return f"{self.median:.{digits}f}{unit} ({self.interval(digits)})"


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Percentile bootstrap of the median: the central CONFIDENCE of the medians of resampled values.

    The seed is fixed, so equal values have equal intervals. Up to five values, the interval is their range.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    draws = numpy.random.default_rng(SEED).choice(numpy.asarray(values), (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(numpy.median(draws, axis=1), [tail, 1 - tail])
    return float(low), float(high)


def ratio_of_rounds(subject: Sequence[float], peer: Sequence[float]) -> Ratio:
    """Ratio subject / peer, round by round; both hold one time per round, in seconds, in the same order.

    Both sides of a round ran within seconds of each other, so a machine that slows down for a while moves
    both and leaves their ratio alone. ValueError when the rounds do not pair up.
    """
    if len(subject) != len(peer) or not subject:
        raise ValueError(f"rounds must pair up: {len(subject)} of the subject, {len(peer)} of the peer")
    if min(peer) <= 0:
        raise ValueError(f"times must be positive, the peer has {min(peer)}")
    ratios = [mine / theirs for mine, theirs in zip(subject, peer, strict=True)]
    return Ratio(median(ratios), *interval_of_median(ratios), len(ratios))


def largest_difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference of two curves over the steps both have; not-a-number if either has one."""
    if not values or not reference:
        raise ValueError("two curves of at least one step are needed")
    shared = min(len(values), len(reference))
    differences = [
        abs(ours - theirs) / abs(theirs)
        for ours, theirs in zip(values[:shared], reference[:shared], strict=True)
    ]
    return math.nan if any(math.isnan(d) for d in differences) else max(differences)


def agree(values: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether two curves of losses or norms match to one unit of bfloat16's accuracy (2^-7, relative)."""
    return largest_difference(values, reference) <= BFLOAT16_EPSILON


def mean_over_ranks(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Loss of every step averaged over ranks; `per_rank` holds one curve per rank."""
    return [sum(values) / len(values) for values in zip(*per_rank, strict=True)]


def within(value: float, bar: float | None) -> str:
    """'yes', 'no', or '' where no bar is set; a bar is met when value <= bar."""
    if bar is None:
        return ""
    return "yes" if value <= bar else "no"
