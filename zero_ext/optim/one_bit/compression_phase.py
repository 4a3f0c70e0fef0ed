"""The exchange between ranks in a step of an optimizer that compresses."""

from __future__ import annotations

import enum


class CompressionPhase(enum.Enum):
    """The exchange between ranks in one step of a one-bit optimizer.

    Attributes:
        FULL: gradients in full precision; both moments are updated.
        GRADIENT: the signs of gradients; the variance stays.
        MOMENTUM: the signs of the momentum. Each rank has its own. The variance stays.
        SCALED: as `MOMENTUM`, of parameters with momenta scaled to one magnitude.
        LOCAL: nothing; each rank steps by its own momentum, and the variance stays.
        DRIFT: as `LOCAL`, and then the signs of what all steps since the last exchange did.
    """

    FULL = "full"  # gradients in full precision; both moments are updated
    GRADIENT = "gradient"  # the signs of gradients; the variance stays
    MOMENTUM = "momentum"  # the signs of the momentum, of which each rank has its own; the variance stays
    SCALED = "scaled"  # as MOMENTUM, of parameters whose momenta were brought to one magnitude
    LOCAL = "local"  # nothing: each rank steps by its own momentum; the variance stays
    DRIFT = "drift"  # as LOCAL, and then the signs of what all steps since the last exchange did

    @property
    def compresses(self) -> bool:
        """Return whether gradients stay on their rank, unreduced."""
        return self is not CompressionPhase.FULL
