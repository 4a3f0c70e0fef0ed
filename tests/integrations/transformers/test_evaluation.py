"""Evaluating, predicting and generating with a sharded model: what the plain Trainer gives, ranks in step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from tests.integrations.transformers.models import (
    Sentences,
    arguments,
    bert,
    enter,
    fitted,
    gpt2,
    largest_difference,
    llama,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations.transformers import ZeroTrainer, ZeroTrainerMixin
from zero_ext.zero import engine_of


def accuracy(outcome: Any) -> dict[str, float]:
    """A metric over what all ranks predicted."""
    return {"accuracy": float((outcome.predictions.argmax(-1) == outcome.label_ids).mean())}


@on_ranks(1, 2)
def test_evaluate_and_predict_equal_the_plain_trainer(world: World) -> None:
    enter(world)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    data, held_out = Sentences(24, world.seed, labels=3), Sentences(11, world.seed + 1, labels=3)
    settings = {"eval_dataset": held_out, "compute_metrics": accuracy}
    folder = world.shared_folder()
    before, after, predicted = [], [], []
    for kind in (Trainer, ZeroTrainer):
        args = arguments(folder, max_steps=4)
        before.append(kind(model=bert(world.seed, **still), args=args, **settings).evaluate())
        trainer = kind(model=bert(world.seed, **still), args=args, train_dataset=data, **settings)
        if kind is ZeroTrainer:
            # The plain one's ranks would train apart after it: accelerate takes its model for prepared.
            before.append(trainer.evaluate())
        trainer.train()
        after.append(trainer.evaluate())
        predicted.append(trainer.predict(held_out).predictions)
    for wanted, *found in (before, after):
        for other in found:
            assert other["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)
            assert other["eval_accuracy"] == wanted["eval_accuracy"]
    assert predicted[0].shape == (11, 3)
    assert np.allclose(predicted[1], predicted[0], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_a_trainer_without_training_data_has_no_optimizer_state(world: World) -> None:
    enter(world)
    folder = world.shared_folder()
    trainer = ZeroTrainer(
        model=llama(world.seed), args=arguments(folder), eval_dataset=Sentences(7, world.seed)
    )
    assert trainer.evaluate()["eval_loss"] > 0
    held = engine_of(trainer.model).memory_breakdown()
    assert not any(bytes_ for kind, bytes_ in held.items() if "optimizer" in kind or "grads" in kind), held
    trainer.train_dataset = Sentences(8, world.seed)
    with pytest.raises(RuntimeError, match="train_dataset"):
        trainer.train()


@on_ranks(2)
def test_ranks_with_other_lengths_generate_in_step(world: World) -> None:
    enter(world)
    data = Sentences(24, world.seed)
    generator = torch.Generator().manual_seed(world.seed)
    prompts = [torch.randint(3, 64, (1, 3 + 4 * rank), generator=generator) for rank in range(2)]
    for make in (llama, gpt2):
        folder = world.shared_folder()
        plain, model = make(world.seed), make(world.seed)
        fitted(Trainer, plain, folder, data, max_steps=2)
        fitted(ZeroTrainer, model, folder, data, max_steps=2)
        for sample in (False, True):
            settings = {"max_new_tokens": 3 + 8 * (1 - world.rank), "do_sample": sample, "pad_token_id": 0}
            found = []
            for subject in (plain, model):
                torch.manual_seed(world.seed)
                found.append(subject.eval().generate(prompts[world.rank], **settings))
            assert torch.equal(*found)


@on_ranks(2)
def test_predict_with_generate_goes_through_the_mixin(world: World) -> None:
    enter(world)

    class Mine(ZeroTrainerMixin, Seq2SeqTrainer):
        pass

    folder = world.shared_folder()
    shapes = []
    for kind in (Seq2SeqTrainer, Mine):
        args = Seq2SeqTrainingArguments(
            str(folder),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            predict_with_generate=True,
            generation_max_length=16,
            per_device_eval_batch_size=2,
        )
        trainer = kind(model=llama(world.seed), args=args, eval_dataset=Sentences(6, world.seed))
        outcome = trainer.predict(Sentences(6, world.seed))
        shapes.append((outcome.predictions.tolist(), round(outcome.metrics["test_loss"], 4)))
    assert shapes[0] == shapes[1]


@on_ranks(2)
def test_the_embedding_is_resized_before_and_refused_after(world: World) -> None:
    enter(world)
    curves = []
    folder = world.shared_folder()
    for kind in (Trainer, ZeroTrainer):
        model = gpt2(world.seed)
        trainer = kind(
            model=model, args=arguments(folder, max_steps=4), train_dataset=Sentences(24, world.seed)
        )
        torch.manual_seed(world.seed)
        model.resize_token_embeddings(70)
        trainer.train()
        curves.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert largest_difference(curves[1], curves[0]) < 1e-5
    assert model.get_input_embeddings().weight.shape[0] == 70
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    with pytest.raises(RuntimeError, match=r"before train\(\)"):
        model.resize_token_embeddings(80)
