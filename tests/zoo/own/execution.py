"""Recomputed, compiled, traced and scripted modules, functions of one's own, closures and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.zoo.case import WITHOUT_CHECKPOINT, Case, TrainingState, plain_step, sgd
from tests.zoo.inputs import classification, features, labeled, mean_square
from tests.zoo.own.interfaces import SIZE, Block, Stack


class Recomputed(Stack):
    """Checkpointed in one of the ways that torch has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = self.embed(x)
        if self.kind == "sequential":
            x = checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False)
        elif self.kind == "method":
            for block in self.blocks:
                x = x + checkpoint(block.residual, x, use_reentrant=False)
        elif self.kind == "nested":
            x = checkpoint(
                lambda y: checkpoint(self.blocks[1], self.blocks[0](y), use_reentrant=False),
                x,
                use_reentrant=False,
            )
        else:
            for block in self.blocks:
                x = checkpoint(lambda y, b=block: self.drop(b(y)), x, use_reentrant=self.kind == "reentrant")
        return self.head(x)


class Compiled(nn.Module):
    """Blocks are compiled one by one, as training scripts do."""

    def __init__(self, backend: str, in_place: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(SIZE, 3)
        for i in range(2):
            if in_place:
                self.blocks[i].compile(backend=backend)
            else:
                self.blocks[i] = torch.compile(self.blocks[i], backend=backend)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Scripted(nn.Module):
    """A submodule is scripted or traced."""

    def __init__(self, how: str) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
        self.inner = (
            torch.jit.script(inner) if how == "script" else torch.jit.trace(inner, torch.zeros(1, SIZE))
        )
        self.head = nn.Linear(SIZE, 3)

    def forward(self, x):
        return self.head(self.inner(x))


class SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, g.t() @ x, g.sum(0)


class HoldsWeight(torch.autograd.Function):
    """Keeps the weight as an attribute of the context, which autograd does not see."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.x, ctx.weight = x.detach(), weight.detach()
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.weight, g.t() @ ctx.x, g.sum(0)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.sign() * w.abs().mean()

    @staticmethod
    def backward(ctx, g):
        return g


class FunctionLinear(nn.Linear):
    def __init__(self, function: Any, a: int = SIZE, b: int = SIZE) -> None:
        super().__init__(a, b)
        self.function = function

    def forward(self, x):
        return self.function.apply(x, self.weight, self.bias)


class BinaryLinear(nn.Linear):
    def __init__(self, a: int = SIZE, b: int = SIZE) -> None:
        super().__init__(a, b)

    def forward(self, x):
        return F.linear(x, StraightThrough.apply(self.weight), self.bias)


class FakeQuantized(nn.Linear):
    """LSQ: a learned step; observers that are buffers; rounding by ``(x.round() - x).detach()``."""

    def __init__(self, a: int = SIZE, b: int = SIZE) -> None:
        super().__init__(a, b)
        self.step = nn.Parameter(torch.tensor(0.05))
        self.register_buffer("max_abs", torch.tensor(0.0))

    def forward(self, x):
        if self.training:
            self.max_abs.copy_(torch.maximum(self.max_abs * 0.9, x.detach().abs().max()))
        scaled = (self.weight / self.step).clamp(-8, 7)
        w = (scaled + (scaled.round() - scaled).detach()) * self.step
        x = torch.fake_quantize_per_tensor_affine(x, float(self.max_abs) / 127 + 1e-8, 0, -128, 127)
        return F.linear(x, w, self.bias)


def closure_step(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Pass the step a closure that computes loss and gradients."""

    def closure() -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = F.cross_entropy(state.model(inputs[0]), inputs[1])
        loss.backward()
        return loss

    return state.optimizer.step(closure)


class Hooked(Stack):
    """Forward hooks collect features, a backward hook scales gradients, a tensor hook logs them."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: dict[str, torch.Tensor] = {}
        for i, block in enumerate(self.blocks):
            block.register_forward_hook(lambda _m, _i, out, i=i: self.collected.update({str(i): out}))
        self.head.register_full_backward_hook(lambda _m, grads, _out: tuple(g * 0.5 for g in grads))
        self.blocks[0].register_forward_pre_hook(lambda _m, args: (args[0] * 1.1,))

    def forward(self, x):
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda g: g.clamp(-1, 1))
        return out + sum(f.mean() for f in self.collected.values())


def frozen_in_turns(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Freeze and unfreeze a block between the steps."""
    for p in state.model.blocks[1].parameters():
        p.requires_grad_(state.step_number % 2 == 0)
    return plain_step(state, classification, inputs)


def two_backwards(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Run backward twice through one graph."""
    state.optimizer.zero_grad()
    loss = classification(state.model, inputs)
    (0.3 * loss).backward(retain_graph=True)
    (0.7 * loss).backward()
    state.optimizer.step()
    return loss


def scheduled(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Warm the learning rate up by a scheduler and by hand."""
    if "scheduler" not in state.memory:
        rule = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda n: (n + 1) / 4)
        state.memory["scheduler"] = rule
    loss = plain_step(state, classification, inputs)
    state.memory["scheduler"].step()
    state.optimizer.param_groups[0]["weight_decay"] = 0.1
    return loss


def autocast_step(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Clip under a scaler that is switched off, as scripts do on the CPU."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state.optimizer.zero_grad(set_to_none=True)
    loss = classification(state.model, inputs)
    scaler.scale(loss).backward()
    scaler.unscale_(state.optimizer)
    nn.utils.clip_grad_norm_(state.model.parameters(), 0.1)
    scaler.step(state.optimizer)
    scaler.update()
    return loss


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Give layers learning rates that decay with depth, in a group for each parameter."""
    named = list(model.named_parameters())
    return torch.optim.AdamW(
        [{"params": [p], "lr": 1e-3 * 0.9**i} for i, (_, p) in enumerate(named)], eps=1e-3
    )


def execution(name: str, build: Any = Stack, **more: Any) -> Case:
    """Return a case of a classifier of eight features."""
    return Case(
        f"own/execution/{name}", build, **({"batch": labeled(SIZE, 3), "loss": classification} | more)
    )


def function_case(name: str, layer: Any) -> Case:
    """Return a case of two layers that use a function of their own."""
    return Case(
        f"own/execution/{name}",
        lambda: nn.Sequential(layer(), nn.Tanh(), layer()),
        features(SIZE),
        mean_square,
    )


OPTIMIZERS: dict[str, Any] = {
    "adam-amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, eps=1e-3, amsgrad=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, eps=1e-3),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-3, initial_accumulator_value=0.1),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=1e-3, eps=1e-3),
    "sgd-nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
}
CASES = [
    *(
        execution(f"checkpoint-{k}", lambda k=k: Recomputed(k))
        for k in ("reentrant", "plain", "sequential", "method", "nested")
    ),
    *(
        execution(
            f"compiled-{b.replace('_', '-')}{'-in-place' if p else ''}", lambda b=b, p=p: Compiled(b, p)
        )
        for b in ("eager", "aot_eager")
        for p in (False, True)
    ),
    execution("scripted", lambda: Scripted("script"), expected=r"[Ss]cript|jit", reason="torch.jit"),
    execution("traced", lambda: Scripted("trace"), expected=r"[Tt]rac|jit", reason="torch.jit"),
    function_case("saves-weight", lambda: FunctionLinear(SavesWeight)),
    function_case("holds-weight", lambda: FunctionLinear(HoldsWeight)),
    function_case("straight-through", BinaryLinear),
    function_case("fake-quantized", FakeQuantized),
    execution("hooked", Hooked),
    execution("closure", step=closure_step, optimizer=sgd),
    execution("frozen-in-turns", step=frozen_in_turns),
    execution("two-backwards", step=two_backwards),
    execution("scheduled", step=scheduled, variants=WITHOUT_CHECKPOINT),
    execution("disabled-scaler", step=autocast_step),
    execution("parameter-groups", optimizer=groups),
    *(execution(f"optimizer-{n}", optimizer=o) for n, o in OPTIMIZERS.items()),
]
