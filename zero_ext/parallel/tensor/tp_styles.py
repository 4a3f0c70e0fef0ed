"""Tensor-parallel styles that torch lacks: fused projections, parameters, attention, experts, words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from zero_ext.parallel.tensor.auto_tp_plan import HEADS
from zero_ext.zero.units.dtensor_local import is_distributed, like_parameter, local_tensor
from zero_ext.zero.units.presharded import presharded_of


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
        _distribute(module, device_mesh, "weight", self._placement(int(is_conv1d(module))))
        _distribute(module, device_mesh, "bias", self._placement(0))
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
        _distribute(module, device_mesh, "weight", Shard(int(not is_conv1d(module))))
        _distribute(module, device_mesh, "bias", Replicate())
        module.forward = MethodType(_sum_over_inputs, module)
        return module


class ParameterSplit(NamedTuple):
    """The split of a parameter that a plan names itself: along ``axis``, each of ``fused`` tensors side by
    side."""

    axis: int
    fused: int


def parameter_split(parameter: torch.Tensor, name: str, style: str) -> ParameterSplit | None:
    """Return how ``style`` splits the parameter ``name``, weights [..., out, in], one matrix per expert, or a
    vector, as transformers does; None where it stays replicated, as biases that "rowwise" is given for."""
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
    _distribute(module, mesh, name, placement)


def _distribute(module: nn.Module, mesh: DeviceMesh, name: str, placement: Placement) -> None:
    """Make the parameter ``name`` of ``module``, where there is one, a DTensor on ``mesh``."""
    parameter = getattr(module, name)
    if parameter is not None:
        value = distribute_tensor(parameter.data, mesh, [placement])
        split = nn.Parameter(value, requires_grad=parameter.requires_grad)
        vars(split).update(vars(parameter))  # what the user set, as use_muon of Muon
        module.register_parameter(name, split)


def _sum_gradients(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return ``value``, the same on all ranks, with gradients that backward sums over them."""
    replicated: Any = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    local: torch.Tensor = replicated.to_local(grad_placements=[Partial()])
    return local


class _SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' terms. Backward hands its gradient to each of them."""

    @staticmethod
    def forward(context: Any, term: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        total = term.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=mesh.get_group())
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
    return _project(module, _sum_gradients(hidden, module.weight.device_mesh), bias)


def _sum_over_inputs(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[..., the inputs of this rank] to [..., out]."""
    output: torch.Tensor = _SumOverRanks.apply(_project(module, hidden, None), module.weight.device_mesh)
    return output if module.bias is None else output + ToLocalSlice.apply(module.bias)


def _project(module: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = ToLocalSlice.apply(module.weight)
    return nn.functional.linear(hidden, weight.t() if is_conv1d(module) else weight, bias)


# Numbers of heads of keys and values. Multi-query attention has one, on every rank.
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")


class LocalHeads(ParallelStyle):
    """Makes an attention module count this rank's heads alone.

    ALiBi's biases [samples × heads, 1, keys], an argument ``alibi``, and masks with a dimension of heads
    [samples, heads, queries, keys], an argument ``attention_mask``, are narrowed to them. With
    ``shared_keys`` the heads of keys and values stay unsplit.
    """

    def __init__(self, shared_keys: bool = False) -> None:
        super().__init__()
        self.shared_keys = shared_keys

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks, rank = device_mesh.size(), device_mesh.get_local_rank()
        counted = [name for name in HEADS if not (self.shared_keys and name in KEY_HEADS)]
        for name in (*counted, "split_size"):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // ranks)

        def narrow(_: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
            alibi, mask = named.get("alibi"), named.get("attention_mask")
            if alibi is not None:
                by_rank = alibi.unflatten(0, (-1, ranks, module.num_heads))
                named = {**named, "alibi": by_rank[:, rank].flatten(0, 1)}
            if alibi is not None and mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
                named = {**named, "attention_mask": mask.chunk(ranks, 1)[rank]}
            return inputs, named

        module.register_forward_pre_hook(narrow, with_kwargs=True)
        return module


class MultiQueryOutputs(ParallelStyle):
    """Projects to this rank's heads of queries and to the one head of keys and values that all of them share.

    The weight [queries | key | value, in] stays replicated, as part of every rank's outputs needs all ranks'
    gradients. A rank uses its rows alone, so that the ranks' gradients must be summed.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks, rank, keys = device_mesh.size(), device_mesh.get_local_rank(), 2 * self.head_dim

        def rows(parameter: torch.Tensor) -> torch.Tensor:
            queries = parameter[:-keys].chunk(ranks)[rank]
            return torch.cat([queries, parameter[-keys:]])

        def forward(linear: Any, hidden: torch.Tensor) -> torch.Tensor:
            bias = None if linear.bias is None else rows(linear.bias)
            return nn.functional.linear(_sum_gradients(hidden, device_mesh), rows(linear.weight), bias)

        module.forward = MethodType(forward, module)
        return module


class LatentKeys(ParallelStyle):
    """Sums the gradients of the rotary keys that multi-head latent attention projects for all heads together.

    The outputs are latent keys and values. Their projection to heads sums their gradients itself, and behind
    them the ``rotary`` numbers of a key, which each rank's heads use as they are (DeepSeek-V2, arXiv
    2405.04434, section 2.1.3).
    """

    def __init__(self, rotary: int) -> None:
        super().__init__()
        self.rotary = rotary

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hook(_: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            latent, keys = output[..., : -self.rotary], output[..., -self.rotary :]
            return torch.cat([latent, _sum_gradients(keys, device_mesh)], -1)

        module.register_forward_hook(hook)
        return module


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
            return _sum_gradients(value, device_mesh) if floating else value

        def on_slices(*args: Any, **kwargs: Any) -> Any:
            named = {name: shared(value) for name, value in kwargs.items()}
            with local_parameters(module):
                term = forward(*map(shared, args), **named)
            return _SumOverRanks.apply(term, device_mesh)

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
        _distribute(module, device_mesh, "weight", Shard(0))
        words = -(-module.num_embeddings // device_mesh.size())  # as torch's Shard: the last rank has fewer
        first = words * device_mesh.get_local_rank()
        end = first + local_tensor(module.weight).shape[0]
        padding, forward = module.padding_idx, module.forward
        if padding is not None:
            module.padding_idx = padding - first if first <= padding < end else None

        def look_up(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            local = (ids >= first) & (ids < end)
            with local_parameters(module):
                vectors = forward((ids - first).where(local, 0), *args, **kwargs)
            return _SumOverRanks.apply(vectors.where(local[..., None], 0), device_mesh)

        module.forward = look_up
        return module


@contextlib.contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Replace the distributed parameters that ``module`` itself has by this rank's slices, for a while."""
    own: dict[str, Any] = module._parameters
    distributed = {name: each for name, each in own.items() if is_distributed(each)}
    if any(presharded_of(own[name]) is not None for name in distributed):
        raise RuntimeError(
            f"{type(module).__name__}: expected the parameters of a prepared model, got shards. Call "
            "zero_ext.prepare before the first forward."
        )
    slice_of: Callable[[torch.Tensor], torch.Tensor] = ToLocalSlice.apply
    own.update({name: slice_of(parameter) for name, parameter in distributed.items()})
    try:
        yield
    finally:
        own.update(distributed)
