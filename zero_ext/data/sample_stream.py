"""The sequence of samples that training consumes: an epoch's shuffle, dealt out in global micro-batches.

The shuffle is a permutation that needs no table and no random generator's state. Each index is computed on
its own by a Feistel network over the bits of its position (Luby and Rackoff 1988); a result outside the range
walks on along its cycle until it falls inside (Black and Rogaway 2002, section 3). So a data set of any size
costs no memory on any rank, and the order cannot change with torch's version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, splitmix64's increment
_ROUND_PAIRS = 4
_LEAST_BITS = 6  # narrower networks favor some orders of five or six samples measurably


@dataclass(frozen=True)
class EpochOrder:
    """The order of `samples` samples in each epoch: a function of `seed` and the epoch alone.

    Without `shuffle` every epoch has the data set's own order.
    """

    samples: int
    seed: int
    shuffle: bool

    def indices(self, epoch: int, begin: int, end: int) -> list[int]:
        """Return the data set indices at positions `begin` to `end` (excluded) of the epoch.

        Raises ValueError when the range leaves the epoch.
        """
        if not 0 <= begin <= end <= self.samples:
            raise ValueError(
                f"positions: expected a range within 0 to {self.samples}, the samples of an epoch, got "
                f"{begin} to {end}. Pass positions of this epoch."
            )
        if not self.shuffle:
            return list(range(begin, end))
        keys = _round_keys(self.seed, epoch)
        return [_permuted(position, self.samples, keys) for position in range(begin, end)]


def _permuted(position: int, size: int, keys: list[tuple[int, int]]) -> int:
    bits = max(_LEAST_BITS, (size - 1).bit_length())
    low_bits = (bits + 1) // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    while True:
        high, low = position >> low_bits, position & low_mask
        for high_key, low_key in keys:
            high ^= _mixed(low ^ high_key) & high_mask
            low ^= _mixed(high ^ low_key) & low_mask
        position = high << low_bits | low
        if position < size:
            return position


def _round_keys(seed: int, epoch: int) -> list[tuple[int, int]]:
    start = _mixed(_mixed(seed + _STEP & _WORD) + epoch & _WORD)
    words = [_mixed(start + _STEP * count & _WORD) for count in range(1, 2 * _ROUND_PAIRS + 1)]
    return list(zip(words[::2], words[1::2], strict=True))


def _mixed(value: int) -> int:
    """Return splitmix64's finaliser (Steele, Lea, Flood 2014): any bit in changes half of the bits out."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _WORD
    return value ^ value >> 31


class Position(NamedTuple):
    """The position of training: `sample` samples of `epoch` are consumed, over all ranks."""

    epoch: int
    sample: int


@dataclass(frozen=True)
class SampleStream:
    """The epochs of `order` one after the other, consumed `micro_batch_size * world_size` samples at a time.

    Rank r gets the r-th slice of `micro_batch_size` samples of each global micro-batch, so the samples of a
    global micro-batch depend on its position alone. At the end of an epoch that does not divide:

    - `drop_last` False: the last global micro-batch is filled up with the first samples of the next epoch,
      which goes on behind them. Every epoch has each sample exactly once, every batch is full.
    - `drop_last` True: the remainder is left out of this epoch; the next one starts at its first sample.
    """

    order: EpochOrder
    micro_batch_size: int
    world_size: int
    drop_last: bool

    @property
    def global_batch(self) -> int:
        """Samples that all ranks consume per micro-batch."""
        return self.micro_batch_size * self.world_size

    @property
    def batches(self) -> int:
        """Global micro-batches of an epoch that starts at its first sample."""
        full, remainder = divmod(self.order.samples, self.global_batch)
        return full if self.drop_last or not remainder else full + 1

    def normalized(self, epoch: int, sample: int) -> Position:
        """Return the position of the next batch: epochs that `sample` runs over are counted off."""
        samples = self.order.samples
        if self.drop_last:
            full_batch_left = samples - sample >= self.global_batch
            return Position(epoch, sample) if full_batch_left else Position(epoch + 1, 0)
        return Position(epoch + sample // samples, sample % samples)

    def after(self, position: Position) -> Position:
        """Return the position behind the global micro-batch that starts at `position`."""
        return self.normalized(position.epoch, position.sample + self.global_batch)

    def indices(self, position: Position, rank: int) -> list[int]:
        """Return the data set indices of `rank`'s slice of the global micro-batch at `position`."""
        epoch, begin = divmod(position.sample + rank * self.micro_batch_size, self.order.samples)
        found = list[int]()
        while len(found) < self.micro_batch_size:
            end = min(self.order.samples, begin + self.micro_batch_size - len(found))
            found += self.order.indices(position.epoch + epoch, begin, end)
            epoch, begin = epoch + 1, 0
        return found
