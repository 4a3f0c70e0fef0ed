"""Tensor-parallel styles of modules that run on slices of parameters: experts, sinks, vocabularies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from zero_ext.parallel.tensor.tp_styles import (
    ToLocalSlice,
    distribute_parameter,
    sum_gradients,
    sum_over_ranks,
)
from zero_ext.zero.units.dtensor_local import is_distributed, local_tensor


class LocalParameters(ParallelStyle):
    """Runs a module on this rank's slices of the parameters that it has itself, such as attention sinks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.forward

        def on_slices(*args: Any, **kwargs: Any) -> Any:
            with local_parameters(module):
                return forward(*args, **kwargs)

        module.forward = on_slices
        return module


class ExpertsParallel(ParallelStyle):
    """Runs experts on this rank's slice of every expert's width, and sums the ranks' partial outputs.

    Inputs, routing weights among them, are the same on all ranks, and their gradients are summed. Only
    modules with an output summed over that width may have this style.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.forward

        def shared(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return sum_gradients(value, device_mesh) if floating else value

        def on_slices(*args: Any, **kwargs: Any) -> torch.Tensor:
            named = {name: shared(value) for name, value in kwargs.items()}
            with local_parameters(module):
                term = forward(*map(shared, args), **named)
            return sum_over_ranks(term, device_mesh)

        module.forward = on_slices
        return module


class IdentityExpert(ParallelStyle):
    """Divides what an expert without weights is given by the ranks, since :class:`ExpertsParallel` sums its
    output over them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return inputs[0] / device_mesh.size(), *inputs[1:]

        module.register_forward_pre_hook(divide)
        return module


class VocabularyParallel(ParallelStyle):
    """Looks words up in this rank's rows of an ``nn.Embedding``, and sums the ranks' vectors.

    For subclasses that change each vector, by a factor or a norm, which torch's style does not support.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameter(module, device_mesh, "weight", Shard(0))
        words = -(-module.num_embeddings // device_mesh.size())  # as torch's Shard: the last rank has fewer
        first = words * device_mesh.get_local_rank()
        end = first + local_tensor(module.weight).shape[0]
        padding, forward = module.padding_idx, module.forward
        if padding is not None:
            module.padding_idx = padding - first if first <= padding < end else None

        def look_up(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            local = (ids >= first) & (ids < end)
            with local_parameters(module):
                vectors = forward((ids - first).where(local, 0), *args, **kwargs)
            return sum_over_ranks(vectors.where(local[..., None], 0), device_mesh)

        module.forward = look_up
        return module


@contextlib.contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Replace the distributed parameters that ``module`` itself has by this rank's slices, for a while."""
    own: dict[str, Any] = module._parameters
    distributed = {name: each for name, each in own.items() if is_distributed(each)}
    slice_of: Callable[[torch.Tensor], torch.Tensor] = ToLocalSlice.apply
    own.update({name: slice_of(parameter) for name, parameter in distributed.items()})
    try:
        yield
    finally:
        own.update(distributed)
