"""Heads with adapters and split heads: the loss in chunks is that of the plain model."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import zero_ext
from tests.integrations.transformers.causal_models import batches, check_trains_as, model_of
from tests.integrations.transformers.largest_result import LargestResult
from tests.integrations.transformers.models import enter, llama
from tests.integrations.transformers.test_tensor_parallel import (
    UNPLANNED,
    built,
    check_steps,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations.peft import prepare
from zero_ext.integrations.transformers.chunked_loss import chunk_loss, chunking_problem
from zero_ext.parallel import apply_tensor_parallel, make_mesh, tensor_plan

CHUNK = 5
LOSS = {"loss": {"chunk_tokens": CHUNK}}

llama_tied = partial(llama, tie_word_embeddings=True)
gemma2 = partial(model_of, "Gemma2", head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=0.5)
ADAPTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (llama, {}),
    "tied": (llama_tied, {}),
    "softcap": (gemma2, {}),
    "scaled logits": (partial(model_of, "Granite", logits_scaling=3.0), {"use_rslora": True}),
    "bias": (partial(model_of, "Phi"), {"lora_bias": True}),
    "saved": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
}


def adapted(make: Any, seed: int, changes: dict[str, Any]) -> Any:
    """A model with adapters that do something from the start: B is random too."""
    model = make(seed)
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"}
    made = peft.get_peft_model(model, peft.LoraConfig(**{**settings, **changes}))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return made.train()


@on_ranks(2)
@pytest.mark.parametrize("case", ADAPTED)
def test_steps_of_an_adapted_head(world: World, case: str) -> None:
    make, changes = ADAPTED[case]
    for stage in (1, 2, 3):
        model, plain = (adapted(make, world.seed, changes) for _ in range(2))
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
        model, optimizer = prepare(model, optimizer, {"stage": stage, **LOSS}, process_group=world.group)
        check_trains_as(world, model, optimizer, plain, [[each] for each in batches(world)], f"{stage}: ")


def check_gradients(model: Any, rtol: float, **inputs: Any) -> None:
    """Gradients of the model with its loss in chunks are those of the plain one, with the same dropout."""
    plain = copy.deepcopy(model)
    chunk_loss(model.get_base_model(), CHUNK)
    for each in (model, plain):
        torch.manual_seed(3)
        each(**inputs).loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert any("lm_head" in name for name in found)
    for name, parameter in plain.named_parameters():
        assert (parameter.grad is None) is (name not in found), name
        if name in found:
            error = (found[name].double() - parameter.grad.double()).norm()
            assert error <= rtol * parameter.grad.double().norm(), name


WORDS = torch.arange(3, 63).view(2, -1)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_dropout_and_in_16_bits(dtype: torch.dtype, dropout: float) -> None:
    """PEFT's adapters are in float32 over a model in bfloat16."""
    model = adapted(lambda seed: llama(seed).to(dtype), 0, {"lora_dropout": dropout})
    assert next(each for name, each in model.named_parameters() if "lora_B" in name).dtype == torch.float32
    check_gradients(model, 1e-5 if dtype == torch.float32 else 0.05, input_ids=WORDS, labels=WORDS)


def test_several_adapters_and_none() -> None:
    model = adapted(llama, 0, {})
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"]))
    nn.init.normal_(model.get_base_model().lm_head.lora_B["other"].weight, std=0.1)
    model.base_model.set_adapter(["default", "other"])
    plain = model(input_ids=WORDS, labels=WORDS).loss
    check_gradients(model, 1e-5, input_ids=WORDS, labels=WORDS)
    with model.disable_adapter():
        without = model(input_ids=WORDS, labels=WORDS).loss
        expected = model.eval()(input_ids=WORDS, labels=WORDS).loss
    torch.testing.assert_close(without, expected)
    assert (without - plain).abs() > 1e-3


@pytest.mark.parametrize("case", ["lora", "saved"])
def test_no_logits_of_all_tokens_of_an_adapted_head(case: str) -> None:
    model = adapted(partial(llama, vocab_size=4096), 0, ADAPTED[case][1])
    words = torch.arange(3, 4003).view(200, -1)
    chunk_loss(model.get_base_model(), 100)
    with LargestResult() as largest:
        model(input_ids=words, labels=words).loss.backward()
    assert 100 * 4096 <= largest.elements < 200 * 4096


class OwnFactors(nn.Linear):
    """A layer that may compute anything."""


def with_own_factors() -> Any:
    model = adapted(llama, 0, {})
    model.get_base_model().lm_head.lora_B["default"].__class__ = OwnFactors
    return model


def merged() -> Any:
    model = adapted(llama, 0, {})
    model.merge_adapter()
    return model


def hooked() -> Any:
    model = adapted(llama, 0, {})
    model.get_base_model().lm_head.base_layer.register_forward_hook(lambda *_: None)
    return model


def above_another_kind() -> Any:
    scaled = peft.get_peft_model(llama(0), peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]))
    return peft.get_peft_model(scaled.get_base_model(), peft.LoraConfig(r=4, target_modules=["lm_head"]))


def with_own_forward() -> Any:
    model = adapted(llama, 0, {})
    head = model.get_base_model().lm_head.base_layer
    head.forward = head.forward
    return model


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (partial(adapted, llama, 0, {"use_dora": True}), "head: expected plain LoRA on it, got Dora"),
        (with_own_factors, "head: expected plain LoRA on it, got OwnFactors"),
        (merged, "head: expected an adapter that is not merged"),
        (hooked, "head: expected no hooks, got some"),
        (
            lambda: peft.get_peft_model(
                llama(0), peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[])
            ),
            r"head: expected a plain nn.Linear .* got peft.*\.ia3\..*Linear. Leave the head out of other",
        ),
        (above_another_kind, r"head: expected a plain nn.Linear .* got peft.*\.ia3\..*Linear"),
        (with_own_forward, "head: expected a plain nn.Linear .* got one with another forward"),
    ],
)
def test_adapters_that_it_cannot_serve_are_refused(make: Any, match: str) -> None:
    with pytest.raises(zero_ext.ConfigError, match=f"loss: .*{match}"):
        prepare(make(), None, LOSS)


SPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "softcap": ("gemma2", {"final_logit_softcapping": 0.5}),
    "bias": ("phi", {}),
    "uneven": ("gpt2", UNPLANNED["gpt2"]),
}


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("case", SPLIT)
def test_steps_of_a_split_head(world: World, case: str) -> None:
    enter(world)
    kind, changes = SPLIT[case]
    mesh = make_mesh(tp=2, device_type="cpu")
    for stage in (0, 1, 2, 3):
        model = apply_tensor_parallel(built(kind, changes, world.seed), mesh)
        check_steps(world, mesh, model, built(kind, changes, world.seed), stage, **LOSS)


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(("tp", "stage"), [(4, 3), (2, 0), (2, 3)])
@pytest.mark.parametrize("style", ["colwise_rep", "colwise_split_logits"])
def test_steps_of_a_split_head_on_four_ranks(world: World, style: str, tp: int, stage: int) -> None:
    enter(world)
    mesh, changes = make_mesh(tp=tp, device_type="cpu"), {"num_key_value_heads": 4}
    model = built("llama", changes, world.seed)
    model = apply_tensor_parallel(model, mesh, {**tensor_plan(model), "lm_head": style})
    check_steps(world, mesh, model, built("llama", changes, world.seed), stage, **LOSS)


@on_ranks(2)
def test_no_rank_has_logits_of_all_words(world: World) -> None:
    enter(world)
    words = torch.arange(3, 4003).view(200, -1)
    model = llama(world.seed, vocab_size=4096).train()
    model = apply_tensor_parallel(model, make_mesh(tp=2, device_type="cpu"))
    chunk_loss(model, 100)
    with LargestResult() as largest:
        model(input_ids=words, labels=words).loss.backward()
    assert 100 * 2048 <= largest.elements < 100 * 4096


@on_ranks(2)
def test_split_heads_that_it_cannot_serve_are_refused(world: World) -> None:
    enter(world)
    mesh = make_mesh(tp=2, device_type="cpu")["tp"]
    model = llama(world.seed)
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(1)]))
    assert "head: expected a weight that is split over its words" in str(chunking_problem(model))
    model = adapted(llama, world.seed, {})
    head = model.get_base_model().lm_head.base_layer
    head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    assert "head: expected no adapter on a head that tensor parallelism splits" in str(
        chunking_problem(model.get_base_model())
    )
