"""Gradients of several backward passes: by the engine, by autograd alone, and until the caller steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.config import ConfigError
from zero_ext.integrations import deepspeed

STEPS = 2
ALL = 4  # deepspeed.initialize takes the world, which in the pool is all ranks


class Losses(nn.Module):
    """Returns a loss and, inside other containers, the logits that it comes from."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        logits = self.second(self.first(inputs).tanh())
        loss = logits.square().mean()
        if self.container == "tensor":
            return loss
        if self.container == "tuple":
            return loss, [logits, None, logits]
        return {"loss": loss, "more": (logits,), "name": "x"}


def losses_of(outputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss, and logits if there are any."""
    if isinstance(outputs, torch.Tensor):
        return outputs, None
    return (
        (outputs[0], outputs[1][2]) if isinstance(outputs, tuple) else (outputs["loss"], outputs["more"][0])
    )


def model_of(container: str = "tensor") -> Losses:
    torch.manual_seed(5)
    return Losses(container)


def inputs_of(number: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def engine_of(stage: int, model: nn.Module, **more: Any) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": STEPS,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def assert_stepped(world: World, engine: nn.Module, numbers: range, divisor: float, weight: float) -> None:
    """`engine` made one step of SGD on the mean over ranks of the losses of `numbers`, over `divisor`."""
    model = model_of("tuple")
    for number in numbers:
        for rank in range(world.size):
            loss, logits = losses_of(model(inputs_of(number, rank)))
            assert logits is not None
            ((loss + weight * logits.sum()) / divisor / world.size).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    found = engine.module_state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value)


@on_ranks(ALL)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("container", ["tensor", "tuple", "dict"])
def test_plain_backward_is_divided(world: World, stage: int, container: str) -> None:
    """Once, also where a loss comes from other outputs; backward of the engine divides the loss instead."""
    engine = engine_of(stage, model_of(container))
    weight = 0.0 if container == "tensor" else 0.25
    for number in range(STEPS):
        outputs = engine(inputs_of(number, world.rank))
        loss, logits = losses_of(outputs)
        if logits is not None:
            loss = loss + weight * logits.sum()
        if number == 0:
            engine.scale(loss).backward()
        else:
            returned = engine.backward(loss)
            assert returned.item() == pytest.approx(loss.item() / STEPS)
        engine.step()
    assert engine.global_steps == 1
    assert_stepped(world, engine, range(STEPS), STEPS, weight)


@on_ranks(ALL)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_caller_owns_the_boundary(world: World, stage: int) -> None:
    """Without managed accumulation every step counts, however many backward passes came before it."""
    engine = engine_of(stage, model_of(), managed_gradient_accumulation=False)
    passes = range(STEPS + 1)
    for number in passes:
        engine.backward(engine(inputs_of(number, world.rank)))
        assert not engine.is_gradient_accumulation_boundary()
    assert engine.global_steps == 0
    engine.step()
    assert engine.was_step_applied() and (engine.global_steps, engine.micro_steps) == (1, 1)
    assert engine.global_samples == 2 * world.size * len(passes)
    assert_stepped(world, engine, passes, STEPS, 0.0)
    for call in (lambda: engine.set_gradient_accumulation_boundary(True), engine.coalesce_grad_reduction):
        with pytest.raises(RuntimeError, match="managed_gradient_accumulation: expected true, got false"):
            call().__enter__()
    with pytest.raises(ConfigError, match="managed_gradient_accumulation"):
        engine_of(stage, model_of(), managed_gradient_accumulation=0)
