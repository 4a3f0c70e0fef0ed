"""Mixtures of experts by their sizes: parameters and activations of a layer, and the tokens that it sends."""

from __future__ import annotations

from dataclasses import dataclass

from zero_ext.plan.state_memory import check_count

_MATRICES = 3  # of an expert, which is gated
# Bytes per token in 16 bits that autograd saves: a row sent to an expert and the row that returns, in units
# of the model's width, and what is computed inside, in units of the hidden width.
_ROWS, _INSIDE = 4, 8


@dataclass(frozen=True)
class Mixture:
    """Experts instead of a layer's feed-forward part, each a gated network.

    Attributes:
        experts: routed experts of a layer.
        per_token: experts that a token is sent to.
        width: width of an expert's hidden layer.
        shared: width of the hidden layers of all shared experts, which every token passes; 0: there are none.
        gates: elements of a layer's gates of shared experts.
        dense_layers: numbers of the layers with a dense feed-forward part, from 0 on.
        ep_size: ranks that the routed experts of a layer are spread over.

    Raises:
        ValueError: a size is out of range, or `ep_size` does not divide the experts.
    """

    experts: int
    per_token: int
    width: int
    shared: int = 0
    gates: int = 0
    dense_layers: tuple[int, ...] = ()
    ep_size: int = 1

    def __post_init__(self) -> None:
        for name in ("experts", "per_token", "width", "ep_size"):
            check_count(name, getattr(self, name), 1)
        for name in ("shared", "gates"):
            check_count(name, getattr(self, name), 0)
        if self.per_token > self.experts:
            raise ValueError(
                f"per_token: expected at most the {self.experts} experts of a layer, got {self.per_token}. "
                "Lower it."
            )
        if self.experts % self.ep_size:
            raise ValueError(
                f"ep: expected a divisor of the {self.experts} experts of a layer, got {self.ep_size}. "
                "Choose a divisor."
            )

    def stacks(self, hidden: int) -> tuple[int, int]:
        """Return the sizes of the routed experts' two stacks of matrices on one of `ep_size` ranks.

        Args:
            hidden: width of the layer.

        Returns:
            Elements of each stack.
        """
        matrix = self.experts // self.ep_size * hidden * self.width
        return 2 * matrix, matrix

    def replicated(self, hidden: int) -> tuple[int, ...]:
        """Return the sizes of the matrices that every rank has: router, shared experts and their gates.

        Args:
            hidden: width of the layer.

        Returns:
            Elements of each matrix.
        """
        shared = (hidden * self.shared,) * _MATRICES if self.shared else ()
        return (hidden * self.experts, *shared, *((self.gates,) if self.gates else ()))

    def active(self, hidden: int) -> int:
        """Return the size of the routed experts that one token passes in a layer.

        Args:
            hidden: width of the layer.

        Returns:
            Elements.
        """
        return self.per_token * _MATRICES * hidden * self.width

    def routed_activations(self, hidden: int) -> float:
        """Return what autograd saves of the routed experts, where these are equally busy.

        Args:
            hidden: width of the layer.

        Returns:
            Bytes per token.
        """
        return float(self.per_token * (_ROWS * hidden + _INSIDE * self.width))

    def shared_activations(self) -> float:
        """Return what autograd saves of the shared experts.

        Returns:
            Bytes per token.
        """
        return float(_INSIDE * self.shared)

    def exchanged(self, hidden: int) -> float:
        """Return what one all-to-all exchange moves in 16 bits, rows that stay on their rank included.

        Args:
            hidden: width of the layer.

        Returns:
            Bytes per token; 0 on one rank.
        """
        return 2.0 * self.per_token * hidden if self.ep_size > 1 else 0.0
