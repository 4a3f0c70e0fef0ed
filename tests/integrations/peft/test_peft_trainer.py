"""transformers' Trainer on adapters beside modules that are trained whole, over a sharded base model."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer

from tests.integrations.peft.models import base, with_adapters
from tests.integrations.transformers.models import (
    Sentences,
    arguments,
    column,
    enter,
    largest_difference,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations.peft import ZeroPeftTrainer


@on_ranks(2)
def test_modules_to_save_train_are_saved_and_resume(world: World) -> None:
    enter(world)
    data = Sentences(32, world.seed)
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(world.seed))

    def model(seed: int) -> PeftModel:
        return with_adapters(base(world.seed), seed, modules_to_save=["lm_head"])

    folder = world.shared_folder()
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    plain = Trainer(
        model=model(world.seed), args=arguments(folder / "plain", max_steps=4), train_dataset=data
    )
    plain.train()
    trained = model(world.seed)
    first = ZeroPeftTrainer(model=trained, args=arguments(folder, **settings), train_dataset=data)
    first.train()
    assert largest_difference(column(first, "loss"), column(plain, "loss")) < 1e-5
    again = model(world.seed + 1)
    second = ZeroPeftTrainer(model=again, args=arguments(folder, **settings), train_dataset=data)
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert largest_difference(column(second, "loss"), column(plain, "loss")) < 1e-5
    for name in ("checkpoint-2", "checkpoint-4"):
        assert not (folder / name / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(base(world.seed), folder / "checkpoint-4").eval()
    for sharded in (trained, again):
        wanted = sharded.eval()(input_ids=ids).logits
        assert torch.allclose(loaded(input_ids=ids).logits, wanted, rtol=1e-5, atol=1e-6)
