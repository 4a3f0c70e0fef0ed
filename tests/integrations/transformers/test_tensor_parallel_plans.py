"""Models of transformers with experts, fused projections and plans of ours, split over two ranks."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from tests.integrations.transformers.beside_one_process import assert_steps_as_alone
from tests.integrations.transformers.models import VOCABULARY, enter
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.parallel import apply_tensor_parallel, make_mesh

STEPS, SAMPLES, LENGTH = 4, 4, 10
# Each configuration takes what it knows of these.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "dropout_rate"), 0.0),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "activation_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
MANY_KEYS = {"num_key_value_heads": 4}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
DEEPSEEK = {**LATENT, **MANY_KEYS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LONGCAT = {**LATENT, **MANY_KEYS, "num_layers": 1, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 16}
INKLING = {"mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 2, "d_rel": 4, "rel_extent": 16}
SWA = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 4}
T5 = {
    "decoder_start_token_id": 0,
    "d_model": 16,
    "d_ff": 24,
    "d_kv": 4,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": False}
# Of each case: a model's type and what is special of it, by the plan that transformers ships and by ours.
SHIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {"shared_expert_intermediate_size": 16, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "longcat_flash": ("longcat_flash", {**LONGCAT, "moe_topk": 2, "zero_expert_num": 2}),
    "llama4": ("llama4_text", {"intermediate_size_mlp": 24, "num_experts_per_tok": 1}),
    "granite_swa": ("granite_swa", {"sliding_window": 4}),
    "inkling": ("inkling_text", {**INKLING, **SWA}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {}),
    "gemma2": ("gemma2", {}),
    "apertus": ("apertus", {}),
    "doge": ("doge", {}),
}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", {"ffn_dim": 24, "word_embed_proj_dim": 8}),
    "gptj": ("gptj", {**GPT, "rotary_dim": 2}),
    "falcon": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon_multi_query": ("falcon", {"multi_query": True}),
    "falcon_alibi": ("falcon", {"multi_query": True, "alibi": True, "bias": True}),
    "falcon_new": ("falcon", NEW_FALCON),
    "t5": ("t5", T5),
    "t5_gated": ("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", T5),
    "roberta": ("roberta", {}),
    "roberta_decoder": ("roberta", {"is_decoder": True}),
    "xlm_roberta": ("xlm-roberta", {}),
    "camembert": ("camembert", {}),
}


def built(kind: str, changes: dict[str, Any], seed: int) -> Any:
    """A model with random values for all parameters: biases are zero and norms one at first."""
    known = AutoConfig.for_model(kind)
    fixed = {name for name in SIZES if isinstance(getattr(type(known), name, None), property)}
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name) and name not in fixed}
    config = AutoConfig.for_model(kind, **sizes | changes)
    made: Any = AutoModelForCausalLM
    if config.is_encoder_decoder:
        made = AutoModelForSeq2SeqLM
    elif "roberta" in kind or kind == "camembert":
        made = AutoModelForCausalLM if config.is_decoder else AutoModelForMaskedLM
    model = made.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return model


@cache
def mesh_of_all() -> DeviceMesh:
    """Two ranks with slices of tensors; made once in a process."""
    return make_mesh(tp=2, device_type="cpu")


def batches(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(STEPS)]


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """The model's own loss; the last two words of each sample are padding."""
    there = torch.ones_like(words)
    there[:, -2:] = 0
    return model(input_ids=words, attention_mask=there, labels=words.where(there > 0, -100)).loss


@on_ranks(2)
@pytest.mark.parametrize("case", [*SHIPPED, *OURS])
def test_steps_are_those_of_one_process(world: World, case: str) -> None:
    enter(world)
    kind, changes = {**SHIPPED, **OURS}[case]
    for stage in (0, 1, 2, 3):
        model = apply_tensor_parallel(built(kind, changes, world.seed), mesh_of_all())
        losses = [(partial(loss_of, words=words),) * 2 for words in batches(world.seed)]
        assert_steps_as_alone(world, mesh_of_all(), model, built(kind, changes, world.seed), stage, losses)
