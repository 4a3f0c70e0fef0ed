"""Models of transformers split by their own plans, under ZeRO: as one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel

import zero_ext
from tests.integrations.transformers.models import VOCABULARY, enter
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.parallel import make_mesh, split_tensors
from zero_ext.zero import engine_of

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


def batches(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(STEPS)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


@on_ranks(4, timeout=300)
@pytest.mark.parametrize(("stage", "tied"), [(0, True), (2, False), (3, True)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_steps_are_those_of_one_process(world: World, kind: str, stage: int, tied: bool) -> None:
    enter(world)
    mesh = make_mesh(tp=2, device_type="cpu")
    model = split_tensors(built(kind, world.seed, tie_word_embeddings=tied), mesh)
    assert isinstance(model.get_parameter("model.layers.0.self_attn.q_proj.weight"), DTensor)
    assert isinstance(model.get_input_embeddings().weight, DTensor)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model, optimizer = zero_ext.prepare(
        model, optimizer_of(model), {"stage": stage, "gradient_clipping": 0.5}, process_group=mesh
    )
    reference = built(kind, world.seed, tie_word_embeddings=tied)
    plain = optimizer_of(reference)
    share = SAMPLES // mesh["dp"].size()
    own = slice(share * mesh["dp"].get_local_rank(), share * (mesh["dp"].get_local_rank() + 1))
    for words in batches(world.seed):
        loss = model(input_ids=words[own], labels=words[own]).loss
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        wanted = reference(input_ids=words, labels=words).loss
        wanted.backward()
        norm = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
        plain.step()
        plain.zero_grad()
        mean = torch.tensor(world.everyone(float(loss.detach())), dtype=torch.float64).mean().item()
        torch.testing.assert_close(mean, float(wanted.detach()), rtol=1e-5, atol=0)
        torch.testing.assert_close(engine_of(model).grad_norm, norm, rtol=1e-5, atol=0)
    found = zero_ext.full_state_dict(model)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


@on_ranks(2, timeout=300)
@pytest.mark.parametrize(
    ("changes", "plan", "message"),
    [
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, None, "num_attention_heads is 1"),
        ({"num_key_value_heads": 1}, None, "num_key_value_heads is 1"),
        ({"intermediate_size": 33}, None, "mlp.gate_proj' has a weight of (33, 16)"),
        ({}, {"model.layers.*.mlp.up": "colwise"}, "'model.layers.*.mlp.up' names no module"),
        ({}, {"model.layers.*.mlp.up_proj": "sideways"}, "style 'sideways'"),
    ],
)
def test_splits_that_cannot_be(world: World, changes: Any, plan: Any, message: str) -> None:
    enter(world)
    model = built("llama", world.seed, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        split_tensors(model, make_mesh(tp=2, device_type="cpu"), plan)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(2, timeout=300)
def test_a_model_without_a_plan(world: World) -> None:
    enter(world)
    config = AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match="GPT2LMHeadModel brings no plan"):
        split_tensors(GPT2LMHeadModel(config), make_mesh(tp=2, device_type="cpu"))
