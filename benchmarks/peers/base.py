"""What the harness asks of a contender, and the hyper-parameters all of them share."""

import os
import tempfile
from typing import Any, Protocol

import torch

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
# torch.optim.Muon's settings; AdamW's above are those of the parameters that it does not serve.
MUON: dict[str, Any] = {
    "lr": LEARNING_RATE,
    "weight_decay": WEIGHT_DECAY,
    "momentum": 0.95,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": "original",
}


def nvme_folder() -> str:
    """Where contenders keep what they offload: $ZERO_EXT_BENCH_NVME, else the folder of temporary files."""
    return os.environ.get("ZERO_EXT_BENCH_NVME") or tempfile.gettempdir()


class Trainer(Protocol):
    """One rank of a contender: a model and an optimizer that train by whole steps."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Forward, backward, clip, update, clear gradients. tokens int64 [batch, sequence]; 0-d loss out."""

    def gradient_norm(self) -> float:
        """Global gradient norm of the last step before clipping; called by all ranks together."""


class BreakdownTrainer(Trainer, Protocol):
    """A contender that counts the bytes it holds."""

    def memory_breakdown(self) -> dict[str, int]:
        """Bytes this rank holds now, by state kind."""


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss of a causal language model; tokens int64 [batch, sequence], 0-d loss out."""
    return model(input_ids=tokens, labels=tokens).loss


def muon_serves(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon steps this parameter of a Llama: the matrices of its layers."""
    return parameter.dim() == 2 and "embed" not in name and "lm_head" not in name


def adamw(parameters: list[torch.nn.Parameter] | list[torch.Tensor]) -> torch.optim.AdamW:
    """torch's fastest AdamW on CPU (one fused kernel) with the shared hyper-parameters."""
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
