"""Measure the seconds of each pipeline layer on this device, as weights for the split into stages."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ext.config.config_errors import clause_of
from zero_ext.parallel.pipeline.stages.layers import Layer, LayerSpec, TiedLayerSpec
from zero_ext.parallel.pipeline.stages.stage_layers import layer_seed


def profile_layers(
    layers: nn.Sequential | Sequence[Layer],
    *inputs: torch.Tensor,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Measure the seconds of forward and backward of every layer, for `PipelineModule(..., split=...)`.

    Where torch.distributed runs this is a collective of all ranks: rank 0 measures, all return the same. It
    has one layer at a time, unsharded and in the precision it is built in. Layers given as modules are copied
    and not changed, nor are random numbers. The loss is not measured.

    Args:
        layers: as for [`PipelineModule`][zero_ext.parallel.pipeline.PipelineModule].
        *inputs: one micro-batch on the device to measure on.
        repeats: measurements after one that warms up. The shortest counts.
        clock: returns seconds.

    Returns:
        Seconds per layer.

    Raises:
        ValueError: less than one repeat.
        RuntimeError: on all ranks, a layer fails.
    """
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(
            f"repeats: expected an integer of at least 1, got {repeats!r}. Pass the number of measurements."
        )
    several = dist.is_available() and dist.is_initialized()
    outcome: list[Any] = [[], ""]
    cause: Exception | None = None
    if not several or dist.get_rank() == 0:
        try:
            outcome[0] = _measure_all(layers, inputs, repeats, clock)
        except Exception as error:
            outcome[1], cause = str(error), error
    if several:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1]:
        raise RuntimeError(outcome[1]) from cause
    return list(outcome[0])


def _measure_all(
    layers: nn.Sequential | Sequence[Layer],
    inputs: tuple[Any, ...],
    repeats: int,
    clock: Callable[[], float],
) -> list[float]:
    """Return every layer's seconds, called with what the one before returned."""
    if not inputs:
        raise ValueError(
            "inputs: expected one micro-batch of the first layer's inputs on rank 0, got none. Pass it there."
        )
    found, values, device = [], inputs, inputs[0].device
    with torch.random.fork_rng():
        for number, layer in enumerate(layers):
            try:
                seconds, values = _measure(number, layer, values, device, repeats, clock)
            except Exception as error:
                raise RuntimeError(
                    f"layer {number}, {layer!r}: it failed while it was timed: {clause_of(error)}. Give "
                    "layers that fit together, and a micro-batch that the first one takes."
                ) from error
            found.append(seconds)
    return found


def _measure(
    number: int,
    layer: Layer,
    values: tuple[Any, ...],
    device: torch.device,
    repeats: int,
    clock: Callable[[], float],
) -> tuple[float, tuple[Any, ...]]:
    """Return the layer's seconds, and what the next one is called with."""
    module = layer.build(layer_seed(number)) if isinstance(layer, LayerSpec) else copy.deepcopy(layer)
    call: Callable[..., Any] = module
    trained: list[torch.Tensor] = []
    if isinstance(module, nn.Module):
        module.to(device)
        trained = [each for each in module.parameters() if each.requires_grad]
        if isinstance(layer, TiedLayerSpec) and layer.forward is not None:
            call = partial(layer.forward, module)
    trained += [each for each in values if isinstance(each, torch.Tensor) and each.requires_grad]
    seconds = []
    for _ in range(repeats + 1):
        began = _now(device, clock)
        outputs = _forward_and_backward(call, values, trained)
        seconds.append(_now(device, clock) - began)
    return min(seconds[1:]), tuple(_cut_off(each) for each in outputs)


def _forward_and_backward(
    call: Callable[..., Any], values: tuple[Any, ...], trained: Sequence[torch.Tensor]
) -> tuple[Any, ...]:
    """Return the layer's outputs; gradients are made and thrown away."""
    made = call(*values)
    outputs = made if isinstance(made, tuple) else (made,)
    roots = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
    if roots and trained:
        ones = [torch.ones_like(each) for each in roots]
        torch.autograd.grad(roots, trained, ones, allow_unused=True)
    return outputs


def _cut_off(value: Any) -> Any:
    """Return an output as another stage receives it."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _now(device: torch.device, clock: Callable[[], float]) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock()
