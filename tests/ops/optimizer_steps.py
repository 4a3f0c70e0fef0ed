"""The table of ops that step an optimizer: usual hyper-parameters, random arguments, the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_ext import ops

NAN, INF = float("nan"), float("inf")
MOMENT_DTYPES = [torch.float32, torch.bfloat16]
SEGMENTS = [(0, 5), (7, 300), (300, 300), (301, 1000)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class State:
    """The tensor arguments of an op of ``family``, as attributes by their names."""

    def __init__(self, family: StepOp, **tensors: Tensor | None) -> None:
        self.family = family
        vars(self).update(tensors)

    def named(self) -> dict[str, Tensor | None]:
        """By name, in the op's order."""
        return {name: value for name, value in vars(self).items() if name != "family"}

    def arguments(self) -> list[Tensor | None]:
        """As the op takes them."""
        return list(self.named().values())

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        """Return the state with every tensor changed."""
        changed = {name: None if value is None else change(value) for name, value in self.named().items()}
        return type(self)(self.family, **changed)

    def clone(self) -> State:
        """The same values in memory of their own."""
        return self.map(Tensor.clone)

    def replaced(self, **changes: Tensor) -> State:
        """Return the state with other tensors."""
        return type(self)(self.family, **{**self.named(), **changes})

    def differing(self, other: State) -> list[str]:
        """Names of the arguments whose bits differ."""
        return [
            name
            for name, mine in self.named().items()
            if mine is not None and not torch.equal(bits(mine), bits(getattr(other, name)))
        ]

    def step(self) -> None:
        self.family.op(*self.arguments())

    def norms(self) -> Tensor:
        """What lamb_norms_ finds."""
        norms = torch.zeros(self.segments.shape[0], 2, 33, dtype=torch.int64, device=self.master.device)
        self.add_norms(norms)
        return norms

    def add_norms(self, norms: Tensor) -> None:
        buffers = (self.master, self.exp_avg, self.exp_avg_sq, self.grad)
        ops.lamb_norms_(*buffers, self.segments, self.hyper, self.grad_scale, norms)


@dataclass(frozen=True)
class StepOp:
    """An op: its usual row of ``hyper``, what the rows of ``SEGMENTS`` change in it, and what it refuses."""

    op: Callable[..., None]
    hyper: dict[str, float]
    rows: Sequence[dict[str, float]]
    bad_hyper: Sequence[tuple[str, float]]
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    smallest_square: float = 0.0  # of the second moment

    @property
    def name(self) -> str:
        return self.op.__name__

    @property
    def values(self) -> tuple[str, ...]:
        """Names of what a step changes besides the parameters."""
        return ("master", *self.moments)

    def row(self, **changes: float) -> list[float]:
        return list({**self.hyper, **changes}.values())

    def state(
        self,
        generator: torch.Generator,
        count: int,
        segments: Sequence[tuple[int, int]] = SEGMENTS,
        rows: Sequence[dict[str, float]] | None = None,
        moments: torch.dtype = torch.float32,
        grad: torch.dtype = torch.float32,
        param: torch.dtype | None = None,
        scale: float = 0.25,
    ) -> State:
        """Random arguments; ``rows`` are what each segment changes in the usual hyper-parameters."""

        def normal() -> Tensor:
            return torch.randn(count, generator=generator)

        rows = self.rows if rows is None else rows
        kinds = {"master": normal(), "exp_avg": normal().to(moments)}
        if "exp_avg_sq" in self.moments:
            kinds["exp_avg_sq"] = normal().square().add(self.smallest_square).to(moments)
        hyper = torch.tensor([self.row(**row) for row in rows], dtype=torch.float64)
        return State(
            self,
            **kinds,
            grad=(normal() / scale).to(grad),
            param=None if param is None else torch.full((count,), NAN, dtype=param),
            segments=torch.tensor(segments, dtype=torch.int64).reshape(-1, 2),
            hyper=hyper.reshape(-1, len(self.hyper)),
            grad_scale=torch.tensor(scale),
        )


@dataclass
class Reference:
    """Values after a step, in float64, straight from the papers. ``updates`` are LAMB's, of each segment,
    ``direction`` is what Lion takes the sign of."""

    values: dict[str, Tensor]
    updates: list[Tensor]
    direction: Tensor


def reference(state: State) -> Reference:
    values = {name: getattr(state, name).double().clone() for name in state.family.values}
    p, m, v = values["master"], values["exp_avg"], values.get("exp_avg_sq")
    found = Reference(values, [], torch.ones_like(p))
    for (begin, end), row in zip(state.segments.tolist(), state.hyper.tolist(), strict=True):
        h = dict(zip(state.family.hyper, row, strict=True))
        e, beta1, beta2, decay = slice(begin, end), h["beta1"], h["beta2"], h["weight_decay"]
        g = state.grad[e].double() * state.grad_scale.double() * (-1 if h["maximize"] else 1)
        if v is None:
            found.direction[e] = beta1 * m[e] + (1 - beta1) * g
            p[e] -= h["lr"] * (found.direction[e].sign() + decay * p[e])
            m[e] = beta2 * m[e] + (1 - beta2) * g
            continue
        if h.get("decoupled"):
            p[e] *= 1 - h["lr"] * decay
        elif "decoupled" in h:
            g = g + decay * p[e]
        m[e] = beta1 * m[e] + (1 - beta1) * g
        v[e] = beta2 * v[e] + (1 - beta2) * g * g
        if "step" in h:
            root = (v[e] / (1 - beta2 ** h["step"])).sqrt() + h["eps"]
            p[e] -= h["lr"] * m[e] / (1 - beta1 ** h["step"]) / root
        else:
            square = v[e] / h["correction2"]
            root = (square + h["eps"]).sqrt() if h["eps_inside_sqrt"] else square.sqrt() + h["eps"]
            found.updates.append(m[e] / h["correction1"] / root + decay * p[e])
            p[e] -= h["lr"] * h["trust_ratio"] * found.updates[-1]
    return found


def assert_near(actual: Tensor, wanted: Tensor, name: str) -> None:
    unit = 2**-8 if actual.dtype == torch.bfloat16 else 4e-6
    error = (actual.double() - wanted).abs() / (wanted.abs() + 1)
    assert error.max().item() <= unit, f"{name}: relative error {error.max().item()}"


_USUAL = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99}
_BAD = [
    *(("lr", value) for value in (NAN, INF)),
    *(("beta1", value) for value in (1.0, -0.1, NAN)),
    *(("beta2", value) for value in (1.0, -1e-9, NAN)),
    *(("weight_decay", value) for value in (NAN, INF)),
    *(("maximize", value) for value in (0.5, 2.0)),
]
_BAD_EPS = [("eps", value) for value in (-1e-8, -1.0, NAN, INF)]

ADAM = StepOp(
    ops.adam_step_,
    {
        **_USUAL,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "step": 3,
        "decoupled": 1,
        "maximize": 0,
    },
    [
        {},
        {"lr": 3e-3, "beta1": 0.3, "decoupled": 0, "weight_decay": 0.01, "step": 1},
        {},
        {"beta1": 0.0, "maximize": 1, "eps": 1e-3, "step": 1000, "weight_decay": 0.0},
    ],
    [*_BAD, *_BAD_EPS, ("step", 0.0), ("step", NAN), ("decoupled", 0.5)],
)
LAMB = StepOp(
    ops.lamb_step_,
    {
        **_USUAL,
        "eps": 1e-6,
        "weight_decay": 0.1,
        "correction1": 0.3,
        "correction2": 0.04,
        "eps_inside_sqrt": 0,
        "maximize": 0,
        "trust_ratio": 1.7,
    },
    [
        {},
        {"lr": 3e-3, "beta1": 0.0, "correction1": 1, "maximize": 1, "eps_inside_sqrt": 1, "eps": 0.1},
        {"trust_ratio": 0.01},
        {"beta1": 0.3, "beta2": 0.0, "weight_decay": 0, "eps": 1e-3, "correction1": 1, "correction2": 1},
    ],
    [
        *_BAD,
        *_BAD_EPS,
        ("correction1", 0.0),
        ("correction2", 1.5),
        ("correction2", NAN),
        ("eps_inside_sqrt", 2),
    ],
    smallest_square=0.1,
)
LION = StepOp(
    ops.lion_step_,
    {**_USUAL, "weight_decay": 0.1, "maximize": 0},
    [
        {},
        {"lr": 3e-3, "beta1": 0.0, "maximize": 1},
        {},
        {"beta1": 0.3, "beta2": 0.0, "weight_decay": 0},
    ],
    _BAD,
    moments=("exp_avg",),
)
STEP_OPS = (ADAM, LAMB, LION)


class State8(State):
    """The arguments of adam_step_8bit_, its moments as codes and scales one by one."""

    def exp_avg(self) -> ops.Quantized:
        return ops.Quantized(self.exp_avg_codes, self.exp_avg_scales)

    def exp_avg_sq(self) -> ops.Quantized:
        return ops.Quantized(self.exp_avg_sq_codes, self.exp_avg_sq_scales)

    def step(self) -> None:
        moments = (self.exp_avg(), self.exp_avg_sq())
        rest = (self.grad, self.param, self.segments, self.hyper, self.grad_scale)
        ops.adam_step_8bit_(self.master, *moments, *rest)


@dataclass(frozen=True)
class StepOp8(StepOp):
    """Adam with moments in 8 bits."""

    def state(self, generator: torch.Generator, count: int, *arguments: Any, **options: Any) -> State8:
        plain = ADAM.state(generator, count, *arguments, **options).named()

        def codes() -> Tensor:
            return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)

        blocks = ops.block_count(count)
        moments = {"exp_avg_codes": codes(), "exp_avg_sq_codes": codes()}
        moments["exp_avg_scales"] = torch.rand(blocks, generator=generator) * 3
        moments["exp_avg_sq_scales"] = torch.rand(blocks, generator=generator) * 9
        rest = {name: value for name, value in plain.items() if name not in ("master", *ADAM.moments)}
        return State8(self, master=plain["master"], **moments, **rest)


ADAM_8BIT = StepOp8(
    ops.adam_step_8bit_,
    ADAM.hyper,
    ADAM.rows,
    ADAM.bad_hyper,
    moments=("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "exp_avg_sq_scales"),
)
