"""Generation inside training: as the plain model, whether parameters are gathered once or in every pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_ext
from tests.integrations.transformers.models import VOCABULARY, llama
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import placed
from zero_ext.integrations.transformers.model_patches import RANKS_IN_STEP
from zero_ext.zero import engine_of

ALL = 4  # generate meets the world, which in the pool is all ranks


def loss_of(model: Any, world: World, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.seed + 10 * step + world.rank)
    ids = torch.randint(3, VOCABULARY, (2, 8), generator=generator)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@on_ranks(ALL)
@pytest.mark.parametrize(
    ("stage", "offload", "budget"),
    [(3, "device", None), (3, "nvme", "1GB"), (3, "host", "10KB"), (2, "device", 0)],
)
def test_each_rank_generates_what_the_plain_model_does(
    world: World, stage: int, offload: str, budget: Any
) -> None:
    with placed({"params": offload}) as section:
        config = {"stage": stage, "gradient_clipping": 1.0, "offload": section}
        check(world, config, budget)


def check(world: World, config: dict[str, Any], budget: Any) -> None:
    plain, model = llama(world.seed), llama(world.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
    engine = engine_of(model)
    model.eval()
    prompt = torch.arange(3, 6 + world.rank)[None]
    asked = {"input_ids": prompt, "max_new_tokens": 2 + 5 * world.rank, "do_sample": False}
    marks = [vars(module).get(RANKS_IN_STEP) for module in model.module.modules()]
    for step in range(2):
        plain.load_state_dict(zero_ext.full_state_dict(model))
        held = engine.pool.live_bytes, engine.memory_by_tier()
        with zero_ext.unsharded_for_generation(model, budget) as unsharded:
            assert unsharded == (budget != "10KB")
            found = model.generate(**asked)
            if unsharded:
                with zero_ext.unsharded_for_generation(model, budget):
                    pass  # and the block around it goes on
                with pytest.raises(RuntimeError, match=r"optimizer\.step\(\): expected a call outside"):
                    optimizer.step()
                with torch.enable_grad(), pytest.raises(RuntimeError, match="expected no gradients inside"):
                    loss_of(model, world, step)
        assert torch.equal(found, plain.generate(**asked))
        assert not unsharded or (engine.pool.live_bytes, engine.memory_by_tier()) == held
        assert marks == [vars(module).get(RANKS_IN_STEP) for module in model.module.modules()]
        model.backward(loss_of(model, world, step))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1)
def test_what_is_no_budget(world: World) -> None:
    model, _ = zero_ext.prepare(llama(0), None, {"stage": 3}, process_group=world.group)
    for budget in (-1, True, 1.5, "much"):
        with (
            pytest.raises(ValueError, match=r"budget: expected (a number of )?bytes"),
            (
                zero_ext.unsharded_for_generation(model, budget)  # type: ignore[arg-type]
            ),
        ):
            pass
