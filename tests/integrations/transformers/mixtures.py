"""Mixtures of experts: tiny models of each family of transformers, and one of experts in a list."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import zero_ext
from tests.multi.rank import World

VOCABULARY, EXPERTS, LENGTH = 48, 8, 6
WORDS_OF_A_RANK = 2  # few, so that they reach few experts
# Each configuration takes what it knows of these.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK = {**LATENT, **GROUPS, "head_dim": 4}
LLAMA4 = {"num_experts_per_tok": 1, "intermediate_size_mlp": 16, "interleave_moe_layer_step": 1}
MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 1, "mamba_dt_rank": 4}
JAMBA = {
    **MAMBA,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
}
# Of each family: its type in transformers, and what its configuration has of its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "olmoe": ("olmoe", {}),
    "deepseek_v2": ("deepseek_v2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "gpt_oss": ("gpt_oss", {}),
    "llama4": ("llama4_text", LLAMA4),
    "glm4_moe": ("glm4_moe", GROUPS),
    "granite_moe": ("granitemoe", {}),
    "phi_moe": ("phimoe", {}),
    "jamba": ("jamba", JAMBA),
}

LISTED = ("listed", "listed_without_blocks")


class _ListedMixture(nn.Module):
    """Experts in a list. A forward calls those that its tokens are routed to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(EXPERTS)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, dim=-1)
        mixed = torch.zeros_like(tokens)
        for number in chosen.unique().tolist():
            token, choice = torch.where(chosen == number)
            mixed = mixed.index_add(
                0, token, self.experts[number](tokens[token]) * weights[token, choice, None]
            )
        return hidden + mixed.view_as(hidden)


class ListedExperts(nn.Module):
    """A language model of two mixtures: in the blocks of a stack, or without any block around them."""

    def __init__(self, stacked: bool, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        if stacked:
            self.layers: Any = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(width), _ListedMixture(width)) for _ in range(2)
            )
        else:
            self.first, self.second = _ListedMixture(width), _ListedMixture(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden = self.words(input_ids)
        for layer in self.layers if hasattr(self, "layers") else (self.first, self.second):
            hidden = layer(hidden)
        scores = self.head(hidden[:, :-1])
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())
        )


def mixture_of(family: str, seed: int, **changes: Any) -> Any:
    """A tiny model with random values for all parameters: biases are zero and norms one at first."""
    if family in LISTED:
        model: Any = ListedExperts(stacked=family == "listed")
    else:
        kind, own = FAMILIES[family]
        known = AutoConfig.for_model(kind)
        fixed = {name for name in SIZES if isinstance(getattr(type(known), name, None), property)}
        sizes = {name: value for name, value in SIZES.items() if hasattr(known, name) and name not in fixed}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **own, **changes}))
    model.train(family != "phi_moe")  # which routes by random numbers while it trains
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def batches(seed: int, ranks: int, steps: int) -> list[torch.Tensor]:
    """Of each step a sample per rank, of words that no other rank has: so that ranks route differently."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS_OF_A_RANK, (steps, ranks, LENGTH), generator=generator)
    return list(3 + words + WORDS_OF_A_RANK * torch.arange(ranks)[:, None])


def routed_apart(model: nn.Module, seed: int, ranks: int, steps: int) -> list[torch.Tensor]:
    """Batches whose first samples reach other experts on some ranks than on others."""
    for number in range(20):
        words = batches(seed + number, ranks, steps)
        reached = [reached_experts(model, words[0][rank, None]) for rank in range(ranks)]
        if any(each != reached[0] for each in reached):
            return words
    raise AssertionError(f"ranks reach the same experts with 20 batches, seed {seed}")


def reached_experts(model: nn.Module, words: torch.Tensor) -> set[tuple[str, int]]:
    """The experts with a gradient from the loss of these samples, by name of a parameter or the list."""
    model.zero_grad()
    model(input_ids=words, labels=words).loss.backward()
    found = set()
    for name, parameter in model.named_parameters():
        before, experts, after = name.partition(".experts.")
        if not experts or parameter.grad is None:
            continue
        number = after.partition(".")[0]
        if number.isdecimal():
            found.add((before, int(number)))
        else:
            used = parameter.grad.flatten(1).abs().sum(1).nonzero().flatten()
            found.update((before, each) for each in used.tolist())
    model.zero_grad()
    return found


Maker = Callable[[nn.Module], torch.optim.Optimizer]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon that does not make rounding large where gradients are nothing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def muon_of(model: nn.Module) -> torch.optim.Optimizer:
    """Muon, its iterations in float32, for the stacks and the other matrices of the blocks."""
    adamw = {"lr": 1e-2, "eps": 1e-3}
    return zero_ext.Muon(model.parameters(), lr=2e-2, eps=1e-3, ns_dtype="fp32", adamw=adamw, module=model)


def losses_alone(
    model: nn.Module, words: list[torch.Tensor], clip: float = float("inf"), make: Maker = optimizer_of
) -> list[float]:
    """Of one process with the samples of all ranks, gradients of a norm of at most ``clip``."""
    optimizer, losses = make(model), []
    for each in words:
        loss = model(input_ids=each, labels=each).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def mean_losses(world: World, model: Any, optimizer: Any, words: list[torch.Tensor]) -> list[float]:
    """Of a step of a prepared model for each batch, the mean of the ranks' losses of their own samples."""
    losses = []
    for each in words:
        own = each[world.rank, None]
        loss = model(input_ids=own, labels=own).loss
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(world.everyone(float(loss.detach()))) / world.size)
    return losses
