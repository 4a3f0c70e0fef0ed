"""QLoRA: bitsandbytes' 4-bit weights shard and tier as raw bytes, and train as unsharded ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import zero_ext
from tests.integrations.peft.models import base, batch, quantized, with_adapters
from tests.integrations.peft.test_lora import HOST, SHARDED, check_same, curve, trainable
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import configuration
from zero_ext.integrations.peft import prepare
from zero_ext.integrations.transformers import from_pretrained
from zero_ext.zero import engine_of


@on_ranks(2)
@pytest.mark.parametrize("nested", [False, True])
def test_losses_are_those_of_unsharded_qlora(world: World, nested: bool) -> None:
    twin = with_adapters(quantized(base(world.seed), nested), world.seed)
    ids = batch(world.seed, 9, 0, 0)
    before = {name: each.detach().clone() for name, each in twin.named_parameters()}
    wanted = curve(world, twin, trainable(twin), 5, everyone=True)
    assert wanted[4] < wanted[0]
    folder = world.shared_folder()
    tiers: dict[str, dict[str, Any]] = {
        "device": {},
        "host": HOST,
        "nvme": {"params": "nvme", "nvme_paths": [str(folder)]},
    }
    for tier, offload in tiers.items():
        # Other weights on rank 1: rank 0's bytes count, and its scales with them.
        made = with_adapters(quantized(base(world.seed + world.rank), nested), world.seed)
        config = configuration(3, units=SHARDED, offload=offload)
        model, optimizer = prepare(made, trainable(made), config, process_group=world.group)
        check_same(curve(world, model, optimizer, 5, everyone=False), wanted)
        engine = engine_of(model)
        packed = [unit for unit in engine.units if unit.layout.dtype is torch.uint8]
        assert packed and all(unit.storage.tier == tier for unit in packed)
        total = sum(each.numel() for each in before.values() if each.dtype is torch.uint8)
        held = sum(unit.storage.numel for unit in packed)
        assert total / 2 <= held <= total / 2 + 4096 * len(packed)
        assert engine.memory_by_tier()[tier]["params"] >= held
        # Evaluation would put the bytes into another order on processors with AVX512-BF16.
        model.eval()
        twin.train()
        with torch.no_grad():
            assert torch.allclose(
                model(input_ids=ids).logits, twin(input_ids=ids).logits, rtol=1e-4, atol=1e-5
            )
        state = zero_ext.full_state_dict(model)
        for name, value in before.items():
            if value.dtype is torch.uint8:
                assert torch.equal(state[name], value), name
                assert f"{name}.quant_state.absmax" in state
        with pytest.raises(RuntimeError, match="load it onto the plain base model"):
            model.merge_and_unload()
        model.save_pretrained(folder / tier)
        world.barrier()


@on_ranks(2)
def test_weights_that_were_evaluated_before_are_put_back_in_order(world: World) -> None:
    made = with_adapters(quantized(base(world.seed, hidden_size=64)), world.seed)
    ids = batch(world.seed, 0, 0, 0)
    wanted = made(input_ids=ids).logits.detach()
    made.eval()
    with torch.no_grad():
        made(input_ids=ids)
    model, _ = prepare(made, None, configuration(3, units=SHARDED), process_group=world.group)
    with torch.no_grad():
        # bitsandbytes itself rounded the scales to bfloat16 on the way.
        assert torch.allclose(model(input_ids=ids).logits, wanted, rtol=5e-2, atol=2e-2)


@on_ranks(2)
def test_quantized_files_are_refused_by_name_and_load_as_the_message_says(world: World) -> None:
    ids = batch(world.seed, 0, 0, 0)
    folder = world.shared_folder()
    if world.rank == 0:
        base(world.seed, hidden_size=64).save_pretrained(folder / "plain")
        four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        packed = LlamaForCausalLM.from_pretrained(folder / "plain", quantization_config=four_bits)
        packed.save_pretrained(folder / "packed")
    world.barrier()
    with pytest.raises(ValueError, match=r"quantized ones \(bitsandbytes\).*from_pretrained\(folder\)"):
        from_pretrained(LlamaForCausalLM, folder / "packed", {"stage": 3}, process_group=world.group)
    twin, model = (
        with_adapters(LlamaForCausalLM.from_pretrained(folder / "packed"), world.seed).train()
        for _ in range(2)
    )  # in training mode: evaluation lets bitsandbytes round on some processors
    config = configuration(3, units=SHARDED)
    same, _ = prepare(model, trainable(model), config, process_group=world.group)
    assert any(unit.layout.dtype is torch.uint8 for unit in engine_of(same).units)
    assert torch.allclose(same(input_ids=ids).logits, twin(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
