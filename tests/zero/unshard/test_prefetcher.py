"""Which units are live when: the cap, look-ahead, the one warning, and departures from the recorded order."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import (
    WIDTH,
    Block,
    TinyModel,
    feature_batch,
    feature_loss,
    language_batch,
    language_loss,
)
from tests.zero.training import Plan, adamw, check_equal, configuration, language_steps, train_prepared
from zero_ext.zero import Engine, engine_of
from zero_ext.zero.units.released_params import ReleasedTensor
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.prefetcher import Prefetcher


def largest_pair(model: nn.Module, world: World) -> int:
    """Elements of the two largest units together."""
    _, sizes = sizes_of(model, world)
    return sum(sorted(sizes)[-2:])


def sizes_of(model: nn.Module, world: World) -> tuple[Engine, list[int]]:
    prepared, _ = zero_ext.prepare(model, None, configuration(3), process_group=world.group)
    engine = engine_of(prepared)
    return engine, [unit.layout.numel for unit in engine.units]


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


def peak_of(
    world: World, model: nn.Module, steps: int = 4, **units: Any
) -> tuple[Peak, list[str], list[float]]:
    """Trains a few steps under a cap; the peak, the warnings and the losses."""
    peak = Peak()
    losses = []
    with warnings.catch_warnings(record=True) as caught, peak.watch():
        warnings.simplefilter("always")
        model, optimizer = zero_ext.prepare(
            model, adamw(model.parameters()), configuration(3, units=units), process_group=world.group
        )
        peak.units = engine_of(model).units
        losses += language_steps(world, model, optimizer, range(steps))
    return peak, [str(item.message) for item in caught if "max_live_elements" in str(item.message)], losses


def tiny(world: World) -> TinyModel:
    torch.manual_seed(world.seed)
    return TinyModel(layers=5)


@on_ranks(2)
def test_live_elements_never_exceed_the_cap(world: World) -> None:
    free, none, losses = peak_of(world, tiny(world))
    assert not none
    _, sizes = sizes_of(tiny(world), world)
    for cap in (max(sizes), largest_pair(tiny(world), world), sum(sizes) // 2):
        peak, received, capped = peak_of(world, tiny(world), max_live_elements=cap)
        assert peak.elements <= cap < free.elements or cap >= free.elements
        assert not received
        assert capped == losses
    assert free.combined > 2


@on_ranks(2)
def test_a_unit_above_the_cap_is_gathered_alone_with_one_warning_naming_it(world: World) -> None:
    _, sizes = sizes_of(tiny(world), world)
    block = sorted(sizes)[-1]
    small = [size for size in sizes if size < block]
    peak, received, losses = peak_of(world, tiny(world), max_live_elements=block - 1)
    assert peak.elements == block > max(small)
    assert len(received) == len(set(received)) == sum(size == block for size in sizes)
    assert all("unit 'blocks." in text and f"= {block - 1}" in text for text in received)
    assert losses == peak_of(world, tiny(world))[2]


@on_ranks(2)
def test_no_look_ahead_when_it_is_off(world: World) -> None:
    peak, _, losses = peak_of(world, tiny(world), prefetch_elements=0)
    assert peak.combined == 1
    ahead, _, same = peak_of(world, tiny(world))
    # In each of the four steps but the first, which learns, the head stays from forward to backward.
    assert ahead.combined > 1 and ahead.gathers == peak.gathers - 3
    assert losses == same


class Wandering(nn.Module):
    """Calls its blocks in another order at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        count = len(features)
        for number in range(4):
            features = self.blocks[(number * (1 + 2 * (count % 2)) + count) % 4](features)
        return features


@on_ranks(2, 3)
def test_another_order_than_the_recorded_one_is_still_right(world: World) -> None:
    def batch(seed: int, step: int, micro: int, rank: int) -> torch.Tensor:
        return feature_batch(seed, step, micro, rank, size=1 + step)

    runs = []
    for stage in (0, 3):
        torch.manual_seed(world.seed)
        runs.append(
            train_prepared(world, Wandering(), feature_loss, batch, configuration(stage), Plan(steps=6))
        )
    check_equal(*runs)
    assert runs[1].engine is not None and runs[1].engine.prefetcher.live_elements == 0


@on_ranks(2)
def test_only_what_backward_needs_first_stays_after_a_forward(world: World) -> None:
    model, optimizer = zero_ext.prepare(
        (net := TinyModel()), adamw(net.parameters()), configuration(3), process_group=world.group
    )
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
            assert prefetcher.live_elements == engine_of(model).index[model.head.weight][0].layout.numel
        assert prefetcher.live_elements == 0


class Untied(TinyModel):
    """Parts in the order of Llama; ``mark`` reads the embedding's weight again, ``layers`` blocks run."""

    def __init__(self, mark: bool = False) -> None:
        super().__init__(layers=4)
        self.mark, self.layers = mark, 4
        if mark:
            self.embedding.register_forward_hook(lambda own, ids, out: out * own.weight.square().mean())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks[: self.layers]:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def gathers_of_steps(world: World, model: Untied, layers: list[int]) -> list[Counter[str]]:
    """Gathers by unit of steps that run so many blocks; the losses are those of stage 0."""
    twin = copy.deepcopy(model)
    model, optimizer = zero_ext.prepare(
        model, adamw(model.parameters()), configuration(3, gradient_clipping=1.0), process_group=world.group
    )
    plain, stepper = zero_ext.prepare(
        twin, adamw(twin.parameters()), configuration(0, gradient_clipping=1.0), process_group=world.group
    )
    found, original = [], Unit.to_gathering
    for step, count in enumerate(layers):
        gathers: Counter[str] = Counter()

        def to_gathering(unit: Unit) -> None:
            gathers[unit.name] += 1  # noqa: B023
            original(unit)

        losses = []
        for each, chosen in ((model, optimizer), (plain, stepper)):
            each.layers = count
            with mock.patch.object(Unit, "to_gathering", to_gathering):
                losses.append(language_loss(each, language_batch(world.seed, step, 0, world.rank)))
                losses[-1].backward()
            chosen.step()
            chosen.zero_grad()
        assert losses[0].item() == losses[1].item()
        found.append(gathers)
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


@on_ranks(2)
def test_a_shorter_order_is_learned(world: World) -> None:
    torch.manual_seed(world.seed)
    found = gathers_of_steps(world, Untied(), [4, 2, 2, 2])
    assert found[1]["blocks.2"] == 2  # ahead, in vain
    once = dict.fromkeys(("embedding", "head"), 1)
    assert found[3] == {**once, "blocks.0": 2, "blocks.1": 2, "norm": 2}


def test_sizes_are_in_padded_elements() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    prepared, _ = zero_ext.prepare(model, None, {"stage": 3})
    (unit,) = engine_of(prepared).units
    assert unit.layout.numel == WIDTH * WIDTH + 16  # the bias of 12 starts on and fills up to 64 bytes
    assert unit.layout.nbytes == 4 * unit.layout.numel
    with pytest.raises(ValueError, match="rank: expected 0 to 0, got 1"):
        unit.layout.shard_range(1)
