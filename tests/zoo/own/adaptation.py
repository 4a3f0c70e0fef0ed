"""Adapters, networks that make weights, and learning to learn."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.zoo.case import Case, TrainingState, plain_step
from tests.zoo.inputs import classification, greedy, labeled, next_token, own_loss, tokens
from tests.zoo.own.language import GPT, LENGTH, VOCABULARY


class LoRALinear(nn.Linear):
    """loralib's layer: evaluation merges the product into ``weight.data``, training takes it out again."""

    def __init__(self, a: int, b: int, r: int = 2, merge_weights: bool = False) -> None:
        super().__init__(a, b)
        self.lora_A = nn.Parameter(self.weight.new_zeros((r, a)))
        self.lora_B = nn.Parameter(self.weight.new_zeros((b, r)))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.normal_(self.lora_B, std=0.1)
        self.weight.requires_grad = False
        self.merge_weights, self.merged = merge_weights, False

    def train(self, mode: bool = True):
        super().train(mode)
        if self.merge_weights and hasattr(self, "lora_B"):
            if mode and self.merged:
                self.weight.data -= self.lora_B @ self.lora_A
                self.merged = False
            elif not mode and not self.merged:
                self.weight.data += self.lora_B @ self.lora_A
                self.merged = True
        return self

    def forward(self, x):
        result = F.linear(x, self.weight, bias=self.bias)
        if not self.merged:
            result = result + x @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)
        return result


def with_lora() -> nn.Module:
    """Replace the linear layers of a frozen GPT by assigning to the parents' attributes."""
    model = GPT()
    for p in model.parameters():
        p.requires_grad_(False)
    for block in model.transformer["h"]:
        for parent, name in ((block.attn, "c_attn"), (block.mlp, "c_fc")):
            old = (
                getattr(parent, name)
                if isinstance(parent, nn.Module) and hasattr(parent, name)
                else parent[name]
            )
            new = LoRALinear(old.in_features, old.out_features)
            new.weight, new.bias = old.weight, old.bias
            setattr(parent, name, new)
    return model


class LoRAWrapper(nn.Module):
    """An adapter around a layer, with dropout and a scale that is a plain number."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.linear = layer
        self.A = nn.Parameter(torch.randn(layer.in_features, 2) / 2**0.5)
        self.B = nn.Parameter(torch.zeros(2, layer.out_features))
        self.m = nn.Parameter(layer.weight.norm(p=2, dim=1, keepdim=True))

    def forward(self, x):
        # DoRA: magnitude and direction apart.
        directed = self.linear.weight + (self.A @ self.B).T
        weight = self.m * (directed / (directed.norm(p=2, dim=1, keepdim=True) + 1e-8))
        return F.linear(x, weight, self.linear.bias)


class Houlsby(nn.Module):
    """Bottlenecks put into a frozen encoder by forward hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.base.requires_grad_(False)
        self.adapters = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 8)) for _ in range(3)]
        )
        for layer, adapter in zip(self.base, self.adapters, strict=True):
            layer.register_forward_hook(lambda _m, _i, out, adapter=adapter: out + adapter(out))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.base(x))


class HyperNetwork(nn.Module):
    """One network makes all parameters of another, which is called by ``functional_call``."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).requires_grad_(False)
        self.shapes = {n: p.shape for n, p in self.target.named_parameters()}
        self.z = nn.Parameter(torch.randn(4))
        self.generator = nn.Linear(4, sum(s.numel() for s in self.shapes.values()))

    def forward(self, x):
        flat, weights, start = self.generator(torch.tanh(self.z)), {}, 0
        for name, shape in self.shapes.items():
            weights[name] = flat[start : start + shape.numel()].view(shape)
            start += shape.numel()
        return functional_call(self.target, weights, (x,))


class ScaledParameters(nn.Module):
    """Every parameter of an inner network is multiplied by a learned scale through ``functional_call``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
        self.scales = nn.ParameterDict(
            {n.replace(".", "_"): nn.Parameter(torch.ones(())) for n, _ in self.inner.named_parameters()}
        )

    def forward(self, x):
        weights = {n: p * self.scales[n.replace(".", "_")] for n, p in self.inner.named_parameters()}
        return functional_call(self.inner, weights, (x,))


class Net(nn.Module):
    """A small classifier for meta-learning."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden1, self.hidden2, self.out = nn.Linear(8, 10), nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden2(torch.tanh(self.hidden1(x)))))


def maml_loss(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Adapt by one inner step with a graph and return the loss of the adapted parameters."""
    x, y = inputs
    names, parameters = zip(*model.named_parameters(), strict=True)
    inner = F.cross_entropy(model(x[:4]), y[:4])
    gradients = torch.autograd.grad(inner, parameters, create_graph=True)
    adapted = OrderedDict((n, p - 0.1 * g) for n, p, g in zip(names, parameters, gradients, strict=True))
    return F.cross_entropy(functional_call(model, adapted, (x[4:],)), y[4:])


def maml_step(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Make a step of MAML as it is written for plain torch."""
    return plain_step(state, maml_loss, inputs)


def maml_documented(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Make a step of MAML inside ``double_backward``."""
    with state.double_backward():
        return maml_step(state, inputs)


def reptile_step(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Train from a snapshot, then go a part of the way back, inside ``gathered``."""
    with state.gathered(state.model):
        before = {n: p.detach().clone() for n, p in state.model.named_parameters()}
    for _ in range(2):
        loss = plain_step(state, classification, inputs)
    with state.gathered(state.model, modifier_rank=0), torch.no_grad():
        for n, p in state.model.named_parameters():
            p.copy_(before[n] + 0.5 * (p - before[n]))
    return loss


class LearnedOptimizer(nn.Module):
    """An inner loop over one parameter, with a learned rate for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 3) * 0.3)
        self.log_lr = nn.Parameter(torch.full((8, 3), -2.0))

    def forward(self, inputs):
        x, y = inputs
        w = self.w
        with torch.enable_grad():
            for _ in range(2):
                (g,) = torch.autograd.grad(F.cross_entropy(x[:4] @ w, y[:4]), w, create_graph=True)
                w = w - self.log_lr.exp() * g
        return F.cross_entropy(x[4:] @ w, y[4:])


def adapted(name: str, build: Any, **more: Any) -> Case:
    """Return a case of a classifier of eight features."""
    return Case(
        f"own/adaptation/{name}", build, **({"batch": labeled(8, 3, 8), "loss": classification} | more)
    )


def trained_only(model: nn.Module) -> torch.optim.Optimizer:
    """Give the optimizer the trainable parameters alone."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-3)


CASES = [
    Case(
        "own/adaptation/lora",
        with_lora,
        tokens(VOCABULARY, LENGTH),
        next_token,
        optimizer=trained_only,
        generate=greedy,
    ),
    adapted(
        "lora-merged",
        lambda: nn.Sequential(LoRALinear(8, 8, 2, True), nn.Tanh(), LoRALinear(8, 3, 2, True)),
    ),
    adapted(
        "dora", lambda: nn.Sequential(LoRAWrapper(nn.Linear(8, 8)), nn.Tanh(), LoRAWrapper(nn.Linear(8, 3)))
    ),
    adapted("adapters-by-hooks", Houlsby, optimizer=trained_only),
    adapted("hypernetwork", HyperNetwork),
    adapted("scaled-parameters", ScaledParameters),
    adapted("maml-naive", Net, loss=maml_loss, step=maml_step, evaluate=classification),
    adapted("maml", Net, loss=maml_loss, step=maml_documented, evaluate=classification),
    adapted("reptile", Net, step=reptile_step),
    adapted("learned-rates", LearnedOptimizer, loss=own_loss, evaluate=None),
]
