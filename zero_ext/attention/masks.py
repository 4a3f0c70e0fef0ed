"""Masks as scaled_dot_product_attention takes them, split by kind: keys that are padding, and a bias."""

from __future__ import annotations

from typing import TypedDict

import torch

_NAMES = ("batch", "query heads", "query length", "key length")


class MoreMasks(TypedDict, total=False):
    """Masks that scaled_dot_product_attention does not have; each may be left out."""

    key_padding: torch.Tensor | None
    bias: torch.Tensor | None


def split_mask(
    attn_mask: torch.Tensor | None, scores_shape: tuple[int, int, int, int]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what `attn_mask` says as (key padding, bias); None for what it does not say.

    A boolean mask (True may be attended) that depends on batch and key alone is key padding, bool
    [batch, key length]; every other becomes a float32 bias of its own shape with minus infinity where it is
    False. A mask of floats is the bias.

    Args:
        attn_mask: bool or float, of up to 4 dims that broadcast to `scores_shape`.
        scores_shape: batch, query heads, query length, key length.

    Raises:
        TypeError: it is neither boolean nor floating.
        ValueError: its shape does not broadcast to `scores_shape`.
    """
    if attn_mask is None:
        return None, None
    mask = as_scores(attn_mask, scores_shape, "attn_mask")
    if mask.dtype != torch.bool:
        return None, mask
    if mask.shape[1] == mask.shape[2] == 1:
        return mask[:, 0, 0].expand(scores_shape[0], scores_shape[3]), None
    bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return None, bias.masked_fill_(~mask, float("-inf"))


def as_scores(tensor: torch.Tensor, scores_shape: tuple[int, int, int, int], name: str) -> torch.Tensor:
    """`tensor` with 4 dims, each 1 or that of `scores_shape`; a view. Raises as `split_mask` does."""
    if tensor.dtype != torch.bool and not tensor.is_floating_point():
        raise TypeError(
            f"{name}: expected torch.bool (True may be attended) or a float to add, got {tensor.dtype}. "
            "Convert it, for example with .bool()."
        )
    shape = tuple(tensor.shape)
    wide = (1,) * (4 - len(shape)) + shape
    if len(wide) != 4 or any(size not in (1, full) for size, full in zip(wide, scores_shape, strict=True)):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to the scores {scores_shape} ({', '.join(_NAMES)}), "
            f"got {shape}. Pass key padding of [batch, key length] as key_padding."
        )
    return tensor.reshape(wide)


def check_key_padding(key_padding: torch.Tensor, batch: int, key_length: int) -> None:
    """Raise ValueError unless it is bool [batch, key length]."""
    if key_padding.dtype != torch.bool or tuple(key_padding.shape) != (batch, key_length):
        raise ValueError(
            f"key_padding: expected torch.bool of shape {(batch, key_length)}, True where a key may be "
            f"attended, got {key_padding.dtype} of shape {tuple(key_padding.shape)}. Convert it, or pass "
            "it as attn_mask."
        )


def both(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """Two boolean masks that both must allow, or two biases that add up; None adds nothing."""
    if first is None or second is None:
        return second if first is None else first
    return first & second if first.dtype == torch.bool else first + second
