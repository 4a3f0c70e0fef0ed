"""Ways to split what torch's styles do not know: projections side by side, [in, out] weights, heads."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from zero_ext.parallel.automatic import HEADS
from zero_ext.zero.local_part import like_parameter, local_part


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' ``Conv1D``: a projection whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


class OutputsParallel(ParallelStyle):
    """Splits the outputs of an ``nn.Linear`` or transformers' ``Conv1D`` that is ``parts`` projections side
    by side, such as query | key | value: a rank has its share of each, and gets and gives plain tensors.

    The parameters are placed so that their whole tensors stay what they were. The inputs are the same on all
    ranks, and their gradients are added up (Megatron-LM, arXiv 1909.08053, section 3).
    """

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _place(module, device_mesh, "weight", self._placement(int(is_conv1d(module))))
        _place(module, device_mesh, "bias", self._placement(0))
        module.forward = MethodType(_share_of_outputs, module)
        return module

    def _placement(self, axis: int) -> Placement:
        return Shard(axis) if self.parts == 1 else _StridedShard(axis, split_factor=self.parts)


class InputsParallel(ParallelStyle):
    """Splits the inputs of transformers' ``Conv1D``; what ranks compute of their shares is added up."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _place(module, device_mesh, "weight", Shard(0))
        _place(module, device_mesh, "bias", Replicate())
        module.forward = MethodType(_sum_over_inputs, module)
        return module


class LocalHeads(ParallelStyle):
    """An attention module that counts its heads: what it counts becomes this rank's share, and ALiBi's biases
    [samples × heads, 1, keys], an argument ``alibi``, those of its own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks, rank = device_mesh.size(), device_mesh.get_local_rank()
        for name in (*HEADS, "split_size"):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // ranks)

        def narrow(_: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
            alibi = named.get("alibi")
            if alibi is not None:
                by_rank = alibi.unflatten(0, (-1, ranks, module.num_heads))
                named = {**named, "alibi": by_rank[:, rank].flatten(0, 1)}
            return inputs, named

        module.register_forward_pre_hook(narrow, with_kwargs=True)
        return module


def _place(module: nn.Module, mesh: DeviceMesh, name: str, placement: Placement) -> None:
    parameter = getattr(module, name)
    if parameter is not None:
        whole = distribute_tensor(parameter.data, mesh, [placement])
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _share_of_outputs(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[..., in] to [..., the outputs of this rank]."""
    whole: Any = DTensor.from_local(hidden, module.weight.device_mesh, [Replicate()], run_check=False)
    bias = None if module.bias is None else _Part.apply(module.bias)
    return _project(module, whole.to_local(grad_placements=[Partial()]), bias)


def _sum_over_inputs(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[..., the inputs of this rank] to [..., out]."""
    term: Any = DTensor.from_local(
        _project(module, hidden, None), module.weight.device_mesh, [Partial()], run_check=False
    )
    output: torch.Tensor = term.redistribute(placements=[Replicate()]).to_local()
    return output + _Part.apply(module.bias)


def _project(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = _Part.apply(module.weight)
    return nn.functional.linear(hidden, weight.t() if is_conv1d(module) else weight, bias)


class _Part(torch.autograd.Function):
    """The part of a parameter that is here. What autograd keeps of it is no view of the parameter's memory,
    as ``to_local`` gives, which nobody may write to again: ZeRO gathers there."""

    @staticmethod
    def forward(context: Any, parameter: torch.Tensor) -> torch.Tensor:
        context.parameter = parameter
        return local_part(parameter).data

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return like_parameter(context.parameter, gradient.contiguous())
