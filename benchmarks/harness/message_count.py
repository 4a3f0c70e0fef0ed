"""Collectives of a rank and the messages that it sends to other ranks, counted at its transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

METHODS = ("all_to_all", "gather", "broadcast", "all_reduce")


class MessageCount:
    """Counts calls of the transports of `collectives` from outside, and what they send to another rank.

    A collective of the backend counts as one message to each other rank. The other collectives count the
    non-empty tensors of their exchange. Calls that the transport makes of itself are one collective.
    """

    def __init__(self, collectives: Any) -> None:
        self.collectives = self.sent = 0
        self._depth = 0
        self._transports = {
            id(each): each
            for ordered in (collectives._gathers, collectives._reductions)
            for each in (ordered.unordered.for_tensor(torch.empty(0)),)
        }
        for transport in self._transports.values():
            for name in METHODS:
                setattr(transport, name, self._counted(transport, name))

    def reset(self) -> None:
        """Start again from zero."""
        self.collectives = self.sent = 0

    def restore(self) -> None:
        """Leave the transports as they were."""
        for transport in self._transports.values():
            for name in METHODS:
                delattr(transport, name)

    def _counted(self, transport: Any, name: str) -> Callable[..., Any]:
        original = getattr(transport, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.collectives += self._depth == 0
            sent, self._depth = self.sent, self._depth + 1
            try:
                result = original(*arguments, **named)
            finally:
                self._depth -= 1
            if name == "all_to_all":
                self.sent += _addressed(transport.rank, arguments[1])
            elif self.sent == sent and (name != "broadcast" or arguments[1] == transport.rank):
                self.sent += transport.world_size - 1
            return result

        return call


def _addressed(rank: int, sends: Sequence[torch.Tensor]) -> int:
    return sum(peer != rank and each.numel() > 0 for peer, each in enumerate(sends))
