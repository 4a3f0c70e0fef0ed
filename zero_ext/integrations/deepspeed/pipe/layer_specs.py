"""DeepSpeed's specifications of layers, which are built where their stage is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zero_ext.parallel import pipeline


class LayerSpec(pipeline.LayerSpec):
    """``typename(*module_args, **module_kwargs)``, built on the ranks of its stage.

    Its random values depend on torch's seed and the layer's number alone, so not on the number of stages.
    ``TypeError`` for another class than a module's.
    """

    @property
    def typename(self) -> type[nn.Module]:
        """The class of the layer."""
        return self.kind

    @property
    def module_args(self) -> tuple[Any, ...]:
        """Return what it is built from."""
        return self.arguments

    @property
    def module_kwargs(self) -> dict[str, Any]:
        """And by name."""
        return self.options


class TiedLayerSpec(LayerSpec, pipeline.TiedLayerSpec):
    """A layer that shares its parameters with all others of the same ``key``.

    ``forward_fn(module, inputs)`` is what this occurrence does; None is the layer's own forward. All
    parameters are shared, those that ``tied_weight_attr`` names and the others, as on one rank.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        /,
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(key, typename, *module_args, forward=forward_fn, **module_kwargs)
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr

    @property
    def forward_fn(self) -> Callable[[nn.Module, Any], Any] | None:
        """Return what this occurrence does in place of the layer's own forward."""
        return self.forward
