"""Models of transformers split by their own plans and by ours, under ZeRO: as one process."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import zero_ext
from tests.integrations.transformers.beside_one_process import assert_steps_as_alone, optimizer_of
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
# Without a plan of transformers. Vocabularies of two do not divide by 2, as GPT-2's.
UNPLANNED = {
    "gpt2": {**GPT, "vocab_size": VOCABULARY + 1},
    "bloom": {"hidden_size": 24, "num_attention_heads": 6, "vocab_size": VOCABULARY + 1},
    "bert": {},
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
    elif "roberta" in kind or kind in ("bert", "camembert"):
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


def loss_of(model: nn.Module, words: torch.Tensor, samples: slice = slice(None)) -> torch.Tensor:
    """The model's own loss of some samples; the last two words of each are padding."""
    there = torch.ones_like(words)
    there[:, -2:] = 0
    labels = words.where(there > 0, -100)
    return model(input_ids=words[samples], attention_mask=there[samples], labels=labels[samples]).loss


def check_steps(
    world: World, mesh: DeviceMesh, model: Any, reference: Any, stage: int, **sections: Any
) -> None:
    """Steps of ``model``, split over ``mesh``, are those of ``reference`` alone."""
    share, replica = SAMPLES // mesh["dp"].size(), mesh["dp"].get_local_rank()
    own = slice(share * replica, share * (replica + 1))
    losses = [
        (partial(loss_of, words=each, samples=own), partial(loss_of, words=each))
        for each in batches(world.seed)
    ]
    assert_steps_as_alone(world, mesh, model, reference, stage, losses, **sections)


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("case", [*SHIPPED, *OURS])
def test_steps_are_those_of_one_process(world: World, case: str) -> None:
    enter(world)
    kind, changes = {**SHIPPED, **OURS}[case]
    for stage in (0, 1, 2, 3):
        model = apply_tensor_parallel(built(kind, changes, world.seed), mesh_of_all())
        check_steps(world, mesh_of_all(), model, built(kind, changes, world.seed), stage)


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(("stage", "tied"), [(0, True), (2, False), (3, True)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_steps_of_two_replicas(world: World, kind: str, stage: int, tied: bool) -> None:
    enter(world)
    mesh, changes = make_mesh(tp=2, device_type="cpu"), {"tie_word_embeddings": tied}
    model = apply_tensor_parallel(built(kind, changes, world.seed), mesh)
    assert isinstance(model.get_parameter("model.layers.0.self_attn.q_proj.weight"), DTensor)
    assert isinstance(model.get_input_embeddings().weight, DTensor)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    check_steps(world, mesh, model, built(kind, changes, world.seed), stage)


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", UNPLANNED)
def test_models_that_bring_no_plan(world: World, kind: str, stage: int) -> None:
    enter(world)
    mesh = make_mesh(tp=2, device_type="cpu")
    model = apply_tensor_parallel(built(kind, UNPLANNED[kind], world.seed), mesh)
    matrices = [each for each in model.base_model.parameters() if isinstance(each, DTensor)]
    assert sum(each.dim() == 2 for each in matrices) == {"gpt2": 9, "bloom": 9, "bert": 13}[kind]
    check_steps(world, mesh, model, built(kind, UNPLANNED[kind], world.seed), stage)


@on_ranks(4)
def test_fused_projections_are_saved_in_full(world: World) -> None:
    enter(world)
    folder = world.shared_folder()
    mesh = make_mesh(tp=2, device_type="cpu")
    first = apply_tensor_parallel(built("gpt2", UNPLANNED["gpt2"], world.seed), mesh)
    first, _ = zero_ext.prepare(first, optimizer_of(first), {"stage": 3}, process_group=mesh)
    zero_ext.save_checkpoint(folder, first).wait()
    for tp in (4, 1):
        mesh = make_mesh(tp=tp, device_type="cpu")
        then = apply_tensor_parallel(built("gpt2", UNPLANNED["gpt2"], world.seed + 1), mesh)
        then, _ = zero_ext.prepare(then, optimizer_of(then), {"stage": 1}, process_group=mesh)
        zero_ext.load_checkpoint(folder, then)
        for name, value in built("gpt2", UNPLANNED["gpt2"], world.seed).state_dict().items():
            assert torch.equal(zero_ext.full_state_dict(then)[name], value), name


@on_ranks(2)
@pytest.mark.parametrize(
    ("changes", "plan", "message"),
    [
        (
            {"num_attention_heads": 1, "num_key_value_heads": 1},
            None,
            "num_attention_heads: expected a multiple of",
        ),
        ({"num_key_value_heads": 1}, None, "num_key_value_heads: expected a multiple of tp (2), got 1"),
        ({"intermediate_size": 33}, None, "mlp.gate_proj.weight': expected a multiple of tp (2)"),
        ({}, {"model.layers.*.mlp.up": "colwise"}, "expected 'model.layers.*.mlp.up' to name a module"),
        ({}, {"model.layers.*.mlp.up_proj": "sideways"}, "style 'sideways'"),
        ({}, {"model.layers.*.mlp.up_proj": "embedding_rowwise"}, "expected Embedding, got Linear"),
        ({}, {"model.layers.*.mlp": "colwise"}, "expected Linear or Embedding, got LlamaMLP"),
        ({}, {"model.layers.*.mlp.up_proj.weight": "local_params"}, "expected one of colwise"),
        ({}, {"model.layers.*.self_attn": "mla_kv_a_proj"}, "expected qk_rope_head_dim"),
        ({"tie_word_embeddings": True}, {"lm_head": "colwise"}, "expected 'model.embed_tokens' to be split"),
    ],
)
def test_splits_that_cannot_be(world: World, changes: Any, plan: Any, message: str) -> None:
    enter(world)
    model = built("llama", changes, world.seed)
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_tensor_parallel(model, make_mesh(tp=2, device_type="cpu"), plan)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(2)
def test_a_model_without_a_plan(world: World) -> None:
    enter(world)
    config = AutoConfig.for_model(
        "codegen", n_embd=16, n_layer=1, n_head=2, vocab_size=VOCABULARY, rotary_dim=4
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="CodeGenForCausalLM: expected a plan"):
        apply_tensor_parallel(model, make_mesh(tp=2, device_type="cpu"))
    assert apply_tensor_parallel(model, make_mesh(pp=2, device_type="cpu")) is model  # nothing is to be split
