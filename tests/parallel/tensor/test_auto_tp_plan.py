"""Plans found by trial: what they are, that they train as one process, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.training import Course, alone, assert_same_steps, assert_same_values, mesh_of
from zero_ext.parallel import apply_tensor_parallel, automatic_plan

WIDTH, LENGTH, SAMPLES = 8, 5, 4


class Attention(nn.Module):
    """``flaw`` is what makes it unfit: "scale" (of heads counted anew), "norm", "count"."""

    def __init__(self, flaw: str = "") -> None:
        super().__init__()
        self.flaw = flaw
        if flaw == "count":
            self.count = 4
        else:
            self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH // 4)

    def forward(self, hidden: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        heads = self.count if self.flaw == "count" else self.num_heads
        projected = [each(hidden) for each in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in projected)
        if self.flaw == "norm":
            query = self.norm(query)
        if self.flaw == "scale":
            scale = WIDTH / heads
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, flaw: str = "") -> None:
        super().__init__()
        self.flaw = flaw
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(flaw)
        self.gate, self.wide, self.narrow = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(3 * WIDTH, WIDTH),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(hidden + self.attention(hidden, scale=0.5))
        inner = torch.tanh(self.gate(hidden)) * self.wide(hidden)
        if self.flaw == "softmax":
            inner = inner.softmax(-1)
        hidden = hidden + self.narrow(inner)
        return hidden * inner.norm(dim=-1, keepdim=True) if self.flaw == "beside" else hidden


def built(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    ends = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
    return nn.Sequential(
        ends[0],
        Block(),
        Block(),
        nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)),
        ends[1],
    )


@on_ranks(4)
def test_what_is_found_trains_as_one_process(world: World) -> None:
    def square(model: nn.Module, samples: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return model(samples).square().mean()

    mesh = mesh_of(tp=2)
    model, reference = built(world.seed), built(world.seed)
    torch.manual_seed(world.seed + 1)
    samples = torch.randn(3, SAMPLES, LENGTH, 3)
    plan = automatic_plan(model, samples[0], ranks=2)
    assert plan == {
        f"{name}{inner}": style
        for name in ("1.", "2.")
        for inner, style in {
            "gate": "colwise",
            "wide": "colwise",
            "narrow": "rowwise",
            "attention": "local_heads",
            **{f"attention.{each}_proj": "colwise" for each in "qkv"},
            "attention.out_proj": "rowwise",
        }.items()
    } | {"3.0": "colwise", "3.2": "rowwise"}
    apply_tensor_parallel(model, mesh, plan)
    assert isinstance(model.get_parameter("1.attention.q_proj.weight"), DTensor)
    course = Course(model, mesh, {"stage": 2}, square)
    data = [torch.stack([each, each]) for each in samples]
    records, wanted = course.steps(data), alone(reference, data, square)
    assert_same_steps(records.norms, wanted.norms)
    found = zero_ext.full_state_dict(course.model)
    assert found.keys() == reference.state_dict().keys()
    assert_same_values(found, reference.state_dict())


@pytest.mark.parametrize(
    ("flaw", "ranks", "message"),
    [
        ("scale", 2, "block 'attention': it cannot be split automatically: a share of its outputs is not"),
        ("norm", 2, r"'norm\.weight' is used on a share alone"),
        ("count", 2, "it has no number of heads"),
        ("softmax", 2, "block '': it cannot be split automatically: a share of its outputs is not"),
        ("beside", 2, "block '': it cannot be split automatically: what it returns depends on a share alone"),
        ("", 3, "num_heads is 4, which does not divide by 3"),
        ("", 16, "'gate' has 24 outputs, which do not divide by 16"),
    ],
)
def test_what_it_refuses(flaw: str, ranks: int, message: str) -> None:
    torch.manual_seed(7)
    with pytest.raises(ValueError, match=message):
        automatic_plan(Block(flaw), torch.randn(SAMPLES, LENGTH, WIDTH), ranks=ranks)


def test_models_that_are_no_blocks() -> None:
    with pytest.raises(ValueError, match="Sequential: expected a block"):
        automatic_plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4), ranks=2)
    with pytest.raises(ValueError, match="Attention: it is attention itself"):
        automatic_plan(Attention(), torch.randn(SAMPLES, LENGTH, WIDTH), ranks=2)
