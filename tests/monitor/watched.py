"""A small model in training, for tests of monitors."""

from __future__ import annotations

from typing import Any

import zero_ext
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, configuration
from zero_ext.zero import engine_of


def prepared(world: World, stage: int, **more: Any) -> tuple[Any, Any]:
    """A tiny language model and its optimizer, prepared with ``more`` settings, made by ``make``."""
    model = TinyModel()
    device, make = more.pop("device", None), more.pop("make", adamw)
    return zero_ext.prepare(
        model,
        make(model.parameters()),
        configuration(stage, **more),
        process_group=world.group,
        device=device,
    )


def train(world: World, model: Any, optimizer: Any, steps: int, first: int = 0, micro_steps: int = 1) -> None:
    """Trains from step number ``first`` on."""
    for step in range(first, first + steps):
        for micro in range(micro_steps):
            batch = language_batch(world.seed, step, micro, world.rank)
            loss = language_loss(model, batch.to(engine_of(model).device))
            model.backward(loss / micro_steps)
        optimizer.step()
        optimizer.zero_grad()
