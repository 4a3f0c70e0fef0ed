"""Tiny models with adapters, plain and quantized, alike on all sides of a comparison."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, TIME = 64, 12


def base(seed: int, **changes: Any) -> LlamaForCausalLM:
    """Two blocks, hidden 32, without dropout."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(
        LlamaConfig(**{"vocab_size": VOCABULARY, "num_key_value_heads": 2, **sizes, **ids, **changes})
    )


def lora(**changes: Any) -> LoraConfig:
    """Rank 4 on attention and one linear layer, without dropout."""
    targets = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM", **changes}
    )


def with_adapters(model: LlamaForCausalLM, seed: int, **changes: Any) -> PeftModel:
    """Adapters that do something from the start: B is random too."""
    torch.manual_seed(seed)
    made = get_peft_model(model, lora(**changes))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    assert isinstance(made, PeftModel)
    return made


def quantized(model: LlamaForCausalLM, nested: bool = True) -> LlamaForCausalLM:
    """All linear layers of the blocks in NF4, as transformers leaves them with load_in_4bit."""
    for block in model.model.layers:
        for name, layer in list(block.named_modules()):
            if type(layer) is nn.Linear:
                packed = bitsandbytes.nn.Linear4bit(
                    layer.in_features,
                    layer.out_features,
                    bias=False,
                    compute_dtype=torch.float32,
                    compress_statistics=nested,
                    quant_type="nf4",
                )
                packed.load_state_dict(layer.state_dict())
                block.set_submodule(name, packed.to("cpu"))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.is_loaded_in_4bit = True
    return model


def batch(seed: int, step: int, micro: int, rank: int) -> torch.Tensor:
    """Ids [2, TIME] that only this step, micro-batch and rank see."""
    generator = torch.Generator().manual_seed(hash((seed, step, micro, rank)) & 0x7FFFFFFF)
    return torch.randint(3, VOCABULARY, (2, TIME), generator=generator)


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model's own loss of predicting each id."""
    found: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return found
