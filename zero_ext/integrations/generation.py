"""Generation inside training: parameters gathered once, ranks in step, weights for other engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ext.config.config_errors import show
from zero_ext.integrations.transformers.model_patches import RANKS_IN_STEP, modules_that_ask
from zero_ext.plan.parse_sizes import bytes_of
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.full_parameters import named_values
from zero_ext.zero.api.gathered import gathered
from zero_ext.zero.api.zero_module import unwrapped
from zero_ext.zero.units.parameter_marks import has_spread_experts


@contextlib.contextmanager
def unsharded_for_generation(model: nn.Module, budget: str | int | None = None) -> Iterator[bool]:
    """Gather all parameters once for the forward passes inside the block, if they fit; a collective.

    Inside, gradients are off. With all parameters in memory a forward pass is the plain module's: ranks need
    not make equally many, and `model.generate` ends on each rank by itself. Otherwise every forward pass
    gathers as in training, and `generate` of transformers goes on until all ranks are done, which it does
    only if the model's ranks are all of the job. So it does with experts that are spread over ranks:
    every forward pass exchanges tokens.

    Args:
        model: what [`prepare`][zero_ext.prepare] returned.
        budget: bytes of device memory for the full parameters, as a number or like "20GB". None: no limit.

    Yields:
        Whether the parameters are in memory.

    Raises:
        ValueError: `budget` is no number of bytes.
        RuntimeError: a forward pass with gradients inside the block, or as [`gathered`][zero_ext.gathered].

    Examples:
        >>> model, _ = zero_ext.prepare(torch.nn.Linear(4, 2), None, {"stage": 3})
        >>> with zero_ext.unsharded_for_generation(model, budget="1MB") as unsharded:
        ...     unsharded, model(torch.ones(3, 4)).shape
        (True, torch.Size([3, 2]))
    """
    engine, limit = engine_of(model), _bytes_of(budget)
    sharded = [unit for unit in engine.units if unit.placement.params]
    fits = limit is None or sum(unit.layout.nbytes for unit in sharded) <= limit
    spans_job = 1 < engine.world_size == dist.get_world_size()  # generate waits for all ranks of it
    if not fits:
        with torch.no_grad(), _in_step(model, spans_job):
            yield False
        return
    exchanges = spans_job and has_spread_experts(model)
    with torch.no_grad(), gathered(model.parameters()), _in_step(model, exchanges):
        before, engine.hooks.paused = engine.hooks.paused, True
        try:
            yield True
        finally:
            engine.hooks.paused = before
    engine.pool.overflow.release_idle()


def generate_unsharded(model: nn.Module, name: str, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``generate`` of a sharded model: gather its parameters once for all tokens."""
    with unsharded_for_generation(model):
        return plain(*args, **kwargs)


def _bytes_of(budget: str | int | None) -> int | None:
    if budget is None or (isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0):
        return budget
    if not isinstance(budget, str):
        raise ValueError(
            f"budget: expected a number of bytes, text such as '20GB' or None, got {show(budget)}. Pass one "
            "of these."
        )
    return bytes_of(budget, "budget")


@contextlib.contextmanager
def _in_step(model: nn.Module, value: bool) -> Iterator[None]:
    """Have ``generate`` of transformers keep all ranks in step inside, or not."""
    before = {module: vars(module).get(RANKS_IN_STEP) for module in modules_that_ask(unwrapped(model))}
    try:
        for module in before:
            setattr(module, RANKS_IN_STEP, value)
        yield
    finally:
        for module, mark in before.items():
            if mark is None:
                delattr(module, RANKS_IN_STEP)
            else:
                setattr(module, RANKS_IN_STEP, mark)


def stream_weights(model: nn.Module, merge_adapters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a prepared model one by one, as engines for generation take them; a collective.

    One unit of parameters is gathered at a time. Every rank iterates to the end. Under pipeline parallelism
    a rank has the weights of its stages.

    Args:
        model: what [`prepare`][zero_ext.prepare] returned.
        merge_adapters: merge PEFT's active adapters into a copy of each layer, as `merge_and_unload` does,
            and use the names of the model without adapters. The model itself stays as it is.

    Yields:
        Name and full tensor, in compute precision, of every parameter and persistent buffer, to be read until
        the next one. It is on the engine's device, of tiled layers on the CPU. What has several names has the
        first of them.

    Raises:
        TypeError: `model` is not a module, or has no adapters to merge.
        ValueError: `model` is not prepared, or its adapters cannot be merged a layer at a time.
        RuntimeError: a tensor was written to.

    Examples:
        >>> model, _ = zero_ext.prepare(torch.nn.Linear(4, 2), None, {"stage": 3})
        >>> {name: tuple(value.shape) for name, value in zero_ext.stream_weights(model)}
        {'weight': (2, 4), 'bias': (2,)}
    """
    engine = engine_of(model)
    if merge_adapters:
        # Imported where it is used: it needs PEFT.
        from zero_ext.integrations.peft_merging import merged_values

        values = merged_values(engine)
    else:
        values = named_values(engine)
    engine.finish_updates()
    return _read_only(values)


def _read_only(values: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values:
        before = value._version
        yield name, value
        if value._version != before:
            raise RuntimeError(
                f"stream_weights: '{name}': expected that it is only read, got a write, which may have "
                "reached the model on this rank alone. Write inside zero_ext.gathered(..., modifier_rank=0)."
            )
