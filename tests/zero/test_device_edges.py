"""A model on an accelerator as users meet it, and groups whose backend serves no host tensor."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_ext
from tests.accelerator.host_waits import HostWaits
from tests.accelerator.stand_in import BACKEND
from tests.multi.mute_group import mute_group
from tests.multi.on_ranks import on_ranks
from tests.multi.pool import RankPool
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, check_same, configuration, language_steps, train_step
from zero_ext.zero import engine_of

DEVICE = "stand_in:0"
TIERS = [{}, {"optimizer": "host"}, {"optimizer": "host", "grads": "host", "params": "host"}]


class Normalised(nn.Module):
    """Running statistics, a buffer that is not saved, a parameter outside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("scale", torch.full((8,), 0.5, device="cpu"), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(values)) * self.scale
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return hidden.square().mean()


def adam_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def on_device(world: World, model: nn.Module | None = None, **config: Any) -> tuple[Any, Any]:
    """A model on the device, prepared with its optimizer."""
    torch.manual_seed(world.seed)
    model = Normalised().to(DEVICE) if model is None else model
    return zero_ext.prepare(model, adam_of(model), config, process_group=world.group)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, count: int = 2) -> list[float]:
    losses = []
    for step in range(count):
        generator = torch.Generator().manual_seed(world.seed + 10 * step + world.rank)
        loss = model(torch.randn(5, 6, generator=generator).to(engine_of(model).device))
        losses.append(train_step(model, optimizer, loss))
    return losses


def initialized(how: str, config: dict[str, object], world: World) -> nn.Module:
    """The same model, made in one of the ways that users have."""
    torch.manual_seed(world.seed)
    if how.startswith("init"):
        meta = torch.device("meta") if how == "init_meta" else contextlib.nullcontext()
        with zero_ext.Init(config, process_group=world.group), meta:
            return Normalised()
    model = Normalised()
    return model.to(DEVICE) if how == "device" else model


@on_ranks(1, 3, stand_in=True)
@pytest.mark.parametrize("tiers", TIERS, ids=["device", "optimizer", "host"])
def test_however_a_model_is_initialized_it_trains_on_the_device(world: World, tiers: dict[str, str]) -> None:
    config = {"stage": 3, "offload": tiers, "timeout_seconds": 20.0}
    seen = {}
    for how in ("device", "argument", "init", "init_meta"):
        model = initialized(how, config, world)
        retained = dict(model.named_parameters())
        device = DEVICE if how == "argument" else None
        model, optimizer = zero_ext.prepare(
            model, adam_of(model), config, process_group=world.group, device=device
        )
        assert engine_of(model).device == torch.device(DEVICE)
        assert all(parameter is retained[name] for name, parameter in model.named_parameters())
        assert {each.device for each in (*model.parameters(), *model.buffers())} == {torch.device(DEVICE)}
        losses = steps(model, optimizer, world)
        state = zero_ext.full_state_dict(model)
        assert {each.device.type for each in state.values()} == {"cpu"}
        seen[how] = (losses, state)
    for how, (losses, state) in seen.items():
        assert losses == seen["device"][0], how
        check_same(state, seen["device"][1])


@on_ranks(2, stand_in=True)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_are_read_and_edited_where_they_are(world: World, stage: int) -> None:
    model, optimizer = on_device(world, stage=stage)
    full_model = {name: value.clone() for name, value in zero_ext.full_state_dict(model).items()}
    with zero_ext.gathered(model):
        assert torch.equal(model.first.weight.cpu(), full_model["first.weight"])
    with zero_ext.gathered(model.first, modifier_rank=1), torch.no_grad():
        if world.rank == 1:
            model.first.weight.fill_(2.0)
    assert zero_ext.full_state_dict(model)["first.weight"].eq(2.0).all()
    zero_ext.load_full_state_dict(model, full_model)
    model(torch.ones(5, 6, device=DEVICE)).backward()
    gradients = [zero_ext.full_gradient(parameter) for parameter in model.parameters()]
    assert {each.device for each in gradients} == {torch.device(DEVICE)}
    assert len({tuple(each) for each in world.everyone(gradients[0].flatten().tolist())}) == 1
    norm = torch.stack([each.cpu().double().norm() for each in gradients]).norm()
    assert float(model.clip_grad_norm_(1e9)) == pytest.approx(float(norm), rel=1e-5)
    optimizer.step()


@on_ranks(2, stand_in=True)
def test_ranks_start_with_the_buffers_of_rank_0(world: World) -> None:
    model = Normalised().to(DEVICE)
    model.norm.running_mean.fill_(float(world.rank + 1))
    model, _ = on_device(world, model, stage=3)
    assert model.norm.running_mean.tolist() == [1.0] * 8
    assert model.scale.tolist() == [0.5] * 8


@on_ranks(1, stand_in=True)
def test_a_prepared_model_stays_where_it_is(world: World) -> None:
    model, _ = on_device(world, stage=3)
    assert model.to(DEVICE) is model and model.float() is model
    for move in (lambda: model.cpu(), lambda: model.to("meta"), lambda: model.to(torch.bfloat16)):
        with pytest.raises(RuntimeError, match=r"\.to\(\).* would break .*move it to its device, before"):
            move()


@on_ranks(1, stand_in=True)
def test_parameters_on_several_devices_are_refused(world: World) -> None:
    model = Normalised()
    model.first.to(DEVICE)
    refusal = r"expected one device, got 'first\.weight' on 'stand_in:0', 'norm\.weight' on 'cpu'"
    with pytest.raises(ValueError, match=refusal):
        zero_ext.prepare(model, adam_of(model), process_group=world.group)
    model, _ = zero_ext.prepare(model, adam_of(model), process_group=world.group, device=DEVICE)
    assert {each.device for each in (*model.parameters(), *model.buffers())} == {torch.device(DEVICE)}


class Wide(nn.Module):
    """4 MiB of parameters in fp32, in blocks of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))


@on_ranks(1, 2, stand_in=True)
@pytest.mark.parametrize(("limit", "advice"), [(6, "'offload.optimizer' 'host'"), (1, "Use more ranks")])
def test_a_model_that_does_not_fit_is_refused_with_what_would(world: World, limit: int, advice: str) -> None:
    device = torch.stand_in  # type: ignore[attr-defined]
    model = Wide()
    before = model.blocks[0].weight.clone()
    config = {"stage": 1, "precision": {"dtype": "bf16"}}
    gc.collect()  # what other tests left would go at any time
    used = torch.accelerator.memory_allocated(DEVICE)
    device.set_memory_limit(used + (limit << 20), DEVICE)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            zero_ext.prepare(model, adam_of(model), config, process_group=world.group, device=DEVICE)
    finally:
        device.set_memory_limit(1 << 40, DEVICE)
    text = str(raised.value)
    optimizer = 12.0 / world.size
    for section in ("params 2.0 MiB", "grads 2.0 MiB", f"optimizer {optimizer:.1f} MiB", "got ", advice):
        assert section in text, text
    assert "Nothing was sharded." in text and torch.equal(model.blocks[0].weight, before)
    zero_ext.prepare(model, adam_of(model), config, process_group=world.group, device=DEVICE)


@on_ranks(2, stand_in=True)
@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_torchs_default_device_is_the_models_alone(world: World, name: str) -> None:
    config = {
        "stage": 3,
        "gradient_clipping": 1.0,
        "offload": {"optimizer": "host"},
        "batch": {"gradient_accumulation_steps": 2},
    }
    torch.set_default_device(DEVICE)
    try:
        model = Normalised().to(DEVICE)
        model, optimizer = zero_ext.prepare(
            model, getattr(torch.optim, name)(model.parameters(), lr=1e-2), config, process_group=world.group
        )
        for _ in range(2):
            model(torch.randn(5, 6)).backward()
            model(torch.randn(5, 6)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert zero_ext.full_state_dict(model)["first.weight"].isfinite().all()
    finally:
        torch.set_default_device(None)  # "cpu" would stay on as a mode over every later function


@on_ranks(1, stand_in=True)
def test_a_batch_in_host_memory_is_refused_as_torch_refuses_it(world: World) -> None:
    plain, local = Normalised().to(DEVICE), torch.randn(5, 6)
    with pytest.raises(RuntimeError) as wanted:
        plain(local)
    assert "cpu" in str(wanted.value) and DEVICE in str(wanted.value)
    for stage, tiers in ((2, {}), (3, {}), (3, TIERS[2])):
        model, optimizer = on_device(world, stage=stage, offload=tiers)
        first = steps(model, optimizer, world)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=re.escape(str(wanted.value))):
                model(local)
        # Nothing was changed: training goes on as if nobody had tried.
        other, other_optimizer = on_device(world, stage=stage, offload=tiers)
        assert steps(other, other_optimizer, world) == first
        assert steps(model, optimizer, world) == steps(other, other_optimizer, world)


@on_ranks(1, stand_in=True)
@pytest.mark.parametrize("tiers", TIERS)
def test_a_model_goes_when_its_device_has_nothing_to_do(world: World, tiers: dict[str, str]) -> None:
    """Before any of its memory: a copy on a stream of its own would write where others have theirs."""
    model, optimizer = on_device(world, stage=3, offload=tiers)
    steps(model, optimizer, world)
    engine, found = engine_of(model), []
    device = engine.tiers.device
    torch.stand_in.set_schedule("lazy")  # type: ignore[attr-defined]
    into, source = torch.zeros(1000, device=DEVICE), torch.ones(1000).pin_memory()
    event = device.copy(into, source)._event  # type: ignore[attr-defined]
    storages = (unit.storage for unit in engine.units)
    for each in (engine.pool, engine.tiers, *engine.units, *engine.masters, *storages):
        weakref.finalize(each, lambda: found.append(event.query())).atexit = False
    del each, storages, engine, device, model, optimizer
    gc.collect()
    assert found and all(found)


@on_ranks(1, stand_in=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_a_step_on_the_device_waits_for_nothing(world: World, kind: str, stage: int) -> None:
    accelerator = torch.get_device_module("stand_in")
    torch.manual_seed(world.seed)
    model = Normalised().to(DEVICE)
    own = adam_of(model) if kind == "adamw" else zero_ext.Lion(model.parameters(), lr=1e-3)
    prepared, optimizer = zero_ext.prepare(model, own, {"stage": stage}, process_group=world.group)
    values = torch.randn(5, 6).to(DEVICE)
    for step in range(3):
        prepared(values).backward()
        pageable = accelerator.pageable_copies()
        with HostWaits() as waits:
            optimizer.step()
        assert waits.found == [], step
        assert accelerator.pageable_copies() == pageable
        optimizer.zero_grad()
    with HostWaits() as waits:
        float(values.sum())
        values.to("cpu")
        torch.accelerator.synchronize()
    assert len(waits.found) == 3, waits.found


@on_ranks(1, stand_in=True)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_graph_captures_neither_the_step_nor_a_forward_that_needs_python(world: World, stage: int) -> None:
    accelerator = torch.get_device_module("stand_in")
    capturing = functools.partial(
        mock.patch.object, accelerator, "is_current_stream_capturing", lambda: True, create=True
    )
    no_forward = pytest.raises(RuntimeError, match="a forward: expected no capture of a graph")
    model, optimizer = on_device(world, stage=stage, offload={"params": "host"} if stage == 3 else {})
    values = torch.randn(5, 6).to(DEVICE)
    loss = model(values)
    with capturing(), pytest.raises(RuntimeError, match="a backward: expected no capture of a graph"):
        loss.backward(retain_graph=True)
    optimizer.zero_grad()
    if stage == 0:
        # As torch.cuda.make_graphed_callables does: its caller gets the gradients, the engine none.
        block = model.blocks[0]
        output = block(torch.randn(5, 8).to(DEVICE)).sum()
        with capturing():
            found = torch.autograd.grad(output, tuple(block.parameters()))
        assert all(gradient is not None for gradient in found) and not engine_of(model).in_use
        assert block.weight.grad is None
    model(values).backward()
    with capturing():
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\): expected no capture.*stages 0 to 2"):
            optimizer.step()
        with no_forward:
            model(values)
        with torch.no_grad(), no_forward if stage == 3 else contextlib.nullcontext():
            model(values)
    optimizer.step()


STEPS = 2


def trained(
    world: World, group: dist.ProcessGroup, stage: int, early: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and whole parameters after some steps, with the state saved and loaded between them."""
    torch.manual_seed(world.seed)
    config = configuration(stage, gradient_clipping=0.5)
    if early:
        with zero_ext.Init(config=config, process_group=group):
            model = TinyModel(tied=True)
    else:
        model = TinyModel(tied=True)
    prepared, optimizer = zero_ext.prepare(model, adamw(model.parameters()), config, process_group=group)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            folder = world.shared_folder()
            zero_ext.save_checkpoint(folder, prepared)
            zero_ext.load_checkpoint(folder, prepared)
        losses += language_steps(world, prepared, optimizer, [step])
    return losses, zero_ext.full_state_dict(prepared, rank0_only=False)


@pytest.mark.parametrize(("stage", "early"), [(0, False), (2, False), (3, False), (3, True)])
@on_ranks(4, by_turns=True)
def test_a_group_without_a_backend_for_the_host_trains_saves_and_loads(
    world: World, stage: int, early: bool
) -> None:
    with pytest.raises(RuntimeError, match="No backend"):
        dist.all_reduce(torch.ones(1), group=mute_group())
    wanted, values = trained(world, world.group, stage, early)
    losses, found = trained(world, mute_group(), stage, early)
    assert losses == wanted
    assert found.keys() == values.keys() and len(values) > 5
    for name, value in values.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def strict_pool() -> Iterator[RankPool]:
    """Two ranks of a world that has the stand-in's own collectives alone."""
    pool = RankPool(2, stand_in=True, backend=BACKEND)
    yield pool
    pool.close()


def refuse_to_form(world: World) -> str:
    if world.rank == 1:
        torch.get_device_module("stand_in").refuse_communicators()
    return "stand_in"


# Where each rank's model is, and what all ranks are told.
REFUSED: dict[str, tuple[Callable[[World], str], type[Exception], str]] = {
    "ranks on different kinds of device": (
        lambda world: ("cpu", "stand_in")[world.rank],
        ValueError,
        r"one kind of device.*got cpu on rank 0, stand_in over stand_in_ccl on rank 1",
    ),
    "a communicator that does not form": (
        refuse_to_form,
        RuntimeError,
        r"stand_in over stand_in_ccl: the connections of the ranks did not form: .*rank 1 could not form a",
    ),
}


def refused(world: World, what: str) -> None:
    """One error on every rank, nothing sharded, and ranks that go on."""
    position, kind, message = REFUSED[what]
    world.barrier()  # the world's own communicator is there
    model = TinyModel(tied=True).to(position(world))
    before = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    try:
        with pytest.raises(kind, match=message):
            zero_ext.prepare(model, adamw(model.parameters()), configuration(3))
    finally:
        torch.get_device_module("stand_in").refuse_communicators(-1)
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name
    prepared, _ = zero_ext.prepare(model.to("stand_in"), adamw(model.parameters()), configuration(3))
    language_loss(prepared, language_batch(world.seed, 0, 0, world.rank).to("stand_in")).backward()


@pytest.mark.parametrize("what", REFUSED)
def test_ranks_that_cannot_be_connected_are_refused_before_anything_is_sharded(
    strict_pool: RankPool, what: str
) -> None:
    strict_pool.run(2, f"{__name__}:refused", {"what": what})
