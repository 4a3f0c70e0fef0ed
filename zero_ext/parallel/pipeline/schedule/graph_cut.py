"""Cut the autograd graph between layers: backward stops there, and is resumed explicitly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree


@dataclass
class Crossing:
    """A tensor that went from one layer to the next: where the graph goes on behind it, and, once the later
    layer's backward ran, its gradient. The tensor itself is kept by whoever saved it for backward."""

    edge: GradientEdge
    gradient: torch.Tensor | None = None


def cross(values: Any) -> tuple[Any, list[Crossing]]:
    """``values``, tensors in whatever torch's pytrees support, as the next layer gets them: the same memory,
    and a graph that begins there.
    """
    leaves, structure = pytree.tree_flatten(values)
    crossings = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            crossings.append(Crossing(get_gradient_edge(leaf)))
            anchor = torch.empty(0, device=leaf.device, requires_grad=True)
            leaves[index] = _Beginning.apply(anchor, leaf.detach(), crossings[-1])
    return pytree.tree_unflatten(leaves, structure), crossings


def backward(crossings: Iterable[Crossing]) -> None:
    """Take the gradients of what crossed back through the layer that it came from."""
    arrived = [each for each in crossings if each.gradient is not None]
    gradients = [each.gradient for each in arrived]
    for each in arrived:
        each.gradient = None  # graphs keep crossings alive to the end of the step
    if arrived:
        torch.autograd.backward([each.edge for each in arrived], gradients)


class _Beginning(torch.autograd.Function):
    """``value`` as it is; its gradient is kept. ``anchor`` makes autograd take part."""

    @staticmethod
    def forward(context: Any, anchor: torch.Tensor, value: torch.Tensor, crossing: Crossing) -> torch.Tensor:
        context.crossing = crossing
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        context.crossing.gradient = gradient
        return None, None, None
