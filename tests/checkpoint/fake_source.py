"""A stand-in for the engine: N ranks that hold slices of random tensors, in the way of a ZeRO stage."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero_ext.checkpoint import StoredValues


class TensorSlice(NamedTuple):
    kind: str
    name: str
    start: int
    tensor: torch.Tensor | StoredValues
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Parameter:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str = "bfloat16"
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    kinds: Mapping[str, torch.dtype] = field(
        default_factory=lambda: dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), torch.float32)
    )
    unsharded: Mapping[str, torch.Tensor] = field(
        default_factory=dict
    )  # state with shapes of its own, like these

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Config:
    timeout_seconds: float = 30.0


def dense(*shape: int, **settings: Any) -> Parameter:
    return Parameter(shape, torch.empty(shape, device="meta").stride(), **settings)


def channels_last(*shape: int, **settings: Any) -> Parameter:
    stride = torch.empty(shape, device="meta").to(memory_format=torch.channels_last).stride()
    return Parameter(shape, stride, **settings)


UNSHARDED = {
    "left": torch.empty(11, 11),
    "steps": torch.empty((), dtype=torch.int64),
    "rows[0].mean": torch.empty(11, 1, dtype=torch.bfloat16),
    "nothing": torch.empty(0, 3),
}
FROZEN = {"master": torch.bfloat16}
MIXED = {
    "embed.weight": dense(700, 1013, aliases=("head.weight",)),  # several chunks
    "conv.weight": channels_last(8, 3, 5, 5, dtype="float32"),
    "norm.scale": dense(),
    "nothing": dense(0, 4),
    "frozen.weight": dense(37, 53, trainable=False, kinds=FROZEN),
    "gate.weight": dense(11, 3, kinds={"master": torch.float32, "momentum": torch.bfloat16}),
    'ünïcode "name"': dense(5, unsharded={"left": torch.empty(700, 513)}),
    "factored.weight": dense(11, 3, unsharded=UNSHARDED),
}
SMALL = {"a.weight": dense(33, 7), "b.bias": dense(13, kinds=FROZEN, trainable=False)}


def random_state(table: Mapping[str, Parameter], seed: int) -> dict[tuple[str, str], torch.Tensor]:
    """Every state tensor whole, flat, in memory order."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (kind, name): torch.randn(entry.numel, generator=generator).to(dtype)
        for name, entry in table.items()
        for kind, dtype in entry.kinds.items()
    }


def random_unsharded(table: Mapping[str, Parameter], seed: int) -> dict[tuple[str, str], torch.Tensor]:
    """Every state tensor that has a shape of its own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (kind, name): torch.randn(like.shape, generator=generator).mul(99).to(like.dtype)
        for name, entry in table.items()
        for kind, like in entry.unsharded.items()
    }


def random_buffers(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "steps_seen": torch.randint(1 << 40, (), generator=generator),
        "running_mean": torch.randn(5, 3, generator=generator).t(),
        "mask": torch.rand(7, generator=generator) > 0.5,
        "none": torch.empty(0),
    }


class FakeSource:
    """``sharded``: each rank holds its own 1/N of all elements (else all of them, saving its 1/N). State with
    a shape of its own is dealt to ranks in turn."""

    def __init__(
        self,
        table: Mapping[str, Parameter],
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        sharded: bool = True,
    ) -> None:
        self.rank, self.world_size, self.group = rank, world_size, group
        self.config = Config()
        self.table = dict(table)
        self.sharded = sharded
        self.live_buffers = random_buffers(seed)
        self.scalars: dict[str, Any] = {"steps": seed, "lr": 0.1 * seed, "betas": (0.9, 0.999)}
        self.finished = 0
        self.held = {
            key: full[slice(*self._held(full))].clone() for key, full in random_state(table, seed).items()
        }
        self.unsharded = {
            key: value
            for number, (key, value) in enumerate(random_unsharded(table, seed).items())
            if not sharded or number % world_size == rank
        }

    def _own(self, numel: int) -> tuple[int, int]:
        size = -(-numel // self.world_size)
        return min(self.rank * size, numel), min((self.rank + 1) * size, numel)

    def _held(self, full: torch.Tensor) -> tuple[int, int]:
        return self._own(full.numel()) if self.sharded else (0, full.numel())

    def parameter_table(self) -> Mapping[str, Parameter]:
        return self.table

    def save_slices(self) -> Iterator[TensorSlice]:
        for (kind, name), tensor in self.held.items():
            begin, end = self._own(self.table[name].numel)
            first = begin if self.sharded else 0
            # Two slices for each, so that a tensor has more slices than ranks.
            middle = begin + (end - begin) // 3
            for low, high in ((begin, middle), (middle, end)):
                if low < high:
                    yield TensorSlice(kind, name, low, tensor[low - first : high - first])
        for number, ((kind, name), tensor) in enumerate(self.unsharded.items()):
            if self.sharded or number % self.world_size == self.rank:
                yield TensorSlice(kind, name, 0, tensor.view(-1), tuple(tensor.shape))

    def load_slices(self) -> Iterator[TensorSlice]:
        for (kind, name), tensor in self.held.items():
            start = self._own(self.table[name].numel)[0] if self.sharded else 0
            yield TensorSlice(kind, name, start, tensor)
        for (kind, name), tensor in self.unsharded.items():
            yield TensorSlice(kind, name, 0, tensor.view(-1), tuple(tensor.shape))

    def scalar_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.scalars)

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        self.scalars = state

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return self.live_buffers

    def finish_load(self, optimizer: bool = True) -> None:
        self.finished += 1

    def poison(self) -> None:
        for tensor in (*self.held.values(), *self.unsharded.values(), *self.live_buffers.values()):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
            else:
                tensor.zero_()
        self.scalars = {}

    def holds(self, seed: int) -> bool:
        """Whether every element on this rank is that of ``random_state(seed)``, bit for bit."""
        expected = FakeSource(self.table, seed, self.rank, self.world_size, None, self.sharded)
        same = [torch.equal(tensor, expected.held[key]) for key, tensor in self.held.items()]
        same += [torch.equal(tensor, expected.unsharded[key]) for key, tensor in self.unsharded.items()]
        same += [torch.equal(t, expected.live_buffers[name]) for name, t in self.live_buffers.items()]
        return all(same) and self.scalars == expected.scalars
