"""Mixtures of experts in which every rank has all experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case
from tests.zoo.inputs import mean_square, sequences

WIDTH = 8


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TopKLoop(nn.Module):
    """Mixtral's loop over experts. An expert without tokens is not called."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(4)])
        self.noise = nn.Linear(WIDTH, 4) if noisy else None
        self.aux_loss = None

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        logits = self.gate(flat)
        if self.noise is not None and self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(flat))
        weights, selected = torch.topk(logits.softmax(-1), 2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        mask = F.one_hot(selected, 4).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            k, token = torch.where(mask[index])
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * weights[token, k, None])
        density = mask.sum(1).float().mean(-1)
        self.aux_loss = 4 * (density * logits.softmax(-1).mean(0)).sum()
        return out.view_as(x)


class RareExperts(nn.Module):
    """Two of eight experts get tokens; the others have no gradient in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert() for _ in range(8)])

    def forward(self, x):
        start = int(torch.randint(0, 7, (1,)))
        return sum(self.experts[i](x) for i in (start, start + 1))


class GroupedExperts(nn.Module):
    """Rows of the stacked weights are taken one by one in a loop, as ``self.w1[i]``."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(4, WIDTH) * 0.3)
        self.w1, self.w2 = (nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.2) for _ in range(2))
        self.register_buffer("expert_bias", torch.zeros(4))

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = F.linear(flat, self.router).sigmoid()
        choice = (scores + self.expert_bias).argmax(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=4)
        if self.training:
            # DeepSeek-V3 balances by a bias that is no parameter.
            self.expert_bias += 0.01 * (counts.float().mean() - counts).sign()
        per_expert = torch.split(flat[order], counts.tolist())
        outs = [F.silu(rows @ self.w1[i]) @ self.w2[i] for i, rows in enumerate(per_expert)]
        result = torch.empty_like(flat)
        result[order] = torch.cat(outs)
        return (result * scores.gather(1, choice[:, None])).view_as(x)


class ExpertChoice(nn.Module):
    """Experts choose tokens; parameters are dispatched through ``torch.vmap`` over stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.2)

    def forward(self, x):
        flat = x.flatten(0, 1)
        g, index = self.gate(flat).softmax(0).topk(5, dim=0)
        picked = flat[index.t()]
        out = torch.vmap(lambda tokens, w: torch.tanh(tokens @ w))(picked, self.weight)
        return (
            torch.zeros_like(flat)
            .index_add(0, index.t().flatten(), (out * g.t()[..., None]).flatten(0, 1))
            .view_as(x)
        )


def with_auxiliary(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Add the losses that the layers left as attributes."""
    out = model(x).square().mean()
    return out + 0.1 * sum(m.aux_loss for m in model.modules() if hasattr(m, "aux_loss"))


def layered(name: str, layer: Any, loss: Any = mean_square) -> Case:
    """Return a case of two layers of a mixture between linear layers."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, WIDTH), layer(), nn.LayerNorm(WIDTH), layer(), nn.Linear(WIDTH, 4))

    return Case(f"own/mixtures/{name}", build, sequences(6, 5), loss)


CASES = [
    layered("top-k-loop", TopKLoop, with_auxiliary),
    layered("top-k-noisy", lambda: TopKLoop(noisy=True), with_auxiliary),
    layered("rare-experts", RareExperts),
    layered("grouped-experts", GroupedExperts),
    layered("expert-choice-vmap", ExpertChoice),
]
