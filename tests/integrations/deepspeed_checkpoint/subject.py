"""The model that DeepSpeed saves and zero_ext loads: tied and frozen weights, buffers, two param groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WORDS, WIDTH, BATCH = 17, 9, 12
WARMUP = {"warmup_num_steps": 10, "warmup_max_lr": 0.02}
CLIPPING = 0.5
SAVED_AFTER, RESUMED_FOR = 3, 3
CASES: dict[str, dict[str, Any]] = {
    "stage1-fp32": {"stage": 1, "dtype": "fp32", "zero": {}},
    "stage2-bf16": {"stage": 2, "dtype": "bf16", "zero": {"round_robin_gradients": True}},
    "stage3-fp32": {"stage": 3, "dtype": "fp32", "zero": {"sub_group_size": 100}},
    "stage3-bf16": {"stage": 3, "dtype": "bf16", "zero": {"stage3_param_persistence_threshold": 10}},
}


class Subject(nn.Module):
    """A word model of a few hundred parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.hidden = nn.Linear(WIDTH, 13)
        self.out = nn.Linear(13, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        state = self.norm(self.embedding(words)) * self.scale.to(self.frozen.weight.dtype)
        state = state + self.frozen(state)
        logits = self.head(state + self.out(torch.relu(self.hidden(state))))
        return nn.functional.cross_entropy(logits.float(), (words * 3 + 1) % WORDS)


def subject_of(seed: int) -> tuple[Subject, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Subject()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95))


def batch_of(step: int, rank: int, ranks: int) -> torch.Tensor:
    words = torch.randint(WORDS, (BATCH,), generator=torch.Generator().manual_seed(step))
    return words.chunk(ranks)[rank]


def config_of(ranks: int, stage: int, dtype: str, zero: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's JSON for ``ranks`` ranks."""
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": dtype == "bf16"},
    }
