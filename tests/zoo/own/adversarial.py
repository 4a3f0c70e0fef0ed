"""Two networks with an optimizer each, and gradient penalties."""

from __future__ import annotations

from typing import Any

import torch
from torch import autograd, nn
from torch.nn import functional as F

from tests.zoo.case import Case, TrainingState
from tests.zoo.inputs import features

LATENT = 5


def generator_network() -> nn.Module:
    """Return a generator of eight features, with batch norm."""
    return nn.Sequential(
        nn.Linear(LATENT, 12), nn.BatchNorm1d(12), nn.ReLU(True), nn.Linear(12, 8), nn.Tanh()
    )


def critic_network(norm: Any = lambda layer: layer) -> nn.Module:
    """Return a critic of eight features."""
    return nn.Sequential(
        norm(nn.Linear(8, 12)),
        nn.LeakyReLU(0.2, inplace=True),
        norm(nn.Linear(12, 12)),
        nn.Tanh(),
        nn.Linear(12, 1),
    )


def noise(x: torch.Tensor) -> torch.Tensor:
    """Return latent vectors."""
    return torch.randn(x.shape[0], LATENT)


def dcgan_step(state: TrainingState, x: torch.Tensor) -> torch.Tensor:
    """Train the critic on real and fake with two backward passes, then the generator."""
    (G, D), (opt_g, opt_d) = state.models, state.optimizers
    D.zero_grad()
    real = F.binary_cross_entropy_with_logits(D(x).view(-1), torch.ones(x.shape[0]))
    real.backward()
    fake = G(noise(x))
    false = F.binary_cross_entropy_with_logits(D(fake.detach()).view(-1), torch.zeros(x.shape[0]))
    false.backward()
    opt_d.step()
    G.zero_grad()
    loss = F.binary_cross_entropy_with_logits(D(fake).view(-1), torch.ones(x.shape[0]))
    loss.backward()
    opt_g.step()
    return loss + real + false


def gan_evaluation(models: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the critic's opinion of real and fake samples."""
    G, D = models
    return D(x).mean() - D(G(noise(x))).mean()


def gradient_penalty(D: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return WGAN-GP's penalty at random points between real and fake."""
    alpha = torch.rand(real.size(0), 1)
    interpolates = (alpha * real + ((1 - alpha) * fake)).requires_grad_(True)
    d_interpolates = D(interpolates)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones_like(d_interpolates),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.view(gradients.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()


def penalized_step(state: TrainingState, x: torch.Tensor, documented: bool) -> torch.Tensor:
    """Train the critic with the gradient penalty, naively or inside ``double_backward``."""
    (G, D), (opt_g, opt_d) = state.models, state.optimizers
    opt_d.zero_grad()
    fake = G(noise(x)).detach()
    with state.double_backward(*([D] if documented else [])) if documented else torch.enable_grad():
        loss = -torch.mean(D(x)) + torch.mean(D(fake)) + 10 * gradient_penalty(D, x, fake)
        loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    (-torch.mean(D(G(noise(x))))).backward()
    opt_g.step()
    return loss


def r1_step(state: TrainingState, x: torch.Tensor) -> torch.Tensor:
    """Regularize the critic's gradient at real samples every other step, as StyleGAN2 does."""
    (G, D), (opt_g, opt_d) = state.models, state.optimizers
    loss = F.softplus(D(G(noise(x)).detach())).mean() + F.softplus(-D(x)).mean()
    opt_d.zero_grad()
    loss.backward()
    opt_d.step()
    if state.step_number % 2 == 0:
        x = x.clone().requires_grad_()
        with state.double_backward(D):
            (grad_real,) = autograd.grad(outputs=D(x).sum(), inputs=x, create_graph=True)
            penalty = grad_real.pow(2).reshape(grad_real.shape[0], -1).sum(1).mean()
            opt_d.zero_grad()
            (5 * penalty).backward()
        opt_d.step()
    for p in D.parameters():
        p.requires_grad_(False)
    opt_g.zero_grad()
    F.softplus(-D(G(noise(x)))).mean().backward()
    opt_g.step()
    for p in D.parameters():
        p.requires_grad_(True)
    return loss


def gan(name: str, step: Any, critic: Any = critic_network, **more: Any) -> Case:
    """Return a case of generator and critic."""
    return Case(
        f"own/adversarial/{name}", lambda: [generator_network(), critic()],
        **({"batch": features(8), "loss": gan_evaluation, "step": step} | more),
    )  # fmt: skip


CASES = [
    gan("dcgan", dcgan_step),
    gan("dcgan-spectral-norm", dcgan_step, lambda: critic_network(nn.utils.spectral_norm)),
    gan("wgan-gp-naive", lambda s, x: penalized_step(s, x, False)),
    gan("wgan-gp", lambda s, x: penalized_step(s, x, True)),
    gan("r1", r1_step),
]
