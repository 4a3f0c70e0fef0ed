"""The shuffle: a permutation of an epoch's samples that needs no table and no random generator's state.

Each index is computed on its own by a Feistel network over the bits of its position (Luby and Rackoff 1988);
a result outside the range walks on along its cycle until it falls inside (Black and Rogaway 2002, section 3).
So a data set of any size costs no memory on any rank, and the order cannot change with torch's version.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Return the finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit in changes half of the bits
    out.
    """
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _WORD
    return value ^ value >> 31
