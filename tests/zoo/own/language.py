"""Transformers written by hand, with the ways of using parameters that such code has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case
from tests.zoo.inputs import features, greedy, mean_square, next_token, sequences, tokens

VOCABULARY, LENGTH, WIDTH = 29, 8, 16


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int = WIDTH, n_head: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x, attn_bias=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        if attn_bias is not None:
            att = att + attn_bias
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, dropout=dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(n_embd, 2 * n_embd), "act": nn.GELU(), "c_proj": nn.Linear(2 * n_embd, n_embd)}
        )

    def forward(self, x, attn_bias=None):
        x = x + self.attn(self.ln_1(x), attn_bias)
        m = self.mlp
        return x + m.c_proj(m.act(m.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT: a ModuleDict of everything, the head tied by assigning the weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(32, WIDTH),
                "h": nn.ModuleList([Block(dropout=dropout) for _ in range(2)]),
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


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    """Decay matrices alone, as nanoGPT does."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decay = [p for p in named.values() if p.dim() >= 2]
    no_decay = [p for p in named.values() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-3)


class LearnedPositions(nn.Module):
    """A module that returns a view of its own parameter, in several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(16, WIDTH) * 0.02)
        self.form = form

    def forward(self, x):
        n = x.shape[1]
        if self.form == "slice":
            return self.p[:n]
        if self.form == "none":
            return self.p[None, :n]
        if self.form == "expand":
            return self.p[:n].unsqueeze(0).expand(x.shape[0], -1, -1)
        if self.form == "whole":
            return self.p
        if self.form == "transpose":
            return self.p.t()
        if self.form == "clone":
            return self.p[:n].clone()
        return self.p.view(1, 16, WIDTH)[:, :n]


class PositionedEncoder(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = LearnedPositions(form)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        pos = self.positions(x)
        if self.positions.form == "whole":
            pos = pos[: x.shape[1]]
        elif self.positions.form == "transpose":
            pos = pos.t()[: x.shape[1]]
        x = x + pos
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


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


class UniversalTransformer(nn.Module):
    """Adaptive computation time: a block that is called until every position has halted."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.halt = nn.Linear(WIDTH, 1)
        self.time = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.emb(ids)
        total = torch.zeros_like(x)
        left = torch.ones(*ids.shape, 1)
        for t in range(4):
            x = self.block(x + self.time[t])
            p = torch.sigmoid(self.halt(x)) if t < 3 else torch.ones(*ids.shape, 1)
            total = total + left * p * x
            left = left * (1 - p)
            if left.max() <= 0.01:
                break
        return self.head(total)


class PromptTuned(nn.Module):
    """A frozen language model behind learned prompt vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.base = GPT()
        for p in self.base.parameters():
            p.requires_grad = False
        self.prompt = nn.Parameter(self.base.transformer.wte.weight[:3].detach().clone())

    def forward(self, ids):
        x = self.base.transformer["wte"](ids)
        x = torch.cat([self.prompt.unsqueeze(0).repeat(ids.shape[0], 1, 1), x], dim=1)
        for block in self.base.transformer["h"]:
            x = block(x)
        return self.base.lm_head(self.base.transformer["ln_f"](x))[:, 3:]


class ALiBi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25]).view(2, 1, 1))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.emb(ids)
        n = ids.shape[1]
        bias = self.slopes * (torch.arange(n)[None, :] - torch.arange(n)[:, None])[None]
        for block in self.blocks:
            x = block(x, attn_bias=bias)
        return self.head(x)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.w2 = nn.Linear(24, WIDTH, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, x, freqs_cis):
        B, T, _ = x.shape
        h = self.attention_norm(x)
        q, k, v = (w(h).view(B, T, 2, WIDTH // 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, freqs_cis), rotate(k, freqs_cis)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(B, T, WIDTH))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def rotate(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of channels by position, as Llama's reference code does."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[None, : x.shape[1], None]).flatten(3).type_as(x)


class Llama(nn.Module):
    """Rotary frequencies are a plain attribute, as in Llama's reference code."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(LlamaBlock())
        self.norm = RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        freqs = 1.0 / (10000.0 ** (torch.arange(0, WIDTH // 2, 2).float() / (WIDTH // 2)))
        angles = torch.outer(torch.arange(32), freqs)
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, ids):
        h = self.tok_embeddings(ids)
        for layer in self.layers:
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h)).float()


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


def tied_kwargs() -> dict[str, Any]:
    """Return what the language models have in common."""
    return {"batch": tokens(VOCABULARY, LENGTH), "loss": next_token}


def language(name: str, build: Any, **more: Any) -> Case:
    """Return a case of a language model."""
    return Case(f"own/language/{name}", build, **(tied_kwargs() | more))


CASES = [
    language("gpt-tied", GPT, generate=greedy),
    language("gpt-dropout-decay-groups", lambda: GPT(0.1), optimizer=configure_optimizers),
    *(
        language(f"positions-{form}", lambda form=form: PositionedEncoder(form))
        for form in ("slice", "none", "expand", "whole", "transpose", "clone", "view")
    ),
    language("shared-embedding-head", SharedEmbeddingHead, generate=greedy),
    language("shared-layers", SharedLayers),
    language("universal", UniversalTransformer),
    language("prompt-tuning", PromptTuned),
    language("alibi", ALiBi),
    language("llama", Llama, generate=greedy),
    Case("own/language/perceiver", Perceiver, sequences(7, 6), mean_square),
    language("seq2seq", Seq2Seq),
    Case(
        "own/language/rms-norm-stack",
        lambda: nn.Sequential(nn.Linear(6, WIDTH), RMSNorm(WIDTH), nn.Linear(WIDTH, 3)),
        features(6),
        mean_square,
    ),
]
