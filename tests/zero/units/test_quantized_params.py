"""Frozen parameters of packed bytes: sharded in every tier, loud while released, saved with their meaning."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.pool import RankPool
from tests.multi.rank import World
from tests.zero.training import (
    adamw,
    check_close,
    configuration,
    placed,
    prepared,
    train_plain,
    train_prepared,
    train_step,
)
from zero_ext.zero import engine_of

MODULE = "tests.zero.units.test_quantized_params"
WIDTH = 13
TIERS: tuple[dict[str, Any], ...] = ({}, {"params": "host", "optimizer": "host"}, {"params": "nvme"})


class Meaning:
    """What a quantizer hangs on its weights."""

    def __init__(self, scale: torch.Tensor, offset: torch.Tensor) -> None:
        self.scale = scale
        self.nested = type("Nested", (), {})()
        self.nested.offset = offset


class Packed(nn.Parameter):
    """A class of its own, as quantizers have."""

    def __new__(cls, data: torch.Tensor, meaning: Meaning | None = None) -> Packed:
        made: Packed = torch.Tensor._make_subclass(cls, data, False)
        made.meaning = meaning  # type: ignore[attr-defined]
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return Packed(self.data.clone(), copy.deepcopy(self.meaning, memo))  # type: ignore[attr-defined]


class ByteLinear(nn.Module):
    """A frozen 8-bit linear layer [.., n] to [.., n], with a trainable adapter of rank 2."""

    def __init__(self, width: int, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (width, width), dtype=torch.uint8)
        if dtype.itemsize > 1:
            # Bytes of 4 codes in a number: all kinds of them, NaN among them.
            codes = torch.randint(0, 256, (width, 4 * width), dtype=torch.uint8)
            codes[0, :4] = torch.tensor([0x01, 0x02, 0xC0, 0x7F], dtype=torch.uint8)
        meaning = Meaning(torch.rand(width, 1) / 300, torch.tensor(127.0))
        self.weight: Any = Packed(codes.view(dtype), meaning)
        self.bias = nn.Parameter(torch.randn(width), requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, width) / width)
        self.up = nn.Parameter(torch.randn(width, 2))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        codes = self.weight.view(torch.uint8)[:, : features.shape[-1]]
        meaning = self.weight.meaning
        full = (codes.float() - meaning.nested.offset) * meaning.scale
        base = functional.linear(features, full, self.bias)
        return torch.tanh(base + functional.linear(functional.linear(features, self.down), self.up))


def model_of(seed: int, dtype: torch.dtype = torch.uint8) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(*(ByteLinear(WIDTH, dtype) for _ in range(3)), nn.Linear(WIDTH, 2))


def loss_of(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    return model(features).square().mean()


def batch_of(seed: int, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((seed, step, micro, rank)) & 0x7FFFFFFF)
    return torch.randn(4, WIDTH, generator=generator)


def trainable(parameters: Any) -> torch.optim.Optimizer:
    return adamw([each for each in parameters if each.requires_grad])


@on_ranks(1, 2, 3, by_turns=True)
def test_training_over_packed_bytes_is_that_of_one_process(world: World) -> None:
    for dtype in (torch.uint8, torch.float32):
        reference = train_plain(world, model_of(world.seed, dtype), loss_of, batch_of, make_optimizer=adamw)
        frozen = model_of(world.seed, dtype)
        for stage, offload in ((3, TIERS[0]), (3, TIERS[1]), (3, TIERS[2]), (2, TIERS[0])):
            with placed(offload) as tiers:
                config = configuration(stage, offload=tiers, units={"persistence_threshold": 4})
                model = model_of(world.seed + world.rank, dtype)  # rank 0's values count, scales included
                run = train_prepared(world, model, loss_of, batch_of, config, make_optimizer=trainable)
                assert run.engine is not None
                for name, parameter in model.named_parameters():
                    if name.endswith("0.weight"):
                        assert isinstance(parameter, Packed) and parameter.dtype is dtype
                        assert parameter.grad is None
                _check_memory_breakdown(run.engine, model, stage, offload.get("params", "device"))
                state = zero_ext.full_state_dict(model)
            for number in range(3):
                own, twin = state[f"{number}.weight"], frozen[number].weight.data
                assert own.dtype is dtype and torch.equal(own.view(torch.uint8), twin.view(torch.uint8))
                assert torch.equal(
                    state[f"{number}.weight.meaning.scale"], frozen[number].weight.meaning.scale
                )
            parameters = {name: value for name, value in state.items() if name in reference.parameters}
            for found in (parameters, reference.parameters):
                for number in range(3):
                    found[f"{number}.weight"] = torch.zeros(1)
            # Losses fall to 4e-4, where fp32 sums in another order differ by more than 1e-6 of them.
            check_close(run._replace(parameters=parameters), reference, tolerance=1e-5)


def _check_memory_breakdown(engine: Any, model: nn.Module, stage: int, tier: str) -> None:
    """Bytes are counted as bytes, in their tier, and the optimizer's are those of what is trained alone."""
    held: dict[str, int] = {}
    for unit in engine.units:
        lies = tier if unit.placement.params else "device"
        numel = unit.layout.shard_numel if unit.placement.params else unit.layout.numel
        held[lies] = held.get(lies, 0) + numel * unit.layout.dtype.itemsize
    found = engine.memory_by_tier()
    assert {name: found[name]["params"] for name in found if found[name]["params"]} == held
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {spec.name for master in engine.masters for spec in master.unit.layout.specs}
    owned = sum(master.end - master.begin for master in engine.masters)
    optimizer = sum(each["optimizer"] for each in found.values())
    assert 2 * 4 * owned <= optimizer <= 3 * 4 * owned + 4096 * 3 * len(engine.masters)


@on_ranks(1, 2)
def test_a_released_parameter_of_integers_refuses_to_be_computed_with(world: World) -> None:
    model = model_of(world.seed)
    units = {"persistence_threshold": 0}
    wrapped, _ = prepared(world, model, 3, trainable, offload={"params": "host"}, units=units)
    weight = model[1].weight
    ones = torch.ones(WIDTH)
    uses: list[Any] = [
        lambda: weight + 1,
        lambda: functional.embedding(torch.tensor([0]), weight),
        lambda: torch.ops.aten.bitwise_and(weight, weight),
        lambda: weight.float() @ ones,
        lambda: torch.cat([weight, weight]),
        lambda: weight.data + 1,
        lambda: weight.detach().sum(),
        lambda: weight[0],
        lambda: weight.numpy(),
        lambda: weight.item(),
        lambda: weight.fill_(1),
        lambda: (model[1](ones[None]), weight.t()),
    ]
    for number, use in enumerate(uses):
        with pytest.raises(RuntimeError, match=r"'1\.weight'.*zero_ext\.gathered"):
            use()
            raise AssertionError(f"use {number} passed")
    assert weight.shape == (WIDTH, WIDTH) and weight.dtype is torch.uint8 and not weight.requires_grad
    assert isinstance(weight, Packed) and repr(weight) and weight.numel() == WIDTH**2
    with zero_ext.gathered([weight]):
        assert type(weight) is Packed and torch.equal(weight.data, model_of(world.seed)[1].weight.data)
    with zero_ext.gathered([weight], modifier_rank=0):
        weight.fill_(7 + world.rank)
    assert bool((wrapped.full_state_dict()["1.weight"] == 7).all())
    assert engine_of(model).index[weight][0].layout.dtype is torch.uint8


@on_ranks(2)
def test_presharded_bytes(world: World) -> None:
    for offload in ({}, {"params": "host"}):
        torch.manual_seed(world.seed)
        with zero_ext.Init(configuration(3, offload=offload), process_group=world.group):
            model = nn.Sequential(*(ByteLinear(WIDTH) for _ in range(3)), nn.Linear(WIDTH, 2))
        with pytest.raises(RuntimeError, match=r"zero_ext\.Init.*gives its bytes"):
            model[0].weight.float()
        assert model[0].weight.shape == (WIDTH, WIDTH)
        zero_ext.prepare(model, None, configuration(3, offload=offload), process_group=world.group)
        plain = model_of(world.seed)
        assert torch.equal(zero_ext.full_state_dict(model)["2.weight"], plain[2].weight.data)
        features = batch_of(world.seed, 0, 0, 0)
        assert torch.equal(model(features), plain(features))


def checkpoint(world: World, folder: str, save: bool, seed: int, tier: str) -> list[torch.Tensor]:
    """Saves a model, or loads it into another; the outputs it gives, and those of its whole state dict."""
    with placed({"params": tier}) as offload:
        model, _ = prepared(world, model_of(seed + (not save)), 3, trainable, offload=offload)
        if save:
            zero_ext.save_checkpoint(Path(folder) / "saved", model, step=1)
        else:
            zero_ext.load_checkpoint(Path(folder) / "saved", model)
        again, _ = prepared(world, model_of(seed + 2), 3, None)
        zero_ext.load_full_state_dict(again, zero_ext.full_state_dict(model))
        return [each(batch_of(seed, 0, 0, 0)).detach() for each in (model, again, model_of(seed))]


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_checkpoints_hold_the_bytes_and_what_they_mean(
    rank_pool: RankPool, tmp_path: Path, tier: str
) -> None:
    seed = int(torch.randint(1 << 30, ()))
    print(f"seed {seed}")
    arguments = {"folder": str(tmp_path), "seed": seed, "tier": tier}
    for ranks, save in ((2, True), (3, False), (1, False)):
        for outputs in rank_pool.run(ranks, f"{MODULE}:checkpoint", {**arguments, "save": save}):
            assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[2])


def resume(world: World, folder: str, save: bool, seed: int) -> list[float]:
    """Two steps and a save without what is frozen, or two more after loading it; the losses of the latter."""
    model, optimizer = prepared(world, model_of(seed), 3, trainable, units={"persistence_threshold": 0})
    if not save:
        with pytest.raises(ValueError, match=r"'0\.weight' is missing"):
            zero_ext.load_checkpoint(folder, model)
        zero_ext.load_checkpoint(folder, model, include_frozen=False)
    losses = []
    for step in range(4 if save else 2):
        if save and step == 2:
            zero_ext.save_checkpoint(folder, model, step=2, include_frozen=False, async_save=False)
            found = zero_ext.full_state_dict(model, key_filter=lambda name: name.endswith("up"))
            assert sorted(found) == ["0.up", "1.up", "2.up"] and found["1.up"].shape == (WIDTH, 2)
            assert not zero_ext.full_state_dict(model, key_filter=lambda name: False)
        losses.append(train_step(model, optimizer, loss_of(model, batch_of(seed, step % 2, 0, 0))))
    return losses[-2:]


def test_a_checkpoint_without_the_frozen_base_resumes(rank_pool: RankPool, tmp_path: Path) -> None:
    seed = int(torch.randint(1 << 30, ()))
    print(f"seed {seed}")
    arguments = {"folder": str(tmp_path), "seed": seed}
    wanted = rank_pool.run(2, f"{MODULE}:resume", {**arguments, "save": True})[0]
    for ranks in (2, 1):
        found = rank_pool.run(ranks, f"{MODULE}:resume", {**arguments, "save": False})[0]
        assert found == pytest.approx(wanted, rel=1e-5) if ranks == 1 else found == wanted
    stored = "".join(file.read_text() for file in tmp_path.rglob("*.json"))
    assert "0.up" in stored and "0.weight" not in stored and "0.bias" not in stored


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_before_anything_changes(world: World) -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3)), requires_grad=False)
    bias = model.bias.detach().clone()
    with pytest.raises(ValueError, match=r"'weight': .*a TwoTensor.*bitsandbytes"):
        prepared(world, model, 3, trainable)
    assert torch.equal(model.bias, bias)
    # One rank that quantized in other blocks has other scales.
    packed = model_of(world.seed)
    if world.rank == 1:
        packed[0].weight.meaning.scale = torch.ones(1, 1)
    with pytest.raises(RuntimeError, match=r"Ranks \[1\] differ from rank 0"):
        prepared(world, packed, 3, None)
