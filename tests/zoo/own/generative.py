"""Autoregressive images, codebooks, flows, energies and diffusion."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import WITHOUT_CHECKPOINT, Case, TrainingState, plain_step
from tests.zoo.inputs import features, generator, own_loss


class MaskedConv2d(nn.Conv2d):
    """PixelCNN's convolution, masked by writing to ``weight.data`` in every forward."""

    def __init__(self, mask_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", self.weight.data.clone())
        _, _, kH, kW = self.weight.size()
        self.mask.fill_(1)
        self.mask[:, :, kH // 2, kW // 2 + (mask_type == "B") :] = 0
        self.mask[:, :, kH // 2 + 1 :] = 0

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x)


class MaskedConv2dFunctional(MaskedConv2d):
    """The same mask, applied to a copy of the weight."""

    def forward(self, x):
        return self._conv_forward(x, self.weight * self.mask, self.bias)


class PixelCNN(nn.Module):
    def __init__(self, conv: type[MaskedConv2d]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            conv("A", 1, 6, 5, 1, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU(True),
            conv("B", 6, 6, 5, 1, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU(True),
            nn.Conv2d(6, 4, 1),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


def pixels(step: int) -> torch.Tensor:
    """Return images [4, 6, 6] of four gray levels."""
    return torch.randint(4, (4, 6, 6), generator=generator(step))


def pixel_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of every pixel."""
    return F.cross_entropy(model(x.unsqueeze(1) / 3.0), x)


class VectorQuantizerEMA(nn.Module):
    """The codebook is a buffer that forward moves; its size counters are buffers as well."""

    def __init__(self, codes: int = 8, dim: int = 4, decay: float = 0.9) -> None:
        super().__init__()
        embed = torch.randn(dim, codes)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.register_buffer("embed_avg", embed.clone())
        self.decay, self.codes = decay, codes

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        dist = (
            flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        )
        index = (-dist).max(1)[1]
        onehot = F.one_hot(index, self.codes).type(flat.dtype)
        quantize = F.embedding(index, self.embed.transpose(0, 1)).view_as(x)
        if self.training:
            self.cluster_size.data.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(flat.detach().t() @ onehot, alpha=1 - self.decay)
            self.embed.data.copy_(self.embed_avg / (self.cluster_size + 1e-2).unsqueeze(0))
        diff = (quantize.detach() - x).pow(2).mean()
        return x + (quantize - x).detach(), diff


class VQVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.quantize = VectorQuantizerEMA()
        self.dec = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x):
        z, diff = self.quantize(self.enc(x).view(-1, 2, 4))
        return F.mse_loss(self.dec(z.flatten(1)), x) + diff


class ActNorm(nn.Module):
    """Initialized by the first batch through ``data.copy_`` on its parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.loc, self.log_scale = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.data.copy_(-x.mean(0))
                self.log_scale.data.copy_(-torch.log(x.std(0) + 1e-6))
            self.initialized.fill_(1)
        return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([ActNorm(6), ActNorm(6)])
        self.W = nn.Parameter(torch.linalg.qr(torch.randn(6, 6))[0].contiguous())

    def forward(self, x):
        total = torch.slogdet(self.W)[1]
        for norm in self.norms:
            x, logdet = norm(x @ self.W)
            total = total + logdet
        return (0.5 * x.pow(2).sum(-1) - total).mean()


class Denoiser(nn.Module):
    """Its schedule of noise is a buffer, which the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 12), nn.SiLU(), nn.Linear(12, 6))
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - torch.linspace(1e-4, 0.5, 10), 0))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None] / 10], -1))


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def langevin(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Draw negatives by gradient steps on the inputs, with the parameters' gradients switched off."""
    for p in model.parameters():
        p.requires_grad = False
    x = torch.randn_like(x).requires_grad_(True)
    for _ in range(3):
        (g,) = torch.autograd.grad(model(x).sum(), [x])
        x = (x - 0.1 * g + 0.01 * torch.randn_like(x)).detach().requires_grad_(True)
    for p in model.parameters():
        p.requires_grad = True
    return x.detach()


def contrastive_divergence(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the difference of energies of data and samples."""
    negative = langevin(model, x)
    e, n = model(x), model(negative)
    return e.mean() - n.mean() + 0.1 * (e**2 + n**2).mean()


def denoising(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the error of the predicted noise at random times, with the schedule read from the model."""
    t = torch.randint(0, 10, (x.shape[0],))
    noise = torch.randn_like(x)
    a = model.alphas_cumprod[t][:, None]
    return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


def keep_average(state: TrainingState) -> None:
    """Copy the weights before the first step."""
    with state.gathered(state.model):
        state.memory["ema"] = {n: p.detach().clone() for n, p in state.model.named_parameters()}


def denoising_step_with_average(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Move an average of the weights after each step, read inside ``gathered``."""
    loss = plain_step(state, denoising, inputs)
    with state.gathered(state.model), torch.no_grad():
        for name, p in state.model.named_parameters():
            state.memory["ema"][name].mul_(0.9).add_(p, alpha=0.1)
            state.record(f"ema.{name}", state.memory["ema"][name])
    return loss


def copy_model(state: TrainingState) -> None:
    """Keep a deep copy of the prepared model, as most diffusion code does."""
    state.memory["ema_model"] = copy.deepcopy(state.model).eval().requires_grad_(False)


def denoising_step_with_copy(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Move the copy by zipping the parameters of both models."""
    loss = plain_step(state, denoising, inputs)
    with torch.no_grad():
        for ema, p in zip(state.memory["ema_model"].parameters(), state.model.parameters(), strict=True):
            ema.copy_(ema * 0.9 + p.data * 0.1)
    for name, ema in state.memory["ema_model"].named_parameters():
        state.record(f"ema.{name}", ema)
    return loss


def generative(name: str, build: Any, **more: Any) -> Case:
    """Return a case of a density model of six features."""
    return Case(f"own/generative/{name}", build, **({"batch": features(6), "loss": own_loss} | more))


CASES = [
    generative("pixelcnn-data-mask", lambda: PixelCNN(MaskedConv2d), batch=pixels, loss=pixel_loss),
    generative(
        "pixelcnn-functional-mask", lambda: PixelCNN(MaskedConv2dFunctional), batch=pixels, loss=pixel_loss
    ),
    generative("vqvae-ema", VQVAE, batch=features(12)),
    generative("flow-actnorm", Flow),
    generative("energy-langevin", Energy, loss=contrastive_divergence, evaluate=lambda m, x: m(x).mean()),
    generative("diffusion", Denoiser, loss=denoising),
    generative(
        "diffusion-ema",
        Denoiser,
        loss=denoising,
        setup=keep_average,
        step=denoising_step_with_average,
        variants=WITHOUT_CHECKPOINT,
    ),
    generative(
        "diffusion-ema-deepcopy",
        Denoiser,
        loss=denoising,
        setup=copy_model,
        step=denoising_step_with_copy,
        variants=WITHOUT_CHECKPOINT,
    ),
]
