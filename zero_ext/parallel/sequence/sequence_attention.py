"""Wrap any attention function in the all-to-alls of sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.parallel.sequence.ulysses import SequenceExchange


class SequenceAttention:
    """``function`` on full sequences, called with shards of them; see :func:`sequence_attention`."""

    def __init__(self, function: Callable[..., torch.Tensor], exchange: SequenceExchange) -> None:
        self.function = function
        self.exchange = exchange

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """[batch, heads, length / cp, head dim], of tensors of this shape, those of keys and values with as
        many heads or a divisor of them. Raises ``ValueError`` on all ranks for shapes that differ along "cp",
        and as :meth:`SequenceExchange.enter`."""
        exchange = self.exchange
        exchange.agree([*query.shape, *key.shape, *value.shape], "shapes of query, key and value")
        full = exchange.enter(query, key, value)
        with exchange.abort_on_error():
            attended = self.function(*full, *args, **kwargs)
            if attended.shape[:3] != full[0].shape[:3]:
                raise ValueError(
                    f"the attention function gave {tuple(attended.shape)} for queries "
                    f"{tuple(full[0].shape)}; wanted [batch, heads, length, head dim] with the same batch, "
                    "heads and length"
                )
        return exchange.leave(attended)


def sequence_attention(
    function: Callable[..., torch.Tensor], mesh: DeviceMesh, *, timeout_seconds: float = 600.0
) -> SequenceAttention:
    """Return attention over sequences that are sharded over the ranks along mesh["cp"]; a collective of them.

    ``function`` gets full sequences of some heads. One call serves all layers.

    ``function`` takes query, key and value [batch, heads, length, head dim] first and returns such a tensor:
    torch's scaled_dot_product_attention, or one of your own. Whatever else it is called with is handed on:
    masks and biases are those of full sequences, for any head. ``timeout_seconds``: longest wait for the
    other ranks. Raises ``ValueError`` for a mesh without "cp".

    Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509), section 3.
    """
    return SequenceAttention(function, SequenceExchange(mesh, timeout_seconds))
