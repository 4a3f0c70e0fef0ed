"""Layers of torch under every stage: convolutions, attention, recurrence, parametrizations, norms."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TIME, WIDTH, feature_batch, feature_loss, language_batch
from tests.zero.training import (
    check_against_plain,
    check_equal,
    configuration,
    sgd,
    train_prepared,
)


class Pixels(nn.Module):
    """A small convolutional net over features seen as an image."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 4, 2, groups=2),
        ).to(memory_format=memory_format)
        self.head = nn.ConvTranspose2d(4, 1, 2)
        self.memory_format = memory_format

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        image = features.view(-1, 1, 3, 4).contiguous(memory_format=self.memory_format)
        return self.head(self.layers(image))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 17, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.attention(hidden, hidden, hidden, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(23, WIDTH, mode="sum")
        self.lstm = nn.LSTM(WIDTH, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRUCell(14, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(ids.reshape(-1, 1)).view(*ids.shape, -1))
        return self.gru(hidden[:, -1])


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
                nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
                nn.GroupNorm(3, WIDTH),
                nn.PReLU(WIDTH),
                nn.Bilinear(WIDTH, WIDTH, 5),
            ]
        )
        self.rms = nn.RMSNorm(5)
        self.tail = nn.Linear(5, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = features
        for block in self.blocks[:4]:
            hidden = block(hidden)
        return self.tail(self.rms(self.blocks[4](hidden, features)))


class Strided(nn.Module):
    """Parameters whose memory order is not contiguous, dense (transposed) or not (strided)."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(7, WIDTH).t())
        self.sparse = nn.Parameter(torch.randn(7, 10)[:, ::2])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return functional.gelu(features @ self.turned) @ self.sparse


FEATURES: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: Pixels(torch.contiguous_format),
    "channels last": lambda: Pixels(torch.channels_last),
    "parametrized": Parametrized,
    "strided": Strided,
}


def eval_norms(model: nn.Module) -> nn.Module:
    """Batch and spectral norm keep statistics of the data a rank sees; as constants they are comparable."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) or "SpectralNorm" in type(module).__name__:
            module.eval()
    return model


@on_ranks(1, 2)
@pytest.mark.parametrize("name", list(FEATURES))
def test_feature_layers(world: World, name: str) -> None:
    for stage in (1, 3):
        torch.manual_seed(world.seed)
        check_against_plain(
            world, eval_norms(FEATURES[name]()), feature_loss, feature_batch, stage, tolerance=2e-6
        )


class OldWeightNorm(nn.Module):
    """The hook-based weight norm, which sets a plain tensor as ``weight`` before each forward."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.blocks = nn.ModuleList([nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = torch.tanh(block(features))
        return features


@on_ranks(2)
def test_old_weight_norm(world: World) -> None:
    runs = []
    for stage in (0, 3):
        torch.manual_seed(world.seed)
        runs.append(train_prepared(world, OldWeightNorm(), feature_loss, feature_batch, configuration(stage)))
    check_equal(*runs)
    assert len(set(runs[0].losses)) == 3


@on_ranks(2)
def test_language_layers(world: World) -> None:
    assert language_batch(0, 0, 0, 0).shape[1] == TIME
    for stage in (1, 3):
        for make in (Attention, Recurrent):
            torch.manual_seed(world.seed)
            check_against_plain(world, make(), feature_loss, language_batch, stage, make_optimizer=sgd)
