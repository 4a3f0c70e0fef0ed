"""A plain loop with parameters one step old, and the engine's delayed run that must equal it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import zero_ext
from tests.multi.rank import World
from tests.zero.models import language_batch, language_loss
from tests.zero.training import DTYPES, placed
from tests.zero.training import prepared as prepared_for
from zero_ext import ops
from zero_ext.zero import engine_of

RATES = (1e-2, 3e-3, 1e-1)  # learning rates of steps 0, 1, 2, then again


class Case(NamedTuple):
    """One run. ``read_after`` is a step after which state is read, ``overflow_at`` one whose gradients are
    infinite."""

    steps: int = 5
    micro_batches: int = 1
    clip: float = 0.0
    dtype: str = "fp32"
    fused: bool = True
    undelayed: int = 0
    read_after: int = -1
    overflow_at: int = -1
    muon: bool = False


def maker(fused: bool, muon: bool = False) -> Any:
    """Makes the optimizer of two groups. Only the matrices decay, and with ``muon`` they are Muon's."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        found = list(parameters)
        matrices = {"params": [each for each in found if each.dim() > 1], "weight_decay": 0.1}
        groups = [matrices, {"params": [each for each in found if each.dim() < 2], "weight_decay": 0.0}]
        if muon:
            rules = [{**group, "use_muon": rule} for group, rule in zip(groups, (True, False), strict=True)]
            return zero_ext.Muon(rules, lr=RATES[0], adamw={"lr": RATES[0], "eps": 1e-6})
        if fused:
            return torch.optim.AdamW(groups, lr=RATES[0], eps=1e-6)
        return torch.optim.SGD(groups, lr=RATES[0], momentum=0.9)

    return make


def configuration(case: Case, **more: Any) -> dict[str, Any]:
    """What is not in the stage of a run."""
    config: dict[str, Any] = {
        "gradient_clipping": case.clip,
        "batch": {"gradient_accumulation_steps": case.micro_batches},
        "units": {"bucket_elements": 700},
        "precision": {"dtype": "keep" if case.dtype == "fp32" else case.dtype},
        "loss_scale": {"static": 256.0} if case.dtype == "fp16" else {},
    }
    return {**config, **more}


def backward_of(world: World, model: Any, case: Case, step: int) -> list[float]:
    """Forward and backward of a step's micro-batches; their losses."""
    losses = []
    model.order = (0, 1, 2) if step % 2 else (0, 2)
    for micro in range(case.micro_batches):
        loss = language_loss(model, language_batch(world.seed, step, micro, world.rank))
        losses.append(loss.item())
        model.backward(loss * 1e30 if step == case.overflow_at else loss)
    return losses


class PlainOptimizer:
    """fp32 master weights by name, stepped one parameter at a time."""

    def __init__(self, masters: Mapping[str, torch.Tensor], fused: bool, muon: bool = False) -> None:
        self.masters = {name: value.detach().clone() for name, value in masters.items()}
        self._fused = fused
        self._muon = {
            name: torch.optim.Muon([master])
            for name, master in self.masters.items()
            if muon and master.dim() > 1
        }
        self._moments = {
            name: [torch.zeros_like(value.detach()) for _ in range(2)] for name, value in masters.items()
        }
        self._steps = dict.fromkeys(masters, 0)

    def step(self, name: str, gradient: torch.Tensor, scale: torch.Tensor, rate: float) -> None:
        """One parameter, from its gradient times ``scale``."""
        master, moments = self.masters[name], self._moments[name]
        decay = 0.1 if master.dim() > 1 else 0.0
        if name in self._muon:
            self._muon[name].param_groups[0].update(lr=rate, weight_decay=decay)
            master.grad = gradient.float() * scale
            self._muon[name].step()
            return
        if not self._fused:
            direction = gradient.float() * scale
            direction = direction.add(master, alpha=decay) if decay else direction
            moments[0].mul_(0.9).add_(direction)
            master.add_(moments[0], alpha=-rate)
            return
        self._steps[name] += 1
        hyper = [[rate, 0.9, 0.999, 1e-6, decay, float(self._steps[name]), 1.0, 0.0]]
        flat = [values.view(-1) for values in (master, *moments, gradient.contiguous())]
        bounds = torch.tensor([[0, master.numel()]])
        ops.adam_step_(*flat, None, bounds, torch.tensor(hyper, dtype=torch.float64), scale)


def train_stale(world: World, model: nn.Module, stage: int, case: Case) -> tuple[list[float], dict[str, Any]]:
    """The definition. Update i makes W(i + 1) of W(i) and the gradients of step i, whose forward and backward
    use W(i - 1), or W(0) in the first. Undelayed steps are followed by W(i + 1), as is one after which state
    was read. A skipped step makes no update, and is followed by W(i).

    Gradients come from a model on the device that is never stepped: values are loaded into it.
    """
    optimizer = PlainOptimizer(dict(model.named_parameters()), case.fused, case.muon)
    twin, _ = prepared_for(world, model, stage, maker(case.fused), **configuration(case))
    seen = copy.deepcopy(optimizer.masters)
    losses = []
    for step in range(case.steps):
        zero_ext.load_full_state_dict(twin, seen)
        losses += backward_of(world, twin, case, step)
        parameters = twin.named_parameters()
        gradients = {name: zero_ext.full_gradient(parameter) for name, parameter in parameters}
        twin.zero_grad()
        seen = copy.deepcopy(optimizer.masters)
        present = {name: value for name, value in gradients.items() if value is not None}
        scale = scale_of(present, case)
        if scale is None:
            continue
        for name, gradient in present.items():
            optimizer.step(name, gradient, scale, RATES[step % len(RATES)])
        if step < case.undelayed or step == case.read_after:
            seen = copy.deepcopy(optimizer.masters)
    dtype = DTYPES[case.dtype]
    return losses, {name: value.to(dtype) for name, value in optimizer.masters.items()}


def scale_of(gradients: Mapping[str, torch.Tensor], case: Case) -> torch.Tensor | None:
    """What gradients are multiplied by; None where they are not finite."""
    scale = torch.tensor(1 / 256 if case.dtype == "fp16" else 1.0)
    if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
        return None
    if case.clip:
        accumulator = torch.zeros(33, dtype=torch.int64)
        for gradient in gradients.values():
            ops.squared_norm_(gradient.contiguous().view(-1), accumulator)
        norm = ops.squared_norm_value(accumulator).sqrt() * scale.double()
        scale *= torch.clamp(case.clip / (norm + 1e-6), max=1.0).float()
    return scale


class Gate:
    """Holds updates back until it is opened."""

    def __init__(self, engine: Any) -> None:
        self._open = threading.Event()
        self.threads: set[int] = set()
        stepper = engine.optimizer_step.stepper
        step = stepper.step

        def held(*arguments: Any) -> Iterator[int]:
            if not self._open.wait(30):
                raise RuntimeError("nobody opened the gate")
            self.threads.add(threading.get_ident())
            yield from step(*arguments)

        stepper.step = held

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


def train_delayed(
    world: World, model: nn.Module, stage: int, case: Case, offload: Mapping[str, Any], late: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The engine's run; updates end before the next forward, or with ``late`` begin after its backward."""
    tiers = {**offload, "update_mode": "delayed", "delay_start_step": case.undelayed}
    with placed(tiers) as section:
        config = configuration(case, offload=section)
        model, optimizer = prepared_for(world, model, stage, maker(case.fused, case.muon), **config)
        step_of = engine_of(model).optimizer_step
        gate = Gate(engine_of(model))
        losses = []
        for step in range(case.steps):
            losses += backward_of(world, model, case, step)
            gate.open()
            step_of.wait()
            if late and step >= case.undelayed:
                gate.close()
            optimizer.step()
            if not late:
                step_of.wait()
            for group in optimizer.param_groups:
                group["lr"] = RATES[(step + 1) % len(RATES)]
            optimizer.zero_grad()
            if step == case.read_after:
                gate.open()
                zero_ext.full_state_dict(model)
        gate.open()
        return losses, zero_ext.full_state_dict(model)
