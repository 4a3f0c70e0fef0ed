"""ZeroAccelerator with sequences over ranks: a plain loop has the losses and norms of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from tests.integrations.transformers.mixtures import mixture_of
from tests.integrations.transformers.models import VOCABULARY, enter, llama
from tests.integrations.transformers.test_layout_trainer import Documents, counted, padded, summed
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ZeroAccelerator
from zero_ext.zero.units.parameter_marks import has_spread_experts

MICRO_BATCHES, CLIP, BATCH = 2, 0.5, 2


def accelerator_of(world: World, **settings: Any) -> ZeroAccelerator:
    enter(world)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return ZeroAccelerator(cpu=True, **settings)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3)


def mean_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return summed(model, batch) / counted(batch)


# Ranks, ParallelismConfig, the section.
CASES: dict[str, tuple[int, dict[str, int], dict[str, int]]] = {
    "ring": (2, {"cp_size": 2}, {}),
    "heads and replicas": (4, {"sp_size": 2}, {}),
    "heads and rings": (4, {}, {"cp": 4, "ring": 2}),
}


@on_ranks(2, 4, by_turns=True)
@pytest.mark.parametrize("case", CASES)
def test_a_plain_loop_has_the_losses_of_one_process(world: World, case: str) -> None:
    ranks, sizes, section = CASES[case]
    if ranks != world.size:
        return
    accelerator = accelerator_of(
        world,
        gradient_accumulation_steps=MICRO_BATCHES,
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        config={"stage": 3, **({"parallel": section} if section else {})},
    )
    shared = max([*sizes.values(), *section.values()])
    replicas = world.size // shared
    model, reference = llama(world.seed), llama(world.seed)
    optimizer, plain = optimizer_of(model), optimizer_of(reference)
    data = Documents(BATCH * replicas * MICRO_BATCHES * 2 + 1, world.seed)
    # Ranks draw other numbers, so the order of samples has to come from one of them.
    torch.manual_seed(world.seed + world.rank)
    loader = DataLoader(data, BATCH, shuffle=True, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen: list[Any] = []
    for batch in loader:
        everyone = world.everyone({name: each.tolist() for name, each in batch.items()})
        assert everyone == [everyone[rank - rank % shared] for rank in range(world.size)], world.seed
        seen.append([{name: torch.tensor(each) for name, each in one.items()} for one in everyone[::shared]])
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            expected = torch.stack([mean_of(reference, each) for each in seen[-1]])
            (expected.mean() / MICRO_BATCHES).backward()
            torch.testing.assert_close(loss, expected[world.rank // shared], rtol=1e-5, atol=1e-5)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                wanted = nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
                torch.testing.assert_close(float(norm), float(wanted), rtol=1e-5, atol=1e-5)
                plain.step()
                plain.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    assert len(seen) > MICRO_BATCHES and len({str(each) for each in seen}) == len(seen)


@on_ranks(2)
def test_an_optimizer_gets_the_parameters_of_spread_experts(world: World) -> None:
    accelerator = accelerator_of(world, config={"stage": 3, "parallel": {"ep": 2}})
    model, reference = (mixture_of("mixtral", world.seed, vocab_size=VOCABULARY) for _ in range(2))
    optimizer, plain = optimizer_of(model), optimizer_of(reference)
    data = Documents(BATCH * world.size * 3, world.seed)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, BATCH, collate_fn=padded)
    )
    assert has_spread_experts(model)
    for batch in loader:
        own = world.everyone({name: each.tolist() for name, each in batch.items()})
        batches = [{name: torch.tensor(each) for name, each in one.items()} for one in own]
        loss = model(**batch).loss
        accelerator.backward(loss)
        expected = torch.stack([mean_of(reference, each) for each in batches])
        expected.mean().backward()
        torch.testing.assert_close(loss, expected[world.rank], rtol=1e-5, atol=1e-5)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()


@on_ranks(2)
def test_metrics_have_every_sample_once(world: World) -> None:
    accelerator = accelerator_of(world, config={"parallel": {"cp": 2}})
    model, data = llama(world.seed), Documents(5, world.seed)
    reference = llama(world.seed)
    model, loader = accelerator.prepare(model, DataLoader(data, BATCH, collate_fn=padded))
    model.eval()
    found, names, expected = [], [], []
    for batch in loader:
        rows = len(batch["input_ids"])
        with torch.no_grad():
            loss = model(**batch).loss
            expected += [float(mean_of(reference, batch))] * rows
        found += accelerator.gather_for_metrics(loss.repeat(rows)).tolist()
        names += accelerator.gather_for_metrics([str(each) for each in batch["input_ids"].tolist()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(names) == 5 and len(set(names)) == 5


@on_ranks(2)
def test_refusals(world: World) -> None:
    for settings, message in (
        (
            {"parallelism_config": ParallelismConfig(cp_size=2), "config": {"parallel": {"ep": 2}}},
            "Make them agree",
        ),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "expected tp_size 1, got 2"),
        (
            {"parallelism_config": ParallelismConfig(dp_shard_size=2, dp_replicate_size=2)},
            "dp_replicate_size 1",
        ),
        ({"parallelism_config": ParallelismConfig(cp_size=2, dp_shard_size=2)}, "expected dp_shard_size 1"),
        ({"config": {"parallel": {"cp": 4}}}, "expected a divisor of the 2 ranks, got 4"),
        (
            {
                "config": {"parallel": {"cp": 2}},
                "dataloader_config": DataLoaderConfiguration(dispatch_batches=True),
            },
            "dispatch_batches gives every rank other samples",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            accelerator_of(world, **settings)
    accelerator = accelerator_of(world, config={"parallel": {"cp": 2}})
    with pytest.raises(ValueError, match=r"expected one model of transformers for parallel\.cp, got 0"):
        accelerator.prepare(nn.Linear(2, 2))
    model = accelerator.prepare(llama(world.seed))
    words = torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(world.rank))
    with pytest.raises(ValueError, match="hash of the batch: expected the same along 'cp'"):
        model(input_ids=words)
    with pytest.raises(ValueError, match="past_key_values: expected none"):
        model.generate(words[:1] * 0 + 5, max_new_tokens=2)
