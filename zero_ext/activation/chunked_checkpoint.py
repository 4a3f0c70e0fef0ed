"""``checkpoint_in_chunks``: a function of single tokens, recomputed in backward chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from zero_ext.activation.activation_checkpoint import (
    ActivationCheckpointing,
    checkpoint_activations,
    current_checkpointing,
)
from zero_ext.activation.checkpoint_call import name_of

ChunkTokens = int | Literal["auto"]

_FEWEST_TOKENS = 256
"""Of a chunk with ``chunk_tokens="auto"``. Products of fewer rows leave a device idle."""


def check_chunk_tokens(chunk: object) -> None:
    """Refuse a size of chunks that is neither "auto" nor an integer of at least 1, by ``ValueError``."""
    if chunk != "auto" and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(
            f"chunk_tokens: expected 'auto' or an integer of at least 1, got {chunk!r}. Correct it."
        )


def checkpoint_in_chunks(
    function: Callable[..., Any], hidden: Tensor, /, *others: Tensor, chunk_tokens: ChunkTokens = "auto"
) -> Tensor:
    """Return `function(hidden, *others)`, computed chunk by chunk and again in backward.

    The output for a token must depend on that token alone, as that of a feed-forward network does. Forward
    and backward then hold the intermediates of one chunk, and autograd saves `hidden` and `others` only.
    Forward without gradients runs in chunks too. Each chunk runs again in backward with its random numbers
    and its autocast state, as in [`checkpoint_activations`][zero_ext.checkpoint_activations]. Its inputs stay
    on the device.

    Outputs and gradients are those of one call, except for the order of sums over tokens in the gradients of
    parameters. The gradients of chunks are added in the dtype of the parameter. Dropout draws other numbers
    than in one call.

    In stage 3, call it inside a block of the model: the block's parameters are gathered once per pass, and
    their gradients are reduced once.

    Source: Bekman et al., "Arctic Long Sequence Training" (arXiv 2506.13996), section 3.1.

    Args:
        function: a module, or another function of tensors. It returns one tensor.
        hidden: [..., tokens, width].
        *others: further tensors [..., tokens, any width] with the same tokens.
        chunk_tokens: largest number of tokens per chunk, over all leading dimensions. "auto" is the width of
            `hidden`, at least 256: a chunk's intermediates then have about the size of the weights.

    Returns:
        [..., tokens, any width].

    Raises:
        ValueError: a wrong `chunk_tokens`, or tensors with other tokens than `hidden`.
        TypeError: `function` did not return one tensor with an entry for each token.

    Examples:
        >>> network = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        >>> hidden = torch.ones(2, 6, 4, requires_grad=True)
        >>> zero_ext.checkpoint_in_chunks(network, hidden, chunk_tokens=5).shape
        torch.Size([2, 6, 4])
    """
    check_chunk_tokens(chunk_tokens)
    for each in (hidden, *others):
        if each.dim() < 2 or each.shape[:-1] != hidden.shape[:-1]:
            raise ValueError(
                f"{name_of(function)}: expected tensors [..., tokens, width] with the same tokens, got "
                f"{tuple(hidden.shape)} and {tuple(each.shape)}. Pass other arguments by functools.partial."
            )
    leading = hidden.shape[:-1]
    tokens = leading.numel()
    limit = max(hidden.shape[-1], _FEWEST_TOKENS) if chunk_tokens == "auto" else chunk_tokens
    number = max(1, -(-tokens // limit))
    # All tokens in one dimension, so that no chunk mixes slices of two sequences in a shape of its own.
    # The number of dimensions stays, because functions may unpack it.
    single = [1] * (hidden.dim() - 2)
    cut = [
        each.reshape(*single, tokens, each.shape[-1]).tensor_split(number, -2) for each in (hidden, *others)
    ]
    checkpointing = _checkpointing()
    found = []
    for chunk in zip(*cut, strict=True):
        output = checkpointing(function, *chunk)
        if not isinstance(output, Tensor) or output.shape[:-1] != chunk[0].shape[:-1]:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(
                f"{name_of(function)}: expected one tensor [..., {chunk[0].shape[-2]}, width] for as many "
                f"tokens, got {got}. Call the function without chunks."
            )
        found.append(output)
    return torch.cat(found, -2).reshape(*leading, found[0].shape[-1])


def _checkpointing() -> Callable[..., Any]:
    """Return what recomputes a chunk. It is another one than the configured one, which may move inputs to
    other tiers, compare them across ranks, or save results."""
    if torch.compiler.is_compiling():
        return checkpoint_activations
    return ActivationCheckpointing(streams=current_checkpointing().streams)
