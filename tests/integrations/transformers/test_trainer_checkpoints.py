"""Saving and resuming with ZeroTrainer: other world sizes, the best model, what transformers reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import zero_ext
from tests.integrations.transformers.models import (
    MODELS,
    Sentences,
    arguments,
    column,
    enter,
    fitted,
    largest_difference,
    llama,
    reloaded,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.multi.worlds import Worlds
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.integrations.transformers import ZeroTrainer

MODULE = "tests.integrations.transformers.test_trainer_checkpoints"
STEPS = 9


def train(world: World, folder: str, seed: int, steps: int, resume: bool, stage: int) -> dict[str, Any]:
    """Trains up to ``steps`` of nine steps on 4 samples each, whatever the ranks, saving every third."""
    enter(world)
    args = arguments(
        folder,
        per_device_train_batch_size=4 // world.size,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=3,
        save_total_limit=2,
        lr_scheduler_type="cosine",
    )
    data = Sentences(28, seed)  # seven steps an epoch: the checkpoint lies within the first
    trainer = ZeroTrainer(model=llama(seed), args=args, train_dataset=data, zero_config={"stage": stage})
    if not resume:
        trainer.add_callback(StopAt(steps))
    trainer.train(resume_from_checkpoint=resume or None)
    return {"loss": column(trainer, "loss"), "rates": column(trainer, "learning_rate")}


class StopAt(TrainerCallback):
    """Ends a run as a job's time limit would, between steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize(("first", "second", "stages"), [(2, 2, (3, 3)), (2, 1, (3, 2)), (1, 2, (1, 3))])
def test_a_resumed_run_goes_on_where_it_was(
    rank_pool: Worlds, tmp_path: Path, first: int, second: int, stages: tuple[int, int]
) -> None:
    seed = int(torch.randint(1000, ()))
    common = {"seed": seed, "resume": False}
    uninterrupted = rank_pool.run(
        1, f"{MODULE}:train", {**common, "folder": str(tmp_path / "whole"), "steps": STEPS, "stage": 0}
    )[0]
    folder = {"folder": str(tmp_path / "run"), "seed": seed}
    rank_pool.run(first, f"{MODULE}:train", {**folder, "steps": 6, "stage": stages[0], "resume": False})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-3", "checkpoint-6"]
    # A job that was killed while it saved leaves a folder without its end.
    shutil.copytree(tmp_path / "run" / "checkpoint-6", tmp_path / "run" / "checkpoint-8")
    (tmp_path / "run" / "checkpoint-8" / "trainer_state.json").unlink()
    again = rank_pool.run(
        second, f"{MODULE}:train", {**folder, "steps": STEPS, "stage": stages[1], "resume": True}
    )[0]
    assert len(again["loss"]) == STEPS  # six from the checkpoint's log, three new ones
    assert largest_difference(again["loss"], uninterrupted["loss"]) < 1e-5, seed
    assert again["rates"] == uninterrupted["rates"]
    assert (tmp_path / "run" / "checkpoint-9").is_dir()


@on_ranks(2)
def test_what_is_saved_is_read_by_transformers_alone(world: World) -> None:
    enter(world)
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(world.seed))
    folder = world.shared_folder()
    for name, make in MODELS.items():
        model = make(world.seed, **({"tie_word_embeddings": True} if name == "llama" else {}))
        data = Sentences(24, world.seed, labels=3 if name == "bert" else None)
        trainer = fitted(ZeroTrainer, model, folder, data, max_steps=3)
        trainer.save_model(str(folder / name))
        model.save_pretrained(folder / f"{name}-direct", max_shard_size="20KB")
        world.barrier()
        model.eval()
        wanted = model(ids).logits
        for path in (folder / name, folder / f"{name}-direct"):
            again = reloaded(path, model)
            assert torch.equal(again(ids).logits, wanted), path
            assert {*again.state_dict()} == {*zero_ext.full_state_dict(model)}
        assert (folder / name / "training_args.bin").is_file()
        assert len(list((folder / f"{name}-direct").glob("*.safetensors"))) > 1


@on_ranks(2)
def test_the_best_model_is_loaded_at_the_end_and_early_stopping_stops(world: World) -> None:
    enter(world)
    settings = {
        "max_steps": 30,
        "learning_rate": 0.05,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    data, held_out = Sentences(12, world.seed), Sentences(7, world.seed + 1)
    seen = []
    folder = world.shared_folder()
    for kind in (Trainer, ZeroTrainer):
        for only_model in (False, True):
            run = folder / f"{kind.__name__}-{only_model}"
            trainer = kind(
                model=llama(world.seed),
                args=arguments(run, save_only_model=only_model, **settings),
                train_dataset=data,
                eval_dataset=held_out,
                callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
            )
            trainer.train()
            best = trainer.evaluate()["eval_loss"]
            left = sorted(path.name for path in run.iterdir())
            steps = trainer.state.global_step
            assert best == pytest.approx(trainer.state.best_metric, rel=1e-6)
            seen.append((best, left, steps, Path(trainer.state.best_model_checkpoint).name))
    for other in seen[1:]:
        assert other[0] == pytest.approx(seen[0][0], rel=1e-5)
        assert other[1:] == seen[0][1:]
    assert seen[0][2] < 30  # and so stopped early


@on_ranks(2)
def test_a_checkpoint_of_weights_alone_loads_weights_alone(world: World) -> None:
    enter(world)
    data = Sentences(24, world.seed)
    folder = world.shared_folder()
    model, saving = (
        llama(world.seed),
        {"save_strategy": "steps", "save_steps": 2, "save_only_model": True},
    )
    fitted(ZeroTrainer, model, folder, data, max_steps=4, **saving)
    again = llama(world.seed + 1)
    args = arguments(folder, max_steps=6, learning_rate=0.0)
    trainer = ZeroTrainer(model=again, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert trainer.state.global_step == 6
    wanted, found = zero_ext.full_state_dict(model), zero_ext.full_state_dict(again)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@on_ranks(2)
def test_a_foreign_or_damaged_checkpoint_is_refused_before_anything_changes(world: World) -> None:
    enter(world)
    data = Sentences(24, world.seed)
    folder = world.shared_folder()
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    for name, kind, only in (
        ("zero", ZeroTrainer, False),
        ("weights", ZeroTrainer, True),
        ("plain", Trainer, False),
    ):
        fitted(kind, llama(world.seed), folder / name, data, save_only_model=only, **settings)
    if world.rank == 0:
        spoil(folder)
    world.barrier()
    args = arguments(folder / "new", max_steps=4)
    model = llama(world.seed + 1)
    other = llama(world.seed, intermediate_size=40)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name, subject, words in (
        ("zero", other, "mlp.gate_proj.weight.*48, 32.*40, 32"),
        ("weights", other, "mlp.gate_proj.weight.*48, 32.*40, 32"),
        ("bert", model, "checkpoint of a 'llama' model, got one of 'bert'"),
        ("plain", model, "optimizer.pt.*from_pretrained"),
        ("missing", model, "no such checkpoint folder"),
        ("unfinished", model, "a complete Trainer checkpoint, got no trainer_state.json"),
        ("cut", model, "model.safetensors"),
        ("garbage", model, "model.safetensors"),
        ("manifest", model, "manifest.json"),
    ):
        trainer = ZeroTrainer(model=subject, args=args, train_dataset=data)
        with pytest.raises((ValueError, CheckpointError), match=f"(?s){words}"):
            trainer.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # Damage that only reading every byte finds leaves the model as it was, sharded by then.
    trainer = ZeroTrainer(model=model, args=args, train_dataset=data)
    with pytest.raises(CheckpointError, match="CRC32C"):
        trainer.train(resume_from_checkpoint=str(folder / "flipped" / "checkpoint-2"))
    after = zero_ext.full_state_dict(model)
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def spoil(folder: Path) -> None:
    """Copies of checkpoints, each with something wrong."""

    def copied(source: str, name: str) -> Path:
        shutil.copytree(folder / source, folder / name)
        return folder / name / "checkpoint-2"

    config = copied("zero", "bert") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "bert"}))
    (copied("zero", "unfinished") / "trainer_state.json").unlink()
    weights = copied("weights", "cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (copied("weights", "garbage") / "model.safetensors").write_bytes(b"\xff" * 4096)
    (next((copied("zero", "manifest") / "zero_ext").glob("step-*")) / "manifest.json").write_text("{")
    state = next((copied("zero", "flipped") / "zero_ext").glob("step-*"))
    for shard in state.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-8] ^= 1
        shard.write_bytes(data)
