"""A pipeline's layers before they are built, a class and its arguments: a rank builds only its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


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
        self.kind = kind
        self.arguments = arguments
        self.options = options

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
        self.key = key
        self.forward = forward


Layer = nn.Module | LayerSpec | Callable[..., Any]


def outline_of(layer: Layer) -> nn.Module | None:
    """Return the module of a layer, without values if it is not built yet; None for a function."""
    if isinstance(layer, LayerSpec):
        return layer.outline()
    return layer if isinstance(layer, nn.Module) else None
