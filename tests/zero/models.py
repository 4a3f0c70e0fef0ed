"""Small models and data for the engine's tests. Every architecture here takes ids [batch, time] int64 or
features [batch, width] float and returns a loss through :func:`loss_of`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, VOCABULARY, TIME = 12, 23, 5


class Block(nn.Module):
    """A residual block with sizes that no world size divides."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class TinyModel(nn.Module):
    """Embedding, blocks, norm, head (tied or not): [batch, time] ids to [batch, time, vocabulary] logits."""

    def __init__(self, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class ChosenBlocks(TinyModel):
    """Runs its blocks in the ``order`` that is set, by their numbers."""

    order: Iterable[int] | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for number in range(len(self.blocks)) if self.order is None else self.order:
            hidden = self.blocks[number](hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def llama(layers: int = 2, tied: bool = False) -> Any:
    """A Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 40}
    depth = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **depth, **tokens, tie_word_embeddings=tied))


def language_batch(seed: int, step: int, micro: int, rank: int, size: int = 2) -> torch.Tensor:
    """Ids [size, TIME] that only this step, micro-batch and rank see."""
    generator = torch.Generator().manual_seed(hash((seed, step, micro, rank)) & 0x7FFFFFFF)
    return torch.randint(0, VOCABULARY, (size, TIME), generator=generator)


def language_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in fp32, of predicting each id from those before it."""
    logits = model(ids)
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def feature_batch(seed: int, step: int, micro: int, rank: int, size: int = 3) -> torch.Tensor:
    """Features [size, WIDTH] that only this step, micro-batch and rank see."""
    generator = torch.Generator().manual_seed(hash((seed, step, micro, rank)) & 0x7FFFFFFF)
    return torch.randn(size, WIDTH, generator=generator)


def feature_loss(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """A smooth scalar of a model's single tensor output."""
    return model(features).float().square().mean()
