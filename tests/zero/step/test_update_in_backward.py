"""Updates inside backward: bit for bit the step after backward, taken back exactly, never silently wrong."""

from __future__ import annotations

import errno
import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.api.test_checkpointing import Shared
from tests.zero.models import (
    WIDTH,
    TinyModel,
    feature_batch,
    feature_loss,
    language_batch,
    language_loss,
)
from tests.zero.training import Plan, Run, adamw, check_equal, configuration, sgd, train_prepared
from zero_ext import ops
from zero_ext.config.events import StepEnd
from zero_ext.zero import engine_of

RING = {"staging_buffer_bytes": 1 << 20}
TIERS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {"optimizer": "nvme"}),
    (2, {"optimizer": "host", "grads": "host"}),
    (2, {"optimizer": "nvme"}),
    (3, {}),
    (3, {"optimizer": "host"}),
    (3, {"optimizer": "nvme", "params": "nvme"}),
    (3, {"optimizer": "nvme", "params": "host", "grads": "host"}),
    (3, {"optimizer": "nvme", "params": "nvme", "grads": "nvme"}),
    (3, {"optimizer": "nvme", "ratio": 0.5}),
    (3, {"grads": "nvme"}),
]
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


def train(
    world: World, stage: int, plan: Plan, offload: dict[str, Any], make: Any = adamw, **more: Any
) -> Run:
    torch.manual_seed(world.seed)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
        units = {"bucket_elements": 700, **more.pop("units", {})}
        config = configuration(stage, plan, offload={**RING, **paths, **offload}, units=units, **more)
        return train_prepared(world, TinyModel(), language_loss, language_batch, config, plan, make)


def both(
    world: World, stage: int, plan: Plan, offload: dict[str, Any], make: Any = adamw, **more: Any
) -> Run:
    """Trains with updates after and inside backward, wants the same, returns the latter run."""
    reference = train(world, stage, plan, offload, make, **more)
    run = train(world, stage, plan, {**offload, "update_mode": "in_backward"}, make, **more)
    check_equal(run, reference)
    assert str(run.norms) == str(reference.norms)  # NaN where they overflowed
    assert run.engine is not None and reference.engine is not None
    assert run.engine.steps == reference.engine.steps
    assert run.engine.skipped_steps == reference.engine.skipped_steps
    return run


def prepared(world: World, model: nn.Module | None = None, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(world.seed)
    model = TinyModel() if model is None else model
    offload = {"update_mode": "in_backward", **RING, **more.pop("offload", {})}
    units = {"bucket_elements": 700, "persistence_threshold": 100}
    config = {"stage": 3, "timeout_seconds": 120.0, "units": units, **more, "offload": offload}
    return zero_ext.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), config, process_group=world.group
    )


def backward(world: World, model: Any, number: int = 0) -> float:
    loss = language_loss(model, language_batch(world.seed, number, 0, world.rank))
    model.backward(loss)
    return loss.item()


@on_ranks(1, 2, 3)
def test_equals_the_step_after_backward(world: World) -> None:
    for number, (stage, tiers) in enumerate(TIERS):
        both(world, stage, Plan(dtype=("fp32", "bf16")[number % 2]), tiers)
    both(world, 3, Plan(micro_batches=2, dtype="bf16"), {"optimizer": "host"})
    both(world, 2, Plan(micro_batches=2, accumulation="no_sync"), {})
    both(world, 1, Plan(micro_batches=2), {"optimizer": "nvme"})


@on_ranks(1, 2, 3)
def test_clipping_that_strikes_in_some_steps(world: World) -> None:
    plan = Plan(steps=6, clip=1e9, dtype="bf16")
    norms = sorted(norm for norm in train(world, 3, plan, {}).norms if norm is not None)
    for number, (stage, tiers) in enumerate(TIERS):
        plan = plan._replace(clip=(norms[2] + norms[3]) / 2, dtype=("bf16", "fp32")[number % 2])
        run = both(world, stage, plan, tiers)
        assert run.engine is not None
        updates = run.engine.updates
        assert updates.committed_steps > 0 and updates.rolled_back_steps > 0
        assert updates.committed_steps + updates.rolled_back_steps == plan.steps
    both(world, 3, plan._replace(micro_batches=2), {"optimizer": "nvme"})


@on_ranks(1, 2)
def test_overflow_skips_the_same_steps(world: World) -> None:
    plan = Plan(steps=5, dtype="fp16")
    scale = {"initial_power": 20, "hysteresis": 1, "window": 2}
    for tiers in ({}, {"optimizer": "host"}, {"optimizer": "nvme", "params": "nvme"}):
        run = both(world, 3, plan, tiers, loss_scale=scale)
        assert run.engine is not None
        assert 0 < run.engine.skipped_steps < plan.steps


@on_ranks(1, 2)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_torchs_own_optimizers(world: World, name: str) -> None:
    for plan in (Plan(), Plan(clip=0.7, steps=4, dtype="bf16")):
        for tiers in ({}, {"optimizer": "host"}, {"optimizer": "nvme", "params": "nvme"}):
            both(world, 3, plan, tiers, OPTIMIZERS[name])


@on_ranks(1, 2)
def test_moments_in_8_bits(world: World) -> None:
    precision = {"dtype": "bf16", "moments_dtype": "8bit"}
    for plan in (Plan(dtype="bf16"), Plan(clip=0.7, steps=4, dtype="bf16")):
        for tiers in ({"optimizer": "host"}, {"optimizer": "nvme", "params": "nvme"}):
            both(world, 3, plan, tiers, precision=precision)


class Deep(nn.Module):
    """Many equal layers, so that one of them is little beside the whole."""

    def __init__(self, layers: int = 24, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return hidden


@on_ranks(1)
def test_gradients_of_the_full_model_never_exist(world: World) -> None:
    """Stage 3 on one rank with parameters and 8-bit state on NVMe; and with everything on the device."""
    with tempfile.TemporaryDirectory() as folder:
        nvme = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [folder]}
        for offload in (nvme, {}):
            peaks = {}
            for layers in (8, 24):
                precision = {"dtype": "bf16", "moments_dtype": "8bit"}
                model, optimizer = prepared(
                    world,
                    Deep(layers),
                    precision=precision,
                    offload=offload,
                    units={"persistence_threshold": 0, "bucket_elements": 5000, "prefetch_elements": 0},
                )
                pool = engine_of(model).pool
                live: list[int] = []
                original = pool.acquire
                pool.acquire = lambda *wanted, original=original, live=live, pool=pool: (
                    original(*wanted),
                    live.append(pool.live_bytes),
                )[0]
                for step in range(3):
                    features = torch.randn(2, 64).bfloat16()
                    model(features).float().square().mean().backward()
                    optimizer.step()
                    assert step or live
                assert engine_of(model).memory_breakdown()["grads"] == 0
                peaks[layers] = max(live)
            assert peaks[24] == peaks[8], peaks


@on_ranks(1, 2)
def test_what_is_refused_between_backward_and_step(world: World) -> None:
    for clipping in (0.0, 1e-3):
        model, optimizer = prepared(world, gradient_clipping=clipping)
        parameter = next(model.parameters())
        for number in range(2):
            backward(world, model, number)
            refused = pytest.raises(RuntimeError, match=r"expected optimizer\.step\(\) before it")
            with refused:
                model.clip_grad_norm_(1.0)
            with refused:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with refused:
                zero_ext.full_gradient(parameter)
            with refused:
                zero_ext.full_state_dict(model)
            with refused:
                optimizer.state_dict()
            with refused:
                model(language_batch(0, 0, 0, 0))
            optimizer.step()
            assert parameter.grad is None
        with pytest.raises(RuntimeError, match="expected a gradient, got none"):
            optimizer.step()
        zero_ext.full_state_dict(model)


@on_ranks(1, 2)
def test_a_second_backward_is_refused_and_the_first_counts(world: World) -> None:
    results = []
    for refuse in (False, True):
        model, optimizer = prepared(world)
        first = language_loss(model, language_batch(world.seed, 0, 0, world.rank))
        if refuse:
            second = language_loss(model, language_batch(world.seed, 1, 0, world.rank))
        first.backward()
        if refuse:
            with pytest.raises(RuntimeError, match="gradient_accumulation_steps"):
                second.backward()
        optimizer.step()
        results.append(zero_ext.full_state_dict(model))
        backward(world, model)
        optimizer.step()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])


@on_ranks(1, 2)
def test_zero_grad_before_the_step(world: World) -> None:
    model, optimizer = prepared(world)
    backward(world, model)
    with pytest.raises(RuntimeError, match=r"clearing gradients: expected optimizer\.step\(\) before it"):
        optimizer.zero_grad()
    optimizer.step()
    model, optimizer = prepared(world, gradient_clipping=1e9)
    before = zero_ext.full_state_dict(model)
    backward(world, model)
    optimizer.zero_grad()  # on trial all of it is taken back
    for name, value in zero_ext.full_state_dict(model).items():
        assert torch.equal(value, before[name])


@on_ranks(1, 2)
def test_a_pass_that_breaks_off(world: World) -> None:
    for clipping in (1e9, 0.0):
        model, optimizer = prepared(world, gradient_clipping=clipping)
        before = zero_ext.full_state_dict(model)
        hidden = model.embedding(language_batch(world.seed, 0, 0, 0))
        hidden.register_hook(lambda _: (_ for _ in ()).throw(KeyError("user")))
        output = hidden
        for block in model.blocks:
            output = block(output)
        with pytest.raises(KeyError):
            model.head(model.norm(output)).sum().backward()
        optimizer.zero_grad()
        if clipping:
            for name, value in zero_ext.full_state_dict(model).items():
                assert torch.equal(value, before[name])
        else:
            with pytest.raises(RuntimeError, match="broke off after some units were updated"):
                backward(world, model)


@on_ranks(1)
def test_double_backward_is_refused(world: World) -> None:
    model, _ = prepared(world)
    with pytest.raises(RuntimeError, match="Set it to 'after_backward'"), zero_ext.double_backward(model):
        pass


@on_ranks(1, 2)
def test_settings_that_change_before_the_step(world: World) -> None:
    model, optimizer = prepared(world)
    backward(world, model)
    optimizer.param_groups[0]["lr"] = 5.0
    with pytest.raises(RuntimeError, match=r"param group 0, 'lr': expected(?s:.*)got 5\.0"):
        optimizer.step()


class Detached(nn.Module):
    """Its weights are used once more, detached, by what backward reaches after their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(self.first(hidden), self.second.weight.detach())
        return self.second(hidden)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_used_after_their_update(world: World, stage: int) -> None:
    units = {"bucket_elements": 150, "persistence_threshold": 0}
    features = feature_batch(world.seed, 0, 0, world.rank)
    model, optimizer = prepared(world, Shared(), stage=stage, units=units)
    feature_loss(model, features).backward()
    with pytest.raises(RuntimeError, match="expected no gradient after its update inside backward"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="its state is damaged"):
        model(features)


@on_ranks(1)
@pytest.mark.parametrize("params", ["device", "host"])
def test_values_saved_before_the_update(world: World, params: str) -> None:
    """Replicated parameters change in place, sharded ones when they are gathered again."""
    units = {"bucket_elements": 150, "persistence_threshold": 0}
    features = feature_batch(world.seed, 0, 0, world.rank)
    model, _ = prepared(world, Detached(), units=units, offload={"params": params})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        feature_loss(model, features).backward()
    with pytest.raises(RuntimeError, match="broke off after some units"):
        model(features)


@on_ranks(1, 2)
@pytest.mark.parametrize("clipping", [0.0, 1e9])
def test_storage_that_fails_in_backward(world: World, clipping: float) -> None:
    with tempfile.TemporaryDirectory() as nvme, tempfile.TemporaryDirectory() as saves:
        saves = world.everyone(saves)[0]
        model, optimizer = prepared(
            world, gradient_clipping=clipping, offload={"optimizer": "nvme", "nvme_paths": [nvme]}
        )
        for number in range(2):
            backward(world, model, number)
            optimizer.step()
        zero_ext.save_checkpoint(saves, model)
        wanted = []
        for number in (2, 3):
            wanted.append(backward(world, model, number))
            optimizer.step()
        if world.rank == 0:
            ops.store_inject_fault(engine_of(model).tiers.store.handle, True, 2, -errno.EIO, 1)
        backward(world, model, 4)
        with pytest.raises(RuntimeError, match=r"optimizer step failed on ranks \[0\]"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="its state is damaged"):
            backward(world, model, 5)
        zero_ext.load_checkpoint(saves, model)
        for number in (2, 3):
            assert backward(world, model, number) == wanted.pop(0)
            optimizer.step()
        world.barrier()


@on_ranks(2)
def test_parameters_that_only_some_ranks_use(world: World) -> None:
    """Ranks may update a unit at different times; what comes out is the same."""

    def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        hidden = model.embedding(ids)
        for number, block in enumerate(model.blocks):
            if world.rank == 0 or number != 1:
                hidden = block(hidden)
        return model.head(model.norm(hidden)).float().square().mean()

    for stage in (1, 2):
        for clip in (0.0, 0.05):
            results = []
            for step in ("after_backward", "in_backward"):
                torch.manual_seed(world.seed)
                config = configuration(stage, Plan(clip=clip), offload={"update_mode": step})
                results.append(train_prepared(world, TinyModel(), loss_of, language_batch, config))
            check_equal(*results)


@on_ranks(1)
def test_events_name_rolled_back_steps(world: World) -> None:
    model, optimizer = prepared(world, gradient_clipping=1e-3)
    ends: list[StepEnd] = []
    engine_of(model).subscribe(lambda event: ends.append(event) if isinstance(event, StepEnd) else None)
    backward(world, model)
    optimizer.step()
    assert [end.rolled_back for end in ends] == [True]
    assert (optimizer.committed_steps, optimizer.rolled_back_steps) == (0, 1)


class Hinted(nn.Module):
    """Blocks that also use the head's weight, which gets no gradient there; run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH) for _ in "abcdef"
        )  # two reductions stay in flight
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def _shard(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hint = self.head(torch.ones(WIDTH))
        return block(hidden * hint).tanh()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = checkpoint(self._shard, block, hidden, use_reentrant=False)
        return self.head(hidden)


@on_ranks(1, 2)
def test_a_forward_run_again_does_not_read_updated_parameters(world: World) -> None:
    for stage in (1, 3):
        for clipping in (0.0, 1e-3):
            units = {"bucket_elements": 100, "persistence_threshold": 0}
            model, optimizer = prepared(world, Hinted(), stage=stage, gradient_clipping=clipping, units=units)
            model.backward(feature_loss(model, feature_batch(world.seed, 0, 0, world.rank)))
            with pytest.raises(RuntimeError, match=r"'head\.weight': expected no read after its update"):
                optimizer.step()


@on_ranks(1, 2)
def test_gradients_cleared_between_two_passes(world: World) -> None:
    """Of single parameters, when nothing is reduced yet; and a norm where a unit has no gradient."""

    def zero(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.zero_()

    def clear(parameter: nn.Parameter) -> None:
        parameter.grad = None

    for change in (zero, clear):
        results = []
        for step in ("after_backward", "in_backward"):
            model, optimizer = prepared(world, offload={"update_mode": step})
            for number in (0, 2):
                with model.no_sync():
                    backward(world, model, number)
                change(model.head.weight)
                backward(world, model, number + 1)
                optimizer.step()
                optimizer.zero_grad()
            with model.no_sync():
                model.head(torch.ones(WIDTH)).sum().backward()
            assert model.clip_grad_norm_(1.0, float("inf")) == 1.0
            results.append(zero_ext.full_state_dict(model))
        for name, value in results[0].items():
            assert torch.equal(value, results[1][name]), name
