"""Derivatives with respect to inputs, solvers and unusual layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import grad
from torch.nn import functional as F

from tests.zoo.case import REFUSED_WHERE_SHARDED, Case, TrainingState
from tests.zoo.inputs import features, labeled, mean_square


class Field(nn.Module):
    """A function of points, as physics-informed networks have."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, 12), nn.Linear(12, 12), nn.Linear(12, 1)])
        self.lam = nn.Parameter(torch.tensor(0.5))
        # Adaptive activations: a slope for each layer, in a list of parameters.
        self.a = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])

    def forward(self, x):
        for layer, a in zip(self.layers[:-1], self.a, strict=True):
            x = torch.tanh(a * layer(x))
        return self.layers[-1](x)


def residual(model: nn.Module, points: torch.Tensor) -> torch.Tensor:
    """Return the residual of Burgers' equation, with an unknown coefficient."""
    points = points.clone().requires_grad_(True)
    u = model(points)
    du = grad(u, points, torch.ones_like(u), create_graph=True)[0]
    ux, ut = du[:, :1], du[:, 1:]
    uxx = grad(ux, points, torch.ones_like(ux), create_graph=True)[0][:, :1]
    return (ut + u * ux - model.lam * uxx).square().mean() + (u - 1).square().mean()


def plain_value(model: nn.Module, points: torch.Tensor) -> torch.Tensor:
    """Return the mean of the field."""
    return model(points).mean()


def stepped(loss: Any, documented: bool = True) -> Any:
    """Return a step of ``loss``, inside ``double_backward`` or as it is written for plain torch."""

    def step(state: TrainingState, inputs: Any) -> torch.Tensor:
        state.optimizer.zero_grad()
        with state.double_backward() if documented else torch.enable_grad():
            value = loss(state.model, inputs)
            value.backward()
        state.optimizer.step()
        return value

    return step


class Hamiltonian(nn.Module):
    """Differentiates its own output inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 12), nn.Softplus(), nn.Linear(12, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            dH = grad(self.net(x).sum(), x, create_graph=True)[0]
        return torch.cat([dH[:, 2:], -dH[:, :2]], 1)


class ODEFunc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)
        self.nfe = 0

    def forward(self, t, y):
        self.nfe += 1
        return self.net(y**3) * (1 + t)


class NeuralODE(nn.Module):
    """A fourth-order solver with fixed steps calls the function many times."""

    def __init__(self) -> None:
        super().__init__()
        self.odefunc = ODEFunc()
        self.fc = nn.Linear(6, 3)

    def forward(self, y):
        h = 0.25
        for i in range(4):
            t = i * h
            k1 = self.odefunc(t, y)
            k2 = self.odefunc(t + h / 2, y + h / 2 * k1)
            k3 = self.odefunc(t + h / 2, y + h / 2 * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.odefunc(t + h, y + h * k3))
        return self.fc(y)


class Adjoint(torch.autograd.Function):
    """The adjoint method: backward solves an equation for the parameters' gradients."""

    @staticmethod
    def forward(ctx, func, y, *parameters):
        ctx.func = func
        with torch.no_grad():
            for i in range(4):
                y = y + 0.25 * func(0.25 * i, y)
        ctx.save_for_backward(y, *parameters)
        return y

    @staticmethod
    def backward(ctx, a):
        y, *parameters = ctx.saved_tensors
        sums = [torch.zeros_like(p) for p in parameters]
        for i in reversed(range(4)):
            with torch.enable_grad():
                y = y.detach().requires_grad_(True)
                f = ctx.func(0.25 * i, y)
                da, *dp = grad(f, (y, *parameters), a, allow_unused=True)
            y = y.detach() - 0.25 * f.detach()
            a = a + 0.25 * da
            sums = [s + 0.25 * d for s, d in zip(sums, dp, strict=True)]
        return None, a, *sums


class AdjointODE(NeuralODE):
    def forward(self, y):
        return self.fc(Adjoint.apply(self.odefunc, y, *self.odefunc.parameters()))


class DEQ(nn.Module):
    """A fixed point found without gradients, and a hook that solves for the gradient in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.linear1.weight.data.mul_(0.2)
        self.fc = nn.Linear(6, 3)

    def f(self, z, x):
        return torch.tanh(self.linear1(z) + self.linear2(x))

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(6):
                z = self.f(z, x)
        z = self.f(z, x)
        if self.training:
            z0 = z.clone().detach().requires_grad_()
            f0 = self.f(z0, x)

            def backward_hook(g):
                y = g
                for _ in range(4):
                    y = torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + g
                return y

            z.register_hook(backward_hook)
        return self.fc(z)


def score_network() -> nn.Module:
    """Return a network for sliced score matching: a product with the Jacobian in the loss, by torch.func."""
    return nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 6))


def sliced_score(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the sliced score matching loss."""
    v = torch.randn_like(x)
    score, product = torch.func.jvp(model, (x,), (v,))
    return (0.5 * score.pow(2).sum(-1) + (v * product).sum(-1)).mean()


def transformed_gathered(state: TrainingState, inputs: torch.Tensor) -> torch.Tensor:
    """Run the transform of torch.func inside ``gathered``, and backward outside."""
    state.optimizer.zero_grad()
    with state.gathered(state.model):
        loss = sliced_score(state.model, inputs)
    loss.backward()
    state.optimizer.step()
    return loss


def equation(name: str, build: Any, **more: Any) -> Case:
    """Return a case of a field over the plane."""
    return Case(f"own/equations/{name}", build, **({"batch": features(2, 6), "loss": plain_value} | more))


def classifier(name: str, build: Any) -> Case:
    """Return a case of a classifier of six features."""
    return Case(f"own/equations/{name}", build, labeled(6, 3), lambda m, i: F.cross_entropy(m(i[0]), i[1]))


CASES = [
    equation("physics-informed", Field, step=stepped(residual)),
    equation("physics-informed-naive", Field, step=stepped(residual, False)),
    equation(
        "hamiltonian",
        Hamiltonian,
        batch=features(4),
        loss=mean_square,
        step=stepped(mean_square),
        evaluate=None,
    ),
    equation("hamiltonian-naive", Hamiltonian, batch=features(4), loss=mean_square),
    equation(
        "score-jvp",
        score_network,
        batch=features(6),
        loss=sliced_score,
        expected=REFUSED_WHERE_SHARDED,
        reason="nothing can be gathered inside a transform of torch.func",
    ),
    equation(
        "score-jvp-gathered",
        score_network,
        batch=features(6),
        loss=sliced_score,
        step=transformed_gathered,
        evaluate=None,
    ),
    classifier("neural-ode", NeuralODE),
    classifier("neural-ode-adjoint", AdjointODE),
    classifier("deep-equilibrium", DEQ),
]
