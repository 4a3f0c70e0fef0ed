"""The generation of a model's gradients: what caches of their values and agreements on them are valid for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GradientGeneration:
    """Counts the changes of a model's gradients. A cache stores the counts that it was computed at.

    Direct writes of the user to a full gradient are not counted. The engine therefore counts one write each
    time that it synchronizes the gradients.

    Attributes:
        received: gradients that backward has brought.
        writes: changes of reduced gradients outside reductions, such as clipping.
        rounds: ends of backward passes and of steps, and clearings of all gradients. The ranks have to agree
            on their gradients again after each.
    """

    received: int = 0
    writes: int = 0
    rounds: int = 0

    @property
    def of_values(self) -> tuple[int, int, int]:
        """The counts that the values of the reduced gradients depend on."""
        return self.received, self.writes, self.rounds

    @property
    def of_agreement(self) -> tuple[int, int]:
        """The counts that an agreement of the ranks on their gradients depends on."""
        return self.received, self.rounds
