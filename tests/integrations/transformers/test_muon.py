"""Muon in transformers' Trainer: by the configuration, by the class, and as an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import zero_ext
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
from zero_ext.config.sources.config_source import read_config
from zero_ext.integrations.transformers import ZeroTrainer
from zero_ext.integrations.transformers.trainer_config import resolve_settings

ARGUMENTS = {"learning_rate": 0.02, "weight_decay": 0.1, "max_steps": 5}
ADAMW = {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1}
SECTION = {"type": "Muon", "params": {"eps": 1e-6, "weight_decay": 0.1, "adamw": ADAMW}}


@on_ranks(2)
def test_losses_are_those_of_the_plain_trainer(world: World) -> None:
    """The last bits of a gradient decide about the rounding of directions to bfloat16."""
    enter(world)
    data = Sentences(40, world.seed)

    def by_class(kind: Any, model: Any, folder: Any, **more: Any) -> Any:
        kwargs = {"lr": 0.02, "eps": 1e-6, "adamw": ADAMW, "module": model}
        return kind(
            model, arguments(folder, **ARGUMENTS), None, data,
            optimizer_cls_and_kwargs=(zero_ext.Muon, kwargs), **more,
        )  # fmt: skip

    folder = world.shared_folder()
    model = llama(world.seed)
    trainers = {"plain": by_class(Trainer, model, folder)}
    trainers["plain"].train()
    steps = trainers["plain"].optimizer.optimizer.param_groups
    served = {id(each) for group in steps if group["use_muon"] for each in group["params"]}
    assert served == {
        id(each) for name, each in model.named_parameters() if ".layers." in name and each.dim() == 2
    }
    trainers["class"] = by_class(ZeroTrainer, llama(world.seed), folder, zero_config={"stage": 3})
    args = arguments(folder, **ARGUMENTS)
    config = {"stage": 2, "optimizer": SECTION}
    trainers["section"] = ZeroTrainer(llama(world.seed), args, train_dataset=data, zero_config=config)
    built = by_class(Trainer, llama(world.seed), folder)
    trainers["built"] = zero_ext.shard_trainer(built, {"stage": 1})
    for name in ("class", "section", "built"):
        trainers[name].train()
    adamw = fitted(Trainer, llama(world.seed), folder, data, **ARGUMENTS)
    wanted = trainers.pop("plain")
    for name, trainer in trainers.items():
        assert type(trainer.optimizer.optimizer) is zero_ext.Muon, name
        assert largest_difference(column(trainer, "loss"), column(wanted, "loss")) < 3e-4, name
        assert column(trainer, "learning_rate") == column(wanted, "learning_rate"), name
    assert largest_difference(column(adamw, "loss"), column(wanted, "loss")) > 1e-3


def test_what_the_arguments_say_of_muons_params(tmp_path: Path) -> None:
    args = arguments(tmp_path, **ARGUMENTS)

    def params(source: dict[str, Any]) -> dict[str, Any]:
        optimizer = resolve_settings(read_config(source), args, 5)[0].optimizer
        assert optimizer is not None
        return optimizer.params

    assert params({"optimizer": SECTION}) == {"lr": 0.02, **SECTION["params"]}  # type: ignore[dict-item]
    auto = {"lr": "auto", "weight_decay": "auto", "adam_lr": 1e-4}
    json = {"optimizer": {"type": "Muon", "params": auto}, "zero_optimization": {"stage": 1}}
    found = params(json)
    assert (found["lr"], found["weight_decay"], found["adamw"]["lr"]) == (0.02, 0.1, 1e-4)
    for wrong in ({"lr": 0.1}, {"weight_decay": 0.2}):
        with pytest.raises(ConfigError, match=f"zero_config has {next(iter(wrong.values()))}"):
            params({"optimizer": {"type": "Muon", "params": wrong}})
