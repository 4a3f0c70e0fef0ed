"""Weights streamed with adapters merged are those of PEFT's merge_and_unload of the unsharded model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from peft import IA3Config, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import zero_ext
from tests.integrations.peft.models import base, lora, quantized, with_adapters
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations import peft_merging
from zero_ext.integrations.peft import prepare
from zero_ext.zero import engine_of
from zero_ext.zero.memory.gathered_unit import UnitState

EVERYWHERE = ["embed_tokens", "q_proj", "v_proj", "down_proj", "lm_head"]


def gpt2() -> Any:
    """With weights that are stored transposed, and its head tied to the embedding."""
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64))


def adapted(kind: str, seed: int) -> PeftModel:
    """A model whose adapters change something from the start."""
    torch.manual_seed(seed)
    if kind == "ia3":
        made: Any = get_peft_model(base(seed), IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"]))
    elif kind == "vera":
        made = get_peft_model(base(seed), VeraConfig(r=4, target_modules=["q_proj"], d_initial=0.5))
    elif kind == "fan_in_fan_out":
        made = get_peft_model(gpt2(), lora(target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True))
    elif kind == "two adapters":
        made = with_adapters(base(seed), seed)
        made.add_adapter("other", lora(r=2, target_modules=["q_proj", "o_proj"]))
        made.base_model.set_adapter(["default", "other"])
    else:
        made = with_adapters(base(seed, tie_word_embeddings=kind == "saved tied"), seed, **LORA[kind])
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "original_module" not in name and ("lora_" in name or "ia3" in name or "to_save" in name):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made  # type: ignore[no-any-return]


LORA: dict[str, dict[str, Any]] = {
    "plain": {},
    "patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "everywhere": {"target_modules": EVERYWHERE},
    "dora, saved": {"use_dora": True, "modules_to_save": ["lm_head"]},
    "saved tied": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [3, 5]}},
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "stage", "dtype"),
    [
        *((kind, 3, "bfloat16") for kind in [*LORA, "two adapters", "fan_in_fan_out", "ia3", "vera"]),
        *(("dora, saved", 3, "float32"), ("everywhere", 2, "float32")),
    ],
)
def test_merged_weights(world: World, kind: str, stage: int, dtype: str) -> None:
    model = adapted(kind, world.seed).to(getattr(torch, dtype))
    twin: Any = copy.deepcopy(model)
    config = {"stage": stage, "units": {"persistence_threshold": 0}}
    prepare(model, None, config, process_group=world.group)
    before = zero_ext.full_state_dict(model)
    found = {}
    for name, value in zero_ext.stream_weights(model, merge_adapters=True):
        assert name not in found
        found[name] = value.clone()
    wanted = twin.merge_and_unload()
    parameters = dict(wanted.named_parameters())  # of tied ones the first
    assert found.keys() == parameters.keys()
    assert all(torch.equal(found[name], value) for name, value in parameters.items())
    assert dict(zero_ext.stream_weights(model)).keys() >= dict(model.named_parameters()).keys()
    assert all(torch.equal(value, before[name]) for name, value in zero_ext.full_state_dict(model).items())


@on_ranks(2)
def test_one_unit_and_its_adapters_are_gathered(world: World) -> None:
    model = with_adapters(base(0), 0, target_modules=EVERYWHERE)
    units = {"persistence_threshold": 0, "bucket_elements": 1}
    prepare(model, None, {"stage": 3, "units": units}, process_group=world.group)
    engine, held = engine_of(model), []

    @contextlib.contextmanager
    def recording(parameters: Any) -> Iterator[None]:
        with zero_ext.gathered(parameters):
            held.append([unit for unit in engine.units if unit.state is UnitState.GATHERED])
            yield

    with mock.patch.object(peft_merging, "gathered", recording):
        for _ in zero_ext.stream_weights(model, merge_adapters=True):
            assert sum(unit.state is UnitState.GATHERED for unit in engine.units) <= 1
    assert len(held) == 8
    for units_held in held:  # a block's or a layer's base, and its adapters
        assert sum(not unit.parameters[0].requires_grad for unit in units_held) == 1 < len(units_held) <= 3


def prompts() -> Any:
    settings = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return get_peft_model(base(0), settings)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no adapters": (lambda: base(0), TypeError, "expected a peft.PeftModel, got LlamaForCausalLM"),
    "bias": (
        lambda: with_adapters(base(0), 0, lora_bias=True),
        ValueError,
        "got an adapter with a bias on a layer without",
    ),
    "prompts": (prompts, ValueError, "expected adapters inside layers, got PeftType.PROMPT_TUNING"),
    "quantized": (lambda: with_adapters(quantized(base(0)), 0), ValueError, "q_proj.* got quantized weights"),
    "tied": (
        lambda: with_adapters(base(0, tie_word_embeddings=True), 0, target_modules=["embed_tokens"]),
        ValueError,
        "'base_model.model.lm_head.weight': .* that 'base_model.model.model.embed_tokens' uses too",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_merged(world: World, kind: str) -> None:
    make, error, words = REFUSED[kind]
    model = make()
    zero_ext.prepare(model, None, {"stage": 3}, process_group=world.group, wrap=False)
    with pytest.raises(error, match=words):
        zero_ext.stream_weights(model, merge_adapters=True)  # before the first is asked for
    assert dict(zero_ext.stream_weights(model)).keys() >= dict(model.named_parameters()).keys()
