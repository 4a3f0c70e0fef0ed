"""The sequence of samples that training consumes, and how a global micro-batch is dealt to the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .shuffle import EpochOrder


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
        wanted, found = self.micro_batch_size, list[int]()
        while len(found) < wanted:
            end = min(self.order.samples, begin + wanted - len(found))
            found += self.order.indices(position.epoch + epoch, begin, end)
            epoch, begin = epoch + 1, 0
        return found
