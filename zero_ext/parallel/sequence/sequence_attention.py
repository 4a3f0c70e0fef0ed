"""Wrap any attention function in the all-to-alls of sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.parallel.sequence.ulysses import SequenceExchange


class SequenceAttention:
    """An attention function on full sequences, called with shards of them.

    [`sequence_attention`][zero_ext.parallel.sequence_attention] makes it.

    Args:
        function: gets full sequences of some heads.
        exchange: of the ranks along "cp".

    Attributes:
        function: as given.
        exchange: as given.
    """

    def __init__(self, function: Callable[..., torch.Tensor], exchange: SequenceExchange) -> None:
        self.function = function
        self.exchange = exchange

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Attend to the full sequences; a collective.

        Args:
            query: [batch, heads, length / cp, head dim].
            key: [batch, key heads, length / cp, head dim]; as many heads as `query` or a divisor of them.
            value: as `key`.
            *args: passed on to the function.
            **kwargs: passed on to the function.

        Returns:
            [batch, heads, length / cp, head dim].

        Raises:
            ValueError: on all ranks, shapes differ along "cp", heads do not divide, or the function returned
                another shape.
        """
        exchange = self.exchange
        exchange.agree([*query.shape, *key.shape, *value.shape], "shapes of query, key and value")
        full = exchange.enter(query, key, value)
        with exchange.abort_on_error():
            attended = self.function(*full, *args, **kwargs)
            if attended.shape[:3] != full[0].shape[:3]:
                raise ValueError(
                    "output of the attention function: expected [batch, heads, length, head dim] with the "
                    f"same batch, heads and length as queries {tuple(full[0].shape)}, got "
                    f"{tuple(attended.shape)}. Return its dimensions in this order."
                )
        return exchange.leave(attended)


def sequence_attention(
    function: Callable[..., torch.Tensor], mesh: DeviceMesh, *, timeout_seconds: float = 600.0
) -> SequenceAttention:
    """Return attention over sequences that are sharded over the ranks along mesh["cp"]; a collective of them.

    One call serves all layers. Masks and biases are those of full sequences, for any head.

    Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509), section 3.

    Args:
        function: gets full sequences of some heads. It takes query, key and value [batch, heads, length, head
            dim] first and returns such a tensor: torch's scaled_dot_product_attention, or one of your own.
        mesh: has the dimension "cp".
        timeout_seconds: longest wait for the other ranks.

    Returns:
        The function on shards.

    Raises:
        ValueError: the mesh has no "cp".
    """
    return SequenceAttention(function, SequenceExchange(mesh, timeout_seconds))
