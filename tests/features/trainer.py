"""What a rank trains in each test of transformers' Trainer, and loads of its models, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MixtralForCausalLM, Trainer

import zero_ext
from tests.features.sharding import Found, on_host
from tests.integrations.transformers.mixtures import mixture_of, optimizer_of
from tests.integrations.transformers.models import Sentences, arguments, column, enter, llama
from tests.multi.rank import World
from zero_ext.integrations.transformers import ZeroTrainerMixin, from_pretrained
from zero_ext.parallel import make_mesh
from zero_ext.zero import engine_of


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    pass


def trainer(world: World, device: str, adapters: bool, config: dict[str, Any]) -> Found:
    """Steps, a checkpoint, and the losses of a run that resumes from it."""
    enter(world)
    kind: Any = ZeroTrainer
    found: Found = {}
    folder = world.shared_folder()
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


def spread_loading(world: World, device: str, config: dict[str, Any]) -> Found:
    """Experts that are spread over two ranks, from the files of a full model."""
    enter(world)
    mesh = make_mesh(ep=2, device_type=device)
    folder = world.shared_folder()
    if world.rank == 0:
        mixture_of("mixtral", world.seed).save_pretrained(folder)
    world.barrier()
    model = from_pretrained(MixtralForCausalLM, folder, config, process_group=mesh)
    if config["stage"] < 3:
        model.to(device)
    prepared, _ = zero_ext.prepare(model, optimizer_of(model), config, process_group=mesh)
    assert engine_of(prepared).device.type == device
    return on_host(zero_ext.full_state_dict(prepared))
