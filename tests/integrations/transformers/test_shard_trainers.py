"""Trainers that know nothing of zero_ext: the losses of plain ones, sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import zero_ext
from tests.integrations.launch import RUN, found_in, started
from tests.integrations.transformers.models import (
    Sentences,
    arguments,
    column,
    enter,
    fitted,
    largest_difference,
    llama,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.config import ConfigError
from zero_ext.zero import engine_of

SCRIPT = Path(__file__).parent / "scripts" / "unmodified.py"
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trainer_that_is_built(world: World, precision: str) -> None:
    enter(world)
    settings = {"max_steps": 8, "seed": world.seed % 1000, "bf16": precision == "bf16"}
    data = Sentences(40, world.seed)
    folder = world.shared_folder()
    wanted = fitted(zero_ext_trainer(), llama(world.seed), folder, data, {"stage": 3}, **settings)
    model = llama(world.seed)
    built = Trainer(model, arguments(folder, **settings), train_dataset=data)
    trainer = zero_ext.shard_trainer(built, {"stage": 3})
    assert trainer is built and isinstance(trainer, Trainer)
    trainer.train()
    assert engine_of(model).config.stage == 3
    assert column(trainer, "loss") == column(wanted, "loss")
    with pytest.raises(ValueError, match="shards its model already"):
        zero_ext.shard_trainer(trainer)


def zero_ext_trainer() -> Any:
    from zero_ext.integrations.transformers import ZeroTrainer

    return ZeroTrainer


def test_what_is_refused_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    data = Sentences(8, 1)
    settings = {"max_grad_norm": 0.5, "max_steps": 1}
    trainer = Seq2SeqTrainer(
        llama(0),
        Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **settings),
        train_dataset=data,
    )
    with pytest.raises(ConfigError, match="gradient_clipping"):
        zero_ext.shard_trainer(trainer, {"stage": 3, "gradient_clipping": 2.0})
    assert type(trainer) is Seq2SeqTrainer
    trainer.train()
    with pytest.raises(ValueError, match="expected one that has not trained"):
        zero_ext.shard_trainer(trainer, {"stage": 3})
    assert type(trainer) is Seq2SeqTrainer


@pytest.mark.parametrize("extra", [[], ["--trl"]])
def test_a_script_trains_as_under_ddp(tmp_path: Path, extra: list[str]) -> None:
    options = [
        "--use_cpu",
        "--max_steps",
        "6",
        "--logging_steps",
        "1",
        "--report_to",
        "none",
        "--save_steps",
        "3",
    ]
    options += ["--bf16", "false"] if extra else []
    config = tmp_path / "zero3.json"
    config.write_text(json.dumps(DEEPSPEED))
    found: dict[str, Any] = {}
    for name, more in {"plain": [], "sharded": ["--config", config]}.items():
        folder = tmp_path / name
        folder.mkdir()
        started([*RUN, *more, SCRIPT, folder, *extra, "--output_dir", folder / "out", *options])
        found[name] = found_in(folder)
        found[name]["weights"] = load_file(folder / "model" / "model.safetensors")
    plain, sharded = found["plain"], found["sharded"]
    assert plain["stage"] is None and sharded["stage"] == 3
    assert len(plain["history"]) == len(sharded["history"]) > 6
    for own, other in zip(sharded["history"], plain["history"], strict=True):
        assert own.keys() == other.keys()
        assert own == pytest.approx(other, rel=1e-5)
    assert sharded["saved"] == plain["saved"]
    assert sharded["weights"].keys() == plain["weights"].keys()
    for key, value in plain["weights"].items():
        torch.testing.assert_close(sharded["weights"][key], value, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "sharded" / "out" / "checkpoint-6" / "zero_ext").is_dir()


@on_ranks(1)
def test_losses_differ_where_configurations_do(world: World) -> None:
    """The comparison above would see another batch size."""
    enter(world)
    folder = world.shared_folder()
    data = Sentences(40, world.seed)
    one, other = (
        fitted(
            zero_ext_trainer(),
            llama(world.seed),
            folder,
            data,
            {"stage": 3},
            max_steps=4,
            per_device_train_batch_size=samples,
        )
        for samples in (1, 2)
    )
    assert largest_difference(column(one, "loss"), column(other, "loss")) > 1e-5
