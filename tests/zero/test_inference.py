"""Models without an optimizer: results, what is not allocated, look-ahead from call to call, stale values."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import VOCABULARY, ChosenBlocks, TinyModel, language_batch, language_loss, llama
from tests.zero.training import (
    Plan,
    check_against_plain,
    check_same,
    configuration,
    language_steps,
    placed,
    prepared,
    train_step,
)
from zero_ext import ops
from zero_ext.config.events import GatherEvent
from zero_ext.zero import Engine, engine_of
from zero_ext.zero.memory.gathered_unit import UnitState

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
TIERS = ("device", "host", "nvme")


SHAPE = {"vocab_size": VOCABULARY, "eos_token_id": None, "pad_token_id": 0}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(**SHAPE, n_positions=32, n_embd=16, n_layer=3, n_head=2, bos_token_id=None)
    )


def bloom() -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(**SHAPE, hidden_size=16, n_layer=3, n_head=2, bos_token_id=None))


FAMILIES = {"llama": functools.partial(llama, 3), "gpt2": gpt2, "bloom": bloom}


@contextlib.contextmanager
def inference(
    world: World, model: nn.Module, params: str = "nvme", wrap: bool = True, **more: Any
) -> Iterator[Any]:
    """``model`` prepared without an optimizer, its parameters in the tier ``params``."""
    with placed({"params": params}) as offload:
        config = configuration(3, offload=offload, **more)
        yield zero_ext.prepare(model, None, config, process_group=world.group, wrap=wrap)[0]
        gc.collect()


def gathers(engine: Engine) -> list[GatherEvent]:
    """Every gather from now on."""
    events: list[GatherEvent] = []
    engine.subscribe(lambda event: events.append(event) if isinstance(event, GatherEvent) else None)
    return events


def in_progress(engine: Engine) -> list[str]:
    """Units that are neither released nor gathered; none is gathered between calls."""
    states = {unit.name: unit.state for unit in engine.units if unit.placement.params}
    assert UnitState.GATHERED not in states.values()
    return [name for name, state in states.items() if state is not UnitState.RELEASED]


@on_ranks(1, 2, by_turns=True)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_and_generation_are_those_of_the_plain_model(world: World, family: str) -> None:
    torch.manual_seed(world.seed)
    prompt = torch.randint(VOCABULARY, (2, 4))  # the same on all ranks
    for dtype in (torch.float32, torch.bfloat16):
        plain = FAMILIES[family]().to(dtype).eval()
        wanted = plain.generate(prompt, max_new_tokens=5, do_sample=False)
        for params in TIERS:
            # Both ways to call where it is cheapest to try.
            for number, mode in enumerate(MODES.values() if params == "nvme" else [torch.no_grad]):
                twin = copy.deepcopy(plain)
                with inference(world, twin, params, wrap=number == 0) as model, mode():
                    assert torch.equal(model(prompt).logits, plain(prompt).logits)
                    found = model.generate(prompt, max_new_tokens=5, do_sample=False)
                    assert torch.equal(found, wanted)
                    del model


@on_ranks(1, 2)
@pytest.mark.parametrize("case", ["stage 0", "stage 1", "stage 2", *TIERS])
def test_nothing_is_retained_for_training(world: World, case: str) -> None:
    everything = {"optimizer": "nvme", "grads": "nvme", "ratio": 0.5}
    stage, tiers = {
        "stage 0": (0, {}),
        "stage 1": (1, {"optimizer": "nvme"}),
        "stage 2": (2, everything),
    }.get(case, (3, {**everything, "params": case}))
    stored = tiers.get("params") == "nvme"
    with tempfile.TemporaryDirectory() as folder:
        offload = {**tiers, "nvme_paths": [folder]} if tiers else {}
        before = ops.host_buffer_bytes()
        model, optimizer = prepared(
            world, TinyModel(), stage, None, offload=offload, precision={"dtype": "bf16"}
        )
        engine = engine_of(model)
        assert optimizer is None and not engine.masters and not engine.reducer.gradients
        memory, full = engine.memory_breakdown(), sum(unit.layout.nbytes for unit in engine.units)
        params = full // world.size if stage == 3 else full
        held = 0 if stored else params
        assert (memory["params"], memory["grads"], memory["optimizer"]) == (held, 0, 0)
        assert not any(engine.tiers.staging_bytes().values())
        assert len(list(Path(folder).iterdir())) == int(stored)
        if stored:
            assert engine.tiers.store.facts().capacity == params
        with torch.no_grad():
            model(language_batch(world.seed, 0, 0, world.rank))
        assert ops.host_buffer_bytes() - before <= held + engine.pool.total_bytes
        del model, engine


@on_ranks(1, 2)
@pytest.mark.parametrize("params", TIERS)
def test_the_next_forward_is_prefetched_by_the_last(world: World, params: str) -> None:
    if world.size == 1 and params == "device":
        return  # nothing is ever gathered
    torch.manual_seed(world.seed)
    plain = TinyModel(layers=4)
    largest = 2048  # padded elements of a block, the most of them on two ranks with NVMe
    units = {"prefetch_elements": 100, "max_live_elements": 3 * largest}
    with inference(world, copy.deepcopy(plain), params, units=units) as model:
        engine = engine_of(model)
        events = gathers(engine)
        for step in range(4):
            ids = language_batch(world.seed, step, 0, world.rank)
            with torch.no_grad():
                assert torch.equal(model(ids), plain(ids))
            ahead = in_progress(engine)
            assert ahead == [unit.name for unit in engine.units][: 2 if params == "nvme" else 1]
            assert engine.prefetcher.live_elements <= units["max_live_elements"]
        number = len(engine.units)
        assert len(events) == 4 * number
        assert [event.prefetched for event in events] == [False] * number + [True] * 3 * number
        del model, engine


@on_ranks(1, 2)
def test_no_look_ahead_beyond_the_limits(world: World) -> None:
    torch.manual_seed(world.seed)
    plain = TinyModel(layers=3, tied=True)  # the embedding is held to the end of the forward
    for units in ({"prefetch_elements": 0}, {"max_live_elements": 1}):
        with inference(world, copy.deepcopy(plain), "nvme", units=units) as model, torch.no_grad():
            for step in range(3):
                ids = language_batch(world.seed, step, 0, world.rank)
                with (
                    contextlib.nullcontext()
                    if step or "max_live_elements" not in units
                    else pytest.warns(RuntimeWarning, match="max_live_elements")
                ):
                    assert torch.equal(model(ids), plain(ids))
                assert not in_progress(engine_of(model))
            del model


@on_ranks(2)
def test_ranks_with_other_prompts_and_lengths_stay_in_step(world: World) -> None:
    torch.manual_seed(world.seed)
    plain = llama(3).eval()
    prompt = torch.randint(VOCABULARY, (1, 3 + 2 * world.rank))
    combined = partial(dist.all_reduce, group=world.group)  # the pool's default group has more ranks
    for params in ("device", "nvme"):
        with inference(world, copy.deepcopy(plain), params) as model:
            with mock.patch.object(dist, "all_reduce", combined):
                for new in (2 + 3 * world.rank, 6 - 3 * world.rank):
                    arguments = {"max_new_tokens": new, "do_sample": False}
                    found = model.generate(prompt, synced_gpus=True, **arguments)
                    assert torch.equal(found, plain.generate(prompt, **arguments))
            del model


@on_ranks(2)
def test_a_rank_that_stops_alone_ends_the_other(world: World) -> None:
    torch.manual_seed(world.seed)
    with inference(world, TinyModel(), timeout_seconds=3.0) as model, torch.no_grad():
        ids = language_batch(world.seed, 0, 0, world.rank)
        for _ in range(2):
            model(ids)
        if world.rank == 0:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match=r"rank 0: gather of unit .*timeout_seconds"):
                for _ in range(2):
                    model(ids)
            assert time.monotonic() - began < 60
        world.barrier()
        del model


@on_ranks(2)
def test_ranks_run_what_they_like_while_all_is_gathered(world: World) -> None:
    torch.manual_seed(world.seed)
    plain, ids = ChosenBlocks(4), language_batch(world.seed, 0, 0, 0)
    orders = ([0, 1, 2, 3], [3, 1], [2, 0, 3])

    def check_order(model: Any, order: list[int]) -> None:
        model.order = plain.order = order
        torch.testing.assert_close(model(ids), plain(ids))

    with inference(world, copy.deepcopy(plain), timeout_seconds=20.0) as model, torch.no_grad():
        check_order(model, orders[0])
        for _ in range(2):
            with zero_ext.gathered(model):
                for number in range(1 + 3 * world.rank):
                    check_order(model, orders[(number + world.rank) % 3])
            for order in orders:  # look-ahead that differs between the ranks would gather other units
                check_order(model, order)
        del model


@contextlib.contextmanager
def training(world: World, model: nn.Module, tiers: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    with placed(tiers) as offload:
        yield prepared(world, model, offload=offload)
        gc.collect()


@on_ranks(1, 2)
@pytest.mark.parametrize("params", TIERS)
def test_an_evaluation_between_steps_changes_nothing_and_sees_every_step(world: World, params: str) -> None:
    torch.manual_seed(world.seed)
    start = TinyModel(layers=2)
    with training(world, copy.deepcopy(start), {"params": params}) as (model, optimizer):
        wanted = language_steps(world, model, optimizer, range(3)), zero_ext.full_state_dict(model)
        del model, optimizer
    with training(world, copy.deepcopy(start), {"params": params}) as (model, optimizer):
        losses = []
        for step in range(3):
            ids = language_batch(world.seed, step, 0, world.rank)
            with torch.inference_mode():
                language_loss(model, ids)
            loss = language_loss(model, ids)
            with torch.no_grad():  # between forward and backward of a step
                assert language_loss(model, ids).item() == loss.item()
            loss.backward()
            with torch.no_grad():
                model(ids)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses == wanted[0]
        check_same(model, wanted[1])
        saved = optimizer.state_dict()
        with torch.no_grad():
            output = model(ids)
        train_step(model, optimizer, language_loss(model, ids))
        with torch.no_grad():
            assert not torch.equal(model(ids), output)
            optimizer.load_state_dict(saved)
            assert torch.equal(model(ids), output)
        del model, optimizer, loss


@on_ranks(1, 2)
@pytest.mark.parametrize("params", TIERS)
def test_changed_parameters_are_fetched_again(world: World, params: str) -> None:
    torch.manual_seed(world.seed)
    first, second, third = TinyModel(), TinyModel(), TinyModel()
    ids = language_batch(world.seed, 0, 0, world.rank)
    with tempfile.TemporaryDirectory() as saves, torch.no_grad():
        saves = world.everyone(saves)[0]
        with inference(world, copy.deepcopy(second), params) as model:
            zero_ext.save_checkpoint(saves, model)
            del model
        with inference(world, copy.deepcopy(first), params) as model:
            for change, plain in (
                (lambda _: None, first),
                (lambda model: zero_ext.load_checkpoint(saves, model), second),
                (lambda model: zero_ext.load_full_state_dict(model, third.state_dict()), third),
            ):
                change(model)
                for _ in range(2):
                    assert torch.equal(model(ids), plain(ids))
            for module in ("embedding", "head"):
                with zero_ext.gathered(getattr(model, module).parameters(), modifier_rank=0):
                    getattr(model, module).weight.mul_(2 if world.rank == 0 else 3)
                getattr(third, module).weight.mul_(2)
                assert torch.equal(model(ids), third(ids))
            check_same(model, third)
            assert torch.equal(model(ids), third(ids))
            del model
        world.barrier()


@on_ranks(1, 2)
def test_a_write_to_what_is_being_fetched_holds(world: World) -> None:
    torch.manual_seed(world.seed)
    plain = TinyModel()
    with inference(world, copy.deepcopy(plain)) as model, torch.no_grad():
        ids = language_batch(world.seed, 0, 0, world.rank)
        for _ in range(2):
            model(ids)
        assert in_progress(engine_of(model))[0] == "embedding"
        for own in (plain, model):
            own.embedding.weight.data = own.embedding.weight.data * 0.5
        assert torch.equal(model(ids), plain(ids))
        del model


@on_ranks(1)
def test_a_read_that_failed_is_tried_again(world: World) -> None:
    torch.manual_seed(world.seed)
    plain = TinyModel()
    with inference(world, copy.deepcopy(plain)) as model, torch.no_grad():
        ids = language_batch(world.seed, 0, 0, world.rank)
        for _ in range(2):
            model(ids)
        ops.store_inject_fault(engine_of(model).tiers.store.handle, False, 1, -5, 1)
        with pytest.raises(RuntimeError, match="Input/output error"):
            for _ in range(2):
                model(ids)
        assert torch.equal(model(ids), plain(ids))
        del model


@on_ranks(1, 2)
@pytest.mark.parametrize("params", TIERS)
def test_a_model_dropped_with_running_reads_is_gone(world: World, params: str) -> None:
    gc.collect()
    before = ops.host_buffer_bytes()
    with placed({"params": params}) as offload:
        for _ in range(5):
            model, _ = prepared(world, TinyModel(), 3, None, offload=offload)
            with torch.no_grad():
                for step in range(2):
                    model(language_batch(world.seed, step, 0, world.rank))
            assert in_progress(engine_of(model)) or (world.size == 1 and params == "device")
            del model
            assert ops.host_buffer_bytes() == before
            assert not any(list(Path(path).iterdir()) for path in offload.get("nvme_paths", ()))


def llama_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_trains_as_the_plain_one(world: World, tied: bool) -> None:
    torch.manual_seed(world.seed)
    plan = Plan(clip=1.0)
    check_against_plain(world, llama(2, tied), llama_loss, language_batch, 3, plan, tolerance=2e-6)


@on_ranks(2)
def test_save_pretrained_never_writes_placeholders(world: World) -> None:
    model = llama(2, True)
    model, _ = prepared(world, model)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(RuntimeError, match="full_state_dict"):
        model.module.save_pretrained(folder)
    state = zero_ext.full_state_dict(model)
    if world.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            model.module.save_pretrained(folder, state_dict=dict(state))
            loaded = type(model.module).from_pretrained(folder)
        check_same(loaded.state_dict(), state)
    world.barrier()
