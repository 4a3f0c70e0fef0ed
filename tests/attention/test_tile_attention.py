"""Attention with its log-sum-exp: tiles of the keys merge to attention to all, and so do their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from zero_ext.attention.tile_attention import BLOCK_KERNEL, KERNELS, TileKernel, merge_tile

KERNEL_NAMES = {"flash": KERNELS["cpu"], "blocks": BLOCK_KERNEL}
SCALE = 0.2


@pytest.mark.parametrize("key_heads", [4, 2], ids=["heads", "grouped"])
@pytest.mark.parametrize("kernel", KERNEL_NAMES.values(), ids=KERNEL_NAMES)
def test_tiles_merge(kernel: TileKernel, key_heads: int) -> None:
    """The second half of the queries attends to the first half of the keys, and causally to the second."""
    length, half = 320, 160
    query, gradient = torch.randn(2, 2, 4, half, 16)
    keys = [torch.randn(2, key_heads, length, 16) for _ in range(2)]
    output, logsumexp = torch.zeros_like(query), torch.full(query.shape[:3], -torch.inf)
    tiles = [(slice(0, half), False), (slice(half, length), True)]
    for extent, causal in tiles:
        found = kernel.forward(query, *(each[:, :, extent] for each in keys), causal, SCALE)
        merge_tile(output, logsumexp, *found)
    reference = [each.double().requires_grad_() for each in (query, *keys)]
    mask = torch.ones(half, length, dtype=torch.bool).tril(half)
    wanted = F.scaled_dot_product_attention(*reference, mask, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(output, wanted.float())
    gradients = [torch.zeros_like(each) for each in (query, *keys)]
    for extent, causal in tiles:
        inputs = gradient, query, *(each[:, :, extent] for each in keys), output, logsumexp
        found = kernel.backward(*inputs, causal=causal, scale=SCALE)
        gradients[0] += found[0]
        for total, each in zip(gradients[1:], found[1:], strict=True):
            total[:, :, extent] += each
    expected = torch.autograd.grad(wanted, reference, gradient.double())
    for found_gradient, each in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found_gradient, each.float(), rtol=1e-4, atol=1e-5)
