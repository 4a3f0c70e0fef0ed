"""The loops that tests compare: a prepared model on its ranks, and a plain model on the global batch."""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import zero_ext
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from zero_ext.zero import Engine, engine_of
from zero_ext.zero.units.unit import Unit

Loss = Callable[[nn.Module, Any], torch.Tensor]
Batch = Callable[[int, int, int, int], Any]  # seed, step, micro-batch, rank
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Plan(NamedTuple):
    """How a run goes. ``accumulation`` is "declared" in the configuration, "undeclared", or by "no_sync"."""

    steps: int = 3
    micro_batches: int = 1
    accumulation: str = "declared"
    clip: float = 0.0
    dtype: str = "fp32"


DEFAULT = Plan()


class Run(NamedTuple):
    """Losses of this rank [steps * micro-batches], final parameters by name (whole), gradient norms."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    norms: list[float | None]
    engine: Engine | None


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of most tests. Its ``eps`` bounds what a gradient's rounding can do to a step.

    A gradient that is zero but for rounding differs between two orders of summation; with a small ``eps``
    Adam would make steps of the size of the learning rate of it.
    """
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-3, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """For models with gradients that are zero but for rounding, of which Adam would make whole steps."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def configuration(stage: int, plan: Plan = DEFAULT, **more: Any) -> dict[str, Any]:
    """A configuration mapping for ``plan`` at ``stage``; ``more`` adds or replaces keys."""
    config: dict[str, Any] = {"stage": stage, "gradient_clipping": plan.clip, "timeout_seconds": 120.0}
    if plan.accumulation == "declared":
        config["batch"] = {"gradient_accumulation_steps": plan.micro_batches}
    if plan.dtype != "fp32":
        config["precision"] = {"dtype": plan.dtype}
    if plan.dtype == "fp16":
        config["loss_scale"] = {"static": 256.0}
    return {**config, **more}


@contextlib.contextmanager
def placed(offload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The section ``offload``, with a folder and a small ring where it names NVMe."""
    with tempfile.TemporaryDirectory() as folder:
        nvme = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
        yield {"staging_buffer_bytes": 1 << 20, **nvme, **offload}


def prepared(
    world: World, model: nn.Module, stage: int = 3, make: MakeOptimizer | None = adamw, **more: Any
) -> tuple[Any, Any]:
    """``model`` and the optimizer that ``make`` makes, prepared for ``stage``; ``more`` configures them."""
    optimizer = None if make is None else make(model.parameters())
    return zero_ext.prepare(model, optimizer, configuration(stage, **more), process_group=world.group)


def train_step(model: Any, optimizer: Any, loss: torch.Tensor) -> float:
    """Backward and step; the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def language_steps(world: World, model: Any, optimizer: Any, steps: Iterable[int]) -> list[float]:
    """Train on this rank's batches of ``steps``; the losses."""
    batches = (language_batch(world.seed, step, 0, world.rank) for step in steps)
    return [train_step(model, optimizer, language_loss(model, batch)) for batch in batches]


def plain_backward(
    world: World,
    twin: nn.Module,
    step: int = 0,
    loss_of: Loss = language_loss,
    batch_of: Batch = language_batch,
) -> None:
    """Add the gradients of all ranks' mean loss to those of ``twin``, a model of torch alone."""
    for rank in range(world.size):
        (loss_of(twin, batch_of(world.seed, step, 0, rank)) / world.size).backward()


@contextlib.contextmanager
def poisoned_gradient(world: World, model: Any, name: str, value: float = math.nan) -> Iterator[None]:
    """One element of the gradient of the parameter ``name`` on the last rank, in every backward pass."""

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        if world.rank < world.size - 1:
            return gradient
        poisoned = gradient.clone()
        poisoned.view(-1)[world.seed % poisoned.numel()] = value
        return poisoned

    handle = dict(model.module.named_parameters())[name].register_hook(poison)
    try:
        yield
    finally:
        handle.remove()


def lion(parameters: Any) -> torch.optim.Optimizer:
    """A second fused optimizer."""
    return zero_ext.Lion(parameters, lr=1e-3)


def values_of(source: Any) -> Mapping[str, torch.Tensor]:
    """A mapping as it is; the full state dict of a prepared model; the state dict of another one."""
    if not isinstance(source, nn.Module):
        return source
    try:
        engine_of(source)
    except ValueError:
        return source.state_dict()
    return zero_ext.full_state_dict(source)


def check_same(first: Any, second: Any, where: object = "") -> None:
    """The ``values_of`` both, bit for bit."""
    one, two = values_of(first), values_of(second)
    assert one.keys() == two.keys(), where
    for name, value in one.items():
        assert torch.equal(value, two[name]), f"{name} differs {where}"


def check_near(first: Any, second: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """The ``values_of`` both, element by element within the tolerances."""
    one, two = values_of(first), values_of(second)
    assert one.keys() == two.keys()
    for name, value in one.items():
        close = torch.isclose(value, two[name], rtol, atol, equal_nan=True)
        assert bool(close.all()), f"{name} differs by {(value - two[name]).abs().max()}"


def gathered_once(engine: Engine) -> int:
    """Elements of :func:`units_gathered_once`."""
    return sum(unit.layout.numel for unit in units_gathered_once(engine))


def units_gathered_once(engine: Engine) -> set[Unit]:
    """What the last step gathered for forward and not again for backward: what forward ended with, and what
    backward never needed."""
    forward, backward = (
        order._recorded for order in (engine.prefetcher.forward_order, engine.prefetcher.backward_order)
    )
    stayed = backward[:1] if engine.config.units.prefetch_elements else []
    return {unit for unit in forward if unit in stayed or unit not in backward}


def train_prepared(
    world: World,
    model: nn.Module,
    loss_of: Loss,
    batch_of: Batch,
    config: dict[str, Any],
    plan: Plan = DEFAULT,
    make_optimizer: MakeOptimizer = adamw,
) -> Run:
    """Trains ``model`` under zero_ext on this rank's part of the data."""
    prepared, optimizer = zero_ext.prepare(
        model, make_optimizer(model.parameters()), config, process_group=world.group
    )
    losses: list[float] = []
    norms: list[float | None] = []
    for step in range(plan.steps):
        for micro in range(plan.micro_batches):
            local = plan.accumulation == "no_sync" and micro + 1 < plan.micro_batches
            with prepared.no_sync() if local else contextlib.nullcontext():
                loss = loss_of(prepared, batch_of(world.seed, step, micro, world.rank))
                prepared.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        norms.append(engine_of(prepared).grad_norm)
    return Run(losses, zero_ext.full_state_dict(prepared), norms, engine_of(prepared))


def train_in_tiers(
    world: World,
    stage: int,
    plan: Plan,
    offload: Mapping[str, Any],
    make: MakeOptimizer = adamw,
    model: Callable[[], nn.Module] = TinyModel,
    **more: Any,
) -> Run:
    """:func:`train_prepared` of a ``model`` in small units, with its state in the tiers of ``offload``."""
    torch.manual_seed(world.seed)
    units = {"bucket_elements": 700, **more.pop("units", {})}
    with placed(offload) as section:
        config = configuration(stage, plan, offload=section, units=units, **more)
        return train_prepared(world, model(), language_loss, language_batch, config, plan, make)


def train_plain(
    world: World,
    model: nn.Module,
    loss_of: Loss,
    batch_of: Batch,
    plan: Plan = DEFAULT,
    make_optimizer: MakeOptimizer = adamw,
) -> Run:
    """Trains ``model`` by torch alone, in this process, on every rank's data: what DDP would compute.

    Low precision runs with fp32 masters: gradients of each rank in the model's dtype, averaged in fp32 and
    rounded as a reduction into that dtype rounds them, micro-batches added in fp32.
    """
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    for master, parameter in zip(masters, model.parameters(), strict=True):
        master.requires_grad_(parameter.requires_grad)
    dtype = DTYPES[plan.dtype]
    model.to(dtype)
    parameters = list(model.parameters())
    optimizer = make_optimizer(masters)
    losses: list[float] = []
    norms: list[float | None] = []
    for step in range(plan.steps):
        for micro in range(plan.micro_batches):
            loss, gradients = _average(world, model, parameters, loss_of, batch_of, (step, micro), plan)
            losses.append(loss)
            for master, gradient in zip(masters, gradients, strict=True):
                if gradient is not None:
                    if plan.micro_batches == 1:
                        gradient = gradient.to(dtype).float()
                    master.grad = gradient if master.grad is None else master.grad + gradient
        norms.append(None)
        if plan.clip:
            norms[-1] = nn.utils.clip_grad_norm_(masters, plan.clip).item()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
    return Run(
        losses, {name: value.detach().clone() for name, value in model.state_dict().items()}, norms, None
    )


def _average(
    world: World,
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    loss_of: Loss,
    batch_of: Batch,
    position: tuple[int, int],
    plan: Plan,
) -> tuple[float, list[torch.Tensor | None]]:
    """This rank's loss of one micro-batch, and the gradients averaged over the ranks' micro-batches."""
    scale = 256.0 if plan.dtype == "fp16" else 1.0
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    own = 0.0
    for rank in range(world.size):
        loss = loss_of(model, batch_of(world.seed, *position, rank))
        own = loss.item() if rank == world.rank else own
        (loss * scale).backward()
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                gradient = parameter.grad.float() / (scale * world.size)
                before = sums[number]
                sums[number] = gradient if before is None else before + gradient
                parameter.grad = None
    return own, sums


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """||first - second|| / ||second|| over all floating-point entries, in float64."""
    if first.keys() != second.keys():
        raise AssertionError(f"other keys: {first.keys() ^ second.keys()}")
    pairs = [
        (first[name].double(), second[name].double()) for name in second if second[name].is_floating_point()
    ]
    difference = sum(float((one - two).square().sum()) for one, two in pairs)
    return float((difference / max(sum(float(two.square().sum()) for _, two in pairs), 1e-30)) ** 0.5)


def check_equal(first: Run, second: Run) -> None:
    """Bit-identical losses and parameters."""
    assert first.losses == second.losses, (first.losses, second.losses)
    for name, value in first.parameters.items():
        assert torch.equal(value, second.parameters[name]), f"{name} differs"


def check_close(run: Run, reference: Run, tolerance: float = 1e-6) -> None:
    """Every loss within ``tolerance`` relative, and the parameters within it in norm."""
    for step, (one, two) in enumerate(zip(run.losses, reference.losses, strict=True)):
        assert abs(one - two) <= tolerance * abs(two), f"loss {step}: {one} against {two}"
    for one_norm, two_norm in zip(run.norms, reference.norms, strict=True):
        if two_norm is not None:
            assert one_norm is not None and abs(one_norm - two_norm) <= 10 * tolerance * two_norm
    apart = distance(run.parameters, reference.parameters)
    assert apart <= tolerance, f"parameters differ by {apart:.3g} in norm"


def check_against_plain(
    world: World,
    model: nn.Module,
    loss_of: Loss,
    batch_of: Batch,
    stage: int,
    plan: Plan = DEFAULT,
    make_optimizer: MakeOptimizer = adamw,
    tolerance: float = 1e-6,
    **more: Any,
) -> Run:
    """One architecture, prepared against plain; returns the prepared run."""
    twin = copy.deepcopy(model)
    run = train_prepared(
        world, model, loss_of, batch_of, configuration(stage, plan, **more), plan, make_optimizer
    )
    check_close(run, train_plain(world, twin, loss_of, batch_of, plan, make_optimizer), tolerance)
    return run
