"""Dense attention in float64, the random numbers of its dropout, and layouts as random block masks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_ext import ops


def compressed(mask: Tensor) -> ops.LayoutTensors:
    """Rows and columns of a block mask, bool [heads, row blocks, column blocks]."""

    def by_rows(each: Tensor) -> tuple[Tensor, Tensor]:
        counts = each.sum(-1)
        ends = counts.flatten().cumsum(0).view_as(counts)
        starts = (ends[:, :1] - counts[:, :1]) if counts.size(1) else counts.new_zeros(counts.size(0), 1)
        return torch.cat([starts, ends], 1).int(), each.nonzero()[:, 2].int()

    return ops.LayoutTensors(*by_rows(mask), *by_rows(mask.transpose(1, 2)))


def philox(counter: list[Any], key: int) -> list[Any]:
    """Philox4x32-10 on arrays of 32-bit counter words."""
    words = [np.asarray(word, dtype=np.uint64) for word in counter]
    keys = [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        high, low = [(each >> np.uint64(32), each & np.uint64(0xFFFFFFFF)) for each in (first, second)]
        words = [
            low[0] ^ words[1] ^ np.uint64(keys[0]),
            low[1],
            high[0] ^ words[3] ^ np.uint64(keys[1]),
            high[1],
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


def dropout_weights(case: Case) -> Tensor:
    """Float64 [batch, heads, queries, keys]: 0 where dropped, 1 / (1 - probability) elsewhere."""
    batch, heads, queries, _ = case.query.shape
    keys = case.key.size(2)
    head = np.arange(batch * heads).reshape(-1, 1, 1)
    query, key = np.arange(queries).reshape(1, -1, 1), np.arange(keys).reshape(1, 1, -1)
    words = philox([*np.broadcast_arrays(key // 4, query, head), case.offset], case.seed)
    drawn = np.choose(np.broadcast_to(key % 4, words[0].shape), words)
    drawn_mask = torch.from_numpy(drawn >= np.uint64(int(case.dropout * 2**32)))
    return drawn_mask.double().view(batch, heads, queries, keys) / (1 - case.dropout)


@dataclass
class Case:
    """Inputs of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor  # of blocks
    block: int
    causal: bool = False
    scale: float | None = None
    key_padding: Tensor | None = None
    bias: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    offset: int = 0

    @property
    def options(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value for name, value in values.items() if name not in ("query", "key", "value", "mask")
        }

    @cached_property
    def layout(self) -> ops.LayoutTensors:
        return compressed(self.mask)

    def forward_arguments(self) -> tuple[Any, ...]:
        """Those of the op that also returns the logarithms of the sums."""
        scale = 1 / math.sqrt(self.query.size(-1)) if self.scale is None else self.scale
        rows = (self.query, self.key, self.value, *self.layout, self.key_padding, self.bias)
        return (*rows, self.block, self.causal, scale, self.dropout, self.seed, self.offset)

    def run(self, layout: ops.LayoutTensors | None = None) -> Tensor:
        return ops.block_sparse_attention(
            self.query, self.key, self.value, *(layout or self.layout), **self.options
        )

    def in_float64(self) -> Case:
        """The same values, as leaves that want gradients."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().double().requires_grad_()

        rows = {name: leaf(getattr(self, name)) for name in ("query", "key", "value")}
        return replace(self, **rows, bias=None if self.bias is None else leaf(self.bias))

    def seen(self) -> Tensor:
        """Bool [batch or 1, heads or 1, queries, keys]."""
        queries, keys = self.query.size(2), self.key.size(2)
        spread = self.mask.repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)
        seen = spread[None, :, :queries, :keys]
        if self.causal:
            seen = seen & (torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries)
        return seen if self.key_padding is None else seen & self.key_padding[:, None, None]


def dense_attention(case: Case, full_bias: Tensor | None = None) -> Tensor:
    """What the op must give, from float64 inputs, by the definition; zeros where nothing is seen."""
    groups = case.query.size(1) // case.key.size(1)
    key, value = [each.repeat_interleave(groups, 1) for each in (case.key, case.value)]
    scale = 1 / math.sqrt(case.query.size(-1)) if case.scale is None else case.scale
    scores = case.query @ key.transpose(-1, -2) * scale
    if full_bias is not None:
        scores = scores + full_bias
    scores = scores.masked_fill(~case.seen(), -math.inf)
    highest = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - highest).exp()
    sums = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(sums == 0, 1.0, sums)
    return (weights * dropout_weights(case) if case.dropout else weights) @ value


@dataclass
class Results:
    """Output and gradients, and for each the size that rounding errors are measured by."""

    values: dict[str, Tensor]
    sizes: dict[str, float]


def reference(case: Case, grad_output: Tensor) -> Results:
    """Output and gradients in float64."""
    exact = case.in_float64()
    full = None
    if exact.bias is not None:
        shape = (*exact.query.shape[:3], exact.key.size(2))
        full = exact.bias.expand(shape).contiguous()
        full.retain_grad()
    output = dense_attention(exact, full)
    output.backward(grad_output.double())
    values = {"output": output.detach()}
    for name in ("query", "key", "value"):
        values[name] = getattr(exact, name).grad
    if exact.bias is not None:
        values["bias"] = exact.bias.grad
    largest = {name: float(value.abs().max()) if value.numel() else 0.0 for name, value in values.items()}
    if exact.bias is not None and full is not None:
        # Its terms cancel: along the keys they even add up to zero.
        summed = full.grad.abs()
        for dim, size in enumerate(exact.bias.shape):
            summed = summed.sum(dim, keepdim=True) if size == 1 else summed
        largest["bias"] = float(summed.max()) if summed.numel() else 0.0
    # Gradients are sums of differences, which may come out as zero: with one key, all but the values' do.
    queries = case.query.size(0) * case.query.size(1) * case.query.size(2)
    least = {"output": 0.3, "query": 3.0, **dict.fromkeys(("key", "value", "bias"), 1.0 + queries**0.5)}
    sizes = {name: max(value, least[name]) for name, value in largest.items()}
    return Results(values, sizes)


def results(case: Case, grad_output: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the op."""
    wanted = [name for name in ("query", "key", "value", "bias") if getattr(case, name) is not None]
    leaves = {name: getattr(case, name).detach().requires_grad_() for name in wanted}
    output = replace(case, **leaves).run(case.layout)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad_output)
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}
