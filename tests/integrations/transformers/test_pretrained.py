"""``from_pretrained``: born as shards, equal to what transformers loads, never whole on any rank."""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)

import zero_ext
from tests.integrations.transformers.models import (
    MODELS,
    Sentences,
    bert,
    column,
    enter,
    fitted,
    largest_difference,
    llama,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.config import ConfigError
from zero_ext.integrations.transformers import ZeroTrainer, from_pretrained
from zero_ext.zero import engine_of
from zero_ext.zero.units.presharded import presharded_of

MIB = 2**20


def save(world: World, model: Any, path: Path, **settings: Any) -> None:
    """Rank 0 writes ``model``, whole."""
    if world.rank == 0:
        model.save_pretrained(path, **settings)
    world.barrier()


@on_ranks(1, 2)
def test_models_are_those_that_transformers_loads(world: World) -> None:
    enter(world)
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(world.seed))
    folder = world.shared_folder()
    for name, make in MODELS.items():
        reference = make(world.seed).eval()
        save(world, reference, folder / name, max_shard_size="20KB")
        tiers = [{"stage": 3}, {"stage": 2}]
        if name == "llama":
            nvme = {"params": "nvme", "nvme_paths": [str(folder)]}
            tiers += [{"stage": 3, "offload": {"params": "host"}}, {"stage": 3, "offload": nvme}]
        for config in tiers:
            model = from_pretrained(type(reference), folder / name, config)
            sharded = [presharded_of(parameter) is not None for parameter in model.parameters()]
            moves = config.get("offload") is not None
            assert all(sharded) if config["stage"] == 3 and (world.size > 1 or moves) else not any(sharded)
            assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
            prepared, _ = zero_ext.prepare(model, None, config, wrap=False)
            assert torch.equal(prepared(ids).logits, reference(ids).logits), (name, config)
            assert not prepared.training
            found = zero_ext.full_state_dict(prepared)
            assert all(torch.equal(found[key], value) for key, value in reference.state_dict().items())


@on_ranks(2)
def test_training_goes_on_from_it_as_from_an_ordinary_model(world: World) -> None:
    enter(world)
    data = Sentences(24, world.seed)
    folder = world.shared_folder()
    save(world, llama(world.seed), folder / "saved")
    loaded = LlamaForCausalLM.from_pretrained(folder / "saved")
    plain = fitted(Trainer, loaded, folder, data, max_steps=5)
    config = {"stage": 3, "offload": {"params": "host", "optimizer": "host"}}
    model = from_pretrained(AutoModelForCausalLM, folder / "saved", config)
    trainer = fitted(ZeroTrainer, model, folder, data, config, max_steps=5)
    assert largest_difference(column(trainer, "loss"), column(plain, "loss")) < 1e-5


@on_ranks(2)
def test_new_heads_other_precisions_and_resized_embeddings(world: World) -> None:
    enter(world)
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(world.seed))
    folder = world.shared_folder()
    reference = bert(world.seed)
    save(world, reference.bert, folder / "base")
    torch.manual_seed(world.seed)
    model = from_pretrained(
        AutoModelForSequenceClassification,
        folder / "base",
        {"stage": 3},
        num_labels=5,
        dtype=torch.bfloat16,
    )
    assert model.classifier.weight.shape == (5, 32) and model.dtype is torch.bfloat16
    prepared, _ = zero_ext.prepare(model, None, {"stage": 3}, wrap=False)
    found = zero_ext.full_state_dict(prepared)
    for key, value in reference.bert.state_dict().items():
        assert torch.equal(found[f"bert.{key}"], value.bfloat16()), key
    assert 0.01 < found["classifier.weight"].float().std() < 0.03 and not found["classifier.bias"].any()
    backbone = from_pretrained(BertModel, folder / "base", {"stage": 3})
    prepared, _ = zero_ext.prepare(backbone, None, {"stage": 3}, wrap=False)
    assert torch.equal(prepared(ids).last_hidden_state, reference.bert.eval()(ids).last_hidden_state)

    save(world, llama(world.seed), folder / "llama")
    wider, model = (
        llama(world.seed).eval(),
        from_pretrained(LlamaForCausalLM, folder / "llama", {"stage": 3}),
    )
    for each in (wider, model):
        torch.manual_seed(world.seed)
        each.resize_token_embeddings(75, mean_resizing=False)
    assert model.config.vocab_size == 75 and all(presharded_of(each) for each in model.parameters())
    prepared, _ = zero_ext.prepare(model, None, {"stage": 3}, wrap=False)
    assert torch.equal(prepared(ids).logits, wider(ids).logits)


@on_ranks(2)
def test_no_rank_holds_more_than_its_shard_and_one_tensor(world: World) -> None:
    enter(world)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "vocab_size": 4096}
    folder = world.shared_folder()
    if world.rank == 0:
        llama(world.seed, **sizes).save_pretrained(folder / "large", max_shard_size="60MB")
    world.barrier()
    config = {"stage": 3}
    zero_ext.prepare(from_pretrained(LlamaForCausalLM, folder / "large", config), None, config)  # warm
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmHWM")
    model = from_pretrained(LlamaForCausalLM, folder / "large", config)
    loaded = resident("VmHWM") - before
    prepared, _ = zero_ext.prepare(model, None, config)
    peak = resident("VmHWM") - before
    nbytes = sum(each.numel() * 4 for each in prepared.parameters())
    largest = max(each.numel() * 4 for each in prepared.parameters())
    assert nbytes > 150 * MIB and largest < 10 * MIB
    allowance = nbytes / 2 + largest + 16 * MIB  # reads in flight, and what Python makes
    assert loaded < allowance, (loaded / MIB, nbytes / 2 / MIB)
    assert peak < allowance + engine_of(prepared).pool.total_bytes, (peak / MIB, nbytes / 2 / MIB)


def resident(name: str) -> int:
    """Bytes of this process as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def test_wrong_arguments_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    llama(0).save_pretrained(tmp_path / "saved")
    (tmp_path / "empty").mkdir()
    kind: Any = LlamaForCausalLM
    cases: list[tuple[Any, str, dict[str, Any], type[Exception], str]] = [
        (kind, "saved", {"no_such": 3}, TypeError, "LlamaConfig nor .*no_such = 3"),
        (kind, "saved", {"device_map": "auto"}, TypeError, "device_map = 'auto'.*zero_config"),
        (kind, "saved", {"quantization_config": {}}, TypeError, "quantization_config.*peft"),
        (kind, "saved", {"dtype": "bf61"}, ValueError, "dtype: expected .*'bf61'.*torch.bfloat16"),
        (kind, "saved", {"dtype": torch.int8}, ValueError, "dtype: .*floating-point dtype, got torch.int8"),
        (
            "LlamaForCausalLM",
            "saved",
            {},
            TypeError,
            "model_class: expected a class .*, got 'LlamaForCausalLM'",
        ),
        (torch.nn.Linear, "saved", {}, TypeError, "model_class: .* got .*Linear.*AutoModelForCausalLM"),
        (BertModel, "saved", {}, ValueError, "for BertModel, got 'llama'.*LlamaForCausalLM"),
        (kind, "empty", {}, CheckpointError, "empty: expected a config.json"),
        (kind, "none", {}, CheckpointError, "none: no such folder"),
        (kind, "saved", {"zero_config": tmp_path / "none.json"}, ConfigError, "none.json"),
        (kind, "saved", {"zero_config": {"stag": 3}}, ConfigError, "Did you mean stage"),
    ]
    for kind, name, options, error, words in cases:
        with pytest.raises(error, match=words):
            from_pretrained(kind, tmp_path / name, **options)
    model = from_pretrained(LlamaForCausalLM, tmp_path / "saved", torch_dtype=torch.bfloat16)
    assert model.dtype is torch.bfloat16  # its older name


@on_ranks(2)
def test_a_model_that_was_loaded_for_another_stage_trains_alike(world: World) -> None:
    enter(world)
    data = Sentences(24, world.seed)
    curves = []
    folder = world.shared_folder()
    save(world, llama(world.seed), folder / "saved")
    for loaded in ({"stage": 2}, {"stage": 3}, {"stage": 3, "offload": {"params": "host"}}):
        model = from_pretrained(LlamaForCausalLM, folder / "saved", loaded)
        curves.append(column(fitted(ZeroTrainer, model, folder, data, {"stage": 2}, max_steps=4), "loss"))
    assert all(largest_difference(curve, curves[0]) < 1e-6 for curve in curves[1:])


@on_ranks(2)
def test_bad_folders_are_refused_on_all_ranks(world: World) -> None:
    enter(world)
    folder = world.shared_folder()
    for name in ("good", "cut", "header", "empty", "one"):
        save(world, llama(world.seed), folder / name)
    save(world, llama(world.seed, intermediate_size=40), folder / "other")
    if world.rank == 0:
        weights = folder / "cut" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4])
        (folder / "header" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
        (folder / "empty" / "model.safetensors").unlink()
        config = json.loads((folder / "good" / "config.json").read_text())
        (folder / "other" / "config.json").write_text(json.dumps(config))
    world.barrier()
    for name, kind, words in (
        ("cut", CheckpointError, "model.safetensors"),
        ("header", ValueError, "expected tensors of"),
        ("empty", CheckpointError, "model.safetensors"),
        ("other", ValueError, "mlp.gate_proj.weight.*40, 32.*48, 32"),
        ("nowhere", CheckpointError, "no such folder"),
    ):
        with pytest.raises(kind, match=f"(?s){words}"):
            from_pretrained(LlamaForCausalLM, folder / name, {"stage": 3})


def test_a_copy_is_resized_by_itself(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=2, **sizes)).save_pretrained(tmp_path)
    model = from_pretrained(LlamaForCausalLM, tmp_path, {"stage": 3})
    copied = copy.deepcopy(model)
    copied.resize_token_embeddings(60)
    assert (model.config.vocab_size, copied.config.vocab_size) == (50, 60)
