"""Batches and losses that many handwritten models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = Callable[[int], Any]


def generator(step: int) -> torch.Generator:
    """Return the generator of a step's data."""
    return torch.Generator().manual_seed(7_000 + step)


def features(size: int, batch: int = 4) -> Batch:
    """Return batches of float features [batch, size]."""
    return lambda step: torch.randn(batch, size, generator=generator(step))


def labeled(size: int, classes: int, batch: int = 4) -> Batch:
    """Return batches of float features [batch, size] and labels [batch]."""

    def make(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = generator(step)
        return torch.randn(batch, size, generator=random), torch.randint(classes, (batch,), generator=random)

    return make


def sequences(length: int, size: int, batch: int = 3) -> Batch:
    """Return batches of float sequences [batch, length, size]."""
    return lambda step: torch.randn(batch, length, size, generator=generator(step))


def tokens(vocabulary: int, length: int, batch: int = 3) -> Batch:
    """Return batches of token ids [batch, length]."""
    return lambda step: torch.randint(vocabulary, (batch, length), generator=generator(step))


def images(
    size: int = 8, channels: int = 3, classes: int = 5, batch: int = 4
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of images [batch, channels, size, size] and labels [batch]."""

    def make(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = generator(step)
        return (
            torch.randn(batch, channels, size, size, generator=random),
            torch.randint(classes, (batch,), generator=random),
        )

    return make


def classification(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Return the cross-entropy of the model's logits with the labels."""
    data, labels = inputs
    return F.cross_entropy(model(data), labels)


def next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the model's logits [batch, length, vocabulary] with the next tokens."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def mean_square(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Return the mean square of the model's output."""
    return model(inputs).square().mean()


def own_loss(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Return the loss that the model itself computes."""
    return model(inputs)


def greedy(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return ``ids`` continued by four tokens of the largest logits."""
    for _ in range(4):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids
