"""A pipeline's layers before they are built, a class and its arguments: a rank builds only its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class LayerSpec:
    """A layer that is built where its stage is: ``kind(*arguments, **options)``.

    Its random values depend on torch's seed and the layer's number alone, not on which rank builds it.
    """

    def __init__(self, kind: type[nn.Module], /, *arguments: Any, **options: Any) -> None:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"LayerSpec: a subclass of torch.nn.Module wanted, {kind!r} given")
        self.kind = kind
        self.arguments = arguments
        self.options = options

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind.__name__})"

    def build(self, seed: int) -> nn.Module:
        """The layer, with the values that ``seed`` gives; torch's own random state stays as it was."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.kind(*self.arguments, **self.options)

    def outline(self) -> nn.Module:
        """The layer without values, on the meta device."""
        with torch.device("meta"):
            return self.kind(*self.arguments, **self.options)


class TiedLayerSpec(LayerSpec):
    """A layer whose parameters are those of every other layer with the same ``key``: an embedding, and the
    head that uses it again.

    ``forward`` is what this occurrence does, called with the layer and its inputs; None is the layer's own.
    Where the stages are on several ranks, each has the parameters, and their gradients are added up.
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
        self.key = key
        self.forward = forward


Layer = nn.Module | LayerSpec | Callable[..., Any]


def outline_of(layer: Layer) -> nn.Module | None:
    """The module of a layer, without values if it is not built yet; None for a function."""
    if isinstance(layer, LayerSpec):
        return layer.outline()
    return layer if isinstance(layer, nn.Module) else None
