"""LAMB, and Lion, in every stage and tier: against one process, bit for bit the same, and on bad input."""

from __future__ import annotations

import copy
import math
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.optim.reference_lamb import ReferenceLamb
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import (
    Plan,
    Run,
    adamw,
    check_close,
    check_equal,
    check_same,
    distance,
    language_steps,
    placed,
    prepared,
    train_in_tiers,
    train_plain,
)
from zero_ext.zero import engine_of

CASES: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {}),
    (1, {"optimizer": "host"}),
    (1, {"optimizer": "nvme"}),
    (2, {}),
    (2, {"optimizer": "host", "grads": "host"}),
    (2, {"optimizer": "nvme", "grads": "nvme"}),
    (2, {"grads": "nvme"}),
    (3, {}),
    (3, {"optimizer": "host", "params": "host"}),
    (3, {"optimizer": "host", "params": "nvme", "grads": "nvme"}),
    (3, {"optimizer": "nvme", "grads": "host"}),
    (3, {"optimizer": "nvme", "params": "nvme", "grads": "nvme"}),
    (3, {"optimizer": "nvme", "ratio": 0.5}),
]


class Uneven(nn.Module):
    """A language model with a frozen weight, one that no loss reaches, and one that begins as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.language = TinyModel(layers=2, tied=True)
        self.frozen = nn.Parameter(torch.randn(23), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(7, 2))
        self.fresh = nn.Parameter(torch.zeros(23))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.language(ids) * (1 + 0.1 * self.frozen) + self.fresh
        return logits


def in_groups(parameters: Any) -> list[dict[str, Any]]:
    """Matrices decay; vectors neither decay nor adapt."""
    matrices, vectors = by_dimensions(parameters)
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "min_coeff": 1.0, "max_coeff": 1.0},
    ]


def by_dimensions(parameters: Any) -> tuple[list[Any], list[Any]]:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return zero_ext.Lamb(in_groups(parameters), lr=1e-2, eps=1e-3, max_coeff=4.0)


def reference_lamb(parameters: Any) -> torch.optim.Optimizer:
    return ReferenceLamb(in_groups(parameters), lr=1e-2, eps=1e-3, max_coeff=4.0)


def lion(parameters: Any) -> torch.optim.Optimizer:
    matrices, vectors = by_dimensions(parameters)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return zero_ext.Lion(groups, lr=1e-3)


def train(
    world: World, stage: int, plan: Plan, offload: dict[str, Any], make: Any = lamb, **more: Any
) -> Run:
    return train_in_tiers(world, stage, plan, offload, make, Uneven, **more)


@on_ranks(1, 2, 3, 4, by_turns=True)
@pytest.mark.parametrize("name", ["lamb", "lion"])
def test_stages_and_tiers_are_bit_for_bit_the_same(world: World, name: str) -> None:
    plan, make = Plan(clip=0.5), {"lamb": lamb, "lion": lion}[name]
    first = train(world, 0, plan, {}, make)
    assert all(math.isfinite(loss) for loss in first.losses)
    for stage, offload in CASES[1:]:
        try:
            check_equal(train(world, stage, plan, offload, make), first)
        except AssertionError as error:
            raise AssertionError(f"stage {stage}, {offload}: {error}") from error
    if name == "lamb":
        torch.manual_seed(world.seed)
        model = Uneven()
        check_close(first, train_plain(world, model, language_loss, language_batch, plan, reference_lamb))


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_and_moments_in_bf16(world: World, dtype: str) -> None:
    plan = Plan(clip=0.5, dtype=dtype)
    precision = {"precision": {"dtype": dtype, "moments_dtype": "bf16"}} if dtype == "bf16" else {}
    first = train(world, 1, plan, {}, **precision)
    for stage, offload in CASES[3::3]:
        check_equal(train(world, stage, plan, offload, **precision), first)
    torch.manual_seed(world.seed)
    plain = train_plain(world, Uneven(), language_loss, language_batch, plan, reference_lamb)
    assert distance(first.parameters, plain.parameters) <= 8e-3
    for one, two in zip(first.losses, plain.losses, strict=True):
        assert abs(one - two) <= 8e-3 * abs(two)


@on_ranks(2)
def test_all_norms_are_summed_up_at_once_and_state_is_read_twice(world: World) -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return adamw([parameter for parameter in parameters if parameter.requires_grad])

    for stage, offload in ((0, {}), (3, {}), (2, {"optimizer": "nvme"})):
        engines = [train(world, stage, Plan(), offload, make).engine for make in (lamb, adam)]
        assert engines[0] is not None and engines[1] is not None
        sent, usual = (Counter(engine.traffic.last_elements) for engine in engines if engine is not None)
        groups = engines[0].optimizer_step.groups
        stepped = sum(len(group["params"]) for group in groups) - 1  # one parameter has no gradient
        agreement = world.size if offload else 0
        usual["scalars"] += stepped * 2 * 33 + agreement if stage else 0
        assert sent == usual
        if offload:
            moved, usual = (engine.tiers.transfers.last_moved for engine in engines if engine is not None)
            assert moved["nvme", "host"] == 2 * usual["nvme", "host"] > 0
            assert moved["host", "nvme"] == usual["host", "nvme"] > 0


@on_ranks(1, 2)
@pytest.mark.parametrize("when", ["in_backward", "delayed"])
def test_other_times_are_refused_by_name(world: World, when: str) -> None:
    model = TinyModel(layers=1)
    before = copy.deepcopy(model.state_dict())
    offload = {"update_mode": when, "optimizer": "host"}
    refusal = f"offload.update_mode: expected 'after_backward' with Lamb, got '{when}'"
    with pytest.raises(ValueError, match=refusal):
        prepared(world, model, 2, lamb, offload=offload)
    check_same(model, before)


@on_ranks(1, 3)
def test_a_checkpoint_goes_on_exactly_elsewhere(world: World) -> None:
    with tempfile.TemporaryDirectory() as own, placed({"optimizer": "nvme"}) as nvme:
        saved = f"{world.everyone(own)[0]}/saved"
        model, optimizer = prepared(world, Uneven(), 3, lamb, offload={**nvme, "params": "nvme"})
        language_steps(world, model, optimizer, range(2))
        zero_ext.save_checkpoint(saved, model)
        wanted = language_steps(world, model, optimizer, range(2, 5))
        for stage, offload in ((0, {}), (1, {"optimizer": "host"}), (3, nvme)):
            twin, other = prepared(world, Uneven(), stage, lamb, offload=offload)
            language_steps(world, twin, other, [7])
            zero_ext.load_checkpoint(saved, twin)
            kinds = {name.split("/")[0] for name in other.state_dict()["shards"]}
            assert kinds == {"master", "exp_avg", "exp_avg_sq"}
            assert language_steps(world, twin, other, range(2, 5)) == wanted
            check_same(twin, model)
        world.everyone(None)


@on_ranks(2)
def test_a_read_that_fails_on_one_rank_fails_on_both(world: World) -> None:
    with placed({"optimizer": "nvme"}) as offload:
        model, optimizer = prepared(world, Uneven(), 2, lamb, offload=offload)
        language_steps(world, model, optimizer, [0])
        language_loss(model, language_batch(world.seed, 1, 0, world.rank)).backward()
        if world.rank == 1:
            engine_of(model).optimizer_step.stepper._add_norms = None
        with pytest.raises(RuntimeError, match=r"reading the state for a step failed on ranks \[1\]"):
            optimizer.step()
