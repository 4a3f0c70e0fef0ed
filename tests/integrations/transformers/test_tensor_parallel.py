"""Models of transformers split by their own plans, under ZeRO: as one process."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import zero_ext
from tests.integrations.transformers.beside_one_process import assert_steps_as_alone, optimizer_of
from tests.integrations.transformers.models import VOCABULARY, enter
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.parallel import apply_tensor_parallel, make_mesh

STEPS, SAMPLES, LENGTH = 4, 4, 10
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}


def built(kind: str, seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes}))


# Vocabularies that do not divide by 2, as GPT-2's.
UNPLANNED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY + 1}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "bloom": {"hidden_size": 24, "n_layer": 2, "n_head": 6, "vocab_size": VOCABULARY + 1},
    "bert": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    | {"vocab_size": VOCABULARY, "max_position_embeddings": 32},
}


def unplanned(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    made = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    model = made.from_config(AutoConfig.for_model(kind, **UNPLANNED[kind]))
    for parameter in model.parameters():  # biases are zero and norms one at first, wherever they end up
        nn.init.normal_(parameter, std=0.2)
    return model


def batches(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(STEPS)]


def check_steps(world: World, mesh: DeviceMesh, model: Any, reference: Any, stage: int) -> None:
    """Steps of ``model``, split over ``mesh``, are those of ``reference`` alone."""
    share = SAMPLES // mesh["dp"].size()
    own = slice(share * mesh["dp"].get_local_rank(), share * (mesh["dp"].get_local_rank() + 1))
    losses = [
        (partial(loss_of, words=words, samples=own), partial(loss_of, words=words))
        for words in batches(world.seed)
    ]
    assert_steps_as_alone(world, mesh, model, reference, stage, losses)


def loss_of(model: Any, words: torch.Tensor, samples: slice = slice(None)) -> torch.Tensor:
    """Of some samples; the last two words of each are padding."""
    there = torch.ones_like(words)
    there[:, -2:] = 0
    labels = torch.where(there.bool(), words, -100)
    return model(input_ids=words[samples], attention_mask=there[samples], labels=labels[samples]).loss


@on_ranks(4)
@pytest.mark.parametrize(("stage", "tied"), [(0, True), (2, False), (3, True)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_steps_are_those_of_one_process(world: World, kind: str, stage: int, tied: bool) -> None:
    enter(world)
    mesh = make_mesh(tp=2, device_type="cpu")
    model = apply_tensor_parallel(built(kind, world.seed, tie_word_embeddings=tied), mesh)
    assert isinstance(model.get_parameter("model.layers.0.self_attn.q_proj.weight"), DTensor)
    assert isinstance(model.get_input_embeddings().weight, DTensor)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    check_steps(world, mesh, model, built(kind, world.seed, tie_word_embeddings=tied), stage)


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["gpt2", "bloom", "bert"])
def test_models_that_bring_no_plan(world: World, kind: str, stage: int) -> None:
    enter(world)
    mesh = make_mesh(tp=2, device_type="cpu")
    model = apply_tensor_parallel(unplanned(kind, world.seed), mesh)
    matrices = [each for each in model.base_model.parameters() if isinstance(each, DTensor)]
    assert sum(each.dim() == 2 for each in matrices) == {"gpt2": 9, "bloom": 9, "bert": 13}[kind]
    check_steps(world, mesh, model, unplanned(kind, world.seed), stage)


@on_ranks(4)
def test_fused_projections_are_saved_in_full(world: World) -> None:
    enter(world)
    folder = world.everyone(tempfile.mkdtemp() if world.rank == 0 else None)[0]
    first = apply_tensor_parallel(unplanned("gpt2", world.seed), make_mesh(tp=2, device_type="cpu"))
    first, _ = zero_ext.prepare(
        first, optimizer_of(first), {"stage": 3}, process_group=make_mesh(tp=2, device_type="cpu")
    )
    zero_ext.save_checkpoint(folder, first).wait()
    for tp in (4, 1):
        mesh = make_mesh(tp=tp, device_type="cpu")
        then = apply_tensor_parallel(unplanned("gpt2", world.seed + 1), mesh)
        then, _ = zero_ext.prepare(then, optimizer_of(then), {"stage": 1}, process_group=mesh)
        zero_ext.load_checkpoint(folder, then)
        for name, value in unplanned("gpt2", world.seed).state_dict().items():
            assert torch.equal(zero_ext.full_state_dict(then)[name], value), name


@on_ranks(2)
@pytest.mark.parametrize(
    ("changes", "plan", "message"),
    [
        (
            {"num_attention_heads": 1, "num_key_value_heads": 1},
            None,
            "num_attention_heads: expected a multiple of tp (2), got 1",
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
    model = built("llama", world.seed, **changes)
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
