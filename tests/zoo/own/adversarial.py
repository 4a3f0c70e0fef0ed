"""Two networks with an optimizer each, gradient penalties and clipped weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import autograd, nn
from torch.nn import functional as F

from tests.zoo.case import WITHOUT_CHECKPOINT, Case, TrainingState
from tests.zoo.inputs import features, images

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


def wasserstein_step(state: TrainingState, x: torch.Tensor, clip: str) -> torch.Tensor:
    """Train the critic on the distance and clip its weights, by ``data`` or inside ``gathered``."""
    (G, D), (opt_g, opt_d) = state.models, state.optimizers
    opt_d.zero_grad()
    loss = -torch.mean(D(x)) + torch.mean(D(G(noise(x)).detach()))
    loss.backward()
    opt_d.step()
    if clip == "data":
        for p in D.parameters():
            p.data.clamp_(-0.05, 0.05)
    else:
        with state.gathered(D, modifier_rank=0), torch.no_grad():
            for p in D.parameters():
                p.clamp_(-0.05, 0.05)
    opt_g.zero_grad()
    (-torch.mean(D(G(noise(x))))).backward()
    opt_g.step()
    return loss


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


class ModulatedConv(nn.Module):
    """StyleGAN2: the weight is a parameter of five dimensions, scaled by a style for each sample."""

    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, cout, cin, 3, 3))
        self.modulation = nn.Linear(LATENT, cin)
        self.modulation.bias.data[:] = 1
        self.noise_weight = nn.Parameter(torch.zeros(1))
        self.scale = (cin * 9) ** -0.5

    def forward(self, x, style):
        b, c, h, w = x.shape
        weight = self.scale * self.weight * self.modulation(style).view(b, 1, c, 1, 1)
        demod = torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8)
        weight = (weight * demod.view(b, -1, 1, 1, 1)).view(-1, c, 3, 3)
        x = F.conv2d(x.reshape(1, b * c, h, w), weight, padding=1, groups=b).view(b, -1, h, w)
        return F.leaky_relu(x + self.noise_weight * torch.randn(b, 1, h, w), 0.2)


class EqualLinear(nn.Module):
    """A linear layer whose learning rate is a factor on the weight."""

    def __init__(self, a: int, b: int, lr_mul: float = 0.1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(b, a).div_(lr_mul))
        self.bias = nn.Parameter(torch.zeros(b).fill_(0))
        self.scale, self.lr_mul = a**-0.5 * lr_mul, lr_mul

    def forward(self, x):
        return F.linear(x, self.weight * self.scale, bias=self.bias * self.lr_mul)


class StyleGenerator(nn.Module):
    """The constant input is a parameter that is repeated over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.style = nn.Sequential(
            EqualLinear(LATENT, LATENT), nn.LeakyReLU(0.2), EqualLinear(LATENT, LATENT)
        )
        self.input = nn.Parameter(torch.randn(1, 4, 4, 4))
        self.convs = nn.ModuleList([ModulatedConv(4, 6), ModulatedConv(6, 4)])
        self.to_rgb = nn.Conv2d(4, 3, 1)

    def forward(self, z):
        style = self.style(z)
        out = self.input.repeat(z.shape[0], 1, 1, 1)
        for conv in self.convs:
            out = conv(out, style)
        return self.to_rgb(F.interpolate(out, scale_factor=2))


def image_critic() -> nn.Module:
    """Return a convolutional critic."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 6, 3, 2, 1), nn.Flatten(), nn.Linear(24, 1)
    )


def accumulate(state: TrainingState, decay: float = 0.8) -> None:
    """Move the average generator by ``data.mul_().add_()``, as StyleGAN2 does."""
    average = state.memory["g_ema"]
    with state.gathered(state.models[0]):
        for name, p in state.models[0].named_parameters():
            average[name].data.mul_(decay).add_(p.data, alpha=1 - decay)
            state.record(f"ema.{name}", average[name])


def style_step(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Make a step of both networks and move the average generator."""
    loss = dcgan_step(state, inputs[0])
    accumulate(state)
    return loss


def start_average(state: TrainingState) -> None:
    """Build a plain generator from the full state dict of the prepared one."""
    with state.gathered(state.models[0]):
        state.memory["g_ema"] = {n: p.detach().clone() for n, p in state.models[0].named_parameters()}


def domain_adversarial(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the loss of a classifier behind a reversed gradient."""
    return model(x)


class ReverseGradient(autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.neg() * ctx.alpha, None


class DANN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feature, self.classes, self.domain = nn.Linear(8, 10), nn.Linear(10, 3), nn.Linear(10, 2)

    def forward(self, x):
        f = F.relu(self.feature(x))
        d = self.domain(ReverseGradient.apply(f, 0.3))
        half = x.shape[0] // 2
        labels = (torch.arange(x.shape[0]) >= half).long()
        return F.cross_entropy(self.classes(f[:half]), labels[:half]) + F.cross_entropy(d, labels)


def adversarial_training(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Perturb the inputs by the sign of their gradient and train on the result."""
    x_adv = x.detach() + 0.01 * torch.randn_like(x)
    for _ in range(2):
        x_adv.requires_grad_()
        with torch.enable_grad():
            loss = model(x_adv).square().mean()
        grad = autograd.grad(loss, [x_adv])[0]
        x_adv = (x_adv.detach() + 0.05 * torch.sign(grad.detach())).clamp(-2, 2)
    return model(x_adv).square().mean()


def gan(name: str, step: Any, critic: Any = critic_network, **more: Any) -> Case:
    """Return a case of generator and critic."""
    return Case(
        f"own/adversarial/{name}", lambda: [generator_network(), critic()],
        **({"batch": features(8), "loss": gan_evaluation, "step": step} | more),
    )  # fmt: skip


CASES = [
    gan("dcgan", dcgan_step),
    gan("dcgan-spectral-norm", dcgan_step, lambda: critic_network(nn.utils.spectral_norm)),
    gan(
        "dcgan-spectral-parametrization",
        dcgan_step,
        lambda: critic_network(nn.utils.parametrizations.spectral_norm),
    ),
    gan(
        "wgan-data-clamp",
        lambda s, x: wasserstein_step(s, x, "data"),
    ),
    gan("wgan-gathered-clamp", lambda s, x: wasserstein_step(s, x, "gathered")),
    gan(
        "wgan-gp-naive",
        lambda s, x: penalized_step(s, x, False),
    ),
    gan("wgan-gp", lambda s, x: penalized_step(s, x, True)),
    gan("r1", r1_step),
    Case(
        "own/adversarial/stylegan",
        lambda: [StyleGenerator(), image_critic()],
        images(),
        lambda models, inputs: gan_evaluation(models, inputs[0]),
        step=style_step,
        setup=start_average,
        variants=WITHOUT_CHECKPOINT,
    ),
    Case("own/adversarial/dann", DANN, features(8), domain_adversarial),
    Case(
        "own/adversarial/adversarial-training",
        critic_network,
        features(8),
        adversarial_training,
        evaluate=lambda m, x: m(x).square().mean(),
    ),
]
