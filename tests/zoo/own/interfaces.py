"""Modules called outside any block and in threads, and outputs of every kind."""

from __future__ import annotations

import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case
from tests.zoo.inputs import classification, labeled, next_token, tokens
from tests.zoo.own.language import GPT, LENGTH, VOCABULARY

SIZE = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)
        self.gain = nn.Parameter(torch.ones(SIZE))

    def residual(self, x):
        return self.fc2(torch.tanh(self.fc1(self.norm(x)))) * self.gain

    def forward(self, x):
        return x + self.residual(x)


class Stack(nn.Module):
    """An embedding of features, blocks and a head, used from outside in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(SIZE, 3)
        self.offset = nn.Parameter(torch.zeros(SIZE))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def features(self, x):
        x = self.embed(x) + self.offset
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.features(x))


def submodules(model: Any, inputs: Any) -> torch.Tensor:
    """Run the parts of the model one after another from the loop."""
    x = model.get_input_embeddings()(inputs[0])
    for block in model.blocks:
        x = block(x)
    return F.cross_entropy(model.head(x), inputs[1])


def method(model: Any, inputs: Any) -> torch.Tensor:
    """Call a method of the model that is not forward."""
    return F.cross_entropy(model.head(model.features(inputs[0])), inputs[1])


def block_method(model: Any, inputs: Any) -> torch.Tensor:
    """Call a method of a block from the loop."""
    x = inputs[0] + model.blocks[0].residual(inputs[0])
    return F.cross_entropy(model.head(x), inputs[1])


def functional_use(model: Any, inputs: Any) -> torch.Tensor:
    """Use weights of submodules by functions, outside any forward."""
    x = F.linear(inputs[0], model.embed.weight, model.embed.bias) + model.offset
    return F.cross_entropy(F.linear(model.blocks[0](x), model.head.weight), inputs[1])


def mixed_up(model: Any, inputs: Any) -> torch.Tensor:
    """Add an auxiliary loss of a submodule to that of the model."""
    return F.cross_entropy(model(inputs[0]), inputs[1]) + model.blocks[1](inputs[0]).square().mean()


def tied_outside(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run nanoGPT's parts from outside and multiply with the embedding's weight."""
    x = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(ids.shape[1]))
    for block in model.transformer.h:
        x = block(x)
    logits = model.transformer.ln_f(x) @ model.transformer.wte.weight.t()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class InThread(Stack):
    """Runs half of its blocks in a worker thread."""

    def forward(self, x):
        x = self.embed(x)
        out = []

        def work() -> None:
            with torch.enable_grad() if self.training else torch.no_grad():
                out.append(self.blocks[1](self.blocks[0](x)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return self.head(out[0])


def step_in_thread(model: Any, inputs: Any) -> torch.Tensor:
    """Run forward in a worker thread of the loop."""
    out: list[torch.Tensor] = []
    grad = torch.is_grad_enabled()

    def work() -> None:
        with torch.set_grad_enabled(grad):
            out.append(F.cross_entropy(model(inputs[0]), inputs[1]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return out[0]


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


Loose = namedtuple("Loose", ["logits", "hidden"])


class Holder:
    """An object of a class of one's own."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Packs(nn.Module):
    """Blocks and the model return containers; ``deep`` blocks do so in the middle."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.head, self.kind = Block(), nn.Linear(SIZE, 3), kind
        self.wrap = nn.ModuleList([PackingBlock(kind)])

    def forward(self, x):
        out = self.wrap[0](self.inner(x))
        return self.head(unpacked(out))


class PackingBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(SIZE, SIZE), kind

    def forward(self, x):
        y = torch.tanh(self.fc(x))
        return {
            "dataclass": lambda: Output(y, (x,)),
            "named-tuple": lambda: Pair(y, x),
            "loose-named-tuple": lambda: Loose(y, x),
            "dict": lambda: {"logits": y, "more": [x, {"deep": x}]},
            "object": lambda: Holder(y),
            "generator": lambda: (each for each in [y]),
            "closure": lambda: lambda: y,
            "none": lambda: (None, y, 3, "text"),
        }[self.kind]()


def unpacked(out: Any) -> torch.Tensor:
    """Return the tensor in an output of any kind."""
    if isinstance(out, dict):
        return out["logits"]
    if isinstance(out, tuple) and not hasattr(out, "logits"):
        return out[1]
    if hasattr(out, "logits"):
        return out.logits
    return out() if callable(out) else next(out)


def interface(name: str, build: Any = Stack, **more: Any) -> Case:
    """Return a case of a classifier of eight features."""
    return Case(
        f"own/interfaces/{name}", build, **({"batch": labeled(SIZE, 3), "loss": classification} | more)
    )


OUTPUTS = "dataclass", "named-tuple", "loose-named-tuple", "dict", "none", "object", "generator", "closure"
CASES = [
    interface("outside-submodules", loss=submodules),
    interface("outside-mixed-up", loss=mixed_up),
    interface("outside-method", loss=method),
    interface("outside-block-method", loss=block_method),
    interface("outside-functional-use", loss=functional_use),
    Case("own/interfaces/outside-gpt", GPT, tokens(VOCABULARY, LENGTH), tied_outside, evaluate=next_token),
    interface("thread-of-blocks", InThread),
    interface("thread-of-loop", loss=step_in_thread),
    *(interface(f"output-{k}", lambda k=k: Packs(k)) for k in OUTPUTS),
]
