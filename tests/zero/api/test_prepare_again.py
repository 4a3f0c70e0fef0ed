"""Preparing a model that is prepared already: values, what the first engine leaves, refusals."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import (
    adamw,
    check_same,
    configuration,
    distance,
    language_steps,
    placed,
    sgd,
    train_step,
)
from tests.zero.training import prepared as prepared_for
from zero_ext import ops
from zero_ext.checkpoint.save_session import session_of
from zero_ext.zero import engine_of
from zero_ext.zero.api.engine_lookup import checkpoint_sources

STEPS = 2
CLOSED = "was closed: the model was prepared again"


class Subject(TinyModel):
    """Tied, with a frozen parameter, a buffer, and an attribute that is a view of a parameter."""

    def __init__(self) -> None:
        super().__init__(layers=2, tied=True)
        for name, parameter in self.named_parameters():
            if name == "blocks.0.up.weight":
                parameter.requires_grad_(False)
            elif name == "blocks.1.up.weight":
                self.first = parameter.data[0]
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(ids) + self.first.sum() * 0.01


def built(seed: int, kind: type[nn.Module] = Subject) -> Any:
    torch.manual_seed(seed)
    return kind()


def train(model: Any, optimizer: Any, world: World, first: int) -> list[float]:
    return language_steps(world, model, optimizer, range(first, first + STEPS))


def reference(world: World, kind: type[nn.Module] = Subject) -> tuple[list[float], nn.Module]:
    """This rank's losses of two phases with two optimizers, in one process that sees all samples."""
    model = built(world.seed, kind)
    losses = []
    for phase, make in enumerate((adamw, sgd)):
        optimizer = make([each for each in model.parameters() if each.requires_grad])
        for step in range(phase * STEPS, (phase + 1) * STEPS):
            found = [
                language_loss(model, language_batch(world.seed, step, 0, rank)) for rank in range(world.size)
            ]
            torch.stack(found).mean().backward()
            losses.append(found[world.rank].item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def tiers(stage: int, tier: str) -> dict[str, str]:
    return dict.fromkeys(("optimizer", "grads", "params")[:stage], tier)


@on_ranks(2)
def test_two_phases_are_those_of_one_process_over_all_stages_and_tiers(world: World) -> None:
    wanted, full = reference(world)
    kinds = [(0, "device"), (1, "host"), (2, "nvme"), (3, "device"), (3, "host"), (3, "nvme")]
    for (stage, tier), (later, below) in itertools.product(kinds, kinds):
        model, case = built(world.seed), (stage, tier, later, below)
        found: list[float] = []
        with placed(tiers(stage, tier)) as first, placed(tiers(later, below)) as second:
            for make, number, offload in ((adamw, stage, first), (sgd, later, second)):
                engine, optimizer = prepared_for(world, model, number, make, offload=offload)
                found += train(engine, optimizer, world, len(found))
            assert found == pytest.approx(wanted, rel=1e-5), case
            values = zero_ext.full_state_dict(model)
            assert values.pop("seen") == 2 * STEPS, case
            assert distance(values, {k: v for k, v in full.state_dict().items() if k != "seen"}) < 1e-4, case
            assert engine_of(model).steps == STEPS and model.head.weight is model.embedding.weight
            assert torch.equal(model.first.clone(), model.blocks[1].up.weight.detach()[0])
            del engine, optimizer, model
            for each in (first, second):
                assert not any(list(Path(path).iterdir()) for path in each.get("nvme_paths", ())), case


@on_ranks(2, 4, by_turns=True)
def test_other_ranks_precisions_and_tiles(world: World) -> None:
    """What the second configuration may change, each against its own reference: the values at the change."""
    alone = [dist.new_group([rank], use_local_synchronization=True) for rank in range(world.size)][world.rank]
    ids, all_ranks = language_batch(world.seed, 9, 0, 0), world.group
    tiles = {"stage": 3, "units": {"tiles": {"head": 3, "embedding": 3}, "persistence_threshold": 8}}
    plainly, bf16 = {"stage": 3}, {"stage": 3, "precision": {"dtype": "bf16"}}
    cases: list[tuple[Any, dict[str, Any], Any, dict[str, Any]]] = [
        (alone, plainly, all_ranks, plainly),
        (all_ranks, plainly, alone, plainly),
        (all_ranks, plainly, alone, {"stage": 1}),
        (all_ranks, plainly, all_ranks, tiles),
        (all_ranks, tiles, all_ranks, {"stage": 2}),
        (all_ranks, bf16, all_ranks, plainly),
        (all_ranks, {"stage": 2}, all_ranks, bf16),
    ]
    if world.size == 4:
        shards = {"stage": 3, "communication": {"shard_group_size": 2}}
        cases += [(all_ranks, shards, all_ranks, plainly), (all_ranks, plainly, all_ranks, shards)]
    for before, first, after, second in cases:
        case = (before.size(), first, after.size(), second)
        model = built(world.seed, TinyModel)
        zero_ext.prepare(model, adamw(model.parameters()), first, process_group=before)
        with torch.no_grad():
            if before is alone and world.rank:
                for parameter in model.parameters():
                    parameter.zero_()  # rank 0's values count
            retained = {name: value.clone() for name, value in zero_ext.full_state_dict(model).items()}
            retained = world.everyone(retained)[0]
            dtype = torch.bfloat16 if "precision" in second else next(iter(retained.values())).dtype
            engine, optimizer = zero_ext.prepare(
                model, adamw(model.parameters()), second, process_group=after
            )
            plain = TinyModel().to(dtype)
            plain.load_state_dict(retained)
            assert torch.allclose(engine(ids), plain(ids), rtol=1e-5, atol=1e-6), case
        loss = language_loss(engine, ids)
        train_step(engine, optimizer, loss)
        with torch.no_grad():
            assert language_loss(engine, ids) < loss, case


@on_ranks(2)
def test_inference_training_and_models_that_changed(world: World) -> None:
    """No optimizer first or last, Init, added, replaced and wrapped parts, checkpoints after."""
    ids = language_batch(world.seed, 9, 0, 0)
    for stage in (1, 3):
        config = configuration(stage)
        with zero_ext.Init(config, process_group=world.group):
            model = built(world.seed, TinyModel)
        plain = built(world.seed, TinyModel)
        engine, none = zero_ext.prepare(model, None, config, process_group=world.group)
        assert none is None
        with torch.no_grad():
            assert torch.equal(engine(ids), plain(ids))
        engine, optimizer = zero_ext.prepare(
            engine, adamw(model.parameters()), config, process_group=world.group
        )
        train(engine, optimizer, world, 0)
        values = zero_ext.full_state_dict(model)
        with tempfile.TemporaryDirectory() as own:
            folder = world.everyone(own)[0]
            zero_ext.save_checkpoint(folder, model)
            # The prepared optimizer stands for its own class and param groups; its state starts anew.
            again, second = zero_ext.prepare(model, optimizer, config, process_group=world.group)
            assert type(second.optimizer) is torch.optim.AdamW
            assert second.param_groups[0]["lr"] == 3e-3 and engine_of(model).steps == 0
            train(again, second, world, 0)
            zero_ext.load_checkpoint(folder, model)
            assert distance(zero_ext.full_state_dict(model), values) == 0 and engine_of(model).steps == STEPS
            world.barrier()
        # A new head, and everything inside another module.
        model.head = nn.Linear(model.head.in_features, 7)
        outer = nn.Sequential(model)
        third = adamw(outer.parameters())
        engine, optimizer = zero_ext.prepare(outer, third, config, process_group=world.group)
        engine(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        copied = copy.deepcopy(outer)
        assert not any(hooks for module in copied.modules() for hooks in _hooks_of(module))
        engine, _ = zero_ext.prepare(outer, None, config, process_group=world.group)
        with torch.no_grad():
            assert torch.equal(engine(ids), copied(ids))
        with pytest.raises(ValueError, match=r"'0\.norm\.weight': it belongs to a prepared model already"):
            zero_ext.prepare(model.blocks, None, config, process_group=world.group)


def _hooks_of(module: nn.Module) -> list[Any]:
    return [module._forward_hooks, module._forward_pre_hooks]


def _hooks(model: nn.Module) -> int:
    found = sum(len(hooks) for module in model.modules() for hooks in _hooks_of(module))
    for parameter in model.parameters():
        with torch._C.DisableTorchFunctionSubclass():
            found += len(parameter._backward_hooks or {}) + len(parameter._post_accumulate_grad_hooks or {})
    return found


def held(model: nn.Module, folder: str) -> dict[str, Any]:
    gc.collect()
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "python threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "shared memory": sorted(path.name for path in Path("/dev/shm").glob(f"*{os.getpid()}*")),
        "folders": len(list(Path(folder).iterdir())),
        "stored": sum(path.stat().st_blocks for path in Path(folder).rglob("*")),
        "host": ops.host_buffer_bytes(),
        "hooks": _hooks(model),
        "mapped": sum(1 for _ in Path("/proc/self/maps").open() if "zero" in _),
    }


@on_ranks(2)
@pytest.mark.parametrize(("stage", "tier"), [(2, "device"), (3, "host"), (3, "nvme")])
def test_thirty_engines_leave_what_one_does(world: World, stage: int, tier: str) -> None:
    with tempfile.TemporaryDirectory(prefix=f"again-{world.rank}-") as folder:
        model, old, found = built(world.seed), [], {}
        offload = {**tiers(stage, tier), "nvme_paths": [folder] if tier == "nvme" else []}
        for number in range(31):
            engine, optimizer = prepared_for(world, model, stage, offload=offload)
            if number % 10 == 0:
                loss = language_loss(engine, language_batch(world.seed, number, 0, world.rank))
                train_step(engine, optimizer, loss)
                found[number] = held(model, folder)
                old += [engine, optimizer, loss]  # users keep such things
        # The first one may have loaded what stays for good; what earlier tests left may still go.
        for earlier, later in ((10, 20), (20, 30)):
            assert all(later_of <= found[earlier][name] for name, later_of in found[later].items()), found
        closed = old[0]
        uses: list[Callable[[], Any]] = [
            partial(closed, language_batch(0, 0, 0, 0)),
            partial(type(closed).full_state_dict, closed),
            partial(engine_of, closed),
            partial(getattr, closed, "anything"),
            old[1].step,
            old[1].zero_grad,
            old[1].state_dict,
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match=CLOSED):
                use()
        del engine, optimizer, model


def moments(world: World, model: Any, optimizer: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """Contexts in which a model cannot be prepared again, by what the error says."""
    ids = language_batch(world.seed, 0, 0, world.rank)

    @contextlib.contextmanager
    def between() -> Iterator[None]:
        loss = language_loss(model, ids)
        yield
        loss.backward()
        optimizer.zero_grad()

    @contextlib.contextmanager
    def saving() -> Iterator[None]:
        go = threading.Event()
        handle = zero_ext.save_checkpoint(folder, model, async_save=False)
        handle._finished = go

        session_of(checkpoint_sources(engine_of(model)).own).in_flight = handle
        yield
        go.set()

    return {
        r"inside 'with zero_ext.gathered": lambda: zero_ext.gathered(model.module),
        "outputs of a forward wait for their backward": between,
        r"double_backward\(model\)' is open": lambda: zero_ext.double_backward(model),
        r"no_sync\(\)' is open": model.no_sync,
        "is being saved in the background": saving,
    }


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_bad_moments_are_refused_on_all_ranks_and_change_nothing(world: World, stage: int) -> None:
    model, ids = built(world.seed), language_batch(world.seed, 0, 0, world.rank)
    engine, optimizer = prepared_for(world, model, stage)

    def again(match: str) -> None:
        with pytest.raises(RuntimeError, match=rf"(?s){match}.*Nothing was changed"):
            prepared_for(world, model, stage, sgd)

    def during(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        again("inside a forward")
        output.register_hook(lambda gradient: again("inside a backward pass"))

    with tempfile.TemporaryDirectory() as own:
        for message, enter in moments(world, engine, optimizer, world.everyone(own)[0]).items():
            with enter():
                again(message)
        world.barrier()
    hook = model.blocks[1].register_forward_hook(during)
    language_loss(engine, ids).backward()
    hook.remove()
    optimizer.zero_grad()
    # One rank alone is at a bad moment.
    retained = [language_loss(engine, ids)]
    del retained[world.rank :]
    again(r"failed on ranks \[1\]")
    retained.clear()
    # Gradients that no step has used are dropped, and it is said.
    loss = language_loss(engine, ids)
    loss.backward(retain_graph=True)
    values = zero_ext.full_state_dict(model)
    with pytest.warns(RuntimeWarning, match="gradients of 1 backward passes.*are dropped"):
        engine, optimizer = prepared_for(world, model, stage, sgd)
    assert all(parameter.grad is None for parameter in model.parameters())
    check_same(model, values)
    with pytest.raises(RuntimeError, match=CLOSED):
        loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(engine, optimizer, world, 0)
        prepared_for(world, model, stage, sgd)


@on_ranks(2)
def test_a_refused_configuration_leaves_the_engine_at_work(world: World) -> None:
    model = built(world.seed)
    engine, optimizer = prepared_for(world, model)
    wanted = train(engine, optimizer, world, 0)
    other = nn.Linear(2, 2)
    for config, made, error, match in (
        ({"stage": 7}, None, zero_ext.ConfigError, "stage"),
        ({"stage": 3}, adamw(other.parameters()), ValueError, "expected parameters of the model"),
        ({"stage": 2 + world.rank}, None, RuntimeError, r"configuration key 'stage': expected 2"),
    ):
        with pytest.raises(error, match=match):
            zero_ext.prepare(model, made, config, process_group=world.group)
    assert train(engine, optimizer, world, 0) != wanted
    # Storage that cannot be made is found out when the engine before is gone; the weights are there still.
    values = zero_ext.full_state_dict(model)
    with tempfile.NamedTemporaryFile() as file:
        missing = {**tiers(3, "nvme"), "nvme_paths": [file.name]}
        with pytest.raises(RuntimeError, match=r"(?s)folder.*Mend it and prepare the model again"):
            prepared_for(world, model, offload=missing)
    with pytest.raises(RuntimeError, match=CLOSED):
        optimizer.step()
    prepared_for(world, model)
    check_same(model, values)


@on_ranks(1, 2, stand_in=True)
def test_shards_on_an_accelerator(world: World) -> None:
    ids = language_batch(world.seed, 0, 0, 0)
    for tier, later in itertools.product(("device", "host"), (1, 3)):
        model = built(world.seed, TinyModel)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        for stage in (3, later, 3):
            config, own = configuration(stage, offload=tiers(stage, tier)), adamw(model.parameters())
            engine, optimizer = zero_ext.prepare(
                model, own, config, process_group=world.group, device="stand_in"
            )
            check_same({name: value.cpu() for name, value in zero_ext.full_state_dict(model).items()}, values)
            assert model.norm.weight.device.type == "stand_in"
            train_step(engine, optimizer, language_loss(engine, ids.to("stand_in")))
            values = {name: value.cpu() for name, value in zero_ext.full_state_dict(model).items()}
