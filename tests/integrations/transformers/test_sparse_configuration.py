"""The configuration's sparse_attention section in models that are prepared."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.transformers.models import VOCABULARY, gpt2, llama
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ConfigError
from zero_ext.attention import SparseSelfAttention
from zero_ext.config import SparseAttentionConfig
from zero_ext.integrations.prepare_with_features import apply_sparse_attention, prepare
from zero_ext.integrations.transformers import sparsify_attention

LAYOUT = {"mode": "fixed", "block": 16, "num_local_blocks": 2, "attention": "unidirectional"}


def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    draw = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        ids = torch.randint(3, VOCABULARY, (2, 50), generator=draw)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@on_ranks(2)
def test_prepare_makes_it_sparse_and_trains_alike(world: World) -> None:
    """Sharded in stage 3, the same losses as the sparse model alone, and not those of the dense one."""
    runs = {}
    for name in ("dense", "alone"):
        model = llama(0, hidden_size=64)
        if name == "alone":
            sparsify_attention(model, LAYOUT)
        runs[name] = losses(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model = llama(0, hidden_size=64)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer = prepare(
        model, made, {"stage": 3, "sparse_attention": LAYOUT}, process_group=world.group
    )
    found = losses(prepared, optimizer)
    assert found == pytest.approx(runs["alone"], rel=1e-5)
    assert found != pytest.approx(runs["dense"], rel=1e-4)


@on_ranks(1)
def test_models_without_support_are_refused(world: World) -> None:
    config = {"sparse_attention": LAYOUT}
    with pytest.raises(ConfigError, match="Linear is no model of transformers"):
        prepare(torch.nn.Linear(2, 2), None, config, process_group=world.group)
    policy = SparseAttentionConfig.from_mapping(LAYOUT)
    own = torch.nn.Sequential(torch.nn.Linear(2, 2), SparseSelfAttention(policy.replace(block=32)))
    with pytest.raises(ConfigError, match="Make them agree"):
        prepare(own, None, config, process_group=world.group)
    own[1] = SparseSelfAttention(policy)
    prepare(own, None, config, process_group=world.group)
    with pytest.raises(ConfigError, match="Make them agree"):
        prepare(own, None, {"sparse_attention": LAYOUT | {"backend": "flex"}}, process_group=world.group)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@on_ranks(2)
def test_the_section_chooses_flex_attention(world: World) -> None:
    ids = torch.randint(3, VOCABULARY, (2, 50), generator=torch.Generator().manual_seed(3))
    found = {}
    for backend in ("kernel", "flex"):
        section = LAYOUT | {"backend": backend}
        model, _ = prepare(
            llama(0, hidden_size=64),
            None,
            {"stage": 3, "sparse_attention": section},
            process_group=world.group,
        )
        made = {module.backend for module in model.modules() if isinstance(module, SparseSelfAttention)}
        assert made == {backend}
        with torch.no_grad():
            found[backend] = model(input_ids=ids).logits
    torch.testing.assert_close(found["flex"], found["kernel"], rtol=1e-4, atol=1e-5)


def attention_names(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, SparseSelfAttention)]


def test_models_side_by_side_all_become_sparse() -> None:
    policy = SparseAttentionConfig.from_mapping(LAYOUT)
    pair = torch.nn.ModuleDict({"one": llama(0, hidden_size=64), "two": llama(1, hidden_size=64)})
    ids = torch.randint(3, VOCABULARY, (1, 50), generator=torch.Generator().manual_seed(3))
    dense = [pair[name](input_ids=ids).logits for name in ("one", "two")]
    apply_sparse_attention(pair, policy)
    for name, logits in zip(("one", "two"), dense, strict=True):
        assert not torch.equal(pair[name](input_ids=ids).logits, logits), name


def test_one_model_that_cannot_leaves_the_others_as_they_are() -> None:
    policy = SparseAttentionConfig.from_mapping(LAYOUT)
    crossed = gpt2(0, add_cross_attention=True, n_embd=64)
    pair = torch.nn.ModuleDict({"good": llama(0, hidden_size=64), "bad": crossed})
    with pytest.raises(ConfigError, match="module 'bad': GPT2LMHeadModel: expected self-attention only"):
        apply_sparse_attention(pair, policy)
    assert attention_names(pair) == []
    assert pair["good"].config._attn_implementation != "zero_ext_sparse"


@pytest.mark.parametrize("attention", [None, "bidirectional"])
def test_a_model_that_is_sparse_already_agrees_with_its_section(attention: str | None) -> None:
    policy = SparseAttentionConfig(mode="local_sliding_window", attention=attention)
    model = llama(0, hidden_size=64)
    sparse = sparsify_attention(model, policy)
    apply_sparse_attention(model, policy)
    assert model.model.layers[0].self_attn.sparse_attention is sparse
    with pytest.raises(ConfigError, match="Make them agree"):
        apply_sparse_attention(model, policy.replace(attention="unidirectional"))


class Wrapper(torch.nn.Module):
    """Holds its model's configuration, as PeftModel does."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config


def test_a_wrapper_holds_the_configuration_of_its_model() -> None:
    outside = llama(0, hidden_size=64)
    wrapper = Wrapper(type(outside)(outside.config))
    apply_sparse_attention(wrapper, SparseAttentionConfig.from_mapping(LAYOUT))
    assert wrapper.config is wrapper.model.config
    assert wrapper.config is not outside.config
    assert outside.config._attn_implementation != "zero_ext_sparse"
