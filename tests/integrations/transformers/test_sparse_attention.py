"""Hugging Face models with sparse attention: equal to the original where every block is there."""

from __future__ import annotations

import copy
import pickle
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    BloomModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    ResNetConfig,
    ResNetModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
)
from transformers.models.bloom.modeling_bloom import BloomBlock

from tests.integrations.transformers.models import VOCABULARY, gpt2, llama
from zero_ext.attention import SparseSelfAttention, build_layout
from zero_ext.config import SparseAttentionConfig
from zero_ext.integrations.transformers import extend_position_embedding, sparsify_attention

LENGTH = 45
WIDE = {"hidden_size": 64, "num_attention_heads": 4}  # head dim 16


def bert_lm(**changes: Any) -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 48, "num_hidden_layers": 2, **WIDE}
    return BertForMaskedLM(BertConfig(**sizes, **changes))


def t5_encoder() -> PreTrainedModel:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5EncoderModel(T5Config(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes))


def bloom(**changes: Any) -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 0}
    return BloomForCausalLM(BloomConfig(**sizes, **changes))


def deepseek() -> PreTrainedModel:
    """Its queries and keys are of 24, its values of 16."""
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "intermediate_size": 48}
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, num_key_value_heads=4, v_head_dim=16, **layers, **heads, **WIDE
    )
    return DeepseekV3ForCausalLM(config)


MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": bert_lm,
    "gpt2": lambda: gpt2(0, n_embd=64, n_positions=64),
    "llama": lambda: llama(0, **WIDE),
    "bloom": bloom,
    "t5": t5_encoder,
    "deepseek": deepseek,
}
CAUSAL = ("gpt2", "llama", "bloom", "deepseek")
FIXED = {"mode": "fixed", "block": 16, "num_local_blocks": 2, "attention": "unidirectional"}


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds torch's generator afresh; pytest shows the seed when the test fails."""
    drawn = secrets.randbits(32)
    print(f"seed {drawn}")
    torch.manual_seed(drawn)


def disturbed(model: PreTrainedModel) -> PreTrainedModel:
    """With attention that is far from even, so that it matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def made(name: str) -> PreTrainedModel:
    drawn = int(torch.randint(1 << 31, ()))
    model = MAKERS[name]()
    torch.manual_seed(drawn)  # some makers set a seed of their own
    return disturbed(model)


def pair(name: str, config: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedModel]:
    original = made(name)
    swapped = copy.deepcopy(original)
    sparsify_attention(swapped, config)
    return original, swapped


def batch(lengths: tuple[int, ...] = (LENGTH, LENGTH - 11), left: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (len(lengths), LENGTH))
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids, "attention_mask": mask.long()}


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def assert_same_training(
    found: PreTrainedModel, wanted: PreTrainedModel, inputs: dict[str, torch.Tensor]
) -> None:
    """Outputs of attended tokens and all gradients are the same."""
    attended = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
    weight = torch.randn(2, LENGTH, 64) * attended[..., None]
    outputs = [model(**inputs)[0] for model in (found, wanted)]
    for out in outputs:
        (out * weight[..., : out.shape[2]]).sum().backward()
    equal(outputs[0][attended], outputs[1][attended])
    for (key, one), other in zip(wanted.named_parameters(), found.parameters(), strict=True):
        assert one.grad is None or other.grad is not None, key
        if one.grad is not None and other.grad is not None:
            scale = float(one.grad.abs().max().clamp(min=1.0))
            equal(other.grad / scale, one.grad / scale)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_dense_layout_is_the_original(name: str, padding: str) -> None:
    original, swapped = pair(name, {"mode": "dense", "block": 16})
    assert list(swapped.state_dict()) == list(original.state_dict())
    inputs = batch(left=padding == "left")
    if padding == "none":
        del inputs["attention_mask"]
    assert_same_training(swapped, original, inputs)


def not_reached_from(token: int, model: PreTrainedModel) -> torch.Tensor:
    """Places of outputs that do not change with the token at that place, in all samples: [LENGTH]."""
    ids = batch()["input_ids"]
    other = ids.clone()
    other[:, token] = (ids[:, token] + 5) % VOCABULARY
    with torch.no_grad():
        return (model(input_ids=ids)[0] == model(input_ids=other)[0]).all(dim=2)


@pytest.mark.parametrize("name", MAKERS)
def test_a_sparse_layout_changes_what_it_leaves_out(name: str) -> None:
    """A token that is not in a query's blocks has no influence on it, and one that is has."""
    layout = {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 1}
    model = made(name)
    sparsify_attention(model, layout | {"attention": "bidirectional"})
    same = not_reached_from(3, model)
    assert bool(same[:, 16:].all())
    assert not bool(same[:, 4:16].any())
    assert bool(same[:, :3].all()) == (name in CAUSAL)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("asked", [{}, {"attention": "unidirectional"}])
def test_a_window_hides_later_tokens_if_the_model_does_or_the_policy_says(
    name: str, asked: dict[str, str]
) -> None:
    model = made(name)
    sparsify_attention(
        model, {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 3, **asked}
    )
    assert bool(not_reached_from(20, model)[:, :20].all()) == (name in CAUSAL or bool(asked))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("config", [{"mode": "dense"}, FIXED], ids=["dense", "fixed"])
def test_generation_with_a_cache_is_that_without(name: str, config: dict[str, Any]) -> None:
    original, swapped = pair(name, config)
    inputs = batch((LENGTH, LENGTH - 11), left=True)
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = swapped.generate(**inputs, **how, output_logits=True, return_dict_in_generate=True)
    assert cached.sequences.shape == (2, LENGTH + 6)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 5), value=1)
    full = {"input_ids": cached.sequences[:, :-1], "attention_mask": mask, "use_cache": False}
    if name != "bloom":  # which takes positions from the mask
        full["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    for model in (swapped, original) if config["mode"] == "dense" else (swapped,):
        with torch.no_grad():
            logits = model(**full).logits[:, LENGTH - 1 :]
        equal(torch.stack(cached.logits, dim=1), logits)


def test_steps_with_a_cache_equal_the_full_logits() -> None:
    _, model = pair("llama", FIXED)
    ids = batch()["input_ids"]
    with torch.no_grad():
        full = model(input_ids=ids)[0]
        cache, chunks = None, []
        for chunk in ids.split([31, 1, 1, 12], dim=1):
            out = model(input_ids=chunk, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            chunks.append(out[0])
    equal(torch.cat(chunks, dim=1), full)


def test_masks_of_length_squared_are_accepted_if_they_are_boolean() -> None:
    original, swapped = pair("bert", {"mode": "dense"})
    ids = batch()["input_ids"]
    allowed = (torch.rand(2, 1, LENGTH, LENGTH) < 0.7) | torch.eye(LENGTH, dtype=torch.bool)
    wanted = original(input_ids=ids, attention_mask=allowed)[0]
    equal(swapped(input_ids=ids, attention_mask=allowed)[0], wanted)
    words = r"attention_mask: .* got torch.int64 of shape \(2, 1, 45, 45\).* Pass attention_mask.bool\(\)"
    with pytest.raises(TypeError, match=words):
        swapped(input_ids=ids, attention_mask=allowed.long())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "t5"])
def test_flex_attention_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses its backward on the CPU, but its formulas serve every device."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    kernel = made(name)
    flex = copy.deepcopy(kernel)
    layout = {"mode": "bigbird", "block": 16}
    sparsify_attention(kernel, layout)
    assert sparsify_attention(flex, layout, backend="flex").backend == "flex"
    assert_same_training(flex, kernel, batch())


def test_what_flex_attention_cannot_do_is_refused() -> None:
    masked = made("bert")
    sparsify_attention(masked, {"mode": "dense", "backend": "flex"})
    dropped = [module for module in masked.modules() if isinstance(module, torch.nn.Dropout)]
    for module in dropped:
        module.p = 0.25
    with pytest.raises(ValueError, match=r'dropout_p: expected 0 for backend "flex", got 0.25'):
        masked.train()(**batch())
    relative = made("t5")
    sparsify_attention(relative, {"mode": "dense"}, backend="flex")
    with pytest.raises(ValueError, match="bias: expected one without a gradient"):
        relative(**batch())
    model, layout = made("llama"), build_layout(SparseAttentionConfig(mode="dense"), 1, LENGTH)
    with (
        mock.patch("zero_ext.attention.flex_attention.MOST_TILES", 0),
        pytest.raises(ValueError, match="expected at most 0 tiles"),
    ):
        sparsify_attention(model, layout, backend="flex")
    assert model.config._attn_implementation != "zero_ext_sparse"


def test_layers_share_one_attention_and_copies_have_their_own() -> None:
    model = made("llama")
    sparse = sparsify_attention(model, FIXED)
    found = {id(module) for module in model.modules() if isinstance(module, SparseSelfAttention)}
    assert found == {id(sparse)}
    twin = copy.deepcopy(model)
    assert all(module is not sparse for module in twin.modules())
    ids = batch()["input_ids"]
    equal(twin(input_ids=ids)[0], model(input_ids=ids)[0])


def test_positions_of_ones_own_are_no_documents() -> None:
    original, swapped = pair("bert", {"mode": "dense", "block": 16})
    words = batch()["input_ids"]
    for positions in (torch.arange(LENGTH).flip(0), torch.zeros(LENGTH, dtype=torch.int64)):
        inputs = {"input_ids": words, "position_ids": positions[None]}
        equal(swapped(**inputs)[0], original(**inputs)[0])


def test_what_cannot_be_sparse_is_refused() -> None:
    images = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic"))
    with pytest.raises(ValueError, match="ResNetModel: expected attention"):
        sparsify_attention(images, FIXED)
    with pytest.raises(ValueError, match="slow_but_exact = False, got True with pretraining_tp = 2"):
        sparsify_attention(bloom(pretraining_tp=2, slow_but_exact=True), FIXED)
    loose = made("llama")
    loose.block = BloomBlock(bloom().config, 0)
    with pytest.raises(ValueError, match="expected BloomAttention inside a BloomModel"):
        sparsify_attention(loose, FIXED)
    crossed = gpt2(0, add_cross_attention=True, n_embd=64)
    with pytest.raises(ValueError, match="cross-attention"):
        sparsify_attention(crossed, FIXED)
    model = made("llama")
    sparsify_attention(model, FIXED)
    ids = batch()["input_ids"]
    with pytest.raises(ValueError, match="Use a DynamicCache"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    with pytest.raises(ValueError, match="position_ids that begin anew"):
        packed = torch.cat((torch.arange(20), torch.arange(LENGTH - 20)))[None].expand(2, -1)
        model(input_ids=ids, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="output_attentions"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(ValueError, match="expected full attention in all layers"):
        sparsify_attention(llama(0, **WIDE, layer_types=["sliding_attention", "full_attention"]), FIXED)


@pytest.mark.parametrize("name", ["bert", "gpt2", "roberta"])
def test_positions_for_longer_sequences(name: str) -> None:
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 48, "num_hidden_layers": 1, **WIDE}
    roberta = RobertaConfig(max_position_embeddings=34, **sizes)
    model: PreTrainedModel = RobertaModel(roberta).eval() if name == "roberta" else made(name)
    short = 32 if name == "roberta" else model.config.max_position_embeddings
    ids = torch.randint(3, VOCABULARY, (1, short))
    before = model(input_ids=ids)[0]
    extend_position_embedding(model, 2 * short + 5)
    equal(model(input_ids=ids)[0], before)
    longer = model(input_ids=ids.repeat(1, 2))[0]
    assert longer.shape[1] == 2 * short
    with pytest.raises(ValueError, match="positions: expected at least"):
        extend_position_embedding(model, 3)
    with pytest.raises(ValueError, match="expected a learnt position"):
        extend_position_embedding(made("llama"), 500)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_weights_of_float32_under_autocast(name: str) -> None:
    original, swapped = pair(name, {"mode": "dense", "block": 16})
    ids = batch()["input_ids"]
    outputs, gradients = [], []
    for model in (original, swapped):
        model.config.use_cache = False  # a cache would bring keys and values to one dtype
        with torch.autocast("cpu", torch.bfloat16):
            out = model(input_ids=ids)[0].float()
        out.square().mean().backward()
        outputs.append(out.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    for found, wanted in ((outputs[1], outputs[0]), (gradients[1], gradients[0])):
        assert float((found - wanted).norm() / wanted.norm()) < 0.03


def configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    return [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_that_shares_the_configuration_stays_dense(name: str) -> None:
    model = made(name)
    inputs = batch()
    before = model(**inputs)[0]
    twin = type(model)(model.config).eval()
    assert twin.config is model.config
    sparsify_attention(twin, FIXED)
    assert torch.equal(model(**inputs)[0], before)
    held, own = configurations(model), configurations(twin)
    assert not {id(each) for each in held} & {id(each) for each in own}
    same_objects = [[[one is two for one in each] for two in each] for each in (held, own)]
    assert same_objects[0] == same_objects[1], "modules that shared an object share its copy"


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_built_of_a_sparse_ones_configuration_is_refused(name: str) -> None:
    sparse = made(name)
    sparsify_attention(sparse, FIXED)
    if name == "bloom":  # whose attention would not know
        for model in (sparse, sparse.transformer):
            with pytest.raises(ValueError, match=r"zero_ext_sparse_alibi.* is not supported"):
                type(model)(model.config)
        asked: PreTrainedModel = BloomModel(BloomConfig(**bloom().config.to_dict() | {"n_layer": 1}))
        asked.config._attn_implementation = "zero_ext_sparse"
    else:
        asked = type(sparse)(sparse.config)
    with pytest.raises(
        RuntimeError, match=r"is 'zero_ext_sparse', but it has no layout\. Call sparsify_attention"
    ):
        asked(**batch())


@pytest.mark.parametrize("name", MAKERS)
def test_eager_attention_comes_back(name: str) -> None:
    original, swapped = pair(name, FIXED)
    original.set_attn_implementation("eager")
    inputs = batch()
    wanted = original(**inputs)[0]
    attended = inputs["attention_mask"].bool()
    assert not torch.allclose(swapped(**inputs)[0][attended], wanted[attended], rtol=1e-3, atol=1e-3)
    swapped.set_attn_implementation("eager")
    assert torch.equal(swapped(**inputs)[0], wanted)
    assert torch.equal(copy.deepcopy(swapped)(**inputs)[0], wanted)


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_saved_is_the_dense_model(name: str, tmp_path: Path) -> None:
    original, swapped = pair(name, FIXED)
    swapped.save_pretrained(tmp_path)
    assert "zero_ext" not in (tmp_path / "config.json").read_text()
    inputs = batch()
    loaded = type(swapped).from_pretrained(tmp_path).eval()
    equal(loaded(**inputs)[0], original(**inputs)[0])
    sparsify_attention(loaded, FIXED)
    wanted = swapped(**inputs)[0]
    equal(loaded(**inputs)[0], wanted)
    assert torch.equal(pickle.loads(pickle.dumps(swapped))(**inputs)[0], wanted)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "bloom"])
def test_dropout_of_the_weights_is_the_models(name: str) -> None:
    """Of the model's probability, in training alone; torch's generator repeats it."""
    probability = 0.25
    no_other = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": probability}
    model = disturbed(
        {
            "bert": lambda: bert_lm(**no_other),
            "gpt2": lambda: gpt2(
                0, n_embd=64, n_positions=64, attn_pdrop=0.25, resid_pdrop=0.0, embd_pdrop=0.0
            ),
            "llama": lambda: llama(0, **WIDE, attention_dropout=probability),
            "bloom": lambda: bloom(attention_dropout=probability),
        }[name]()
    )
    sparse = sparsify_attention(model, FIXED)
    dropout_seen = []
    sparse.register_forward_pre_hook(
        lambda module, args, kwargs: dropout_seen.append(kwargs["dropout_p"]), with_kwargs=True
    )
    ids = batch()["input_ids"]

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(input_ids=ids)[0].detach()

    plain = model.eval()(input_ids=ids)[0].detach()
    assert dropout_seen == [0.0, 0.0]
    model.train()
    first, again, other = run(1), run(1), run(2)
    assert dropout_seen[2:] == [probability] * 6
    assert torch.equal(first, again)
    for one, two in ((first, plain), (first, other)):
        assert not torch.allclose(one, two, rtol=1e-3, atol=1e-3)
