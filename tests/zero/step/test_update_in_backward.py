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
    ChosenBlocks,
    TinyModel,
    feature_batch,
    feature_loss,
    language_batch,
    language_loss,
)
from tests.zero.training import (
    Plan,
    Run,
    adamw,
    check_equal,
    check_same,
    configuration,
    placed,
    sgd,
    train_prepared,
)
from tests.zero.training import prepared as prepared_for
from tests.zero.training import train_in_tiers as train
from zero_ext import ops
from zero_ext.config.events import StepEnd
from zero_ext.zero import engine_of

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


def prepared(world: World, model: nn.Module | None = None, stage: int = 3, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(world.seed)
    ring = {"update_mode": "in_backward", "staging_buffer_bytes": 1 << 20}
    units = {"bucket_elements": 700, "persistence_threshold": 100}
    more = {"units": units, **more, "offload": {**ring, **more.get("offload", {})}}
    return prepared_for(world, model or TinyModel(), stage, adam, **more)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def updated(world: World, model: Any, optimizer: Any, number: int) -> float:
    """The loss of a step that was made."""
    loss = backward(world, model, number)
    optimizer.step()
    return loss


def backward(world: World, model: Any, number: int = 0) -> float:
    loss = language_loss(model, language_batch(world.seed, number, 0, world.rank))
    model.backward(loss)
    return loss.item()


@on_ranks(1, 2, 3, by_turns=True)
def test_equals_the_step_after_backward(world: World) -> None:
    for number, (stage, tiers) in enumerate(TIERS):
        both(world, stage, Plan(dtype=("fp32", "bf16")[number % 2]), tiers)
    both(world, 3, Plan(micro_batches=2, dtype="bf16"), {"optimizer": "host"})
    both(world, 2, Plan(micro_batches=2, accumulation="no_sync"), {})
    both(world, 1, Plan(micro_batches=2), {"optimizer": "nvme"})


@on_ranks(1, 2, 3, by_turns=True)
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


@on_ranks(1, 2, by_turns=True)
@pytest.mark.parametrize("name", [*sorted(OPTIMIZERS), "moments in 8 bits"])
def test_other_optimizers(world: World, name: str) -> None:
    make, more = OPTIMIZERS.get(name, adamw), {}
    if name not in OPTIMIZERS:
        more = {"precision": {"dtype": "bf16", "moments_dtype": "8bit"}}
    for plan in (Plan(dtype="bf16" if more else "fp32"), Plan(clip=0.7, steps=4, dtype="bf16")):
        for tiers in ({}, {"optimizer": "host"}, {"optimizer": "nvme", "params": "nvme"})[bool(more) :]:
            both(world, 3, plan, tiers, make, **more)


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
    precision = {"dtype": "bf16", "moments_dtype": "8bit"}
    units = {"persistence_threshold": 0, "bucket_elements": 5000, "prefetch_elements": 0}
    for tiers in ({"params": "nvme", "optimizer": "nvme"}, {}):
        peaks = {}
        for layers in (8, 24):
            with placed(tiers) as offload:
                model, optimizer = prepared(
                    world, Deep(layers), precision=precision, offload=offload, units=units
                )
                pool, live = engine_of(model).pool, [0]
                original = pool.acquire

                def acquire(*wanted: Any, original=original, live=live, pool=pool) -> Any:
                    buffer = original(*wanted)
                    live.append(pool.live_bytes)
                    return buffer

                pool.acquire = acquire
                for _ in range(3):
                    model(torch.randn(2, 64).bfloat16()).float().square().mean().backward()
                    optimizer.step()
                assert engine_of(model).memory_breakdown()["grads"] == 0
                peaks[layers] = max(live)
        assert peaks[24] == peaks[8] > 0, peaks


@on_ranks(1, 2)
@pytest.mark.parametrize("clipping", [0.0, 1e-3])
def test_what_is_refused_between_backward_and_step(world: World, clipping: float) -> None:
    model, optimizer = prepared(world, gradient_clipping=clipping)
    parameter = next(model.parameters())
    for number in range(2):
        backward(world, model, number)
        for refused in (
            lambda: model.clip_grad_norm_(1.0),
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: zero_ext.full_gradient(parameter),
            lambda: zero_ext.full_state_dict(model),
            optimizer.state_dict,
            lambda: model(language_batch(0, 0, 0, 0)),
        ):
            with pytest.raises(RuntimeError, match=r"expected optimizer\.step\(\) before it"):
                refused()
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
        updated(world, model, optimizer, 0)
    check_same(*results)


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
    check_same(model, before)


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
            check_same(model, before)
        else:
            with pytest.raises(RuntimeError, match="broke off after some units were updated"):
                backward(world, model)


@on_ranks(1, 2)
def test_settings_that_change_before_the_step_and_double_backward_are_refused(world: World) -> None:
    model, optimizer = prepared(world)
    with pytest.raises(RuntimeError, match="Set it to 'after_backward'"), zero_ext.double_backward(model):
        pass
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
    with placed({"optimizer": "nvme"}) as offload, tempfile.TemporaryDirectory() as saves:
        saves = world.everyone(saves)[0]
        model, optimizer = prepared(world, gradient_clipping=clipping, offload=offload)
        for number in range(2):
            updated(world, model, optimizer, number)
        zero_ext.save_checkpoint(saves, model)
        wanted = [updated(world, model, optimizer, number) for number in (2, 3)]
        if world.rank == 0:
            ops.store_inject_fault(engine_of(model).tiers.store.handle, True, 2, -errno.EIO, 1)
        backward(world, model, 4)
        with pytest.raises(RuntimeError, match=r"optimizer step failed on ranks \[0\]"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="its state is damaged"):
            backward(world, model, 5)
        zero_ext.load_checkpoint(saves, model)
        assert [updated(world, model, optimizer, number) for number in (2, 3)] == wanted
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
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))  # two reductions in flight
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
    for change in (lambda p: p.grad.zero_(), lambda p: setattr(p, "grad", None)):
        results = []
        for step in ("after_backward", "in_backward"):
            model, optimizer = prepared(world, offload={"update_mode": step})
            for number in (0, 2):
                with model.no_sync():
                    backward(world, model, number)
                change(model.head.weight)
                updated(world, model, optimizer, number + 1)
                optimizer.zero_grad()
            with model.no_sync():
                model.head(torch.ones(WIDTH)).sum().backward()
            assert model.clip_grad_norm_(1.0, float("inf")) == 1.0
            results.append(zero_ext.full_state_dict(model))
        check_same(*results)


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums_of_passes_that_nobody_announced_are_not_rounded(world: World, dtype: str) -> None:
    """A sum in fp32, of passes under ``no_sync``, is the same wherever gradients are stored."""
    units = {"bucket_elements": 100}  # so that there are units of one parameter
    in_backward = {"update_mode": "in_backward"}
    storages = ({"grads": "host"}, {"grads": "nvme"}, in_backward)
    for micro_batches in (2, 3):
        plan = Plan(micro_batches=micro_batches, accumulation="no_sync", dtype=dtype)
        reference = train(world, 3, plan, {}, units=units)
        for offload in (*storages, {**in_backward, "grads": "nvme", "optimizer": "nvme"}):
            check_equal(train(world, 3, plan, offload, units=units), reference)


@on_ranks(2, 3)
def test_ranks_that_sum_gradients_of_other_parameters(world: World) -> None:
    """Passes under ``no_sync`` bring them on some ranks only; all send them in one precision."""
    for stage in (0, 1, 2):
        results = []
        for step in ("after_backward", "in_backward"):
            torch.manual_seed(world.seed)
            module, precision = ChosenBlocks(), {"dtype": "bf16"}
            offload = {"update_mode": step}
            model, optimizer = prepared(world, module, stage, precision=precision, offload=offload)
            for number in range(2):
                module.order = [world.rank % 3]
                with model.no_sync():
                    backward(world, model, 2 * number)
                module.order = [(world.rank + 1) % 3]
                updated(world, model, optimizer, 2 * number + 1)
                optimizer.zero_grad()
            results.append(zero_ext.full_state_dict(model))
        check_same(*results)
