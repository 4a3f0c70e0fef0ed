"""Acoustic models: in-place sums on outputs, masked writes, convolutional positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case
from tests.zoo.inputs import generator, mean_square, own_loss, sequences

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


class ConvPositions(nn.Module):
    """wav2vec 2.0's positions: a grouped convolution with weight norm over the kernel's dimension."""

    def __init__(self, parametrized: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=2, groups=3)
        std = math.sqrt(4.0 / (4 * WIDTH))
        nn.init.normal_(self.conv.weight, mean=0, std=std)
        nn.init.constant_(self.conv.bias, 0)
        norm = nn.utils.parametrizations.weight_norm if parametrized else nn.utils.weight_norm
        self.conv = norm(self.conv, name="weight", dim=2)

    def forward(self, x):
        return F.gelu(self.conv(x.transpose(1, 2))[:, :, :-1]).transpose(1, 2)


class Wav2Vec(nn.Module):
    """Convolutions over samples, masks, positions, layer drop and a Gumbel quantizer."""

    def __init__(self, parametrized: bool) -> None:
        super().__init__()
        self.feature_extractor = nn.ModuleList(
            [
                nn.Sequential(nn.Conv1d(1, 6, 4, 2, bias=False), nn.GroupNorm(6, 6), nn.GELU()),
                nn.Sequential(nn.Conv1d(6, 6, 3, 2, bias=False), nn.GELU()),
            ]
        )
        self.project = nn.Linear(6, WIDTH)
        self.mask_emb = nn.Parameter(torch.FloatTensor(WIDTH).uniform_())
        self.pos_conv = ConvPositions(parametrized)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 2, 20, 0.0, batch_first=True) for _ in range(2)]
        )
        self.vars = nn.Parameter(torch.FloatTensor(1, 2 * 4, 4).uniform_())
        self.weight_proj = nn.Linear(6, 8)
        self.final_proj = nn.Linear(WIDTH, 8)

    def quantize(self, x):
        b, t, _ = x.shape
        logits = self.weight_proj(x).view(b * t * 2, -1)
        hard = logits.argmax(-1)
        probs = (
            F.gumbel_softmax(logits.float(), tau=2, hard=True)
            if self.training
            else F.one_hot(hard, 4).float()
        )
        probs = probs.view(b * t, -1).unsqueeze(-1)
        return (probs * self.vars).view(b * t, 2, 4, -1).sum(-2).view(b, t, -1)

    def forward(self, wave):
        x = wave.unsqueeze(1)
        for conv in self.feature_extractor:
            x = conv(x)
        features = x.transpose(1, 2)
        h = self.project(features)
        mask = torch.rand(h.shape[:2]) < 0.4
        h[mask] = self.mask_emb
        h = h + self.pos_conv(h)
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.2:
                h = layer(h)
        targets = self.quantize(features)
        logits = F.cosine_similarity(self.final_proj(h)[:, :, None], targets[:, None], dim=-1)
        labels = torch.arange(h.shape[1]).expand(h.shape[0], -1)
        return F.cross_entropy(logits.flatten(0, 1) / 0.1, labels.flatten())


class ConformerConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.pointwise1 = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.pointwise2 = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x):
        x = F.glu(self.pointwise1(self.norm(x).transpose(1, 2)), dim=1)
        return self.pointwise2(F.silu(self.batch_norm(self.depthwise(x)))).transpose(1, 2)


class RelativeAttention(nn.Module):
    """Transformer-XL's attention: two biases that are parameters, added to the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.pos = nn.Linear(WIDTH, WIDTH, bias=False)
        self.pos_bias_u, self.pos_bias_v = nn.Parameter(torch.Tensor(2, 6)), nn.Parameter(torch.Tensor(2, 6))
        nn.init.xavier_uniform_(self.pos_bias_u)
        nn.init.xavier_uniform_(self.pos_bias_v)

    def forward(self, x, pos_emb):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 2, 6)
        k, v = (w(x).view(b, t, 2, 6).transpose(1, 2) for w in (self.k, self.v))
        p = self.pos(pos_emb).view(1, -1, 2, 6).transpose(1, 2)
        ac = (q + self.pos_bias_u).transpose(1, 2) @ k.transpose(-2, -1)
        bd = (q + self.pos_bias_v).transpose(1, 2) @ p.transpose(-2, -1)
        return self.o((((ac + bd) / 6**0.5).softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class ConformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff1, self.ff2 = (
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.SiLU(), nn.Dropout(0.1), nn.Linear(20, WIDTH)
            )
            for _ in range(2)
        )
        self.attn, self.conv = RelativeAttention(), ConformerConv()
        self.norm_attn, self.norm_final = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, pos_emb):
        x = x + 0.5 * self.ff1(x)
        x = x + self.attn(self.norm_attn(x), pos_emb)
        x = x + self.conv(x)
        return self.norm_final(x + 0.5 * self.ff2(x)), pos_emb


class Conformer(nn.Module):
    """Blocks in a Sequential of ESPnet's kind, which passes tuples from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU())
        self.out = nn.Linear(16, WIDTH)
        self.encoders = nn.ModuleList([ConformerBlock(), ConformerBlock()])
        self.register_buffer("pe", torch.randn(1, 16, WIDTH), persistent=False)
        self.ctc_lo = nn.Linear(WIDTH, 7)
        self.interctc = nn.Linear(7, WIDTH)

    def forward(self, x):
        x = self.embed(x.unsqueeze(1))
        x = self.out(x.transpose(1, 2).contiguous().view(x.shape[0], x.shape[2], -1))
        pair = (x, self.pe[:, : x.shape[1]])
        for encoder in self.encoders:
            x, pos = encoder(*pair)
            # Self-conditioned CTC: the head of the last layer is used between the layers.
            pair = (x + self.interctc(self.ctc_lo(x).softmax(-1)), pos)
        return self.ctc_lo(x).repeat_interleave(2, dim=1)


class WaveNet(nn.Module):
    """Gated dilated convolutions whose skips are summed over the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(8, 6, 1)
        self.filters = nn.ModuleList([nn.Conv1d(6, 6, 2, dilation=2**i) for i in range(3)])
        self.gates = nn.ModuleList([nn.Conv1d(6, 6, 2, dilation=2**i) for i in range(3)])
        self.skips = nn.ModuleList([nn.Conv1d(6, 7, 1) for _ in range(3)])

    def forward(self, x):
        x, skip = self.start(x.transpose(1, 2)), 0
        for f, g, s in zip(self.filters, self.gates, self.skips, strict=True):
            residual = F.pad(x, (f.dilation[0], 0))
            y = torch.tanh(f(residual)) * torch.sigmoid(g(residual))
            skip = skip + s(y)
            x = y + x
        return skip.transpose(1, 2)


class SubbandFilter(nn.Module):
    """SincNet: kernels computed from two small parameters and buffers that are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.low_hz_ = nn.Parameter(torch.linspace(0.05, 0.2, 5).view(-1, 1))
        self.band_hz_ = nn.Parameter(torch.full((5, 1), 0.1))
        self.n_ = 2 * math.pi * torch.arange(-4, 0).view(1, -1)
        self.window_ = torch.hamming_window(9)[:4]
        self.tail = nn.Linear(5, 3)

    def forward(self, x):
        low = 0.01 + torch.abs(self.low_hz_)
        high = torch.clamp(low + torch.abs(self.band_hz_), 0.01, 0.5)
        left = (torch.sin(high @ self.n_) - torch.sin(low @ self.n_)) / (self.n_ / 2) * self.window_
        band = torch.cat([left, 2 * (high - low), torch.flip(left, [1])], dim=1)
        return self.tail(F.conv1d(x.unsqueeze(1), band.view(5, 1, 9)).abs().mean(-1))


def speech(name: str, build: Any, **more: Any) -> Case:
    """Return a case of an acoustic model with the CTC loss."""
    return Case(f"own/speech/{name}", build, **({"batch": utterances, "loss": ctc} | more))


def waves(step: int) -> torch.Tensor:
    """Return samples [3, 40]."""
    return torch.randn(3, 40, generator=generator(step))


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
    speech("wav2vec-old-weight-norm", lambda: Wav2Vec(False), batch=waves, loss=own_loss),
    speech("wav2vec-parametrized", lambda: Wav2Vec(True), batch=waves, loss=own_loss),
    speech("conformer", Conformer),
    speech("wavenet", WaveNet),
    speech("sincnet", SubbandFilter, batch=waves, loss=mean_square),
    speech(
        "sequence-norms",
        lambda: nn.Sequential(
            nn.Linear(8, WIDTH), nn.RReLU(), nn.LayerNorm([AUDIO_STEPS, WIDTH]), nn.Linear(WIDTH, 7)
        ),
        batch=sequences(AUDIO_STEPS, 8),
        loss=mean_square,
    ),
]
