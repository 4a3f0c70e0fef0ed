"""Packed rows in models of transformers: each document as a sequence of its own, also over ranks."""

from __future__ import annotations

import copy
import re
import unittest.mock
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    SiglipVisionConfig,
)

import zero_ext
from tests.integrations.transformers.beside_one_process import assert_steps_as_alone
from tests.integrations.transformers.models import VOCABULARY, enter, gpt2, llama
from tests.integrations.transformers.test_sequence_interface import LENGTH, masked, mesh_of, mistral
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.attention import documents_from_positions
from zero_ext.integrations import apply_sequence_parallel
from zero_ext.integrations.transformers import apply_document_attention, sparsify_attention
from zero_ext.parallel import shard_batch

STEPS, ROWS = 2, 2
# One document crosses every cut between ranks, and one begins exactly at a cut.
BOUNDS = [0, 7, 32, 61, 64, 96, 97, 128]
SPARSE = {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 3}
KINDS: dict[str, Any] = {
    "llama": llama,
    "gpt2": partial(gpt2, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
}


def opt(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    fixed = {"vocab_size": VOCABULARY, "word_embed_proj_dim": 32, "max_position_embeddings": LENGTH}
    config = AutoConfig.for_model("opt", dropout=0.0, **fixed, **sizes)
    return AutoModelForCausalLM.from_config(config)


def mixtral(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    fixed = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "num_local_experts": 4}
    config = AutoConfig.for_model("mixtral", sliding_window=None, **fixed, **sizes)
    return AutoModelForCausalLM.from_config(config)


def biogpt(seed: int) -> Any:
    """It makes a mask of ones where it gets none."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"), 0.0)
    fixed = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("biogpt", **fixed, **sizes, **dropout))


POSITIONS: dict[str, Any] = {
    **KINDS,
    "opt": opt,
    "biogpt": biogpt,
    "roberta": partial(masked, "roberta", pad_token_id=1),
}


def packed_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    words = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    counted = torch.rand(ROWS, LENGTH, generator=generator) < torch.linspace(1, 0.1, LENGTH)
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(BOUNDS)])
    return {
        "input_ids": words,
        "labels": torch.where(counted, words, -100),
        "position_ids": positions.view(ROWS, LENGTH),
    }


def loss_of_documents(model: Any, batch: dict[str, torch.Tensor], shifts: bool = True) -> torch.Tensor:
    """The mean over all tokens with labels, from a forward of each document alone."""
    losses, count = [], 0
    for start, stop in pairwise(BOUNDS):
        words, labels = (batch[name].flatten()[start:stop] for name in ("input_ids", "labels"))
        scores = model(words[None]).logits[0]
        scores, labels = (scores[:-1], labels[1:]) if shifts else (scores, labels)
        losses.append(torch.nn.functional.cross_entropy(scores, labels, reduction="sum"))
        count += int((labels != -100).sum())
    return torch.stack(losses).sum() / count


def packed_loss(model: Any, mesh: Any, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    if mesh["cp"].size() == 1:
        return model(**batch).loss
    return model(**shard_batch(batch, mesh, packed=True, **options)).loss


@on_ranks(4)
@pytest.mark.parametrize(
    ("cp", "ring", "stage", "kind", "changes"),
    [
        (2, 1, 0, "llama", {}),
        (4, 1, 3, "gpt2", {}),
        (4, 4, 0, "llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
        (4, 2, 3, "llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "checkpoints": True}),
        (2, 2, 2, "gpt2", {}),
    ],
    ids=str,
)
def test_steps_over_ranks_are_those_of_documents_alone(
    world: World, cp: int, ring: int, stage: int, kind: str, changes: dict[str, Any]
) -> None:
    enter(world)
    mesh, sizes = mesh_of(4 // cp, cp), dict(changes)
    checkpoints = sizes.pop("checkpoints", False)
    model, reference = (KINDS[kind](world.seed, **sizes) for _ in range(2))
    if checkpoints:
        model.gradient_checkpointing_enable()
    if ring == 1:
        apply_document_attention(model)
    exchange = apply_sequence_parallel(model, mesh, ring=ring)
    generator = torch.Generator().manual_seed(world.seed)
    batches = [packed_batch(generator) for _ in range(STEPS)]
    losses = [
        (partial(packed_loss, mesh=mesh, batch=each, ring=ring), partial(loss_of_documents, batch=each))
        for each in batches
    ]
    assert_steps_as_alone(world, mesh, model, reference, stage, losses)
    assert bool(exchange.traffic.bytes_sent["ring"]) == (ring > 1)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_steps_of_replicas_are_those_of_documents_alone(world: World, kind: str) -> None:
    enter(world)
    mesh, model, reference = mesh_of(2, 1), KINDS[kind](world.seed), KINDS[kind](world.seed)
    apply_document_attention(model)
    generator = torch.Generator().manual_seed(world.seed)
    batches = [packed_batch(generator) for _ in range(STEPS)]
    losses = [
        (partial(packed_loss, mesh=mesh, batch=each), partial(loss_of_documents, batch=each))
        for each in batches
    ]
    assert_steps_as_alone(world, mesh, model, reference, 3, losses)


@on_ranks(2)
@pytest.mark.parametrize("ring", [1, 2])
def test_masked_words_over_ranks(world: World, ring: int) -> None:
    """Every token sees its full document, and none of another."""
    enter(world)
    mesh, model, reference = mesh_of(1, 2), masked("bert", world.seed), masked("bert", world.seed)
    apply_document_attention(model)
    apply_sequence_parallel(model, mesh, ring=ring)
    generator = torch.Generator().manual_seed(world.seed)
    batch = packed_batch(generator)
    loss = partial(packed_loss, mesh=mesh, batch=batch, ring=ring, shift_labels=False)
    assert_steps_as_alone(
        world, mesh, model, reference, 0, [(loss, partial(loss_of_documents, batch=batch, shifts=False))]
    )


@on_ranks(1)
def test_a_document_changes_no_other_loss_by_one_bit(world: World) -> None:
    enter(world)
    model, batch = llama(world.seed), packed_batch(torch.Generator().manual_seed(world.seed))
    apply_document_attention(model)

    def losses() -> torch.Tensor:
        scores = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        return torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), batch["input_ids"].roll(-1).flatten(), reduction="none"
        )

    document = documents_from_positions(batch["position_ids"]).tolist()
    assert document == BOUNDS
    before = losses()
    for start, stop in pairwise(BOUNDS):
        original = batch["input_ids"].clone()
        batch["input_ids"].view(-1)[start:stop] = (original.view(-1)[start:stop] + 1) % VOCABULARY
        after, unchanged = losses(), torch.ones(ROWS * LENGTH, dtype=torch.bool)
        # The token before is compared with a label of this document.
        unchanged[[start - 1, *range(start, stop)]] = False
        assert torch.equal(after[unchanged], before[unchanged])
        assert not torch.equal(after[start:stop], before[start:stop])
        batch["input_ids"] = original


@on_ranks(1)
def test_labels_of_first_tokens_do_not_count(world: World) -> None:
    enter(world)
    model, batch = llama(world.seed), packed_batch(torch.Generator().manual_seed(world.seed))
    apply_document_attention(model)
    batch["labels"] = batch["input_ids"].clone()
    before = model(**batch).loss
    batch["labels"].view(-1)[BOUNDS[:-1]] = 1
    assert torch.equal(model(**batch).loss, before)
    torch.testing.assert_close(before, loss_of_documents(llama(world.seed), batch))


@on_ranks(1)
def test_documents_among_the_inputs_and_rows_with_padding(world: World) -> None:
    enter(world)
    model, reference = llama(world.seed), llama(world.seed)
    apply_document_attention(model)
    batch = packed_batch(torch.Generator().manual_seed(world.seed))
    words, positions = batch["input_ids"], batch["position_ids"]
    wanted = model(words, position_ids=positions).logits
    found = model(words, None, positions, cu_seq_lens_q=torch.tensor(BOUNDS)).logits
    assert torch.equal(found, wanted)
    attended = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    attended[0, 40:], attended[1, :9] = 0, 0
    found, alone = (each(words, attention_mask=attended).logits for each in (model, reference))
    torch.testing.assert_close(found[attended > 0], alone[attended > 0])
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(words).logits, reference(words).logits)


@on_ranks(1)
@pytest.mark.parametrize("kind", ["biogpt", "gpt2", "llama", "opt", "roberta"])
def test_documents_without_positions(world: World, kind: str) -> None:
    """Positions count from the start of each document, behind that of padding where a model has one."""
    enter(world)
    model, reference = (POSITIONS[kind](world.seed) for _ in range(2))
    apply_document_attention(model)
    words = packed_batch(torch.Generator().manual_seed(world.seed))["input_ids"]
    found = model(words, cu_seq_lens_q=torch.tensor(BOUNDS)).logits.flatten(0, 1)
    for start, stop in pairwise(BOUNDS):
        alone = reference(words.flatten()[None, start:stop]).logits[0]
        torch.testing.assert_close(found[start:stop], alone)


@on_ranks(1)
def test_padding_on_the_left(world: World) -> None:
    """OPT counts positions from the mask, others do not."""
    enter(world)
    for make in (POSITIONS["opt"], biogpt, llama):
        model, reference = make(world.seed), make(world.seed)
        apply_document_attention(model)
        words = packed_batch(torch.Generator().manual_seed(world.seed))["input_ids"]
        attended = torch.ones(ROWS, LENGTH, dtype=torch.int64)
        attended[0, :11], attended[1, :1] = 0, 0
        found, alone = (each(words, attention_mask=attended).logits for each in (model, reference))
        torch.testing.assert_close(found[attended > 0], alone[attended > 0])


@on_ranks(1)
def test_shifted_labels_cross_no_documents(world: World) -> None:
    enter(world)
    model, batch = llama(world.seed), packed_batch(torch.Generator().manual_seed(world.seed))
    apply_document_attention(model)
    labels = batch.pop("labels")
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    found = model(**batch, labels=labels, shift_labels=shifted).loss
    torch.testing.assert_close(found, loss_of_documents(llama(world.seed), {**batch, "labels": labels}))
    # The token before padding may predict an end that is no token.
    mask = torch.ones(1, LENGTH, dtype=torch.int64)
    mask[0, 40:] = 0
    words, ends = batch["input_ids"][:1], torch.full((1, LENGTH), -100)
    ends[0, 39] = 2
    loss = model(words, attention_mask=mask, labels=ends, shift_labels=ends).loss
    scores = llama(world.seed)(words[:, :40]).logits[0, 39:]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(scores, torch.tensor([2])))
    loss = model(words, attention_mask=mask, labels=ends.roll(1, 1)).loss
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(scores, torch.tensor([2])))


@on_ranks(1)
@pytest.mark.parametrize("adapted_first", [False, True])
def test_adapters_attend_within_documents(world: World, adapted_first: bool) -> None:
    """They call the forward of the model, past its hooks."""
    enter(world)
    batch, model = packed_batch(torch.Generator().manual_seed(world.seed)), llama(world.seed)
    if not adapted_first:
        apply_document_attention(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    if adapted_first:
        apply_document_attention(adapted)
    # Adapters change nothing as long as they are not trained.
    torch.testing.assert_close(adapted(**batch).loss, loss_of_documents(llama(world.seed), batch))
    copied = copy.deepcopy(adapted)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.zero_()
    torch.testing.assert_close(copied(**batch).loss, loss_of_documents(llama(world.seed), batch))


@pytest.mark.parametrize("adapted_first", [False, True])
def test_prompts_which_drop_positions_are_refused(adapted_first: bool) -> None:
    model = llama(0)
    if not adapted_first:
        apply_document_attention(model)
    prompted = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="expected adapters that pass position_ids on"):
        apply_document_attention(prompted) if adapted_first else zero_ext.prepare(prompted, None, {})


def test_a_prefix_that_is_seen_in_full_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = GemmaConfig(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=50)
    sizes["num_hidden_layers"] = 1
    vision = SiglipVisionConfig(**sizes, image_size=16, patch_size=8, projection_dim=32)
    config = PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=49, projection_dim=32)
    model, words = PaliGemmaForConditionalGeneration(config).train(), torch.arange(5, 15)[None]
    apply_document_attention(model)
    types = (torch.arange(10) >= 4).long()[None]
    with pytest.raises(ValueError, match="got one that the model has changed"):
        model(words, token_type_ids=types, labels=words)


@on_ranks(1)
def test_losses_of_routers_need_rows_without_padding(world: World) -> None:
    enter(world)
    model, reference = mixtral(world.seed), mixtral(world.seed)
    apply_document_attention(model)
    words = packed_batch(torch.Generator().manual_seed(world.seed))["input_ids"]
    mask = torch.ones_like(words)
    inputs = {"input_ids": words, "labels": words, "output_router_logits": True}
    found, wanted = (each(**inputs, attention_mask=mask).aux_loss for each in (model, reference))
    torch.testing.assert_close(found, wanted)
    mask[0, 40:] = 0
    message = "output_router_logits: expected False with padding"
    with pytest.raises(ValueError, match=message):
        model(**inputs, attention_mask=mask)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match=message):
        model(words, attention_mask=mask)
    model(**{**inputs, "output_router_logits": False}, attention_mask=mask)


@on_ranks(1)
def test_one_rank_refuses_documents_under_attention_over_full_rows(world: World) -> None:
    enter(world)
    mesh, batch = mesh_of(1, 1), packed_batch(torch.Generator().manual_seed(world.seed))
    plain, sparse, documents = (llama(world.seed) for _ in range(3))
    sparsify_attention(sparse, SPARSE)
    apply_document_attention(documents)
    for model in (plain, sparse, documents):
        apply_sequence_parallel(model, mesh)
    shard = shard_batch(batch, mesh, packed=True)
    inputs = {name: shard[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q")}
    for called in (partial(plain, **shard), partial(plain.model, **inputs), partial(sparse.model, **inputs)):
        with pytest.raises(
            ValueError, match=r"attention of this model is over full rows|one sequence per row"
        ):
            called()
    torch.testing.assert_close(documents(**shard).loss, loss_of_documents(llama(world.seed), batch))
    plain(batch["input_ids"])


@on_ranks(1)
def test_base_models_and_adapters_are_refused_too(world: World) -> None:
    """An adapter calls the forward of the model, past its hooks."""
    enter(world)
    batch = packed_batch(torch.Generator().manual_seed(world.seed))
    words, positions = batch["input_ids"], batch["position_ids"]
    sparse = llama(world.seed)
    sparsify_attention(sparse, SPARSE)
    for called in (sparse.model, sparse.forward):
        with pytest.raises(ValueError, match="one sequence per row"):
            called(words, position_ids=positions)
        called(words)


@on_ranks(1)
def test_refusals(world: World) -> None:
    enter(world)
    sparse = llama(world.seed)
    sparsify_attention(sparse, SPARSE)
    for model, message in (
        (sparse, "expected dense attention, got a sparse layout"),
        (mistral(world.seed), "expected full attention in all layers"),
        (gpt2(world.seed, add_cross_attention=True), "it has cross-attention"),
        (torch.nn.Linear(2, 2), "expected a model of transformers, got none"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            apply_document_attention(model)
    batch = packed_batch(torch.Generator().manual_seed(world.seed))
    ones = torch.ones_like(batch["input_ids"])
    for mask in (None, ones):
        with pytest.raises(ValueError, match="one sequence per row"):
            sparse(**batch, attention_mask=mask)
    model = llama(world.seed)
    apply_document_attention(model)
    model.train(False)
    with pytest.raises(ValueError, match="packed documents do not support generation"):
        model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="position_ids and attention_mask: expected both"):
        model(batch["input_ids"], attention_mask=ones[:, None, None].expand(ROWS, 1, LENGTH, LENGTH))
    with pytest.raises(ValueError, match="cu_seqlens: expected 128 at the end"):
        model(batch["input_ids"], cu_seq_lens_q=torch.tensor([0, 64]))
    with pytest.raises(ValueError, match="expected cu_seq_lens_q from the model's forward"):
        model.model(batch["input_ids"])


@on_ranks(2)
def test_shards_that_would_leak_are_refused_by_all_ranks(world: World) -> None:
    enter(world)
    mesh, batch = mesh_of(1, 2), packed_batch(torch.Generator().manual_seed(world.seed))
    plain, documents, ring = (llama(world.seed) for _ in range(3))
    apply_document_attention(documents)
    apply_sequence_parallel(plain, mesh)
    apply_sequence_parallel(documents, mesh)
    apply_sequence_parallel(ring, mesh, ring=2)
    rows = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    equal, quarters = (
        {**rows, "cu_seq_lens_q": torch.arange(0, ROWS * LENGTH + 1, LENGTH // count)} for count in (2, 4)
    )

    def by_hand(full: dict[str, Any], **options: Any) -> dict[str, Any]:
        shard = shard_batch(full, mesh, **options)
        return {name: value for name, value in shard.items() if name != "sequence_ring"}

    theirs = "rank 0 of 'cp': it refused its shard of the sequence"
    for model, shard, message in (
        (plain, shard_batch(batch, mesh, packed=True), "attention of this model is over full rows"),
        (documents, shard_batch(rows, mesh), "cu_seq_lens_q: expected the documents of the full batch"),
        (ring, shard_batch(rows, mesh), "cu_seq_lens_q: expected the documents of the full batch"),
        (ring, shard_batch(rows, mesh, packed=True), "sequence_ring: expected shards for a ring of 2, got 1"),
        (documents, shard_batch(rows, mesh, ring=2), "sequence_ring: expected shards for a ring of 1, got 2"),
        (ring, by_hand(rows, packed=True), "position_ids: expected ones that increase by 1"),
        (documents, by_hand(rows, ring=2), "position_ids: expected ones that increase by 1"),
        (ring, by_hand(equal, packed=True), "position_ids: expected ones that go on within a document"),
        # These documents have the same positions in both cuts.
        (ring, shard_batch(quarters, mesh, packed=True), "sequence_ring: expected shards for a ring of 2"),
        (
            ring,
            {**shard_batch(rows, mesh, ring=2), "cu_seq_lens_q": [0, "end"]},
            "cu_seqlens: expected a tensor or list of integers, got list",
        ),
        (
            ring,
            {**shard_batch(rows, mesh, ring=2), "position_ids": torch.arange(3)[None]},
            "position_ids: expected shape (2, 32), got (1, 3)",
        ),
        (
            documents,
            {**shard_batch(batch, mesh, packed=True), "attention_mask": torch.ones(ROWS, LENGTH)},
            "attention_mask: expected none, as documents say what is padding",
        ),
    ):
        with pytest.raises(ValueError, match=f"{re.escape(message)}|{re.escape(theirs)}"):
            model(**shard)
    for sparse_or_dropout, message in ((True, "expected dense attention with a ring"), (False, "dropout")):
        model = llama(world.seed, attention_dropout=0.1)
        if sparse_or_dropout:
            sparsify_attention(model, SPARSE)
        with pytest.raises(ValueError, match=message):
            apply_sequence_parallel(model, mesh, ring=2)
            model.train()(**shard_batch(rows, mesh, ring=2))
    with pytest.raises(ValueError, match="expected full attention in all layers"):
        apply_sequence_parallel(mistral(world.seed), mesh, ring=2)


@on_ranks(2)
def test_shards_are_compared_once_and_also_by_base_models(world: World) -> None:
    enter(world)
    mesh, batch = mesh_of(1, 2), packed_batch(torch.Generator().manual_seed(world.seed))
    model = llama(world.seed)
    exchange = apply_sequence_parallel(model, mesh, ring=2)
    shard = shard_batch(batch, mesh, ring=2, packed=True)
    inputs = {name: shard[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q")}
    wrong = {**inputs, "position_ids": inputs["position_ids"].roll(1, 1)}
    theirs = "rank 1 of 'cp': it refused its shard of the sequence"
    message = re.escape(theirs if world.rank == 0 else "position_ids: expected ones that increase by 1")
    with unittest.mock.patch.object(exchange, "agree", wraps=exchange.agree) as agree:
        model(**shard)
        assert agree.call_count == 1
        for called in (model, model.model, model.forward) * 2:  # the last as adapters call it
            with pytest.raises(ValueError, match=message):
                called(**(wrong if world.rank == 1 else inputs))
            called(**inputs)
        assert agree.call_count == 13
