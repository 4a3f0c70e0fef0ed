"""ZeroTrainer with sequences over ranks: losses, norms and evaluation of one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, Trainer, default_data_collator

import zero_ext
from tests.integrations.transformers.mixtures import mixture_of
from tests.integrations.transformers.models import (
    VOCABULARY,
    Sentences,
    arguments,
    column,
    enter,
    llama,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations import apply_sequence_parallel
from zero_ext.integrations.peft import ZeroPeftTrainer
from zero_ext.integrations.transformers import (
    ZeroTrainer,
    apply_document_attention,
    from_pretrained,
    shard_trainer,
)
from zero_ext.parallel import apply_expert_parallel, make_mesh
from zero_ext.zero.units.parameter_marks import has_spread_experts

RATE, CLIP, STEPS, EPSILON = 5e-3, 0.5, 4, 1e-3
BATCH = 2
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": RATE,
    "adam_epsilon": EPSILON,
    "max_grad_norm": CLIP,
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    "include_num_input_tokens_seen": "all",
}


class Documents(Sentences):
    """Samples of several lengths, in which some tokens are not to be learnt, but always the second."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = int(self.lengths[index])
        ids = self.ids[index][:length]
        ignored = (ids % 3 == 0) & (torch.arange(length) != 1)
        return {"input_ids": ids, "labels": torch.where(ignored, -100, ids)}


def padded(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of samples with padding at the end."""
    pads = {"input_ids": 0, "labels": -100}
    batch = {
        name: nn.utils.rnn.pad_sequence([each[name] for each in samples], True, pad)
        for name, pad in pads.items()
    }
    lengths = torch.tensor([len(each["input_ids"]) for each in samples])[:, None]
    return {**batch, "attention_mask": (torch.arange(batch["labels"].shape[1]) < lengths).long()}


def summed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the losses of a batch, from logits and labels alone."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def counted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def batches_of(data: Documents) -> list[dict[str, torch.Tensor]]:
    samples = [data[index] for index in range(len(data))]
    return [padded(samples[first : first + BATCH]) for first in range(0, len(samples), BATCH)]


def alone(model: Any, data: Documents, micro_batches: int) -> dict[str, list[float]]:
    """Losses and norms of plain steps in one process, each over ``micro_batches`` batches in order."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, weight_decay=0.0, eps=EPSILON)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    batches = batches_of(data)
    for step in range(STEPS):
        own = batches[step * micro_batches : (step + 1) * micro_batches]
        loss = torch.stack([summed(model, each) for each in own]).sum() / sum(map(counted, own))
        loss.backward()
        found["loss"].append(float(loss.detach()))
        found["grad_norm"].append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return found


# Ranks, ParallelismConfig, the section, accumulation, and what else is set.
CASES: dict[str, tuple[int, dict[str, int], dict[str, int], int, dict[str, Any]]] = {
    "ring": (2, {"cp_size": 2}, {}, 2, {}),
    "heads": (2, {"sp_size": 2}, {}, 2, {}),
    "section": (2, {}, {"cp": 2, "ring": 2}, 1, {"average_tokens_across_devices": False}),
    "ring and replicas": (4, {"cp_size": 2, "dp_shard_size": 2}, {}, 2, {}),
    "heads and rings": (4, {}, {"cp": 4, "ring": 2}, 2, {}),
}


@on_ranks(2, 4, by_turns=True)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_process(world: World, case: str) -> None:
    ranks, sizes, section, steps, changes = CASES[case]
    if ranks != world.size:
        return
    enter(world)
    replicas = world.size // max([*sizes.values(), section.get("cp", 1)])
    data = Documents(BATCH * replicas * steps * STEPS, world.seed)
    expected = alone(llama(world.seed), data, replicas * steps)
    if sizes:
        changes = {**changes, "parallelism_config": ParallelismConfig(**sizes)}
    folder = world.shared_folder()
    args = arguments(folder, **{**SETTINGS, "gradient_accumulation_steps": steps, **changes})
    config = {"stage": 3, **({"parallel": section} if section else {})}
    model, more = llama(world.seed), {"train_dataset": data, "data_collator": padded}
    if sizes:
        trainer: Any = ZeroTrainer(model, args, **more, zero_config=config)
    else:  # one that was built without zero_ext
        trainer = shard_trainer(Trainer(model, args, **more), config)
    trainer.train()
    for name, values in expected.items():
        found = column(trainer, name)
        torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-5, msg=f"{name}, seed {world.seed}")
    tokens = sum(each["input_ids"].numel() for each in batches_of(data))
    assert trainer.state.num_input_tokens_seen == tokens


@on_ranks(2)
@pytest.mark.parametrize("section", [{"cp": 2}, {"cp": 2, "ring": 2}], ids=str)
def test_evaluation_is_that_of_one_process(world: World, section: dict[str, int]) -> None:
    """Of the last batch, which is not full, too."""
    enter(world)
    data, reference = Documents(5, world.seed), llama(world.seed).eval()
    folder = world.shared_folder()
    trainer = ZeroTrainer(
        llama(world.seed),
        arguments(folder, per_device_eval_batch_size=BATCH),
        eval_dataset=data,
        data_collator=padded,
        zero_config={"stage": 3, "parallel": section},
    )
    found, predicted = trainer.evaluate()["eval_loss"], trainer.predict(data)
    weighted, batches = torch.zeros(()), batches_of(data)
    with torch.no_grad():
        for batch in batches:
            weighted += summed(reference, batch) / counted(batch) * len(batch["labels"])
        logits = [reference(input_ids=data[index]["input_ids"][None]).logits[0] for index in range(5)]
    torch.testing.assert_close(found, float(weighted / 5), rtol=1e-5, atol=1e-5, msg=str(world.seed))
    assert len(predicted.predictions) == len(predicted.label_ids) == 5
    for row, labels, wanted, sample in zip(
        predicted.predictions, predicted.label_ids, logits, data, strict=False
    ):
        torch.testing.assert_close(torch.from_numpy(row[: len(wanted)]), wanted, rtol=1e-4, atol=1e-5)
        assert labels[: len(wanted)].tolist() == sample["labels"].tolist()


PADDED: dict[str, dict[str, Any]] = {
    "biogpt": {"max_position_embeddings": 16},  # makes a mask of its own
    "llama": {"pad_token_id": -1},
    "gpt2": {"pad_token_id": VOCABULARY, "n_positions": 9},
    "opt": {"max_position_embeddings": 9, "ffn_dim": 32, "word_embed_proj_dim": 32},
}


@on_ranks(2)
@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("masked", [False, True])
def test_sequences_are_padded_for_any_model(world: World, kind: str, masked: bool) -> None:
    """Padding tokens that have no embedding, as many tokens as positions, and positions from the mask."""
    enter(world)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, **{**sizes, **PADDED[kind]})
    torch.manual_seed(world.seed)
    model = AutoModelForCausalLM.from_config(config)
    words = torch.randint(3, VOCABULARY, (BATCH, 9), generator=torch.Generator().manual_seed(world.seed))
    batch = {"input_ids": words, "labels": words.clone()}
    batch["labels"][:, 0] = -100  # which the Trainer counts for GPT-2
    if masked:  # at the start
        mask = torch.ones_like(words)
        mask[0, :3] = 0
        batch |= {"attention_mask": mask, "labels": torch.where(mask == 0, -100, batch["labels"])}
    with torch.no_grad():
        expected = float(model.eval()(**batch).loss)
    rows = [{name: value[row] for name, value in batch.items()} for row in range(BATCH)]
    folder = world.shared_folder()
    args = arguments(folder, per_device_eval_batch_size=BATCH, prediction_loss_only=True)
    settings = {"parallel": {"cp": 2}}
    trainer = ZeroTrainer(
        model, args, eval_dataset=rows, data_collator=default_data_collator, zero_config=settings
    )
    found = trainer.evaluate()["eval_loss"]
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-5, msg=f"{kind}: {found} {expected}, seed {world.seed}"
    )


@on_ranks(2)
def test_resuming_continues(world: World) -> None:
    enter(world)
    data = Documents(BATCH * STEPS, world.seed)
    folder = world.shared_folder()
    args = arguments(folder, **SETTINGS, save_strategy="steps", save_steps=2)
    more: dict[str, Any] = {"train_dataset": data, "data_collator": padded}
    config = {"stage": 2, "parallel": {"cp": 2, "ring": 2}}
    first, second = (ZeroTrainer(llama(world.seed), args, **more, zero_config=config) for _ in range(2))
    first.train()
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    second.save_model(str(folder / "model"))
    loaded = LlamaForCausalLM.from_pretrained(folder / "model")
    assert column(second, "loss") == column(first, "loss")
    for name, value in zero_ext.full_state_dict(first.model).items():
        assert torch.equal(loaded.state_dict()[name], value), name


@on_ranks(2)
def test_adapters(world: World) -> None:
    """PEFT calls the forward of the model inside, past its hooks."""
    enter(world)
    data = Documents(BATCH * STEPS, world.seed)

    def adapted() -> Any:
        torch.manual_seed(world.seed)
        return get_peft_model(llama(world.seed), LoraConfig(target_modules=["q_proj", "v_proj"]))

    expected = alone(adapted(), data, 1)
    folder = world.shared_folder()
    args = arguments(folder, **SETTINGS, parallelism_config=ParallelismConfig(cp_size=2))
    trainer = ZeroPeftTrainer(adapted(), args, train_dataset=data, data_collator=padded)
    trainer.train()
    torch.testing.assert_close(column(trainer, "loss"), expected["loss"], rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_rows_of_documents(world: World) -> None:
    """As one process trains them with the same attention. Without it they are refused."""
    enter(world)
    generator = torch.Generator().manual_seed(world.seed)
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    rows = [
        {"input_ids": words, "labels": words, "position_ids": positions}
        for words in torch.randint(3, VOCABULARY, (BATCH * STEPS, 12), generator=generator)
    ]
    reference, model = llama(world.seed), llama(world.seed)
    apply_document_attention(reference)
    apply_document_attention(model)
    optimizer = torch.optim.AdamW(reference.parameters(), RATE, weight_decay=0.0, eps=EPSILON)
    expected = []
    for step in range(STEPS):
        batch = default_data_collator(rows[step * BATCH : (step + 1) * BATCH])
        # The Trainer counts the labels of the first tokens of documents, too.
        loss = reference(**batch, num_items_in_batch=counted(batch)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    folder = world.shared_folder()
    args = arguments(folder, **SETTINGS, parallelism_config=ParallelismConfig(sp_size=2))
    trainer = ZeroTrainer(model, args, train_dataset=rows)
    trainer.train()
    torch.testing.assert_close(column(trainer, "loss"), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"got some that begin anew|refused its shard"):
        ZeroTrainer(llama(world.seed), args, train_dataset=rows).train()


@on_ranks(2)
def test_what_is_not_exact_is_refused(world: World) -> None:
    enter(world)
    section = {"parallel": {"cp": 2}}
    applied = llama(world.seed)
    apply_sequence_parallel(applied, make_mesh(cp=2, device_type="cpu"))
    cases: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor needs the logits"),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha scales noise"),
        ({"accelerator_config": {"dispatch_batches": True}}, {}, "dispatch_batches gives every rank"),
        ({"train_sampling_strategy": "batch_rebalance"}, {}, "'batch_rebalance' gives every rank"),
        ({}, {"compute_loss_func": summed}, "compute_loss_func would get labels"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, {}, "expected tp_size 1"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, {}, "which is cp=2, ring=2"),
        ({}, {"model": applied}, "that apply_sequence_parallel has changed"),
    )
    data = Documents(4, world.seed)
    folder = world.shared_folder()
    for settings, more, message in cases:
        model = more.pop("model", None) or llama(world.seed)
        with pytest.raises(ValueError, match=re.escape(message)):
            args = arguments(folder, max_steps=1, **settings)
            ZeroTrainer(
                model, args, train_dataset=data, data_collator=padded, zero_config=section, **more
            ).train()
    with pytest.raises(ValueError, match=re.escape("got 2, but process_group has 1 ranks along 'cp'")):
        zero_ext.prepare(llama(world.seed), None, section)


@on_ranks(2)
@pytest.mark.parametrize("by", ["section", "call", "loading"])
def test_spread_experts_have_the_losses_of_one_process(world: World, by: str) -> None:
    """By the section alone, or before the model is given to the Trainer, and with its values or without."""
    enter(world)
    data = Documents(BATCH * world.size * STEPS, world.seed)
    model = mixture_of("mixtral", world.seed, vocab_size=VOCABULARY)
    expected = alone(copy.deepcopy(model), data, world.size)
    loaded = copy.deepcopy(model)
    folder = world.shared_folder()
    args = arguments(folder, **SETTINGS, save_strategy="steps", save_steps=2)

    if world.rank == 0:
        model.save_pretrained(folder / "first")
    world.barrier()

    def trainer_of(own: Any) -> Any:
        config: dict[str, Any] = {"stage": 3}
        if by == "call":
            apply_expert_parallel(own, make_mesh(ep=2, device_type="cpu"))
        else:
            config["parallel"] = {"ep": 2}
        if by == "loading":
            own = from_pretrained(type(model), folder / "first", config).train()
        return ZeroTrainer(own, args, train_dataset=data, data_collator=padded, zero_config=config)

    trainer, again = (trainer_of(copy.deepcopy(model)) for _ in range(2))
    trainer.train()
    assert has_spread_experts(trainer.model)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    again.save_model(str(folder / "model"))
    loaded = type(model).from_pretrained(folder / "model")
    for name, values in expected.items():
        found = column(trainer, name)
        torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-5, msg=f"{name}, seed {world.seed}")
    assert column(again, "loss") == column(trainer, "loss")
    full = zero_ext.full_state_dict(trainer.model)
    assert loaded.state_dict().keys() == full.keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, full[name]), name
