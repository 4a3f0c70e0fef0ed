"""Models that are compiled as a whole: no gather can run inside a graph, so blocks have their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.zero.construction.grouping import find_blocks

_Compile = Callable[[Callable[..., object]], Callable[..., object]]


class PlainModel(NamedTuple):
    """A model as its author wrote it, and what compiles its ``blocks``, if anything."""

    model: nn.Module
    compiler: _Compile | None = None
    blocks: Sequence[nn.Module] = ()

    @property
    def is_compiled(self) -> bool:
        """Return whether the blocks are to be compiled."""
        return self.compiler is not None

    def compile_blocks(self) -> None:
        """Compile each block in place with the options of the whole, unless it is compiled already."""
        for block in self.blocks:
            if self.compiler is not None and block._compiled_call_impl is None:
                block._compiled_call_impl = self.compiler(block._call_impl)


def without_compiler(model: nn.Module, settings: ZeroConfig) -> PlainModel:
    """Return the module inside a ``model`` of ``torch.compile`` and its blocks, and any other model itself.

    Raises ``ValueError`` if it has no blocks.
    """
    if not isinstance(model, torch._dynamo.OptimizedModule):
        return PlainModel(model)
    inner: nn.Module = model._orig_mod
    found = find_blocks(inner, settings)
    blocks = [each for each in found.values() if not isinstance(each, torch._dynamo.OptimizedModule)]
    if not found:
        raise ValueError(
            "model: expected one with blocks in a ModuleList or Sequential, got a "
            f"{type(inner).__name__} that is compiled as a whole and has none. Name its blocks in "
            "units.block_classes, or compile modules inside it instead."
        )
    return PlainModel(inner, model.dynamo_ctx, blocks)
