"""Units that are live: the cap, look-ahead, reuse, and departures from the recorded order."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import (
    ChosenBlocks,
    TinyModel,
    language_batch,
    language_loss,
)
from tests.zero.training import (
    Plan,
    adamw,
    check_equal,
    check_same,
    configuration,
    language_steps,
    placed,
    prepared,
    train_prepared,
)
from zero_ext.zero import engine_of
from zero_ext.zero.units.released_params import ReleasedTensor
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.pool_replay import PlannedPasses, PlannedUnit
from zero_ext.zero.unshard.prefetcher import GatherOrder, Prefetcher


def sizes_of(world: World) -> list[int]:
    """Elements of the units of ``tiny``."""
    return [unit.layout.numel for unit in engine_of(prepared(world, tiny(world), 3, None)[0]).units]


class Peak:
    """Records the most elements that were live at any gather."""

    def __init__(self) -> None:
        self.elements = 0
        self.gathers = 0
        self.combined = 0

    def watch(self) -> Any:
        original = Unit.to_gathering

        def to_gathering(unit: Unit) -> None:
            original(unit)
            self.gathers += 1
            live = [other for other in self.units if other.state.value != "released"]
            self.elements = max(self.elements, sum(other.layout.numel for other in live))
            self.combined = max(self.combined, len(live))

        return mock.patch.object(Unit, "to_gathering", to_gathering)

    units: tuple[Unit, ...] = ()


def peak_of(world: World, steps: int = 4, **units: Any) -> tuple[Peak, list[str], list[float]]:
    """Trains ``tiny`` a few steps under a cap; the peak, the warnings and the losses."""
    peak = Peak()
    with warnings.catch_warnings(record=True) as caught, peak.watch():
        warnings.simplefilter("always")
        model, optimizer = prepared(world, tiny(world), units=units)
        peak.units = engine_of(model).units
        losses = language_steps(world, model, optimizer, range(steps))
    return peak, [str(item.message) for item in caught if "max_live_elements" in str(item.message)], losses


def tiny(world: World) -> TinyModel:
    torch.manual_seed(world.seed)
    return TinyModel(layers=5)


@on_ranks(2)
def test_live_elements_never_exceed_the_cap(world: World) -> None:
    free, none, losses = peak_of(world)
    assert not none
    sizes = sizes_of(world)
    for cap in (max(sizes), sum(sorted(sizes)[-2:]), sum(sizes) // 2):
        peak, received, capped = peak_of(world, max_live_elements=cap)
        assert peak.elements <= cap < free.elements or cap >= free.elements
        assert not received
        assert capped == losses
    assert free.combined > 2


@on_ranks(2)
def test_a_unit_above_the_cap_is_gathered_alone_with_one_warning_naming_it(world: World) -> None:
    sizes = sizes_of(world)
    block = max(sizes)
    peak, received, losses = peak_of(world, max_live_elements=block - 1)
    assert peak.elements == block > max(size for size in sizes if size < block)
    assert len(received) == len(set(received)) == sum(size == block for size in sizes)
    assert all("unit 'blocks." in text and f"= {block - 1}" in text for text in received)
    assert losses == peak_of(world)[2]


@on_ranks(2)
def test_no_look_ahead_when_it_is_off(world: World) -> None:
    peak, _, losses = peak_of(world, prefetch_elements=0)
    assert peak.combined == 1
    ahead, _, same = peak_of(world)
    # In each of the four steps but the first, which learns, the head stays from forward to backward.
    assert ahead.combined > 1 and ahead.gathers == peak.gathers - 3
    assert losses == same


@on_ranks(2, 3)
def test_another_order_than_the_recorded_one_is_still_right(world: World) -> None:
    runs, state = [], []
    for stage in (0, 3):
        torch.manual_seed(world.seed)
        model, optimizer = prepared(world, ChosenBlocks(4), stage)
        runs.append([])
        for step in range(6):
            model.order = [(number * (1 + 2 * (step % 2)) + step) % 4 for number in range(4)]
            runs[-1] += language_steps(world, model, optimizer, [step])
        state.append(zero_ext.full_state_dict(model))
    assert runs[0] == runs[1]
    check_same(*state)
    assert engine_of(model).prefetcher.live_elements == 0


@on_ranks(2)
def test_only_what_backward_needs_first_stays_after_a_forward(world: World) -> None:
    model, optimizer = prepared(world, TinyModel())
    prefetcher: Prefetcher = engine_of(model).prefetcher
    head = engine_of(model).index[model.head.weight][0].layout.numel
    for step in range(3):
        with torch.no_grad():
            language_loss(model, language_batch(world.seed, step, 1, world.rank))
        prefetcher.release_idle()
        loss = language_loss(model, language_batch(world.seed, step, 0, world.rank))
        assert prefetcher.live_elements == (head if step else 0)
        assert all(isinstance(each, ReleasedTensor) for each in model.parameters())
        loss.backward()
        assert prefetcher.live_elements == 0
        optimizer.step()
        optimizer.zero_grad()
        with zero_ext.gathered(model.head.weight):
            assert prefetcher.live_elements == head
        assert prefetcher.live_elements == 0


class Untied(ChosenBlocks):
    """``mark`` reads the embedding's weight again."""

    def __init__(self, mark: bool = False) -> None:
        super().__init__(layers=4)
        if mark:
            self.embedding.register_forward_hook(lambda own, ids, out: out * own.weight.square().mean())


def gathers_of_steps(world: World, model: Untied, layers: list[int]) -> list[Counter[str]]:
    """Gathers by unit of steps that run so many blocks; the losses are those of stage 0."""
    twin = copy.deepcopy(model)
    pairs = [prepared(world, net, stage, gradient_clipping=1.0) for net, stage in ((model, 3), (twin, 0))]
    found: list[Counter[str]] = []
    original = Unit.to_gathering

    def to_gathering(unit: Unit) -> None:
        found[-1][unit.name] += 1
        original(unit)

    with mock.patch.object(Unit, "to_gathering", to_gathering):
        for step, count in enumerate(layers):
            found.append(Counter())
            losses = []
            for each, optimizer in pairs:
                each.order = range(count)
                losses += language_steps(world, each, optimizer, [step])
            assert losses[0] == losses[1]
    return found


@on_ranks(2)
def test_embedding_and_head_are_gathered_once_a_step(world: World) -> None:
    torch.manual_seed(world.seed)
    twice = dict.fromkeys(("blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm"), 2)
    first, *others = gathers_of_steps(world, Untied(), [4, 4, 4])
    assert first == {**twice, "embedding": 1, "head": 2}  # the first step learns the order
    assert others == [{**twice, "embedding": 1, "head": 1}] * 2
    # Backward needs the weight that more than the look-up has read.
    marked = gathers_of_steps(world, Untied(mark=True), [4, 4, 4])
    assert marked[1:] == [{**twice, "embedding": 2, "head": 1}] * 2


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ("ab", "ab"),
        ("ab ac", "ab"),  # one departure of the same length
        ("ab ac ac", "ac"),
        ("ab abc", "abc"),
        ("abc ab", "abc"),
        ("abc ab ab", "ab"),
        ("ab a a", "ab"),  # a block called by itself
    ],
)
def test_the_prediction_is_the_longest_pass_or_one_that_came_twice(passes: str, expected: str) -> None:
    units = {name: SimpleNamespace(name=name, spec=SimpleNamespace(experts=None)) for name in "abc"}
    order: GatherOrder[Any] = GatherOrder()
    for names in passes.split():
        order.begin()
        for name in names:
            order.needed(units[name])
        order.finish()
    order.begin()
    assert "".join(unit.name for unit in order.upcoming()) == expected


@on_ranks(2)
def test_a_shorter_order_is_learned(world: World) -> None:
    torch.manual_seed(world.seed)
    found = gathers_of_steps(world, Untied(), [4, 2, 2, 2])
    assert found[1]["blocks.2"] == 2  # ahead, in vain
    once = dict.fromkeys(("embedding", "head"), 1)
    assert found[3] == {**once, "blocks.0": 2, "blocks.1": 2, "norm": 2}


ALL = 1 << 40
LAYERS = 5


def tiny_prepared(world: World, stage: int = 3, **units: Any) -> tuple[Any, Any]:
    config = configuration(stage, units=units)
    model = tiny(world)
    return zero_ext.prepare(model, adamw(model.parameters()), config, process_group=world.group)


def step_of(world: World, model: Any, optimizer: Any, number: int) -> None:
    language_steps(world, model, optimizer, [number])


@on_ranks(2, 3, by_turns=True)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", ["declared", "no_sync"])
def test_training_is_the_same(world: World, dtype: str, accumulation: str) -> None:
    plan = Plan(steps=3, micro_batches=2, accumulation=accumulation, clip=0.1, dtype=dtype)
    runs = []
    for units in ({}, {"reuse_elements": ALL}, {"reuse_elements": ALL, "max_live_elements": 3000}):
        config = configuration(3, plan, units=units)
        runs.append(train_prepared(world, tiny(world), language_loss, language_batch, config, plan))
    for run in runs[1:]:
        check_equal(runs[0], run)


@on_ranks(2)
def test_with_all_of_them_a_step_sends_what_stage_2_sends(world: World) -> None:
    """One gather of each unit and one reduction, and no staging beyond what was planned."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = tiny_prepared(world, reuse_elements=ALL)
        for number in range(3):
            step_of(world, model, optimizer, number)
    engine = engine_of(model)
    numel = sum(unit.layout.numel for unit in engine.units)
    sent = engine.traffic.last_elements
    assert sent["gather"] == sent["reduce_scatter"] == numel
    replicated, steps = tiny_prepared(world, stage=2)
    for number in range(3):
        step_of(world, replicated, steps, number)
    traffic = engine_of(replicated).traffic.last_elements
    # Units of stage 2 are larger, and have less padding.
    assert traffic["gather_updated"] == pytest.approx(numel, rel=0.01)
    assert traffic["reduce_scatter"] == pytest.approx(numel, rel=0.01)


@on_ranks(2)
def test_a_unit_stays_within_the_distance_and_goes_beyond_it(world: World) -> None:
    model, optimizer = tiny_prepared(world)
    sizes = {unit.name: unit.layout.numel for unit in engine_of(model).units}
    block = sizes[f"blocks.{LAYERS - 1}"]
    # Between the last block's uses lies what follows it, forward and backward; one further back, two blocks.
    for blocks in range(1, LAYERS):
        after = sum(size for name, size in sizes.items() if not name.startswith(("blocks", "embedding")))
        reach = 2 * after + 2 * (blocks - 1) * block
        model, optimizer = tiny_prepared(world, reuse_elements=reach)
        engine = engine_of(model)
        for number in range(3):
            language_loss(model, language_batch(world.seed, number, 0, world.rank))
            retained = {unit.name for unit in engine.units if unit.is_aside}
            engine.prefetcher.release_idle()
            step_of(world, model, optimizer, number)
        stayed = {f"blocks.{number}" for number in range(LAYERS - blocks, LAYERS)}
        assert {name for name in retained if name.startswith("blocks")} == stayed, blocks


@on_ranks(2)
def test_the_cap_holds_and_look_ahead_goes_on(world: World) -> None:
    """Kept units leave room for the next one: none is gathered only when it is needed."""
    free, _ = tiny_prepared(world)
    block = max(unit.layout.numel for unit in engine_of(free).units)
    late: list[str] = []
    model, optimizer = tiny_prepared(
        world, reuse_elements=ALL, max_live_elements=4 * block, prefetch_elements=1
    )
    engine = engine_of(model)

    def received(event: Any) -> None:
        assert engine.prefetcher.live_elements <= 4 * block
        if type(event).__name__ == "GatherEvent" and not event.prefetched:
            late.append(event.unit)

    for number in range(4):
        if number == 3:
            engine.subscribe(received)
        step_of(world, model, optimizer, number)
    assert len(late) <= 1  # what forward begins with
    numel = sum(unit.layout.numel for unit in engine.units)
    assert engine.traffic.last_elements["gather"] <= 2 * numel - 2 * block


@on_ranks(2)
def test_without_autograd_token_after_token_finds_them(world: World) -> None:
    model, _ = tiny_prepared(world, reuse_elements=ALL)
    engine = engine_of(model)
    for number in range(4):
        before = engine.traffic.elements["gather"]
        with torch.no_grad():
            model(language_batch(world.seed, number, 0, world.rank)[:, :-1])
        gathered = engine.traffic.elements["gather"] - before
        assert gathered == 0 if number else gathered > 0


@on_ranks(2)
def test_values_that_change_in_between_are_seen(world: World) -> None:
    """A write, a load, and a forward that backward never follows."""
    runs = []
    for reuse in (0, ALL):
        model, optimizer = tiny_prepared(world, reuse_elements=reuse)
        losses = []
        for number in range(4):
            batch = language_batch(world.seed, number, 0, world.rank)
            losses.append(language_loss(model, batch).item())
            with torch.no_grad():
                model.head.weight.mul_(0.5)
            losses.append(language_loss(model, batch).item())
            state = {name: value * 0.9 for name, value in zero_ext.full_state_dict(model).items()}
            zero_ext.load_full_state_dict(model, state)
            step_of(world, model, optimizer, number)
        runs.append(losses)
    assert runs[0] == runs[1]


TRANSITIONS = ("to_fetching", "to_gathering", "to_gathered", "set_aside", "to_released")


@contextmanager
def noted(kind: type[Any], found: list[tuple[str, str]]) -> Iterator[None]:
    """Notes the transitions of all units of ``kind``, with their names."""

    def noting(name: str) -> Any:
        original = getattr(kind, name)

        def note(unit: Any, *args: Any) -> None:
            found.append((name, unit.spec.name))
            original(unit, *args)

        return mock.patch.object(kind, name, note)

    with ExitStack() as stack:
        for name in TRANSITIONS:
            stack.enter_context(noting(name))
        yield


@pytest.mark.parametrize(
    ("units", "tier"),
    [
        ({}, "device"),
        ({"prefetch_elements": 0}, "device"),
        ({"prefetch_elements": 1}, "device"),
        ({"prefetch_elements": 1}, "nvme"),
        ({"reuse_elements": 3000}, "host"),
        ({"max_live_elements": 5000}, "device"),
        ({"max_live_elements": 7000, "reuse_elements": 1 << 30}, "nvme"),
        ({"reuse_elements": 1 << 30}, "device"),
    ],
)
@on_ranks(2)
def test_a_planned_step_is_the_engines(world: World, units: dict[str, Any], tier: str) -> None:
    torch.manual_seed(world.seed)
    with placed({"params": tier}) as offload:
        model, optimizer = prepared(world, TinyModel(layers=5), units=units, offload=offload)
        engine = engine_of(model)
        language_steps(world, model, optimizer, range(2))  # learns the orders
        run, planned = list[tuple[str, str]](), list[tuple[str, str]]()
        with noted(Unit, run):
            language_loss(model, language_batch(world.seed, 2, 0, world.rank)).backward()
        specs = [unit.spec for unit in engine.units]
        sharded = [PlannedUnit(spec) for spec in specs if spec.placement.params]
        passes = PlannedPasses(sharded, 1 + max(spec.gathered[1] for spec in specs), engine.config.units)
        with noted(PlannedUnit, planned):
            for each in (passes.forward(), passes.backward()):
                for _ in each:
                    pass
        assert len({name for _, name in run}) >= 5
        assert planned == run
