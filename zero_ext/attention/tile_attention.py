"""Attention of some queries to some keys, and the log-sum-exp by which such results are merged."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from zero_ext.attention.block_layout import BlockLayout
from zero_ext.ops.attention import BACKWARD, FORWARD
from zero_ext.ops.load_library import op

_BLOCK = 128  # The kernel's log-sum-exp has base 2.

Tensors = tuple[torch.Tensor, ...]


class TileKernel(NamedTuple):
    """Attention with its log-sum-exp, and its gradient for the log-sum-exp of all keys.

    Attributes:
        forward: of query, key, value, causal and scale; returns output and log-sum-exp [batch, heads, query
            length].
        backward: of the output's gradient, query, key, value, output, log-sum-exp, causal and scale; returns
            gradients of query, key and value. Output and log-sum-exp are those over all keys, and the keys
            may be some of them.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> Tensors:
    key, value = (_repeated(each, query) for each in (key, value))
    found: Tensors = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return found


def _flash_backward(gradient: torch.Tensor, *saved: torch.Tensor, causal: bool, scale: float) -> Tensors:
    query, key, value, output, logsumexp = saved
    repeated = (_repeated(each, query) for each in (key, value))
    grad_query, *others = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, *repeated, output, logsumexp, 0.0, causal, scale=scale
    )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        wide = torch.promote_types(query.dtype, torch.float32)
        others = [each.unflatten(1, (-1, groups)).sum(2, dtype=wide) for each in others]
    return grad_query, *others


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return keys or values once for each head of the queries."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _block_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> Tensors:
    options = (None, None, _BLOCK, causal, scale, 0.0, 0, 0)
    output, logsumexp = op(FORWARD)(query, key, value, *_all_blocks(query, key), *options)
    return output, logsumexp * math.log(2)


def _block_backward(gradient: torch.Tensor, *saved: torch.Tensor, causal: bool, scale: float) -> Tensors:
    query, key, *others, logsumexp = saved
    options = (None, None, _BLOCK, causal, scale, 0.0, 0, 0, False)
    *gradients, _ = op(BACKWARD)(
        gradient, query, key, *others, logsumexp / math.log(2), *_all_blocks(query, key), *options
    )
    return tuple(gradients)


def _all_blocks(query: torch.Tensor, key: torch.Tensor) -> Tensors:
    layout = _dense_layout(query.shape[2], key.shape[2], query.device)
    return layout.row_pointers, layout.columns, layout.column_pointers, layout.rows


@lru_cache(maxsize=256)
def _dense_layout(queries: int, keys: int, device: torch.device) -> BlockLayout:
    blocks = math.ceil(queries / _BLOCK), math.ceil(keys / _BLOCK)
    mask = torch.ones(1, *blocks, dtype=torch.bool, device="cpu")
    return BlockLayout.from_block_mask(mask, _BLOCK, query_length=queries, key_length=keys).to(device)


# torch's kernel for the CPU has no limits on head dims. Its kernels for devices differ in what they save for
# backward, so all other devices have this project's own, which is the same op everywhere.
KERNELS = {"cpu": TileKernel(_flash_forward, _flash_backward)}
BLOCK_KERNEL = TileKernel(_block_forward, _block_backward)


def tile_kernel(tensor: torch.Tensor) -> TileKernel:
    """Return the kernel for a tensor's device."""
    return KERNELS.get(tensor.device.type, BLOCK_KERNEL)


def merge_tile(
    output: torch.Tensor, logsumexp: torch.Tensor, tile_output: torch.Tensor, tile_logsumexp: torch.Tensor
) -> None:
    """Add attention to more keys to that of the same queries so far, in place.

    Args:
        output: [batch, heads, length, head dim] in float32, zeros at first.
        logsumexp: [batch, heads, length] in float32, minus infinity at first.
        tile_output: attention to the other keys, of `output`'s shape.
        tile_logsumexp: its log-sum-exp.
    """
    total = torch.logaddexp(logsumexp, tile_logsumexp)
    output.mul_((logsumexp - total).exp_()[..., None])
    output.add_(tile_output * (tile_logsumexp - total).exp_()[..., None])
    logsumexp.copy_(total)
