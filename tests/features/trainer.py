"""What a rank trains in each test of transformers' Trainer, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer

from tests.features.sharding import Found
from tests.integrations.transformers.models import Sentences, arguments, column, enter, llama, shared_folder
from tests.multi.rank import World
from zero_ext.integrations.transformers import ZeroTrainerMixin
from zero_ext.zero import engine_of


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    pass


def trainer(world: World, device: str, adapters: bool, config: dict[str, Any]) -> Found:
    """Steps, a checkpoint, and the losses of a run that resumes from it."""
    enter(world)
    kind: Any = ZeroTrainer
    found: Found = {}
    with shared_folder(world) as folder:
        settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        for resumed in (None, str(folder / "checkpoint-2")):
            model: nn.Module = llama(world.seed, attn_implementation="eager")
            if adapters:
                from tests.integrations.peft.models import with_adapters
                from zero_ext.integrations.peft import ZeroPeftTrainer

                kind, model = ZeroPeftTrainer, with_adapters(model, world.seed)
            training_arguments = arguments(folder, **settings)
            training_arguments.__dict__["_setup_devices"] = torch.device(device)
            made = kind(
                model=model,
                args=training_arguments,
                train_dataset=Sentences(32, world.seed),
                zero_config=config,
            )
            made.train(resume_from_checkpoint=resumed)
            assert engine_of(made.model).device.type == device
            found[f"resumed from {bool(resumed)}"] = column(made, "loss")
    return found
