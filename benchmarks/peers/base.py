"""What the harness asks of a contender, and the hyper-parameters all of them share."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
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

    def step(self, *micro_batches: torch.Tensor) -> torch.Tensor:
        """Forward and backward of each micro-batch, then clip, update, clear gradients. Token ids int64
        [batch, sequence]; 0-d mean loss out. Some contenders have steps of one micro-batch only."""

    def gradient_norm(self) -> float:
        """Global gradient norm of the last step before clipping; called by all ranks together."""


class BreakdownTrainer(Trainer, Protocol):
    """A contender that counts the bytes it holds."""

    def memory_breakdown(self) -> dict[str, int]:
        """Bytes this rank holds now, by state kind."""


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss of a causal language model; tokens int64 [batch, sequence], 0-d loss out."""
    return model(input_ids=tokens, labels=tokens).loss


def backward_of(
    model: torch.nn.Module,
    micro_batches: tuple[torch.Tensor, ...],
    unsynchronized: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> torch.Tensor:
    """Forward and backward of all micro-batches of a step; gradients add up to those of the mean loss.

    Args:
        model: a causal language model.
        micro_batches: token ids, int64 [batch, sequence].
        unsynchronized: makes the context of all micro-batches but the last, in which gradients are not sent.

    Returns:
        The mean loss, 0-d.
    """
    losses = []
    for number, tokens in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else unsynchronized():
            loss = loss_of(model, tokens) / len(micro_batches)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def muon_serves(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon steps this parameter of a Llama: the matrices of its layers."""
    return parameter.dim() == 2 and "embed" not in name and "lm_head" not in name


def adamw(parameters: list[torch.nn.Parameter] | list[torch.Tensor]) -> torch.optim.AdamW:
    """torch's fastest AdamW on CPU (one fused kernel) with the shared hyper-parameters."""
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
