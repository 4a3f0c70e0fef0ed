"""A model of BERT-base's shape with any attention, layers that are checkpointed, and a chunked loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from zero_ext.attention import SparseSelfAttention
from zero_ext.config import SparseAttentionConfig

LAYERS, HIDDEN, HEADS, FEED_FORWARD, VOCABULARY = 12, 768, 12, 3072, 30_522
LAYOUT = SparseAttentionConfig(mode="fixed", block=64, num_local_blocks=32)
LOSS_CHUNK = 1024
BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """One encoder layer, normalised after each part."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.project = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, FEED_FORWARD), nn.Linear(FEED_FORWARD, HIDDEN)
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, tokens, hidden] to the same."""
        batch, tokens, _ = hidden.shape
        projected = self.project(hidden).view(batch, tokens, 3, HEADS, HIDDEN // HEADS)
        query, key, value = (projected[:, :, index].transpose(1, 2) for index in range(3))
        seen = self.attend(query, key, value).transpose(1, 2).reshape(batch, tokens, HIDDEN)
        hidden = self.first(hidden + self.out(seen))
        return self.second(hidden + self.down(F.gelu(self.up(hidden))))


class Encoder(nn.Module):
    """BERT-base with positions for `tokens`; its forward is the loss of predicting every token."""

    def __init__(self, kind: str, tokens: int) -> None:
        super().__init__()
        attend: Attend = F.scaled_dot_product_attention
        if kind == "sparse":
            attend = SparseSelfAttention(LAYOUT)
        self.words, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(tokens, HIDDEN)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        """Mean cross entropy of ids, int64 [batch, tokens], its logits computed a chunk at a time."""
        hidden = self.words(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        total = hidden.new_zeros((), dtype=torch.float32)
        for chunk, wanted in zip(hidden.split(LOSS_CHUNK, 1), ids.split(LOSS_CHUNK, 1), strict=True):
            total = total + checkpoint(self._loss, chunk, wanted, use_reentrant=False)
        return total / ids.numel()

    def _loss(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        logits = F.linear(hidden, self.words.weight).flatten(0, 1).float()
        return F.cross_entropy(logits, wanted.flatten(), reduction="sum")


@contextmanager
def attention_of(kind: str) -> Iterator[None]:
    """Torch's kernel of that name for scaled_dot_product_attention; nothing for "sparse"."""
    if kind not in BACKENDS:
        yield
        return
    with sdpa_kernel(BACKENDS[kind]):
        yield
