"""A zoo case: a model with its data, its loss and the way its training loop is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import zero_ext

VARIANTS = ("0", "1", "2", "3", "nvme", "init", "checkpoint")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of most cases.

    Adam divides a gradient by its own size, so a gradient that is zero but for rounding would become a step
    of the size of the learning rate. An ``eps`` of 1e-3 bounds such a step by the rounding itself.
    """
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def sgd(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Return SGD with momentum, for models whose gradients are noise that ``eps`` does not bound."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@dataclass
class TrainingState:
    """What a training loop holds: models, optimizers and whatever it keeps between steps.

    Attributes:
        models: the modules as the loop sees them: plain, or as ``zero_ext.prepare`` returned them.
        optimizers: one for each module.
        sharded: whether the modules were prepared by zero_ext.
        step_number: the number of the current step, from 0.
        memory: objects that the loop keeps between steps, such as a moving average of the weights.
        recorded: tensors that are compared with the reference in addition to losses and parameters.
    """

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    sharded: bool
    step_number: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    recorded: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        """The only module, or all of them where the case has several."""
        return self.models[0] if len(self.models) == 1 else self.models

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first optimizer."""
        return self.optimizers[0]

    def double_backward(self, *models: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return ``zero_ext.double_backward`` of ``models`` (default: all), or nothing in plain torch."""
        stack = contextlib.ExitStack()
        if self.sharded:
            for model in models or self.models:
                stack.enter_context(zero_ext.double_backward(model))
        return stack

    def gathered(
        self,
        parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
    ) -> contextlib.AbstractContextManager[Any]:
        """Return ``zero_ext.gathered`` of ``parameters``, or nothing in plain torch."""
        if not self.sharded:
            return contextlib.nullcontext()
        return zero_ext.gathered(parameters, modifier_rank=modifier_rank)

    def record(self, name: str, value: torch.Tensor) -> None:
        """Compare ``value`` with the reference's under the same name, in this step."""
        self.recorded[f"{name}@{self.step_number}"] = value.detach().clone()


def plain_step(
    state: TrainingState,
    loss: Callable[[Any, Any], torch.Tensor],
    inputs: Any,
    change: Callable[[TrainingState], Any] = lambda state: None,
) -> torch.Tensor:
    """Make an ordinary step and return its loss; ``change`` runs between backward and the optimizers."""
    for optimizer in state.optimizers:
        optimizer.zero_grad()
    value = loss(state.model, inputs)
    value.backward()
    change(state)
    for optimizer in state.optimizers:
        optimizer.step()
    return value


@dataclass(frozen=True)
class Case:
    """A model and its loop. The functions run on every rank and in plain torch alike.

    Attributes:
        name: unique, with slashes: "own/vision/resnet".
        build: makes the module, or a sequence of modules with an optimizer each. Seeded before the call.
        batch: the inputs of a step, the same for the same step.
        loss: the scalar loss of the module (of the list of modules, where there are several) and the inputs.
        step: replaces zero_grad, loss, backward and step. It returns the loss.
        setup: runs after the optimizers exist and before the first step.
        generate: tokens to compare exactly, in eval mode under no_grad, between steps and at the end.
        evaluate: "loss" computes the loss in eval mode under no_grad after every step. A function replaces
            the loss, and None leaves evaluation out.
        optimizer: makes the optimizer of one module.
        expected: "equal", or a regular expression for the message of a refusal, or either of these by
            variant. Variants that the mapping leaves out are "equal".
        reason: why a refusal is right.
        variants: the variants that make sense for the case. Cases whose loop keeps state of its own leave
            out "checkpoint".
    """

    name: str
    build: Callable[[], nn.Module | Sequence[nn.Module]]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    step: Callable[[TrainingState, Any], torch.Tensor] | None = None
    setup: Callable[[TrainingState], None] | None = None
    generate: Callable[[Any, Any], torch.Tensor] | None = None
    evaluate: str | Callable[[Any, Any], torch.Tensor] | None = "loss"
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    expected: str | Mapping[str, str] = "equal"
    reason: str = ""
    variants: tuple[str, ...] = VARIANTS

    def expectation(self, variant: str) -> str:
        """Return "equal" or the regular expression of the expected refusal."""
        if isinstance(self.expected, str):
            return self.expected
        return self.expected.get(variant, "equal")

    def train_step(self, state: TrainingState, inputs: Any) -> torch.Tensor:
        """Make one step and return its loss."""
        return plain_step(state, self.loss, inputs) if self.step is None else self.step(state, inputs)

    def evaluation(self, state: TrainingState, inputs: Any) -> torch.Tensor | None:
        """Return the loss in eval mode, or None where the case has no evaluation."""
        if self.evaluate is None:
            return None
        compute = self.evaluate if callable(self.evaluate) else self.loss
        return compute(state.model, inputs)


# What a refusal of a naive loop has to name: the call that makes it right.
NAMED_CALL = r"zero_ext\.(gathered|double_backward|full_state_dict|full_gradient|load_full_state_dict)"
REFUSED_WHERE_SHARDED = dict.fromkeys(("3", "nvme", "init", "checkpoint"), NAMED_CALL)
WITHOUT_CHECKPOINT = tuple(variant for variant in VARIANTS if variant != "checkpoint")
