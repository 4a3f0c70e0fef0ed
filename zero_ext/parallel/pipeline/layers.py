"""A pipeline's layers before they are built, so that a rank builds only its own; and their seconds."""

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


class LayerSpec:
    """A layer that is built where its stage is: `kind(*arguments, **options)`.

    Its random values depend on torch's seed and the layer's number alone, not on which rank builds it.

    Args:
        kind: a subclass of `torch.nn.Module`.
        *arguments: of its constructor.
        **options: of its constructor.

    Attributes:
        kind: as given.
        arguments: as given.
        options: as given.

    Raises:
        TypeError: `kind` is no such class.

    Examples:
        >>> from zero_ext.parallel.pipeline import LayerSpec
        >>> layer = LayerSpec(torch.nn.Linear, 4, 2, bias=False)
        >>> layer.build(seed=0)
        Linear(in_features=4, out_features=2, bias=False)
    """

    def __init__(self, kind: type[nn.Module], /, *arguments: Any, **options: Any) -> None:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(
                f"LayerSpec: expected a subclass of torch.nn.Module, got {kind!r}. Pass the class of the "
                "layer."
            )
        self.kind, self.arguments, self.options = kind, arguments, options

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind.__name__})"

    def build(self, seed: int) -> nn.Module:
        """Build the layer; torch's own random state stays as it was.

        Args:
            seed: of its random values.

        Returns:
            The layer.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.kind(*self.arguments, **self.options)

    def outline(self) -> nn.Module:
        """Build the layer without values.

        Returns:
            The layer on the meta device.
        """
        with torch.device("meta"):
            return self.kind(*self.arguments, **self.options)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with every other layer of the same `key`.

    An embedding, for example, and the head that uses it again. Where the stages are on several ranks, each
    has the parameters, and their gradients are summed.

    Args:
        key: names the shared parameters.
        kind: a subclass of `torch.nn.Module`.
        *arguments: of its constructor.
        forward: what this occurrence does, called with the layer and its inputs; None is the layer's own.
        **options: of its constructor.

    Attributes:
        key: as given.
        forward: as given.

    Examples:
        >>> from zero_ext.parallel.pipeline import LayerSpec, TiedLayerSpec
        >>> def scores(embedding, hidden):
        ...     return hidden @ embedding.weight.t()
        >>> layers = [
        ...     TiedLayerSpec("words", torch.nn.Embedding, 10, 4),
        ...     LayerSpec(torch.nn.Linear, 4, 4),
        ...     TiedLayerSpec("words", torch.nn.Embedding, 10, 4, forward=scores),
        ... ]
        >>> layers[0].key == layers[2].key
        True
    """

    def __init__(
        self,
        key: str,
        kind: type[nn.Module],
        *arguments: Any,
        forward: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(kind, *arguments, **options)
        self.key, self.forward = key, forward


Layer = nn.Module | LayerSpec | Callable[..., Any]


def layer_seed(number: int) -> int:
    """Return the seed that a layer is built with, made of torch's own.

    Args:
        number: of the layer in the full model.

    Returns:
        The seed.
    """
    return (torch.initial_seed() + 1_000_003 * (number + 1)) % 2**63


def outline_of(layer: Layer) -> nn.Module | None:
    """Return the module of a layer, without values if it is not built yet; None for a function."""
    if isinstance(layer, LayerSpec):
        return layer.outline()
    return layer if isinstance(layer, nn.Module) else None


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
    layers: nn.Sequential | Sequence[Layer], inputs: tuple[Any, ...], repeats: int, clock: Callable[[], float]
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

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return clock()

    def as_received(value: Any) -> Any:
        """Return an output as another stage receives it."""
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(value.is_floating_point())

    seconds = []
    for _ in range(repeats + 1):
        began = now()
        outputs = call(*values)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        roots = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
        if roots and trained:  # gradients are made and thrown away
            torch.autograd.grad(roots, trained, [*map(torch.ones_like, roots)], allow_unused=True)
        seconds.append(now() - began)
    return min(seconds[1:]), tuple(map(as_received, outputs))
