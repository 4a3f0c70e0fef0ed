"""Byte models on real text, the windows that a step trains on, and the learning rate at each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.shapes import LlamaShape

LEAST_FACTOR = 0.1


@dataclass(frozen=True)
class TextRun:
    """What is trained, on how much, and where it is judged.

    `batch` windows of `window` bytes a rank and step; the held-out loss is a mean over `held_out_windows`.
    The learning rate rises over the part `rise` of the steps; over the part `warm_up` the one-bit family
    sends gradients in full precision.
    """

    name: str
    shape: LlamaShape
    steps: int
    batch: int
    window: int
    learning_rate: float
    rise: float = 1 / 30
    warm_up: float = 0.15
    held_out_windows: int = 128

    @property
    def warm_up_steps(self) -> int:
        """Steps in full precision."""
        return max(1, round(self.warm_up * self.steps))

    def factor(self, step: int) -> float:
        """Of the learning rate at a step from 0: a linear rise, then a cosine to a tenth."""
        rise = max(1, round(self.steps * self.rise))
        done = min(step / self.steps, 1.0)
        fall = LEAST_FACTOR + (1 - LEAST_FACTOR) * 0.5 * (1 + math.cos(math.pi * done))
        return min((step + 1) / rise, fall)

    def windows(self, text: Tensor, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        """What a rank trains on in a step, int64 [batch, window]; ranks draw different windows of `text`."""
        drawn = torch.Generator().manual_seed((seed << 32) + step)
        starts = torch.randint(text.numel() - self.window, (ranks, self.batch), generator=drawn)[rank]
        return torch.stack([text[start : start + self.window] for start in starts]).to(torch.int64)

    def held_out(self, text: Tensor, rank: int, ranks: int) -> Tensor:
        """A rank's part of the windows spread over `text`, int64 [held_out_windows / ranks, window]."""
        spaced = torch.arange(self.held_out_windows) * (text.numel() - self.window) // self.held_out_windows
        chosen = spaced.chunk(ranks)[rank]
        return torch.stack([text[begin : begin + self.window] for begin in chosen]).to(torch.int64)

    def model(self, seed: int) -> nn.Module:
        """The model with random weights of this seed, fp32."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        # In windows this short torch's fused attention on CPUs takes longer than its parts, backward in bf16.
        return AutoModelForCausalLM.from_config(
            self.shape.configuration(), attn_implementation="eager"
        ).train()


BYTE_LLAMA = LlamaShape("8m-bytes", hidden=320, layers=6, feed_forward=928, vocabulary=256, heads=5)
TINY = LlamaShape("tiny", hidden=64, layers=2, feed_forward=192, vocabulary=256, heads=4)
LLAMA_34M = LlamaShape("34m", hidden=512, layers=8, feed_forward=1408, vocabulary=8192, heads=8)

RUNS = {
    run.name: run
    for run in (
        TextRun("8m-bytes", BYTE_LLAMA, steps=3000, batch=1, window=128, learning_rate=3e-4),
        TextRun("8m-bytes-half", BYTE_LLAMA, steps=1500, batch=1, window=128, learning_rate=3e-4),
        # Moments whose bias is not corrected step far in their first hundred steps: a rate that has risen
        # fully by then holds this run back for long. Up to step 200 its loss falls fast, and a variance of
        # before has little to do with the gradients after.
        TextRun(
            "34m",
            LLAMA_34M,
            steps=500,
            batch=4,
            window=128,
            learning_rate=3e-4,
            rise=1 / 10,
            warm_up=0.4,
        ),
        TextRun("tiny", TINY, steps=200, batch=1, window=64, learning_rate=3e-3, held_out_windows=16),
    )
}


def text_run(name: str) -> TextRun:
    """The 8M-parameter byte model over 3,000 steps or half of them, the Llama of 34M over 500 with bytes as
    its tokens, or a tiny one to try.

    ValueError for another name.
    """
    if name not in RUNS:
        raise ValueError(f"unknown run {name!r}; known: {', '.join(RUNS)}")
    return RUNS[name]


def mean_loss(model: Any, windows: Tensor) -> Tensor:
    """Mean loss in nats per byte over `windows`, without gradients, float64 []; stage 3 gathers."""
    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=chunk, labels=chunk).loss.double() for chunk in windows.split(16)]
    model.train()
    return torch.stack(losses).mean()
