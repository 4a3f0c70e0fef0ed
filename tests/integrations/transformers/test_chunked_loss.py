"""The configuration's loss section: losses and updates of the plain model, without logits of all tokens."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer

import zero_ext
from tests.integrations.transformers.beside_one_process import optimizer_of
from tests.integrations.transformers.causal_models import batches, check_trains_as, model_of
from tests.integrations.transformers.largest_result import LargestResult
from tests.integrations.transformers.models import (
    VOCABULARY,
    Sentences,
    bert,
    column,
    enter,
    fitted,
    gpt2,
    largest_difference,
    llama,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations.transformers import ZeroTrainer, chunked_loss
from zero_ext.integrations.transformers.chunked_loss import chunk_loss, hooks_of_loss

CHUNK = 5

FAMILIES: dict[str, Any] = {
    "llama": llama,
    "llama, tied, checkpoints": partial(llama, tie_word_embeddings=True),
    "gpt2": partial(gpt2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "gemma2": partial(model_of, "Gemma2", head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=0.5),
    "cohere": partial(model_of, "Cohere", logit_scale=0.3),
    "granite": partial(model_of, "Granite", logits_scaling=3.0),
    "opt": partial(model_of, "OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "qwen3": partial(model_of, "Qwen3", head_dim=8),
    "mistral": partial(model_of, "Mistral"),
    "phi, head with bias": partial(model_of, "Phi"),
}


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_those_of_the_plain_model(world: World, family: str, stage: int) -> None:
    model, plain = (FAMILIES[family](world.seed).train() for _ in range(2))
    if "checkpoints" in family:
        model.gradient_checkpointing_enable()
    config = {"stage": stage, "loss": {"chunk_tokens": CHUNK}}
    model, optimizer = zero_ext.prepare(model, optimizer_of(model), config, process_group=world.group)
    check_trains_as(world, model, optimizer, plain, [[each] for each in batches(world)])


@pytest.mark.parametrize("chunked", [True, False])
def test_logits_of_all_tokens_are_not_computed(chunked: bool) -> None:
    model, words = llama(0, vocab_size=4096).train(), torch.arange(3, 4003).view(8, -1)
    if chunked:
        chunk_loss(model, 100)
    with LargestResult() as largest:
        model(input_ids=words, labels=words).loss.backward()
    assert (largest.elements >= words.numel() * 4096) is not chunked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_narrow_dtypes_have_the_gradients_of_the_plain_model(dtype: torch.dtype, autocast: bool) -> None:
    plain = model_of("Gemma2", 0, head_dim=8, final_logit_softcapping=0.5).train()
    plain = plain if autocast else plain.to(dtype)
    model, words = copy.deepcopy(plain), torch.arange(3, 63).view(2, -1)
    chunk_loss(model, 7)
    for each in (model, plain):
        with torch.autocast("cpu", dtype, enabled=autocast):
            each(input_ids=words, labels=words).loss.backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        error = (found.grad.float() - expected.grad.float()).norm() / expected.grad.float().norm()
        assert error < 32 * torch.finfo(dtype).eps, name


def test_evaluation_and_calls_without_labels_have_logits() -> None:
    model, words = llama(0), torch.arange(3, 15)[None]
    plain = copy.deepcopy(model)
    chunk_loss(model)
    keys = list(model.state_dict())
    for training, inputs in ((True, {}), (False, {"labels": words})):
        found, expected = (each.train(training)(words, **inputs) for each in (model, plain))
        assert torch.equal(found.logits, expected.logits)
    outputs = model.train()(words, labels=words)
    assert list(model.state_dict()) == keys
    assert type(model.lm_head) is nn.Linear
    assert outputs.logits.shape == (1, 12, VOCABULARY)
    uses = (
        lambda x: x[0],
        lambda x: x.argmax(-1),
        torch.exp,
        lambda x: x + 1,
        lambda x: torch.ones(1) * x,
    )
    for use in uses:
        with pytest.raises(RuntimeError, match="logits: expected no use of them in training"):
            use(outputs.logits)


def test_a_failed_call_leaves_the_model_as_it_was() -> None:
    model, words = llama(0).train(), torch.arange(3, 15)[None]
    chunk_loss(model)
    with pytest.raises(ValueError, match="labels: expected shape"):
        model(words, labels=words[:, 1:])
    assert torch.is_tensor(model(words).logits)
    assert model.loss_function.__name__ == "ForCausalLMLoss"
    assert model(words, labels=words).loss > 0


def test_a_call_that_an_interruption_ends_leaves_the_model_as_it_was() -> None:
    model, words = llama(0).train(), torch.arange(3, 15)[None]
    chunk_loss(model)
    with (
        mock.patch.object(chunked_loss, "linear_cross_entropy", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        model(words, labels=words)
    assert torch.is_tensor(model.eval()(words, labels=words).logits)
    assert model.train()(words, labels=words).loss > 0


def test_shifted_labels_may_be_flat() -> None:
    model, words = llama(0).train(), torch.arange(3, 27).view(2, -1)
    inputs = {"labels": words, "shift_labels": words.roll(-1, 1).flatten()}
    expected = model(words, **inputs).loss
    chunk_loss(model)
    torch.testing.assert_close(model(words, **inputs).loss, expected)


def test_the_loss_follows_the_last_configuration() -> None:
    model, words = llama(0).train(), torch.arange(3, 15)[None]
    for section in ({"chunk_tokens": 5}, {}):
        zero_ext.prepare(model, None, {"loss": section})
        assert not torch.is_tensor(model(words, labels=words).logits)
    zero_ext.prepare(model, None, {})
    assert torch.is_tensor(model(words, labels=words).logits)


def test_a_refused_model_leaves_others_as_they_were() -> None:
    both, words = nn.ModuleDict({"first": llama(0).train(), "second": bert(0)}), torch.arange(3, 15)[None]
    with pytest.raises(zero_ext.ConfigError, match=r"loss: module 'second' \(Bert\w*\): head: "):
        zero_ext.prepare(both, None, {"loss": {}})
    assert torch.is_tensor(both["first"](words, labels=words).logits)


@pytest.mark.parametrize("before", [None, 5])
@pytest.mark.parametrize("section", [{}, {"loss": {"chunk_tokens": 7}}])
def test_a_refused_preparation_leaves_the_loss_as_it_was(before: int | None, section: dict[str, Any]) -> None:
    model, words = llama(0).train(), torch.arange(3, 15)[None]
    zero_ext.prepare(model, None, {} if before is None else {"loss": {"chunk_tokens": before}})
    foreign = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="optimizer"):
        zero_ext.prepare(model, foreign, section)
    assert torch.is_tensor(model(words, labels=words).logits) == (before is None)
    hooks = hooks_of_loss(model)
    assert (None if hooks is None else hooks.chunk_tokens) == before


def with_head(head: nn.Module) -> Any:
    model = llama(0)
    model.lm_head = head
    return model


class OwnLinear(nn.Linear):
    """A head that may compute anything."""


def with_hook() -> Any:
    model = llama(0)
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


def with_loss() -> Any:
    model = llama(0)
    model.loss_function = lambda *_, **__: torch.zeros(())
    return model


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.Linear(2, 2), "expected a causal language model of transformers, got Linear"),
        (lambda: bert(0), "head: expected a plain nn.Linear .* got none"),
        (lambda: llama(0).model, "expected labels among the arguments of forward, got none"),
        (
            lambda: with_head(OwnLinear(32, VOCABULARY)),
            r"head: expected a plain nn.Linear .* got .*\.OwnLinear",
        ),
        (with_hook, "head: expected no hooks, got some"),
        (with_loss, "loss_function: expected transformers' ForCausalLMLoss"),
    ],
)
def test_models_that_it_cannot_serve_are_refused(make: Any, match: str) -> None:
    with pytest.raises(zero_ext.ConfigError, match=f"loss: .*{match}"):
        zero_ext.prepare(make(), None, {"loss": {}})


class OtherLogits(transformers.LlamaForCausalLM):
    """Changes its logits in a manner that no option of the loss describes."""

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return self.loss_function(torch.relu(logits), labels, self.config.vocab_size)


class NoLoss(OtherLogits):
    """Forgets its labels."""

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return (self.lm_head(self.model(input_ids).last_hidden_state),)


@pytest.mark.parametrize(
    ("kind", "match"), [(OtherLogits, "got relu"), (NoLoss, "a forward that calls loss_function")]
)
def test_the_first_forward_refuses_other_uses_of_logits(kind: Any, match: str) -> None:
    model, words = kind(llama(0).config).train(), torch.arange(3, 15)[None]
    chunk_loss(model)
    with pytest.raises(RuntimeError, match=match):
        model(words, labels=words)
    assert type(model.lm_head) is nn.Linear


@on_ranks(2)
def test_the_trainer_trains_as_the_plain_one(world: World) -> None:
    enter(world)
    settings = {"max_steps": 3, "seed": world.seed % 1000, "gradient_accumulation_steps": 2}
    data = Sentences(40, world.seed)
    folder = world.shared_folder()
    plain = fitted(Trainer, llama(world.seed), folder, data, **settings)
    config = {"stage": 3, "loss": {"chunk_tokens": CHUNK}}
    trainer = fitted(ZeroTrainer, llama(world.seed), folder, data, config=config, **settings)
    assert largest_difference(column(trainer, "loss"), column(plain, "loss")) < 1e-5
    trainer.eval_dataset = data
    assert trainer.evaluate()["eval_loss"] > 0
