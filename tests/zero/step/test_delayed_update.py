"""Delayed updates against a plain loop with parameters one step old, bit for bit; what disturbs them."""

from __future__ import annotations

import contextlib
import copy
import gc
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import DTYPES
from zero_ext import ops
from zero_ext.plan import TrainingState, model_state_bytes
from zero_ext.zero import engine_of

RATES = (1e-2, 3e-3, 1e-1)  # learning rates of steps 0, 1, 2, then again


class Case(NamedTuple):
    """One run. ``read_after`` is a step after which state is read, ``overflow_at`` one whose gradients are
    infinite."""

    steps: int = 5
    micro_batches: int = 1
    clip: float = 0.0
    dtype: str = "fp32"
    fused: bool = True
    undelayed: int = 0
    read_after: int = -1
    overflow_at: int = -1


class SometimesShort(TinyModel):
    """Uses its second block in odd steps only, and not at first."""

    short = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            if not (self.short and number == 1):
                hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def make_optimizer(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    if fused:
        return torch.optim.AdamW(groups_of(model), lr=RATES[0], eps=1e-6)
    return torch.optim.SGD(groups_of(model), lr=RATES[0], momentum=0.9)


def configuration(stage: int, case: Case, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "stage": stage,
        "gradient_clipping": case.clip,
        "timeout_seconds": 120.0,
        "batch": {"gradient_accumulation_steps": case.micro_batches},
        "units": {"bucket_elements": 700},
    }
    if case.dtype != "fp32":
        config["precision"] = {"dtype": case.dtype}
    if case.dtype == "fp16":
        config["loss_scale"] = {"static": 256.0}
    return {**config, **more}


def backward_of(world: World, model: Any, case: Case, step: int) -> list[float]:
    """Forward and backward of a step's micro-batches; their losses."""
    losses = []
    model.short = step % 2 == 0
    for micro in range(case.micro_batches):
        loss = language_loss(model, language_batch(world.seed, step, micro, world.rank))
        losses.append(loss.item())
        model.backward(loss * 1e30 if step == case.overflow_at else loss)
    return losses


class PlainOptimizer:
    """fp32 master weights by name, stepped one parameter at a time."""

    def __init__(self, masters: Mapping[str, torch.Tensor], fused: bool) -> None:
        self.masters = {name: value.detach().clone() for name, value in masters.items()}
        self._fused = fused
        self._moments = {
            name: [torch.zeros_like(value.detach()) for _ in range(2)] for name, value in masters.items()
        }
        self._steps = dict.fromkeys(masters, 0)

    def step(self, name: str, gradient: torch.Tensor, scale: torch.Tensor, rate: float) -> None:
        """One parameter, from its gradient times ``scale``."""
        master, moments = self.masters[name], self._moments[name]
        decay = 0.1 if master.dim() > 1 else 0.0
        if not self._fused:
            direction = gradient.float() * scale
            direction = direction.add(master, alpha=decay) if decay else direction
            moments[0].mul_(0.9).add_(direction)
            master.add_(moments[0], alpha=-rate)
            return
        self._steps[name] += 1
        hyper = [[rate, 0.9, 0.999, 1e-6, decay, float(self._steps[name]), 1.0, 0.0]]
        flat = [values.view(-1) for values in (master, *moments, gradient.contiguous())]
        bounds = torch.tensor([[0, master.numel()]])
        ops.adam_step_(*flat, None, bounds, torch.tensor(hyper, dtype=torch.float64), scale)


def train_stale(world: World, model: nn.Module, stage: int, case: Case) -> tuple[list[float], dict[str, Any]]:
    """The definition. Update i makes W(i + 1) of W(i) and the gradients of step i, whose forward and backward
    use W(i - 1), or W(0) in the first. Undelayed steps are followed by W(i + 1), as is one after which state
    was read. A skipped step makes no update, and is followed by W(i).

    Gradients come from a model on the device that is never stepped: values are loaded into it.
    """
    optimizer = PlainOptimizer(dict(model.named_parameters()), case.fused)
    twin, _ = zero_ext.prepare(
        model, make_optimizer(model, case.fused), configuration(stage, case), process_group=world.group
    )
    seen = copy.deepcopy(optimizer.masters)
    losses = []
    for step in range(case.steps):
        zero_ext.load_full_state_dict(twin, seen)
        losses += backward_of(world, twin, case, step)
        parameters = twin.named_parameters()
        gradients = {name: zero_ext.full_gradient(parameter) for name, parameter in parameters}
        twin.zero_grad()
        seen = copy.deepcopy(optimizer.masters)
        present = {name: value for name, value in gradients.items() if value is not None}
        scale = scale_of(present, case)
        if scale is None:
            continue
        for name, gradient in present.items():
            optimizer.step(name, gradient, scale, RATES[step % len(RATES)])
        if step < case.undelayed or step == case.read_after:
            seen = copy.deepcopy(optimizer.masters)
    dtype = DTYPES[case.dtype]
    return losses, {name: value.to(dtype) for name, value in optimizer.masters.items()}


def scale_of(gradients: Mapping[str, torch.Tensor], case: Case) -> torch.Tensor | None:
    """What gradients are multiplied by; None where they are not finite."""
    scale = torch.tensor(1 / 256 if case.dtype == "fp16" else 1.0)
    if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
        return None
    if case.clip:
        accumulator = torch.zeros(33, dtype=torch.int64)
        for gradient in gradients.values():
            ops.squared_norm_(gradient.contiguous().view(-1), accumulator)
        norm = ops.squared_norm_value(accumulator).sqrt() * scale.double()
        scale *= torch.clamp(case.clip / (norm + 1e-6), max=1.0).float()
    return scale


class Gate:
    """Holds updates back until it is opened."""

    def __init__(self, engine: Any) -> None:
        self._open = threading.Event()
        self.threads: set[int] = set()
        stepper = engine.optimizer_step.stepper
        step = stepper.step

        def held(*arguments: Any) -> Iterator[int]:
            if not self._open.wait(30):
                raise RuntimeError("nobody opened the gate")
            self.threads.add(threading.get_ident())
            yield from step(*arguments)

        stepper.step = held

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


def train_delayed(
    world: World, model: nn.Module, stage: int, case: Case, offload: Mapping[str, Any], late: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The engine's run; updates end before the next forward, or with ``late`` begin after its backward."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
        tiers = {
            "update_mode": "delayed",
            "delay_start_step": case.undelayed,
            "staging_buffer_bytes": 1 << 20,
            **paths,
        }
        model, optimizer = zero_ext.prepare(
            model,
            make_optimizer(model, case.fused),
            configuration(stage, case, offload={**tiers, **offload}),
            process_group=world.group,
        )
        step_of = engine_of(model).optimizer_step
        gate = Gate(engine_of(model))
        losses = []
        for step in range(case.steps):
            losses += backward_of(world, model, case, step)
            gate.open()
            step_of.wait()
            if late and step >= case.undelayed:
                gate.close()
            optimizer.step()
            if not late:
                step_of.wait()
            for group in optimizer.param_groups:
                group["lr"] = RATES[(step + 1) % len(RATES)]
            optimizer.zero_grad()
            if step == case.read_after:
                gate.open()
                zero_ext.full_state_dict(model)
        gate.open()
        return losses, zero_ext.full_state_dict(model)


CASES = [
    Case(),
    Case(fused=False, clip=0.1),
    Case(micro_batches=2, clip=0.1),
    Case(dtype="bf16", micro_batches=2, undelayed=2),
    Case(dtype="bf16", clip=0.1, read_after=1),
    Case(dtype="fp16", overflow_at=2, fused=False),
    Case(dtype="fp16", overflow_at=1, clip=0.5),
]
TIERS = [
    {"optimizer": "host"},
    {"optimizer": "nvme"},
    {"optimizer": "host", "grads": "host"},
    {"optimizer": "nvme", "grads": "host"},
    {"optimizer": "host", "grads": "host", "params": "host"},
    {"optimizer": "nvme", "params": "nvme"},
    {"optimizer": "host", "params": "nvme", "grads": "nvme"},
    {"optimizer": "nvme", "grads": "nvme"},
    {"optimizer": "host", "ratio": 0.5},
]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_the_stale_loop(world: World, stage: int) -> None:
    for number, case in enumerate(CASES):
        if world.size != 2 and (number + stage) % 3:
            continue
        torch.manual_seed(world.seed)
        model = SometimesShort()
        losses, parameters = train_stale(world, copy.deepcopy(model), stage, case)
        fitting = [
            tiers
            for tiers in TIERS
            if not (tiers.keys() & {"params"} and stage < 3) and not (tiers.keys() & {"grads"} and stage < 2)
        ]
        offload = fitting[(number + stage) % len(fitting)]
        late = (number + world.size) % 2 == 0
        found, values = train_delayed(world, copy.deepcopy(model), stage, case, offload, late)
        where = f"{case} {offload} late={late}"
        assert found == losses, where
        for name, value in parameters.items():
            assert torch.equal(values[name], value), f"{name} {where}"


def prepared(world: World, stage: int = 2, dtype: str = "bf16", **offload: Any) -> tuple[Any, Any]:
    torch.manual_seed(world.seed)
    model = SometimesShort()
    policy = {"optimizer": "host", "update_mode": "delayed", "staging_buffer_bytes": 1 << 20, **offload}
    return zero_ext.prepare(
        model,
        make_optimizer(model, True),
        configuration(stage, Case(dtype=dtype), offload=policy),
        process_group=world.group,
    )


def train_step(world: World, model: Any, optimizer: Any, step: int) -> list[float]:
    losses = backward_of(world, model, Case(), step)
    optimizer.step()
    optimizer.zero_grad()
    return losses


@on_ranks(1, 2)
def test_updates_run_on_a_thread_of_their_own_once_delayed(world: World) -> None:
    model, optimizer = prepared(world, delay_start_step=1)
    gate = Gate(engine_of(model))
    gate.open()
    train_step(world, model, optimizer, 0)
    assert gate.threads == {threading.get_ident()} and not engine_of(model).updates.in_progress
    train_step(world, model, optimizer, 1)
    assert engine_of(model).updates.in_progress
    model.finish_update()
    assert len(gate.threads) == 2 and not engine_of(model).updates.in_progress


@on_ranks(1, 2)
def test_bytes_held_and_moved(world: World) -> None:
    for dtype in ("fp32", "bf16"):
        for stage in (1, 2, 3):
            model, optimizer = prepared(world, stage, dtype)
            engine = engine_of(model)
            for step in (1, 3, 5):
                train_step(world, model, optimizer, step)
            breakdown, padded = engine.memory_breakdown(), sum(unit.layout.numel for unit in engine.units)
            wanted = model_state_bytes(stage, world.size, TrainingState({dtype: padded}), delayed=True)
            assert [breakdown[kind] for kind in ("params", "grads", "optimizer")] == [*vars(wanted).values()]
            shard_bytes = padded // world.size * (4 if dtype == "fp32" else 2)
            assert engine.tiers.transfers.last_moved == {
                ("device", "host"): shard_bytes,
                ("host", "device"): shard_bytes,
            }


@on_ranks(1, 2)
def test_a_resumed_run_equals_the_one_that_saved(world: World) -> None:
    with tempfile.TemporaryDirectory() as nvme, tempfile.TemporaryDirectory() as saves:
        saves = world.everyone(saves)[0]
        model, optimizer = prepared(world, 3, optimizer="nvme", nvme_paths=[nvme])
        for step in range(3):
            train_step(world, model, optimizer, step)
        zero_ext.save_checkpoint(saves, model)
        wanted = [train_step(world, model, optimizer, step) for step in range(3, 6)]
        full = zero_ext.full_state_dict(model)
        model, optimizer = prepared(world, 2)
        train_step(world, model, optimizer, 9)  # an update under way does not survive the load
        zero_ext.load_checkpoint(saves, model)
        assert [train_step(world, model, optimizer, step) for step in range(3, 6)] == wanted
        for name, value in zero_ext.full_state_dict(model).items():
            assert torch.equal(value, full[name]), name
        world.barrier()


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
def test_state_is_read_and_edited_as_after_the_update(world: World, stage: int) -> None:
    def trained() -> tuple[Any, Any]:
        model, optimizer = prepared(world, stage)
        for step in range(2):
            train_step(world, model, optimizer, step)
        return model, optimizer

    model, optimizer = trained()
    model.finish_update()
    wanted, state = zero_ext.full_state_dict(model), optimizer.state_dict()
    model, optimizer = trained()
    with zero_ext.gathered(model):
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert any(not torch.equal(before[name], wanted[name]) for name in before)  # what forward uses
    found = optimizer.state_dict()
    assert engine_of(model).updates.in_progress and found["scalars"] == state["scalars"]
    assert all(torch.equal(found["shards"][key], value) for key, value in state["shards"].items())
    with zero_ext.gathered(model, modifier_rank=0), torch.no_grad():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, wanted[name])
        model.norm.weight.fill_(0.5)
    assert bool((zero_ext.full_state_dict(model)["norm.weight"] == 0.5).all())
    model, optimizer = trained()
    optimizer.load_state_dict(state)
    model, optimizer = trained()
    assert zero_ext.load_full_state_dict(model, before) == ([], [])
    assert torch.equal(zero_ext.full_state_dict(model)["head.weight"], before["head.weight"])


@on_ranks(1, 2)
def test_misuse_is_refused(world: World) -> None:
    model, optimizer = prepared(world, 3, params="host")
    train_step(world, model, optimizer, 0)
    loss = language_loss(model, language_batch(world.seed, 1, 0, world.rank))
    zero_ext.full_state_dict(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    train_step(world, model, optimizer, 0)
    with (
        zero_ext.gathered(model.norm.weight),
        pytest.raises(RuntimeError, match="inside forward, backward or"),
    ):
        zero_ext.full_state_dict(model)
    handle = model.norm.register_forward_hook(lambda *_: model.finish_update())
    with pytest.raises(RuntimeError, match="inside forward, backward or"):
        train_step(world, model, optimizer, 1)
    handle.remove()
    train_step(world, model, optimizer, 1)

    model, optimizer = prepared(world, 3, params="host")
    train_step(world, model, optimizer, 0)
    released = model.norm.weight

    def write(*_: Any) -> None:
        with torch.no_grad():
            released.fill_(0.5)

    handle = model.blocks[0].register_forward_hook(write)
    with pytest.raises(RuntimeError, match=r"'norm\.weight': expected no write in a forward while"):
        train_step(world, model, optimizer, 1)
    handle.remove()
    optimizer.zero_grad()
    train_step(world, model, optimizer, 1)

    model, optimizer = prepared(world, 2)
    with torch.no_grad():
        model.norm.weight.fill_(0.5)  # before any update, as without delay
    train_step(world, model, optimizer, 0)
    model.finish_update()
    assert torch.equal(model.norm.weight.detach().float().round(decimals=1), torch.full((12,), 0.5))
    train_step(world, model, optimizer, 1)
    with torch.no_grad():
        model.norm.weight.fill_(0.25)
    with pytest.raises(RuntimeError, match=r"'norm\.weight': expected no write while a delayed update"):
        train_step(world, model, optimizer, 2)


@on_ranks(1, 2)
@pytest.mark.parametrize("surfaces_at", ["step", "read", "load"])
def test_a_failed_transfer_surfaces_on_all_ranks(world: World, surfaces_at: str) -> None:
    with tempfile.TemporaryDirectory() as nvme, tempfile.TemporaryDirectory() as saves:
        saves = world.everyone(saves)[0]
        model, optimizer = prepared(world, 2, optimizer="nvme", nvme_paths=[nvme])
        train_step(world, model, optimizer, 0)
        zero_ext.save_checkpoint(saves, model)
        wanted = [train_step(world, model, optimizer, step) for step in (1, 2)]
        model.finish_update()
        backward_of(world, model, Case(), 3)
        if world.rank == 0:
            ops.store_inject_fault(engine_of(model).tiers.store.handle, False, 0, -5, 1)
        optimizer.step()
        optimizer.zero_grad()
        backward_of(world, model, Case(), 4)
        act = {
            "step": optimizer.step,
            "read": lambda: zero_ext.full_state_dict(model),
            "load": contextlib.nullcontext,
        }[surfaces_at]
        if surfaces_at != "load":
            with pytest.raises(RuntimeError, match=r"optimizer step failed on ranks \[0\]") as caught:
                optimizer.zero_grad() if surfaces_at == "read" else None
                act()
            assert world.rank or "Input/output error" in str(caught.value)
            with pytest.raises(RuntimeError, match="its state is damaged"):
                zero_ext.save_checkpoint(saves, model)
        optimizer.zero_grad()
        zero_ext.load_checkpoint(saves, model)
        assert [train_step(world, model, optimizer, step) for step in (1, 2)] == wanted
        world.barrier()


@on_ranks(1, 2)
def test_a_model_is_dropped_during_an_update(world: World) -> None:
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(world, 3, optimizer="nvme", params="nvme", nvme_paths=[nvme])
        gate = Gate(engine_of(model))
        threads = threading.active_count()
        train_step(world, model, optimizer, 0)
        assert threading.active_count() == threads + 1
        threading.Timer(0.1, gate.open).start()
        del model, optimizer
        gc.collect()
        assert gate.threads and list(Path(nvme).iterdir()) == []


EXITS = """
import sys, torch, zero_ext
from zero_ext.zero import engine_of
from tests.zero.models import TinyModel, language_batch, language_loss
model = TinyModel()
offload = {"optimizer": "nvme", "nvme_paths": [sys.argv[1]], "update_mode": "delayed"}
model, optimizer = zero_ext.prepare(model, torch.optim.AdamW(model.parameters()), {"offload": offload})
language_loss(model, language_batch(0, 0, 0, 0)).backward()
optimizer.step()
assert engine_of(model).updates.in_progress
"""


def test_the_interpreter_exits_during_an_update(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
