"""One order of gathers and reductions on all ranks of a device, in another stream than backward's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zero_ext
from tests.accelerator.stand_in import BACKEND
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import configuration, prepared, sgd, train_step
from zero_ext import ops
from zero_ext.comm import DeviceTransport
from zero_ext.offload import Device
from zero_ext.zero import engine_of
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.reducer import GradientReducer, ReductionSchedule
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.memory.pool_plan import PoolPlan

WIDTH = 24
BEGUN = ("gather", "all_to_all", "reduce_scatter", "broadcast", "all_reduce")


class Block(nn.Module):
    """Its second matrix is used only where ``uses`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.uses = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + torch.tanh(self.first(hidden))
        return hidden + torch.tanh(self.second(hidden)) if self.uses else hidden


class Uneven(nn.Module):
    """Its scale gets its gradient at the beginning of backward; at the end where it is used ``early``.
    ``checkpointed`` runs blocks again in backward. There are more than reductions may be in flight."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.early, self.checkpointed = False, checkpointed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * self.scale if self.early else hidden
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return (hidden if self.early else hidden * self.scale).square().mean()


def losses(world: World, model: nn.Module, inner: Uneven) -> Iterator[torch.Tensor]:
    """Of steps in which ranks use other matrices, and use the scale at other places."""
    generator = torch.Generator().manual_seed(world.seed + world.rank)
    for step in range(5):
        inner.early = step > 0 and world.rank == 1
        for number, block in enumerate(inner.blocks):
            block.uses = step == 0 or (number + step) % (world.rank + 2) != 0
        yield model(torch.randn(3, WIDTH, generator=generator).to(inner.blocks[0].first.weight.device))


def train_steps(
    world: World, inner: Uneven, group: Any, config: dict[str, Any]
) -> tuple[Any, list[torch.Tensor]]:
    """A model prepared and trained in these steps, and its parameters then."""
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    model, optimizer = zero_ext.prepare(inner, optimizer, config, process_group=group)
    for loss in losses(world, model, inner):
        train_step(model, optimizer, loss)
    values = zero_ext.full_state_dict(model, rank0_only=False).values()
    return model, [value.cpu() for value in values]


def trained_plainly(world: World) -> list[torch.Tensor]:
    torch.manual_seed(world.seed)
    model = Uneven()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for loss in losses(world, model, model):
        loss.backward()
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=world.group)
            parameter.grad = gradient / world.size
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach() for value in model.state_dict().values()]


def trained(world: World, config: dict[str, Any]) -> tuple[list[torch.Tensor], list[list[str]]]:
    """Parameters after these steps on the strict stand-in, and what each rank began there."""
    torch.manual_seed(world.seed)
    inner = Uneven().to("stand_in")
    group = dist.new_group(backend=BACKEND)
    assert isinstance(group, dist.ProcessGroup)
    begun: list[str] = []
    original = {name: getattr(DeviceTransport, name) for name in BEGUN}

    def noting(name: str) -> Any:
        def call(exchange: DeviceTransport, tensor: Any, *rest: Any) -> Any:
            first = tensor if isinstance(tensor, torch.Tensor) else tensor[(exchange.rank + 1) % world.size]
            begun.append(f"{name} of {first.numel()} {first.dtype}")
            return original[name](exchange, tensor, *rest)

        return call

    with mock.patch.multiple(DeviceTransport, **{name: noting(name) for name in BEGUN}):
        model, values = train_steps(world, inner, group, config)
    assert engine_of(model).collectives.in_one_order
    dist.destroy_process_group(group)
    return values, world.everyone(begun)


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(3, stand_in=True)
def test_ranks_begin_everything_in_one_order(world: World, stage: int) -> None:
    config = {"stage": stage, "units": {"prefetch_elements": 1, "bucket_elements": 700}}
    found, begun = trained(world, config)
    assert len(begun[0]) > 50
    assert begun[1] == begun[0] and begun[2] == begun[0]
    for one, other in zip(found, trained_plainly(world), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# Vectors stay gathered in the second case: no block's end says that a rank has left one out.
HOST_CASES: list[dict[str, Any]] = [
    {"units": {"prefetch_elements": 1}},
    {"units": {"prefetch_elements": 1, "persistence_threshold": 100, "bucket_elements": 50}},
    {"offload": {"update_mode": "in_backward"}},
]


def trained_in_host_memory(world: World, checkpointed: bool, **more: Any) -> list[torch.Tensor]:
    torch.manual_seed(world.seed)
    config = {"stage": 3, "timeout_seconds": 100, **more}
    model, values = train_steps(world, Uneven(checkpointed), world.group, config)
    assert not engine_of(model).collectives.in_one_order
    return values


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("more", HOST_CASES)
@on_ranks(2, 3, by_turns=True)
def test_in_host_memory_no_rank_waits_for_what_another_has_last(
    world: World, more: dict[str, Any], checkpointed: bool
) -> None:
    wanted = trained_plainly(world)
    for one, other in zip(trained_in_host_memory(world, checkpointed, **more), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Counts:
    """In the place of collectives: agreements answer with the largest of some numbers."""

    def __init__(self, others: list[int]) -> None:
        self.world_size, self.rank, self.agreements = 1 + len(others), 0, 0
        self._others = others

    def gather(self, counts: torch.Tensor, own: torch.Tensor, kind: str, label: str) -> Any:
        assert own.data_ptr() == counts.data_ptr()
        counts[1:] = torch.tensor(self._others)
        self.agreements += 1
        return mock.Mock()


def test_positions_are_learned_once() -> None:
    collectives: Any = Counts([2, 0])
    schedule = ReductionSchedule(collectives, ahead=2)
    schedule.begin(lambda: False)
    assert schedule.most == 2
    assert [schedule.at_gather(begun) for begun in (0, 3)] == [2, 3] and schedule.most == 3 + 2
    assert collectives.agreements == 2
    schedule.learn()
    schedule.begin(lambda: False)
    assert schedule.most == 2  # another one waits, even where it is ready
    assert [schedule.at_gather(begun) for begun in (0, 2)] == [2, 3] and collectives.agreements == 2
    assert schedule.most > 1000  # no gather is expected
    assert schedule.at_gather(5) == 5 and collectives.agreements == 3  # and one comes
    schedule.learn()
    schedule.begin(lambda: False)
    assert [schedule.at_gather(0) for _ in range(3)] == [2, 3, 5] and collectives.agreements == 3


def test_where_no_gather_was_learned_none_is_waited_for() -> None:
    collectives: Any = Counts([2, 0])
    schedule = ReductionSchedule(collectives, ahead=2)
    schedule.begin(lambda: False)
    assert schedule.most == 2
    schedule.learn()
    schedule.begin(lambda: False)
    assert schedule.most > 1000 and collectives.agreements == 0
    schedule.begin(lambda: True)
    assert schedule.most == 2


@pytest.mark.parametrize(("stage", "units"), [(1, {}), (2, {}), (3, {"reuse_elements": 1 << 40})])
@on_ranks(2, stand_in=True)
def test_without_gathers_offloaded_gradients_do_not_pile_up(
    world: World, stage: int, units: dict[str, int]
) -> None:
    """The host waits for their way to its memory, and nothing in backward makes ranks agree meanwhile."""
    torch.manual_seed(world.seed)
    inner = Uneven().to("stand_in")
    config = {"stage": stage, "offload": {"optimizer": "host"}, "units": {"bucket_elements": 700, **units}}
    most: list[int] = []
    waiting: list[int] = []
    original = GradientReducer.arrived

    def arrived(reducer: GradientReducer, *rest: Any) -> None:
        original(reducer, *rest)
        full = (each for each in reducer.gradients if each.complete and not each.reducing)
        waiting.append(sum(each.has_local for each in full))

    offered = mock.patch.object(dist, "get_backend_config", lambda group: f"stand_in:{BACKEND}")
    with offered, mock.patch.object(GradientReducer, "arrived", arrived):
        optimizer = torch.optim.AdamW(inner.parameters(), 0.1)
        model, optimizer = zero_ext.prepare(inner, optimizer, config, process_group=world.group)
        assert engine_of(model).collectives.in_one_order
        for _ in range(4):
            waiting.clear()
            model(torch.randn(3, WIDTH).to("stand_in")).backward()
            optimizer.step()
            optimizer.zero_grad()
            most.append(max(waiting))
    assert len(engine_of(model).reducer.gradients) > 5
    assert most[-1] <= 1, most


@on_ranks(2, stand_in=True)
def test_a_gather_after_a_learned_pass_without_any(world: World) -> None:
    """Reading a weight between forward and backward releases its unit, which was kept. The host of the rank
    whose gradients come early must not wait for what the other begins after the gather alone."""
    torch.manual_seed(world.seed)
    inner = Uneven().to("stand_in")
    config = {
        "stage": 3,
        "offload": {"optimizer": "host", "grads": "host"},
        "timeout_seconds": 60.0,
        "batch": {"gradient_accumulation_steps": 2},
        "units": {"reuse_elements": 1 << 40, "prefetch_elements": 0},
    }
    offered = mock.patch.object(dist, "get_backend_config", lambda group: f"stand_in:{BACKEND}")
    with offered:
        optimizer = torch.optim.AdamW(inner.parameters(), 0.1)
        model, optimizer = zero_ext.prepare(inner, optimizer, config, process_group=world.group)
        for step in range(6):
            last = step == 5
            model(torch.randn(3, WIDTH).to("stand_in")).backward()
            inner.early = last and world.rank == 1
            loss = model(torch.randn(3, WIDTH).to("stand_in"))
            if last:
                schedule: Any = engine_of(model).reducer._schedules
                assert schedule._due == []
                inner.blocks[0].first.weight.norm().item()  # on all ranks
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(schedule._due) > 0


NBYTES = 4096


class Watch:
    """What happens in a backward pass of ``engine``: whether ops run in the ``outer`` stream, how many units
    wait to be packed whenever a gradient comes, and whether the memory of packed ones is kept until then."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.outer = torch.accelerator.current_stream()
        self.outside: list[bool] = []
        self.waiting: list[int] = []
        self.retained: list[bool] = []
        self.retained_longer: list[bool] = []
        self._packed: list[StorageWeakRef] = []

    @contextlib.contextmanager
    def watching(self) -> Any:
        add = UnitGradients.add
        self._packed.clear()

        def watched_add(gradients: UnitGradients, index: int, gradient: torch.Tensor) -> None:
            self.retained += [not each.expired() for each in self._packed]
            add(gradients, index, gradient)
            self.retained_longer += [not each.expired() for each in self._packed]
            self._packed.clear()
            self.waiting.append(sum(bool(each._waiting) for each in self.engine.reducer.gradients))

        def pack(flat: torch.Tensor, tensors: list[torch.Tensor], offsets: list[int]) -> None:
            self._packed += [StorageWeakRef(each.untyped_storage()) for each in tensors]
            original_pack(flat, tensors, offsets)

        original_pack = self._noted(ops.pack_)
        with (
            mock.patch.object(UnitGradients, "add", watched_add),
            mock.patch.object(ops, "pack_", pack),
            mock.patch.object(ops, "sum_shards_", self._noted(ops.sum_shards_)),
        ):
            yield

    def _noted(self, original: Callable[..., None]) -> Callable[..., None]:
        def op(*arguments: Any) -> None:
            self.outside.append(torch.accelerator.current_stream() == self.outer)
            original(*arguments)

        return op


@on_ranks(1, 2, stand_in=True)
@pytest.mark.parametrize("accumulation", ["declared", "no_sync"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backward_goes_on_and_its_gradients_do_not_pile_up(
    world: World, stage: int, accumulation: str
) -> None:
    """Whether a pass reduces them or not, gradients of autograd wait while their unit is not complete, and
    until the next one comes."""
    torch.manual_seed(world.seed)
    model = TinyModel().to("stand_in")
    config = configuration(stage) | {"units": {"bucket_elements": 700}}
    if accumulation == "declared":
        config["batch"] = {"gradient_accumulation_steps": 2}
    model, optimizer = zero_ext.prepare(model, sgd(model.parameters()), config, process_group=world.group)
    watch = Watch(engine_of(model))
    for number in range(2):
        retained = number == 0 and accumulation == "no_sync"
        with watch.watching(), model.no_sync() if retained else contextlib.nullcontext():
            language_loss(model, language_batch(world.seed, number, 0, world.rank).to("stand_in")).backward()
    assert watch.outside
    assert not any(watch.outside)
    assert max(watch.waiting) <= 2 < len(engine_of(model).units)
    assert watch.retained
    assert all(watch.retained)
    assert not any(watch.retained_longer)
    optimizer.step()


@on_ranks(2, stand_in=True)
def test_collectives_of_several_phases_continue_in_it(world: World) -> None:
    model = TinyModel().to("stand_in")
    model, _ = prepared(world, model, 3, sgd)
    collectives, outer = engine_of(model).collectives, torch.accelerator.current_stream()
    for exchange in (collectives._gathers, collectives._reductions):
        with exchange.order.beside():
            assert torch.accelerator.current_stream() != outer


@pytest.mark.parametrize("planned", [0, NBYTES])
@on_ranks(1, stand_in=True)
def test_memory_released_on_the_stream_is_reused_after_its_use(world: World, planned: int) -> None:
    """Inside the region and outside it."""
    torch.stand_in.set_schedule("lazy")  # type: ignore[attr-defined]
    device = Device(torch.device("stand_in", 0))
    pool = BufferPool(PoolPlan(planned, {}), device)
    wanted = torch.randn(NBYTES // 4, generator=torch.Generator().manual_seed(world.seed))
    source = wanted.to("stand_in")
    torch.accelerator.synchronize()
    with device.reduction_stream.entered(), pool.growing():
        lent = pool.acquire(NBYTES)
        address = lent.data_ptr()
        lent.view(torch.float32).copy_(source)
        pool.release(lent)
    with pool.growing():
        again = pool.acquire(NBYTES)
    assert again.data_ptr() == address
    assert torch.equal((again.view(torch.float32) + 1).cpu(), wanted + 1)
