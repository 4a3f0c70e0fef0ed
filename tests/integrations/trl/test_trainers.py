"""TRL's trainers over sharded models have the losses of TRL's own, with and without adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.integrations.peft.models import base, lora, quantized
from tests.integrations.transformers.models import column, enter, largest_difference
from tests.integrations.trl.data import preferences, sentences, tokenizer
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations.transformers import shard_trainer
from zero_ext.integrations.trl import ZeroDPOTrainer, ZeroSFTTrainer
from zero_ext.zero import engine_of
from zero_ext.zero.memory.gathered_unit import UnitState

NVME = {"params": "nvme", "grads": "host", "optimizer": "host"}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    fixed = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "max_steps": 6,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "max_length": 16,
    }
    return {**fixed, **changes}


def zero(stage: int, folder: Path, nvme: bool = False) -> dict[str, Any]:
    offload = {"offload": {**NVME, "nvme_paths": [str(folder)]}} if nvme else {}
    return {"stage": stage, "units": {"persistence_threshold": 0}, **offload}


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, ZeroSFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, ZeroDPOTrainer, DPOConfig),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapted", [False, True])
def test_losses_are_those_of_trl(world: World, kind: str, adapted: bool) -> None:
    enter(world)
    (plain, ours, settings_of), words = KINDS[kind], tokenizer()
    data = sentences(60, world.seed) if kind == "sft" else preferences(40, world.seed)
    adapters = {"sft": {"lora_dropout": 0.1}, "dpo": {}}[kind]
    curves = []
    folder = world.shared_folder()
    configs = [
        None,
        zero(3, folder),
        zero(3, folder, nvme=True),
        *([zero(2, folder)] if kind == "sft" else []),
    ]
    for config in configs:
        torch.manual_seed(world.seed)
        more: dict[str, Any] = {} if config is None else {"zero_config": config}
        if kind == "dpo":
            more["ref_model"] = None if adapted else base(world.seed + 1)
        trainer = (plain if config is None else ours)(
            model=base(world.seed),
            args=settings_of(**settings(folder, seed=3)),
            train_dataset=data,
            processing_class=words,
            peft_config=lora(**adapters) if adapted else None,
            **more,
        )
        trainer.train()
        curves.append(column(trainer, "loss"))
        if config is not None and more.get("ref_model") is not None:
            assert engine_of(trainer.ref_model).optimizer_step.stepper is None
            tier = config.get("offload", {}).get("params", "device")
            assert {unit.storage.tier for unit in engine_of(trainer.ref_model).units} == {tier}
    assert len(curves[0]) == 6 and min(curves[0]) != max(curves[0])
    for curve in curves[1:]:
        assert largest_difference(curve, curves[0]) < 1e-5, (curve, curves[0])


@on_ranks(2)
@pytest.mark.parametrize("packed", [False, True])
def test_checkpoints_hold_adapters_alone_and_resume(world: World, packed: bool) -> None:
    enter(world)
    data, words = sentences(60, world.seed), tokenizer()

    def made_base() -> Any:
        return quantized(base(world.seed)) if packed else base(world.seed)

    def make(output: Path, adapters: Any) -> Any:
        return ZeroSFTTrainer(
            model=made_base(),
            args=SFTConfig(**settings(output, seed=3, save_strategy="steps", save_steps=3)),
            train_dataset=data,
            processing_class=words,
            peft_config=adapters,
            zero_config=zero(3, output, nvme=True),
        )

    folder = world.shared_folder()
    reference = make(folder / "whole", lora())
    reference.train()
    wanted = column(reference, "loss")
    saved = folder / "whole" / "checkpoint-3"
    assert all("lora_" in name for name in load_file(saved / "adapter_model.safetensors"))
    names = {name for name, each in reference.model.named_parameters() if not each.requires_grad}
    stored = (saved / "zero_ext").rglob("*.json")
    assert not any(name in file.read_text() for file in stored for name in names)
    resumed = make(folder / "resumed", lora())
    resumed.train(resume_from_checkpoint=str(saved))
    assert column(resumed, "loss")[-3:] == wanted[-3:]
    plain = PeftModel.from_pretrained(made_base(), folder / "resumed" / "checkpoint-6")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits = resumed.model.train()(input_ids=ids).logits
        # TRL keeps adapters over quantized weights in bfloat16; PEFT loads them into float32.
        rtol, atol = (0.05, 0.05) if packed else (1e-4, 1e-5)
        assert torch.allclose(plain.train()(input_ids=ids).logits, logits, rtol=rtol, atol=atol)
    with pytest.raises(ValueError, match="other adapters"):
        make(folder / "other", lora(r=2)).train(resume_from_checkpoint=str(saved))
    world.barrier()
    (saved / "adapter_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        make(folder / "other", lora()).train(resume_from_checkpoint=str(saved))


@on_ranks(2)
@pytest.mark.parametrize("gathers", [False, True])
def test_parameters_are_gathered_once_for_generation(world: World, gathers: bool) -> None:
    enter(world)
    folder = world.shared_folder()
    arguments = settings(folder, max_steps=1, num_generations=2, max_completion_length=4)
    del arguments["max_length"]
    trainer = shard_trainer(
        GRPOTrainer(
            model=base(world.seed),
            reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
            args=GRPOConfig(**arguments, ds3_gather_for_generation=gathers),
            train_dataset=preferences(8, world.seed).select_columns("prompt"),
            processing_class=tokenizer(),
        ),
        zero(3, folder),
    )
    trainer.train()
    model, held = trainer.model, []
    units = engine_of(model).units
    model.lm_head.register_forward_pre_hook(
        lambda *_: held.append(all(unit.state is UnitState.GATHERED for unit in units))
    )
    model.generate(torch.arange(3, 6)[None], max_new_tokens=2 + world.rank, eos_token_id=None)
    # Sharded, ranks stay in step. With all parameters in memory each ends by itself.
    assert held == [True] * (2 + world.rank) if gathers else held == [False] * 3
    assert not all(unit.state is UnitState.GATHERED for unit in units)
