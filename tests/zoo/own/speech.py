"""Acoustic models: in-place sums on outputs, and masked writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case
from tests.zoo.inputs import generator, mean_square

WIDTH, AUDIO_STEPS = 12, 9


def utterances(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features [3, frames, 8] and transcripts [3, 4] of labels from 1."""
    random = generator(step)
    return torch.randn(3, AUDIO_STEPS, 8, generator=random), torch.randint(1, 7, (3, 4), generator=random)


def ctc(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Return the CTC loss of the model's log probabilities."""
    x, y = inputs
    log_probs = model(x).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((x.shape[0],), log_probs.shape[0], dtype=torch.long)
    return F.ctc_loss(
        log_probs, y, lengths, torch.full((x.shape[0],), 4, dtype=torch.long), zero_infinity=True
    )


class InplaceResidual(nn.Module):
    """``h += x`` on the output of a block that is a linear layer over three dimensions."""

    def __init__(self, relu: bool = False) -> None:
        super().__init__()
        self.input = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.output = nn.Linear(WIDTH, 7)
        self.relu = relu

    def forward(self, x):
        x = self.input(x)
        for layer in self.layers:
            h = layer(x)
            h += x
            if self.relu:
                h = F.relu_(h)
            x = h
        return self.output(x)


class SpecAugment(nn.Module):
    """Masks are written into the output of a block, with zeros or a learned vector."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.feature_projection = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, WIDTH))
        self.masked_spec_embed = nn.Parameter(torch.empty(WIDTH).uniform_()) if learned else None
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 20, 0.1, batch_first=True)])
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x):
        h = self.feature_projection(x)
        if self.training:
            mask = torch.rand(h.shape[:2]) < 0.3
            if self.masked_spec_embed is not None:
                h[mask] = self.masked_spec_embed.to(h.dtype)
            else:
                h[:, :, 2:5] = 0.0
                h[mask] = 0
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def speech(name: str, build: Any, **more: Any) -> Case:
    """Return a case of an acoustic model with the CTC loss."""
    return Case(f"own/speech/{name}", build, **({"batch": utterances, "loss": ctc} | more))


CASES = [
    speech("in-place-residual", InplaceResidual),
    speech("in-place-relu", lambda: InplaceResidual(relu=True)),
    speech(
        "in-place-residual-2d",
        InplaceResidual,
        batch=lambda step: torch.randn(5, 8, generator=generator(step)),
        loss=mean_square,
    ),
    speech("specaugment-zeros", lambda: SpecAugment(learned=False)),
    speech("specaugment-learned", lambda: SpecAugment(learned=True)),
]
