"""Parameters that the planner reads out of a config against those that transformers makes of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    RobertaConfig,
)

from zero_ext.plan.models import model_named


def sizes(draw: random.Random) -> dict[str, Any]:
    groups = draw.choice([1, 2])
    return {
        "hidden_size": 16 * draw.randint(2, 5),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": 4,
        "num_key_value_heads": groups,
        "intermediate_size": draw.randint(20, 200),
        "vocab_size": draw.randint(100, 300),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def llama(draw: random.Random) -> PretrainedConfig:
    bias = draw.random() < 0.5
    return LlamaConfig(**sizes(draw), attention_bias=bias, mlp_bias=not bias, head_dim=draw.choice([8, 12]))


def gpt2(draw: random.Random) -> PretrainedConfig:
    inner = draw.choice([None, 48])
    return GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=draw.randint(100, 300), n_inner=inner)


def bloom(draw: random.Random) -> PretrainedConfig:
    return BloomConfig(
        hidden_size=32, n_layer=draw.randint(1, 3), n_head=4, vocab_size=draw.randint(100, 300)
    )


def masked(kind: type[PretrainedConfig], draw: random.Random) -> PretrainedConfig:
    values = sizes(draw)
    for name in ("num_key_value_heads", "tie_word_embeddings"):
        del values[name]
    return kind(**values, type_vocab_size=draw.randint(1, 3))


KINDS = {
    "llama": (llama, AutoModelForCausalLM),
    "mistral": (lambda draw: MistralConfig(**sizes(draw)), AutoModelForCausalLM),
    "qwen2": (lambda draw: Qwen2Config(**sizes(draw)), AutoModelForCausalLM),
    "gpt2": (gpt2, AutoModelForCausalLM),
    "bloom": (bloom, AutoModelForCausalLM),
    "bert": (lambda draw: masked(BertConfig, draw), AutoModelForMaskedLM),
    "roberta": (lambda draw: masked(RobertaConfig, draw), AutoModelForMaskedLM),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_planner_counts_as_transformers_does(kind: str, tmp_path: Path) -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    draw, (make, auto) = random.Random(seed), KINDS[kind]
    for _ in range(4):
        config = make(draw)
        with torch.device("meta"):
            model = auto.from_config(config)
        config.save_pretrained(tmp_path)
        counted = sum(parameter.numel() for parameter in model.parameters())
        assert model_named(str(tmp_path)).parameters == counted, config
