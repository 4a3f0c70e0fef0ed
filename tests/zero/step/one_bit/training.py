"""Models and loops for the tests of optimizers that exchange signs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

import zero_ext
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.step.one_bit.simulation import BETA1, BETA2, DECAY, EPS, LR, Course
from tests.zero.training import check_same as check_same
from zero_ext.zero import engine_of


def zero_one(stage: int, dtype: str, var_freeze: int, scaler: int, clipper: int, steps: int = 12) -> Course:
    policy = {
        "var_freeze_step": var_freeze,
        "var_update_scaler": scaler,
        "local_step_scaler": scaler,
        "local_step_clipper": clipper,
    }
    return Course("ZeroOneAdam", stage, dtype, 1, policy, steps)


COURSES = {
    "1-bit Adam": Course("OneBitAdam", 0, "fp32", 1, {"freeze_step": 3}),
    "1-bit Adam, bf16, accumulated": Course("OneBitAdam", 0, "bf16", 2, {"freeze_step": 2}, 8),
    "1-bit Adam, moments sharded": Course("OneBitAdam", 1, "fp32", 2, {"freeze_step": 3}, 8),
    "1-bit Adam, moments sharded, bf16": Course("OneBitAdam", 1, "bf16", 1, {"freeze_step": 3}),
    "1-bit LAMB": Course("OneBitLamb", 0, "fp32", 1, {"freeze_step": 4}),
    "1-bit LAMB, bf16, accumulated": Course("OneBitLamb", 0, "bf16", 2, {"freeze_step": 3}, 8),
    "0/1 Adam": zero_one(0, "fp32", 7, 2, 4, 18),
    "0/1 Adam, bf16": zero_one(0, "bf16", 5, 1, 2),
    "0/1 Adam, moments sharded": zero_one(1, "bf16", 8, 2, 1),
}


class Branching(nn.Module):
    """A language model with a weight that rank 0 alone uses, in even steps, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.language = TinyModel(layers=2)
        self.sometimes = nn.Parameter(torch.randn(23))
        self.never = nn.Parameter(torch.randn(5))

    def forward(self, ids: torch.Tensor, sometimes: bool = False) -> torch.Tensor:
        logits: torch.Tensor = self.language(ids)
        return logits + self.sometimes.to(logits.dtype) if sometimes else logits


def branching_loss(seed: int, model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    """The loss of rank ``rank`` on a micro-batch of its own."""
    chosen: Any = functools.partial(model, sometimes=rank == 0 and step % 2 == 0)
    ids = language_batch(seed, step, micro, rank).to(next(model.parameters()).device)
    return language_loss(chosen, ids)


def prepared(world: World, course: Course, seed: int, **more: Any) -> tuple[Any, Any, nn.Module]:
    """A prepared model and optimizer of ``course``, and a plain twin of the model as it was before.
    ``device`` among the configuration's keys is where it trains."""
    device = more.pop("device", None)
    torch.manual_seed(seed)
    model, twin = Branching(), Branching()
    twin.load_state_dict(model.state_dict())
    kind = getattr(zero_ext, course.kind)
    optimizer = kind(
        model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, **course.policy
    )
    config = {
        "stage": course.stage,
        "precision": {"dtype": course.dtype},
        "units": {"bucket_elements": 900},
        "timeout_seconds": 120.0,
        "batch": {"gradient_accumulation_steps": course.micro_batches},
        **more,
    }
    return *zero_ext.prepare(model, optimizer, config, process_group=world.group, device=device), twin


def train(world: World, course: Course, seed: int, model: Any, optimizer: Any, steps: range) -> list[float]:
    """Runs ``steps`` of the course; the losses of this rank's micro-batches."""
    losses = []
    for step in steps:
        for micro in range(course.micro_batches):
            loss = branching_loss(seed, model, step, micro, world.rank)
            model.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def layouts(model: Any) -> list[Any]:
    """How the parameters lie in the engine's flat buffers."""
    return [unit.layout for unit in engine_of(model).units]


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """This rank's parameters as they are now."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}
