"""Training over simulated ranks and nodes in one process, what they exchange rounded by plain formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero_ext.zero import Engine

BITS = {"int8": 8, "int4": 4}
BLOCK = 256


@dataclass(frozen=True)
class CommunicationSetup:
    """How ``ranks`` on nodes of ``per_node`` exchange parameters and gradients."""

    ranks: int
    per_node: int
    weights: str | None = None
    gradients: str | None = None
    secondary: bool = False
    group: int | None = None  # ranks that share the state

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    @property
    def shards(self) -> int:
        return self.group or self.ranks

    def communication(self) -> dict[str, object]:
        """The section of the configuration."""
        return {
            "ranks_per_node": self.per_node,
            "quantized_weights": self.weights,
            "quantized_gradients": self.gradients,
            "hierarchical_partition": self.secondary,
            "shard_group_size": self.group,
        }


def rounded(values: torch.Tensor, codes: str | None) -> torch.Tensor:
    """``values`` [n] in float32 as codes tell them: a block at a time, with the scale of its largest one."""
    if codes is None:
        return values.float()
    steps = 2 ** (BITS[codes] - 1) - 1
    found = []
    for block in values.float().split(BLOCK):
        scale = block.abs().max() / steps
        inverse = 1 / scale if scale > 0 else torch.zeros(())
        found.append((block.double() * inverse.double()).round().float() * scale)
    return torch.cat(found)


def payload_bytes(numel: int, codes: str) -> int:
    """Bytes of ``numel`` elements in codes, 8 or 2 in two bytes or so, with a float32 for each block."""
    return (numel + 7) // 8 * BITS[codes] + (numel + BLOCK - 1) // BLOCK * 4


def added(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32 and in order."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total


def averaged(flats: Sequence[torch.Tensor], setup: CommunicationSetup) -> torch.Tensor:
    """The average, in float32, of one gradient of each rank as the shards of all ranks have it."""
    if setup.group is not None:
        groups = [flats[first : first + setup.group] for first in range(0, setup.ranks, setup.group)]
        means = [(added(group) * (1 / setup.group)).to(flats[0].dtype) for group in groups]
        return added(means) * (1 / len(groups))
    if setup.gradients is None:
        return added(flats) * (1 / setup.ranks)
    chunks = []
    for own in range(setup.ranks):
        slices = [rounded(flat.chunk(setup.ranks)[own], setup.gradients) for flat in flats]
        if setup.per_node > 1:
            slices = [
                added(slices[first : first + setup.per_node])
                for first in range(0, setup.ranks, setup.per_node)
            ]
            if setup.nodes > 1:
                slices = [rounded(each, setup.gradients) for each in slices]
        chunks.append(added(slices) * (1 / setup.ranks))
    return torch.cat(chunks)


class Simulation:
    """One process that does what all ranks of ``engine`` do, with units that lie as its units do.

    ``model`` has the initial values; ``batch`` gives the inputs of a step, micro-batch and rank.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        setup: CommunicationSetup,
        loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor],
        optimizer: Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.setup = setup
        self.layouts = [unit.layout for unit in engine.units]
        self.masters = {name: value.detach().clone() for name, value in model.named_parameters()}
        self._loss_of = loss_of
        self._optimizer = optimizer(list(self.masters.values()))
        dtypes = {spec.name: spec.dtype for layout in self.layouts for spec in layout.specs}
        self._model = model.to(next(iter(dtypes.values())))

    def gathered(self) -> dict[str, torch.Tensor]:
        """The parameters that all ranks compute with."""
        found = {}
        for layout in self.layouts:
            flat = torch.zeros(layout.numel, dtype=layout.dtype)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True):
                flat[offset : offset + spec.numel] = self.masters[spec.name].flatten().to(layout.dtype)
            if self.setup.weights is not None:
                shards = flat.chunk(self.setup.shards)
                flat = torch.cat([rounded(shard, self.setup.weights).to(layout.dtype) for shard in shards])
            for spec, offset in zip(layout.specs, layout.offsets, strict=True):
                found[spec.name] = flat[offset : offset + spec.numel].view(spec.shape)
        return found

    def step(self, batch: Callable[[int, int], torch.Tensor], micro_batches: int) -> list[list[float]]:
        """One step on ``batch(micro-batch, rank)``; the losses of each micro-batch and rank."""
        with torch.no_grad():
            for name, value in self.gathered().items():
                self._model.get_parameter(name).copy_(value)
        losses, sums = [], [torch.zeros(layout.numel) for layout in self.layouts]
        for micro in range(micro_batches):
            flats: list[list[torch.Tensor]] = [[] for _ in self.layouts]
            losses.append([self._backward(batch(micro, rank), flats) for rank in range(self.setup.ranks)])
            for total, own in zip(sums, flats, strict=True):
                mean = averaged(own, self.setup)
                total += mean if micro_batches > 1 else mean.to(own[0].dtype).float()
        for layout, total in zip(self.layouts, sums, strict=True):
            for spec, offset in zip(layout.specs, layout.offsets, strict=True):
                self.masters[spec.name].grad = total[offset : offset + spec.numel].view(spec.shape)
        self._optimizer.step()
        return losses

    def _backward(self, inputs: torch.Tensor, flats: list[list[torch.Tensor]]) -> float:
        loss = self._loss_of(self._model, inputs)
        loss.backward()
        gradients: Mapping[str, torch.Tensor | None] = {
            name: each.grad for name, each in self._model.named_parameters()
        }
        for layout, own in zip(self.layouts, flats, strict=True):
            flat = torch.zeros(layout.numel, dtype=layout.dtype)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True):
                gradient = gradients[spec.name]
                if gradient is not None:
                    flat[offset : offset + spec.numel] = gradient.flatten()
            own.append(flat)
        self._model.zero_grad()
        return loss.item()
