"""A GPT in plain torch, with its loss inside: sizes, model, random values, tokens, operations."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.shapes import DATA_SEED, DISTINCT_BATCHES, WEIGHT_SEED

INITIAL_DEVIATION = 0.02
LOSS_CHUNK = 2048  # tokens whose logits exist at a time


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a GPT-3 (Brown et al., arXiv 2005.14165, table 2.1) with a vocabulary of its own and an output
    matrix that is not tied."""

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int = 32_000
    positions: int = 1024

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.layers * self.block_parameters + self.end_parameters

    @property
    def block_parameters(self) -> int:
        """Number of parameters of one block."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def end_parameters(self) -> int:
        """Number of parameters before the first block and after the last."""
        return (2 * self.vocabulary + self.positions + 2) * self.hidden

    def operations(self, tokens: int) -> float:
        """Floating-point operations of forward and backward on `tokens`, without what checkpointing repeats.

        Six a weight and token, the embedding apart, and attention's two products over the causal half.
        """
        weights = self.parameters - (self.vocabulary + self.positions) * self.hidden
        return 6.0 * weights * tokens + 6.0 * self.layers * self.hidden * self.positions * tokens


def gpt_of(hidden: int, layers: int) -> GPTShape:
    """A GPT of any depth with heads of 128."""
    return GPTShape(f"gpt-{hidden}x{layers}", hidden, layers, max(hidden // 128, 1))


TOY = GPTShape("gpt-toy", hidden=32, layers=2, heads=2, vocabulary=64, positions=16)
XL = GPTShape("gpt-1.3b", hidden=2048, layers=24, heads=16)
GPT_13B = GPTShape("gpt-13b", hidden=5120, layers=40, heads=40)


class Block(nn.Module):
    """Attention and a feed-forward of four times the width, each behind a norm and around a residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.second_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] in and out."""
        batch, time, width = hidden.shape
        qkv = self.qkv(self.first_norm(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return hidden + self.down(functional.gelu(self.up(self.second_norm(hidden)), approximate="tanh"))


class Head(nn.Module):
    """Last norm, output matrix and mean cross-entropy; logits of one chunk of tokens exist at a time."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden))

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """[tokens, width] and [tokens] in, 0-d out."""
        hidden, weight = self.norm(hidden), self.weight
        losses = [
            checkpoint(_loss, chunk, weight, wanted, use_reentrant=False)
            for chunk, wanted in zip(hidden.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True)
        ]
        return torch.stack(losses).sum() / targets.numel()


def _loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits, targets, reduction="sum")


class GPT(nn.Module):
    """Tokens in, loss out. `checkpointing` computes every block again in backward."""

    def __init__(self, shape: GPTShape, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.head = Head(shape.hidden, shape.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean next-token loss, 0-d, of ids int64 [batch, positions + 1]."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        position_ids = torch.arange(inputs.shape[1], device=ids.device)
        hidden = self.tokens(inputs) + self.positions(position_ids)
        for block in self.blocks:
            repeated = self.checkpointing
            hidden = checkpoint(block, hidden, use_reentrant=False) if repeated else block(hidden)
        loss: Tensor = self.head(hidden.flatten(0, 1), targets.flatten())
        return loss


@torch.no_grad()
def fill(named: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Ones for norms, zeros for biases, a normal distribution for matrices: the same for the same seed, name
    and kind of device."""
    for name, parameter in named:
        if parameter.dim() > 1:
            own = zlib.crc32(name.encode()) + seed
            generator = torch.Generator(parameter.device).manual_seed(own)
            parameter.normal_(0.0, INITIAL_DEVIATION, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def build(shape: GPTShape, device: torch.device, dtype: torch.dtype, checkpointing: bool = False) -> GPT:
    """A model with random values on `device`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = GPT(shape, checkpointing)
    finally:
        torch.set_default_dtype(before)
    fill(model.named_parameters(), WEIGHT_SEED)
    return model


def tokens_for(shape: GPTShape, batch: int, step: int, device: torch.device) -> Tensor:
    """Ids int64 [batch, positions + 1]: a few fixed batches over and over."""
    generator = torch.Generator().manual_seed(DATA_SEED + step % DISTINCT_BATCHES)
    ids = torch.randint(shape.vocabulary, (batch, shape.positions + 1), generator=generator)
    return ids.to(device)
