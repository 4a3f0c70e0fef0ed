"""Mixtures with stacked weights of their experts, and the experts that the tokens of all ranks reach."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from zero_ext.comm import Collectives

# The argument of an experts module of transformers with the experts of each token.
_ROUTING = ("top_k_index", "router_indices", "selected_experts")


class StackedExperts(NamedTuple):
    """A module with weights [experts, ...] that is called with the experts of each token.

    These are its argument ``name``, at ``position`` of those without a name.
    """

    experts: int
    name: str
    position: int

    def index_in(self, block: str, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor:
        """Return the experts of the tokens of a call of ``block``. ``RuntimeError`` if it has none."""
        positional = args[self.position] if self.position < len(args) else None
        found = kwargs.get(self.name, positional)
        if isinstance(found, torch.Tensor) and found.dtype in (torch.int32, torch.int64):
            return found
        got = f"{found.dtype} tensor" if isinstance(found, torch.Tensor) else type(found).__name__
        raise RuntimeError(
            f"experts '{block}': expected the experts of each token in the integer tensor '{self.name}', "
            f"got {got}. Set units.experts to 'all'."
        )


def stacked_experts(module: nn.Module) -> StackedExperts | None:
    """Return the description of ``module`` if it has the weights of several experts, else None."""
    sizes = {each.shape[0] for each in module.parameters(recurse=False) if each.dim() > 2}
    if len(sizes) != 1:
        return None
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]  # without self
    for position, name in enumerate(arguments):
        if name in _ROUTING:
            return StackedExperts(sizes.pop(), name, position)
    return None


def described_experts(model: nn.Module) -> str:
    """Return what to say about the first stack of experts in ``model`` with another interface, empty for
    none. Kernels of convolutions have as many dimensions."""
    for name, module in model.named_modules():
        stacks = {key: tuple(each.shape) for key, each in module._parameters.items() if each is not None}
        stacks = {key: shape for key, shape in stacks.items() if len(shape) == 3}
        if stacks and not isinstance(module, _ConvNd) and stacked_experts(module) is None:
            called = inspect.signature(type(module).forward)
            return f"'{name}' ({type(module).__name__}) with {stacks} and a forward {called}"
    return ""


@torch.no_grad()
def reached_experts(index: torch.Tensor, experts: int, ranks: Collectives, label: str) -> frozenset[int]:
    """Return the experts, out of ``experts``, that are in the ``index`` of any of ``ranks``. A collective.

    Numbers outside that range stand for no expert. The host waits for an ``index`` on a device.
    """
    numbers = index.detach().reshape(-1).long()
    inside = (numbers >= 0) & (numbers < experts)
    reached = torch.zeros(experts + 1, dtype=torch.uint8, device=index.device)
    reached[torch.where(inside, numbers, experts)] = 1
    everyone = torch.zeros(ranks.world_size, experts, dtype=torch.uint8, device="cpu")
    everyone[ranks.rank].copy_(reached[:experts])
    # In the order of gathers, on which ranks agree also where backward runs a checkpointed call again.
    ranks.gather(everyone.view(-1), everyone[ranks.rank], "scalars", label).wait()
    return frozenset(everyone.amax(0).nonzero().flatten().tolist())
