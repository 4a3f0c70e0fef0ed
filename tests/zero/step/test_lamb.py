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
    configuration,
    distance,
    train_plain,
    train_prepared,
)
from zero_ext.zero import engine_of

RING = {"staging_buffer_bytes": 1 << 20}
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
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "min_coeff": 1.0, "max_coeff": 1.0},
    ]


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return zero_ext.Lamb(in_groups(parameters), lr=1e-2, eps=1e-3, max_coeff=4.0)


def reference_lamb(parameters: Any) -> torch.optim.Optimizer:
    return ReferenceLamb(in_groups(parameters), lr=1e-2, eps=1e-3, max_coeff=4.0)


def lion(parameters: Any) -> torch.optim.Optimizer:
    return zero_ext.Lion(in_groups_of_lion(parameters), lr=1e-3)


def in_groups_of_lion(parameters: Any) -> list[dict[str, Any]]:
    return [
        {"params": group["params"], "weight_decay": 0.1 * (group["params"][0].dim() > 1)}
        for group in in_groups(parameters)
    ]


def train(
    world: World, stage: int, plan: Plan, offload: dict[str, Any], make: Any = lamb, **more: Any
) -> Run:
    torch.manual_seed(world.seed)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
        config = configuration(
            stage, plan, offload={**RING, **paths, **offload}, units={"bucket_elements": 700}, **more
        )
        return train_prepared(world, Uneven(), language_loss, language_batch, config, plan, make)


@on_ranks(1, 2, 3, 4)
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
    with pytest.raises(
        ValueError, match=f"offload.update_mode: expected 'after_backward' with Lamb, got '{when}'"
    ):
        zero_ext.prepare(
            model, lamb(model.parameters()), {"stage": 2, "offload": offload}, process_group=world.group
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def trained(world: World, stage: int, folder: str, offload: dict[str, Any]) -> tuple[nn.Module, Any]:
    paths = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
    config = configuration(stage, offload={**RING, **paths, **offload})
    torch.manual_seed(world.seed)
    model = Uneven()
    return zero_ext.prepare(model, lamb(model.parameters()), config, process_group=world.group)


def steps(world: World, model: nn.Module, optimizer: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = language_loss(model, language_batch(world.seed, step, 0, world.rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(1, 3)
def test_a_checkpoint_goes_on_exactly_elsewhere(world: World) -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = world.everyone(own)[0]
        model, optimizer = trained(world, 3, own, {"optimizer": "nvme", "params": "nvme"})
        steps(world, model, optimizer, 0, 2)
        zero_ext.save_checkpoint(f"{folder}/saved", model)
        wanted = steps(world, model, optimizer, 2, 3)
        for stage, offload in ((0, {}), (1, {"optimizer": "host"}), (3, {"optimizer": "nvme"})):
            twin, other = trained(world, stage, own, offload)
            steps(world, twin, other, 7, 1)
            zero_ext.load_checkpoint(f"{folder}/saved", twin)
            assert {name.split("/")[0] for name in other.state_dict()["shards"]} == {
                "master",
                "exp_avg",
                "exp_avg_sq",
            }
            assert steps(world, twin, other, 2, 3) == wanted
            for name, value in zero_ext.full_state_dict(model).items():
                assert torch.equal(zero_ext.full_state_dict(twin)[name], value), name
        world.everyone(None)


@on_ranks(2)
def test_a_read_that_fails_on_one_rank_fails_on_both_with_nothing_changed(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = trained(world, 2, folder, {"optimizer": "nvme"})
        steps(world, model, optimizer, 0, 1)
        language_loss(model, language_batch(world.seed, 1, 0, world.rank)).backward()
        engine = engine_of(model)
        if world.rank == 1:
            engine.optimizer_step.stepper._add_norms = None  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match=r"reading the state for a step failed on ranks \[1\]"):
            optimizer.step()
