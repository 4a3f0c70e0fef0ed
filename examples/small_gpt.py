"""A small byte-level GPT in plain PyTorch and its text, for the Lightning and Ray examples."""

from __future__ import annotations

import torch
from demo.corpus import STANDARD_LIBRARY, ByteWindows, Corpus, gather_corpus
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        projected = self.queries_keys_values(self.attention_norm(hidden))
        shape = (batch, time, self.heads, width // self.heads)
        queries, keys, values = (
            tensor.reshape(shape).transpose(1, 2) for tensor in projected.chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class SmallGPT(nn.Module):
    """A GPT that maps ids [batch, time] to logits [batch, time, 256], with the head tied to the embedding."""

    def __init__(self, layers: int, width: int, window: int, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(window, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        # Both embeddings need the same small deviation. Torch's default of 1 for positions would drown out
        # the tokens, and the model would learn only byte frequencies.
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte for predicting each next byte of ids [batch, time]."""
    logits = model(ids)
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def text_windows(window: int, quick: bool) -> tuple[ByteWindows, ByteWindows]:
    """Return training and held-out windows of the documentation that ships with Python.

    Args:
        window: Bytes per window.
        quick: Read only the docstrings of asyncio and the language topics.
    """
    corpus: Corpus = gather_corpus(STANDARD_LIBRARY / "asyncio" if quick else STANDARD_LIBRARY)
    return ByteWindows(corpus.training, window), ByteWindows(corpus.held_out, window)
