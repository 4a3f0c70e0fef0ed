"""Small models whose blocks are checkpointed, and their gradients."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zero_ext.activation.offloader import ActivationOffloader, ActivationRecord

WIDTH = 64
Run = Callable[..., Any]


class Block(nn.Module):
    """Residual, with dropout; takes a scale by keyword and an options dict that holds a tensor."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.3) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, hidden: torch.Tensor, *, scale: torch.Tensor | None = None, options: Any = None
    ) -> torch.Tensor:
        inner = self.dropout(torch.tanh(self.up(hidden)))
        if options is not None:
            inner = inner * options["factor"][0] * options["times"]
        inner = self.down(self.dropout(inner))
        return hidden + (inner if scale is None else inner * scale)


class Stack(nn.Module):
    """Blocks, each run by ``run`` if that is given."""

    def __init__(self, depth: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, features: torch.Tensor, run: Run | None = None) -> torch.Tensor:
        hidden = self.entry(features)
        options = {"factor": [hidden.detach().mean(-1, keepdim=True) + 1], "times": 2, "unused": None}
        scale = hidden.detach().t() if hidden.dim() == 2 and hidden.shape[0] == hidden.shape[1] else None
        for block in self.blocks:
            if run is None:
                hidden = block(hidden, scale=scale, options=options)
            else:
                hidden = run(block, hidden, scale=scale, options=options)
        return hidden


class Counting(TorchDispatchMode):
    """Counts the ops that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def fresh_seed() -> int:
    """A seed, printed for whoever has to repeat a failure."""
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    return seed


def gradients(
    model: nn.Module, run: Run | None, seed: int, shape: tuple[int, ...] = (24, WIDTH), **kwargs: Any
) -> list[torch.Tensor]:
    """The loss and all gradients of one pass, inputs included."""
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    features = torch.randn(shape, dtype=dtype, requires_grad=True)
    model.zero_grad()
    loss = model(features, run, **kwargs).float().square().mean()
    loss.backward()
    found = [features.grad, *(parameter.grad for parameter in model.parameters())]
    return [loss.detach(), *(each.clone() for each in found if each is not None)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether all values are the same bits."""
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@contextlib.contextmanager
def noted_records(records: list[ActivationRecord]) -> Iterator[None]:
    """Inside, records that are made go to ``records`` as well."""
    offload = ActivationOffloader.offload

    def noted(offloader: ActivationOffloader, *arguments: Any) -> ActivationRecord:
        records.append(offload(offloader, *arguments))
        return records[-1]

    with mock.patch.object(ActivationOffloader, "offload", noted):
        yield
