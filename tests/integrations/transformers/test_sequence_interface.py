"""Models of transformers whose sequences lie over ranks, under ZeRO: as one process."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from tests.integrations.transformers.beside_one_process import assert_steps_as_alone
from tests.integrations.transformers.models import VOCABULARY, bert, enter, gpt2, llama
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations import apply_sequence_parallel
from zero_ext.integrations.transformers import sparsify_attention
from zero_ext.parallel import apply_tensor_parallel, make_mesh, shard_batch

STEPS, SAMPLES, LENGTH = 3, 4, 64
LONG = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
ALORA = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5])
SPARSE = {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 3}


@cache
def mesh_of(dp: int, cp: int, tp: int = 1) -> DeviceMesh:
    """Made once in a process."""
    return make_mesh(dp=dp, cp=cp, tp=tp, device_type="cpu")


def mistral(seed: int, **changes: Any) -> Any:
    """A window of 5 tokens."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    fixed = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mistral", **{**fixed, **sizes, **changes}))


KINDS: dict[str, Any] = {
    "llama": llama,
    "mistral": mistral,
    "gpt2": partial(gpt2, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
}


def batches(seed: int, padded: bool) -> list[dict[str, torch.Tensor]]:
    """Batches whose labels count for some tokens only, most of them in the first part of a sequence."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(STEPS):
        words = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        counted = torch.rand(SAMPLES, LENGTH, generator=generator) < torch.linspace(1, 0.1, LENGTH)
        batch = {"input_ids": words, "labels": torch.where(counted, words, -100)}
        if padded:
            lengths = torch.randint(LENGTH // 2, LENGTH + 1, (SAMPLES, 1), generator=generator)
            batch["attention_mask"] = (torch.arange(LENGTH) < lengths).long()
            batch["labels"] = torch.where(batch["attention_mask"] > 0, batch["labels"], -100)
        found.append(batch)
    return found


def alone(reference: Any, batch: dict[str, torch.Tensor], replicas: int) -> torch.Tensor:
    """The mean of the replicas' losses, each the mean over the tokens of its samples."""
    shares = [{name: each.chunk(replicas)[own] for name, each in batch.items()} for own in range(replicas)]
    return torch.stack([reference(**share).loss for share in shares]).mean()


def masked(kind: str, seed: int, **changes: Any) -> Any:
    """A model that predicts masked tokens."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    fixed = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH + 2, "pad_token_id": 0}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, embedding_size=16, **{**fixed, **sizes, **dropout, **changes})
    return AutoModelForMaskedLM.from_config(config)


def check_steps(
    world: World,
    mesh: DeviceMesh,
    make: Any,
    stage: int,
    inputs: list[dict[str, torch.Tensor]],
    **shards: Any,
) -> None:
    """Steps of the model that ``make`` makes, whose sequences ``mesh`` shards, are those of one process."""
    model, reference = make(), make()
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh)
    exchange = apply_sequence_parallel(model, mesh)
    replicas, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()

    def sharded_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        own = {name: each.chunk(replicas)[replica] for name, each in batch.items()}
        return model(**shard_batch(own, mesh, **shards)).loss

    losses = [
        (partial(sharded_loss, batch=each), partial(alone, batch=each, replicas=replicas)) for each in inputs
    ]
    assert_steps_as_alone(world, mesh, model, reference, stage, losses)
    assert exchange.traffic.bytes_sent["sequence"] > 0


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(
    ("dp", "cp", "tp", "stage", "kind", "changes"),
    [
        (1, 4, 1, 0, "llama", {}),
        (1, 4, 1, 3, "llama", {"num_key_value_heads": 1, "padded": True, "checkpoints": True}),
        (2, 2, 1, 3, "llama", {"sparse": True, "padded": True}),
        (2, 2, 1, 1, "mistral", {}),
        (2, 2, 1, 2, "gpt2", {}),
        (1, 2, 2, 3, "llama", {"num_attention_heads": 8}),
    ],
)
def test_steps_are_those_of_one_process(
    world: World, dp: int, cp: int, tp: int, stage: int, kind: str, changes: dict[str, Any]
) -> None:
    enter(world)
    sizes = dict(changes)
    padded, sparse, checkpoints = (sizes.pop(name, False) for name in ("padded", "sparse", "checkpoints"))

    def make() -> Any:
        model = KINDS[kind](world.seed, **sizes)
        if sparse:
            sparsify_attention(model, SPARSE)
        if checkpoints:
            model.gradient_checkpointing_enable()
        return model

    check_steps(world, mesh_of(dp, cp, tp), make, stage, batches(world.seed, padded))


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(
    ("dp", "cp", "tp", "stage", "kind", "padding"),
    [
        (1, 4, 1, 0, "bert", None),
        (2, 2, 1, 3, "bert", None),
        (1, 2, 2, 3, "bert", None),
        (2, 2, 1, 2, "roberta", 1),
        (1, 2, 2, 1, "roberta", 1),
        (2, 2, 1, 3, "xlm-roberta", 1),
        (2, 2, 1, 1, "camembert", 1),
        (2, 2, 1, 1, "electra", None),
        (2, 2, 1, 0, "modernbert", None),
    ],
)
def test_masked_tokens_are_predicted_as_by_one_process(
    world: World, dp: int, cp: int, tp: int, stage: int, kind: str, padding: int | None
) -> None:
    """Ranks have different numbers of labels; samples have paddings of different lengths."""
    enter(world)
    inputs = batches(world.seed, True)
    for batch in inputs if padding is not None else ():
        batch["input_ids"][batch["attention_mask"] == 0] = padding
    make = partial(masked, kind, world.seed, **({} if padding is None else {"pad_token_id": padding}))
    shards = {"shift_labels": False, "padding_idx": padding}
    check_steps(world, mesh_of(dp, cp, tp), make, stage, inputs, **shards)


@on_ranks(2)
def test_a_rank_saves_activations_of_its_shard_alone(world: World) -> None:
    enter(world)
    saved_bytes = []
    for cp in (1, 2):
        mesh, model = mesh_of(2 // cp, cp), llama(world.seed, num_key_value_heads=4)
        apply_sequence_parallel(model, mesh)
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found: dict[int, int] = {}

        def keep(tensor: torch.Tensor, own: Any = own, found: Any = found) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(**shard_batch(batches(world.seed, False)[0], mesh))
        saved_bytes.append(sum(found.values()))
        del output
    # Attention keeps its output with whole sequences, what follows keeps the rank's own part of it.
    outputs = 2 * SAMPLES * LENGTH // 2 * model.config.hidden_size * 4
    assert saved_bytes[0] / 2 <= saved_bytes[1] <= saved_bytes[0] / 2 + outputs + 64, saved_bytes


@on_ranks(2)
def test_masked_shards_that_do_not_fit_are_refused_by_all_ranks(world: World) -> None:
    enter(world)
    model, mesh = masked("roberta", world.seed, pad_token_id=1), mesh_of(1, 2)
    apply_sequence_parallel(model, mesh)
    batch = batches(world.seed, False)[0]
    for options, message in (
        ({"padding_idx": 1}, "Give shard_batch shift_labels=False"),
        ({"shift_labels": False}, "position_ids: expected at least 1, got 0"),
    ):
        theirs = "rank 0 of 'cp': it refused its shard of the sequence"
        both = world.rank == 0 or "shift" in message
        with pytest.raises(ValueError, match=re.escape(message if both else theirs)):
            model(**shard_batch(batch, mesh, **options))
    shard = shard_batch(batch, mesh, shift_labels=False, padding_idx=1)
    torch.testing.assert_close(model(**shard, return_dict=False)[0], model(**shard).loss)


@on_ranks(2)
def test_positions_of_opt_are_those_of_attended_tokens(world: World) -> None:
    enter(world)
    sizes = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("opt", vocab_size=VOCABULARY, word_embed_proj_dim=32, **sizes)
    torch.manual_seed(world.seed)
    model, words = AutoModelForCausalLM.from_config(config).eval(), torch.arange(3, 19).view(2, 8)
    mask = torch.ones_like(words)
    mask[0, :3] = 0
    batch = {"input_ids": words, "labels": torch.where(mask > 0, words, -100), "attention_mask": mask}
    expected = float(model(**batch).loss)
    mesh = mesh_of(1, 2)
    apply_sequence_parallel(model, mesh)
    with pytest.raises(ValueError, match="position_ids: they count padding, and this model does not"):
        model(**shard_batch(batch, mesh))
    shards = shard_batch({**batch, "position_ids": mask.cumsum(1) * mask - 1}, mesh)
    found = sum(world.everyone(float(model(**shards).loss))) / 2
    assert abs(found - expected) <= 1e-5 * expected, f"{found} {expected}, seed {world.seed}"


@on_ranks(2)
def test_models_that_cannot_be_split(world: World) -> None:
    enter(world)
    mesh = mesh_of(1, 2)
    eager = llama(world.seed)
    eager.set_attn_implementation("eager")
    per_head = llama(world.seed)
    sparsify_attention(per_head, {"mode": "bigbird", "block": 16, "different_layout_per_head": True})
    for model, message in (
        (llama(world.seed, num_attention_heads=1, num_key_value_heads=1), "expected heads divisible by"),
        (eager, "attention: expected one of transformers' registries, got 'eager'"),
        (bert(world.seed), "its head may look at several tokens"),
        (bert(world.seed).base_model, "its head may look at several tokens"),
        (llama(world.seed, rope_parameters=LONG), "its rotary embeddings of type 'dynamic'"),
        (
            llama(world.seed, output_router_logits=True),
            "output_router_logits: its loss needs the tokens of all ranks",
        ),
        (gpt2(world.seed, add_cross_attention=True), "it has cross-attention"),
        (nn.Linear(2, 2), "expected a model of transformers or one with SparseSelfAttention"),
        (per_head, "expected one layout for all heads"),
        (peft.get_peft_model(llama(world.seed), ALORA), "expected adapters of all tokens"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            apply_sequence_parallel(model, mesh)
    model = llama(world.seed)
    apply_sequence_parallel(model, mesh)
    with pytest.raises(ValueError, match="its sequences are sharded already"):
        apply_sequence_parallel(model, mesh)
    with pytest.raises(ValueError, match="Make its attention sparse first"):
        sparsify_attention(model, SPARSE)


@on_ranks(2)
def test_shards_that_do_not_fit_are_refused_by_all_ranks(world: World) -> None:
    enter(world)
    model, mesh = llama(world.seed), mesh_of(1, 2)
    apply_sequence_parallel(model, mesh)
    inputs = shard_batch(batches(world.seed, True)[0], mesh)
    half = inputs["attention_mask"][:, : LENGTH // 2]
    again = {**inputs, "position_ids": inputs["position_ids"] % 10, "attention_mask": None}
    without = {name: value for name, value in inputs.items() if name != "shift_labels"}
    for wrong, message in (
        ({**inputs, "position_ids": None}, "position_ids: expected those of this shard, got none"),
        (without, "labels: expected shift_labels with them, got none"),
        ({**inputs, "num_items_in_batch": None}, "labels: expected num_items_in_batch with them, got none"),
        (
            {**inputs, "attention_mask": half},
            "attention_mask: expected all 64 tokens of the sequence, got (4, 32)",
        ),
        (again, "position_ids: they begin anew"),
        (
            {**again, "attention_mask": torch.ones_like(inputs["attention_mask"])},
            "position_ids: they begin anew",
        ),
    ):
        theirs = "rank 1 of 'cp': it refused its shard of the sequence"
        with pytest.raises(ValueError, match=re.escape(theirs if world.rank == 0 else message)):
            model(**(inputs if world.rank == 0 else wrong))
    # Positions of padding are no documents.
    padding = inputs["attention_mask"].chunk(2, 1)[world.rank] == 0
    assert any(world.everyone(bool(padding.any())))
    loss = model(**inputs).loss
    positions = inputs["position_ids"].expand(padding.shape).masked_fill(padding, 1)
    torch.testing.assert_close(model(**{**inputs, "position_ids": positions}).loss, loss)
