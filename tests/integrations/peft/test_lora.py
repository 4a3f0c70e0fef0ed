"""LoRA over a base model that is sharded and lies in any tier: trained, saved, loaded as on one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import TrainingArguments

import zero_ext
from tests.integrations.peft.models import base, batch, lora, loss, with_adapters
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import adamw, configuration
from zero_ext.integrations.peft import ZeroPeftTrainer, adapter_state_dict, load_adapter_weights, prepare
from zero_ext.integrations.transformers import ZeroTrainer
from zero_ext.zero import engine_of

SHARDED = {"persistence_threshold": 0}
HOST = {"params": "host", "grads": "host", "optimizer": "host"}


def trainable(model: torch.nn.Module) -> torch.optim.Optimizer:
    return adamw([each for each in model.parameters() if each.requires_grad])


def curve(world: World, model: torch.nn.Module, optimizer: Any, steps: int, everyone: bool) -> list[float]:
    """The mean loss over all ranks' data, step by step; one process computes it all, or each rank its own."""
    found = []
    for step in range(steps):
        losses = []
        for rank in range(world.size) if everyone else [world.rank]:
            value = loss(model, batch(world.seed, step % 2, 0, rank))
            (value / world.size if everyone else value).backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
        mine = losses if everyone else world.everyone(losses[0])
        found.append(sum(mine) / world.size)
    return found


def check_same(found: list[float], wanted: list[float]) -> None:
    assert max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)) < 1e-5, (found, wanted)


@on_ranks(2)
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_training_saving_loading_and_merging(world: World, tier: str) -> None:
    changes: dict[str, Any] = {"modules_to_save": ["lm_head"], "use_dora": tier == "host"}
    twin = with_adapters(base(world.seed), world.seed, **changes)
    model = copy.deepcopy(twin)
    wanted = curve(world, twin, trainable(twin), 6, everyone=True)
    assert wanted[4] < wanted[0]
    folder = world.shared_folder()
    tiers = {
        "device": {},
        "host": HOST,
        "nvme": {**dict.fromkeys(HOST, "nvme"), "nvme_paths": [str(folder)]},
    }
    config = configuration(3, units=SHARDED, offload=tiers[tier])
    same, optimizer = prepare(model, trainable(model), config, process_group=world.group)
    assert same is model
    check_same(curve(world, model, optimizer, 6, everyone=False), wanted)
    _check_only_adapters_cost(model, tier)
    model.save_pretrained(folder / "adapter")
    world.barrier()
    _check_saved(model, twin, world.seed, folder / "adapter", changes)
    with pytest.raises(RuntimeError, match=r"zero_ext\.gathered\(model, modifier_rank=0\)"):
        model.merge_and_unload()
    with pytest.raises(RuntimeError, match="before prepare"):
        model.add_adapter("other", model.peft_config["default"])
    ids = batch(world.seed, 9, 0, 0)
    with zero_ext.gathered(model, modifier_rank=0):
        merged = model.merge_and_unload()
        merged_state = {name: value.clone() for name, value in merged.state_dict().items()}
    plain = base(0)
    plain.load_state_dict(merged_state)
    assert torch.allclose(plain(input_ids=ids).logits, twin(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_muon_steps_adapters_as_matrices(world: World) -> None:
    """As torch's own in one process, which adds gradients in the order of ranks: bit for bit."""

    def muon(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon(trained_of(model), lr=0.02)

    twin = with_adapters(base(world.seed), world.seed)
    model = copy.deepcopy(twin)
    optimizer = muon(twin)
    for step in range(4):
        for rank in range(world.size):
            loss(twin, batch(world.seed, step, 0, rank)).backward()
        for parameter in trained_of(twin):
            parameter.grad *= 1.0 / world.size
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = prepare(model, muon(model), configuration(3, units=SHARDED), process_group=world.group)
    for step in range(4):
        loss(model, batch(world.seed, step, 0, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, wanted = zero_ext.full_state_dict(model, rank0_only=False), twin.state_dict()
    assert sum("lora_" in name for name in found) == 12
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


def _check_only_adapters_cost(model: PeftModel, tier: str) -> None:
    """No gradients and no optimizer state but those of what is trained; the base lies in its tier."""
    engine = engine_of(model)
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert {spec.name for master in engine.masters for spec in master.unit.layout.specs} == set(trained)
    assert {id(unit) for unit in engine._gradients} == {id(master.unit) for master in engine.masters}
    found = engine.memory_by_tier()
    owned = sum(master.end - master.begin for master in engine.masters)
    held = sum(each["optimizer"] for each in found.values())
    assert 2 * 4 * owned <= held <= 3 * 4 * owned + 3 * 4096 * len(engine.masters)
    assert sum(each["grads"] for each in found.values()) <= 4 * owned
    frozen = sum(each.numel() for each in model.parameters()) - sum(
        each.numel() for each in trained_of(model)
    )
    assert found[tier]["params"] >= 4 * frozen / engine.world_size  # type: ignore[index]


def trained_of(model: PeftModel) -> list[torch.nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def _check_saved(model: PeftModel, twin: PeftModel, seed: int, folder: Path, changes: dict[str, Any]) -> None:
    """The file has the adapter alone, with true values, and plain PEFT reads it to equal logits."""
    stored = load_file(folder / "adapter_model.safetensors")
    assert all("lora_" in name or "lm_head" in name for name in stored)
    assert sum(value.numel() for value in stored.values()) == sum(each.numel() for each in trained_of(model))
    plain = PeftModel.from_pretrained(base(seed), folder)
    ids = batch(seed, 7, 0, 0)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        assert torch.allclose(plain(input_ids=ids).logits, logits, rtol=1e-5, atol=1e-6)
        assert torch.allclose(twin(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-5)
        with model.disable_adapter():
            assert torch.allclose(
                base(seed)(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-6
            )


@on_ranks(2)
def test_an_existing_adapter_loads_stored_weights(world: World) -> None:
    folder = world.shared_folder()
    source = with_adapters(base(world.seed), world.seed + 5)
    if world.rank == 0:
        source.save_pretrained(str(folder / "one"))
        with_adapters(base(world.seed), 1, r=2).save_pretrained(str(folder / "smaller"))
        with_adapters(base(world.seed), 1, target_modules=["k_proj"]).save_pretrained(
            str(folder / "elsewhere")
        )
    world.barrier()
    model = with_adapters(base(world.seed), world.seed)
    prepare(model, trainable(model), configuration(3, units=SHARDED), process_group=world.group)
    before = adapter_state_dict(model, rank0_only=False)
    for wrong, pattern in (("smaller", "shape"), ("elsewhere", "another adapter")):
        with pytest.raises(ValueError, match=pattern):
            load_adapter_weights(model, folder / wrong)
    after = adapter_state_dict(model, rank0_only=False)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    load_adapter_weights(model, folder / "one")
    ids = batch(world.seed, 0, 0, 0)
    assert torch.allclose(model(input_ids=ids).logits, source(input_ids=ids).logits, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="got 'other'"):
        load_adapter_weights(model, folder / "one", "other")


@on_ranks(2)
def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(world: World) -> None:
    model = with_adapters(base(world.seed), world.seed)
    prepare(model, None, configuration(3), process_group=world.group)
    folder = world.shared_folder()
    if world.rank == 0:
        (folder / "file").write_text("")
    world.barrier()
    with pytest.raises((ValueError, RuntimeError), match=r"writing the adapter|not a file"):
        model.save_pretrained(str(folder / "file"))
    with pytest.raises(TypeError, match=r"expected a peft\.PeftModel"):
        prepare(base(0), None, configuration(3), process_group=world.group)  # type: ignore[arg-type]


def test_a_trainer_that_does_not_know_adapters_says_which_does(tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "save_strategy": "no"}
    model = with_adapters(base(0), 0, modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match=r"got PeftModelForCausalLM\. Use ZeroPeftTrainer"):
        ZeroTrainer(model=model, args=TrainingArguments(**settings))
    ZeroPeftTrainer(model=model, args=TrainingArguments(**settings))
    native = base(0)
    native.add_adapter(lora())
    for kind in (ZeroTrainer, ZeroPeftTrainer):
        with pytest.raises(ValueError, match=r"peft\.get_peft_model"):
            kind(model=native, args=TrainingArguments(**settings))
