"""Transformers written by hand, with the ways of using parameters that such code has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case
from tests.zoo.inputs import greedy, mean_square, next_token, sequences, tokens

VOCABULARY, LENGTH, WIDTH = 29, 8, 16


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int = WIDTH, n_head: int = 2) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd: int = WIDTH) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(n_embd, 2 * n_embd), "act": nn.GELU(), "c_proj": nn.Linear(2 * n_embd, n_embd)}
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        m = self.mlp
        return x + m.c_proj(m.act(m.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT: a ModuleDict of everything, the head tied by assigning the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(32, WIDTH),
                "h": nn.ModuleList([Block() for _ in range(2)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * 2))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class SharedEmbeddingHead(nn.Module):
    """The head is ``F.linear`` with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, ids):
        return F.linear(self.blocks(self.emb(ids)), self.emb.weight)


class SharedLayers(nn.Module):
    """ALBERT: one layer, called several times; a factorized embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, 6)
        self.project = nn.Linear(6, WIDTH)
        self.layer = Block()
        self.back = nn.Linear(WIDTH, 6)

    def forward(self, ids):
        x = self.project(self.emb(ids))
        for _ in range(3):
            x = self.layer(x)
        return self.back(x) @ self.emb.weight.T


class Perceiver(nn.Module):
    """Latents are a parameter that is expanded over the batch and attends to the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, WIDTH) * 0.02)
        self.cross = nn.MultiheadAttention(WIDTH, 2, kdim=6, vdim=6, batch_first=True)
        self.process = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 20, 0.0, batch_first=True)])
        self.query = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.decode = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, data):
        b = data.shape[0]
        x = self.latents.unsqueeze(0).expand(b, -1, -1)
        x = x + self.cross(x, data, data)[0]
        for layer in self.process:
            x = layer(x)
        return self.decode(self.query.expand(b, -1, -1), x, x)[0]


class Seq2Seq(nn.Module):
    """``nn.Transformer`` with one embedding for encoder, decoder and head."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.model = nn.Transformer(WIDTH, 2, 1, 1, 24, dropout=0.1, batch_first=True)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        source, target = self.shared(ids.flip(1)), self.shared(ids) * WIDTH**0.5
        out = self.model(source, target, tgt_mask=mask, src_key_padding_mask=ids.flip(1) == 0)
        return F.linear(out, self.shared.weight)


def language(name: str, build: Any, **more: Any) -> Case:
    """Return a case of a language model."""
    return Case(
        f"own/language/{name}", build, **({"batch": tokens(VOCABULARY, LENGTH), "loss": next_token} | more)
    )


CASES = [
    language("gpt-tied", GPT, generate=greedy),
    language("shared-embedding-head", SharedEmbeddingHead, generate=greedy),
    language("shared-layers", SharedLayers),
    Case("own/language/perceiver", Perceiver, sequences(7, 6), mean_square),
    language("seq2seq", Seq2Seq),
]
