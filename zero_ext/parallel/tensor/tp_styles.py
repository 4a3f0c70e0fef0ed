"""Tensor-parallel styles that torch lacks: fused projections, [in, out] weights, single parameters."""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from zero_ext.zero.units.dtensor_local import like_parameter, local_tensor


def is_conv1d(module: nn.Module) -> bool:
    """Return whether ``module`` is transformers' ``Conv1D``: a projection with a weight of [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


class OutputsParallel(ParallelStyle):
    """Splits the outputs of an ``nn.Linear`` or transformers' ``Conv1D`` that fuses ``fused`` projections.

    Of projections side by side, such as query | key | value, each rank gets its slice of every one. Inputs
    and outputs are plain tensors.

    The full tensors of the parameters keep their layout. The inputs are the same on all ranks, and their
    gradients are summed (Megatron-LM, arXiv 1909.08053, section 3).
    """

    def __init__(self, fused: int = 1) -> None:
        super().__init__()
        self.fused = fused

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameter(module, device_mesh, "weight", self._placement(int(is_conv1d(module))))
        distribute_parameter(module, device_mesh, "bias", self._placement(0))
        module.forward = MethodType(_share_of_outputs, module)
        return module

    def _placement(self, axis: int) -> Placement:
        return Shard(axis) if self.fused == 1 else _StridedShard(axis, split_factor=self.fused)


class InputsParallel(ParallelStyle):
    """Splits the inputs of an ``nn.Linear`` or transformers' ``Conv1D``, and sums the ranks' partial outputs.

    The output is a tensor of its own. That of torch's style is a view, which models that add to it in place
    must not change.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameter(module, device_mesh, "weight", Shard(int(not is_conv1d(module))))
        distribute_parameter(module, device_mesh, "bias", Replicate())
        module.forward = MethodType(_sum_over_inputs, module)
        return module


class ParameterSplit(NamedTuple):
    """The split of a parameter that a plan names itself: along ``axis``, each of ``fused`` tensors side by
    side."""

    axis: int
    fused: int


def parameter_split(parameter: torch.Tensor, name: str, style: str) -> ParameterSplit | None:
    """Return how ``style`` splits a parameter, as transformers does.

    Args:
        parameter: Weights [..., out, in], one matrix per expert, or a vector.
        name: The parameter's own name. Biases that "rowwise" is given for stay replicated.
        style: "colwise", "rowwise", "packed_colwise" or "packed_rowwise".

    Returns:
        None for a parameter that stays replicated.
    """
    fused = 2 if style.startswith("packed") else 1
    if style.endswith("colwise"):
        return ParameterSplit(max(parameter.dim() - 2, 0), fused)
    if name == "bias" or (fused == 2 and parameter.dim() == 1):
        return None
    return ParameterSplit(parameter.dim() - 1, fused)


def split_parameter(module: nn.Module, name: str, mesh: DeviceMesh, split: ParameterSplit) -> None:
    """Split the parameter ``name`` of ``module`` over ``mesh``, in place."""
    # Rows of a strided shard are a slice of two dimensions, whatever the parameter's (see local_slice_of).
    strided = split.fused > 1 or getattr(module, name).dim() > 2
    placement = _StridedShard(split.axis, split_factor=split.fused) if strided else Shard(split.axis)
    distribute_parameter(module, mesh, name, placement)


def distribute_parameter(module: nn.Module, mesh: DeviceMesh, name: str, placement: Placement) -> None:
    """Make the parameter ``name`` of ``module``, where there is one, a DTensor on ``mesh``."""
    parameter = getattr(module, name)
    if parameter is not None:
        value = distribute_tensor(parameter.data, mesh, [placement])
        module.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))


def sum_gradients(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return ``value``, the same on all ranks, with gradients that backward sums over them."""
    replicated: Any = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    local: torch.Tensor = replicated.to_local(grad_placements=[Partial()])
    return local


def sum_over_ranks(term: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum of the ranks' terms. Backward hands its gradient to each of them."""
    total: torch.Tensor = _Sum.apply(term, mesh.get_group())
    return total


class _Sum(torch.autograd.Function):
    """The sum of the ranks' terms. Its gradient is that of every term."""

    @staticmethod
    def forward(context: Any, term: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = term.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class ToLocalSlice(torch.autograd.Function):
    """This rank's slice of a parameter. What autograd saves of it is no view of the parameter's memory.

    ``to_local`` returns such a view, which must not be written to again, but ZeRO gathers there.
    """

    @staticmethod
    def forward(context: Any, parameter: torch.Tensor) -> torch.Tensor:
        context.parameter = parameter
        return local_tensor(parameter).data

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return like_parameter(context.parameter, gradient.contiguous())


def _share_of_outputs(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[..., in] to [..., the outputs of this rank]."""
    bias = None if module.bias is None else ToLocalSlice.apply(module.bias)
    return _project(module, sum_gradients(hidden, module.weight.device_mesh), bias)


def _sum_over_inputs(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[..., the inputs of this rank] to [..., out]."""
    output = sum_over_ranks(_project(module, hidden, None), module.weight.device_mesh)
    return output if module.bias is None else output + ToLocalSlice.apply(module.bias)


def _project(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = ToLocalSlice.apply(module.weight)
    return nn.functional.linear(hidden, weight.t() if is_conv1d(module) else weight, bias)
