"""Local tensors of parameters that are split over tensor-parallel ranks (``DTensor``).

ZeRO shards the local tensor over the data-parallel ranks like any other tensor. An ordinary parameter is its
own local tensor.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""Exchanges the memory of a parameter, where its class has another ``data``."""
_KNOWN = ("Shard", "_StridedShard", "Replicate")


def is_distributed(tensor: object) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a ``DTensor``, without importing its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of ``parameter``, which is itself if it is no ``DTensor``."""
    return parameter._local_tensor if is_distributed(parameter) else parameter


def point_at(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Make ``tensor`` the local tensor of ``parameter``, which takes its dtype."""
    if is_distributed(parameter):
        if tensor.dtype != parameter.dtype:
            # The wrapper has a dtype of its own, which autograd converts gradients to.
            value: Any = like_parameter(parameter, tensor)
            set_data(parameter, value)
            parameter._spec = value._spec
        parameter._local_tensor = tensor
    else:
        set_data(parameter, tensor)


def is_split(parameter: torch.Tensor) -> bool:
    """Return whether other ranks have other slices of ``parameter``."""
    return is_distributed(parameter) and not all(each.is_replicate() for each in parameter.placements)


class LocalSlice(NamedTuple):
    """A slice of ``sizes`` at ``offset`` of a tensor viewed, in the same memory order, as ``shape``."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def local_slice_of(parameter: torch.Tensor) -> LocalSlice | None:
    """Return the slice of ``parameter`` that is its local tensor; None if that is all of it."""
    if not (is_distributed(parameter) and is_split(parameter)):
        return None
    blocks = _stacked_blocks(parameter)
    if blocks:
        # In a view of rows, one for each of the blocks and each element of the axes before. Each row is
        # contiguous along the split axis.
        placement: Any = parameter.placements[0]
        ranks, rank = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
        rows = math.prod(parameter.shape[: placement.dim]) * blocks
        width = parameter.numel() // rows
        return LocalSlice((rows, width), (0, rank * width // ranks), (rows, width // ranks))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return LocalSlice(tuple(parameter.shape), tuple(offset), tuple(sizes))


def _stacked_blocks(parameter: DTensor) -> int:
    """Return how many tensors, each split by itself, are stacked in ``parameter``; 0 for none."""
    placement: Any = parameter.placements[0]
    return int(placement.split_factor) if type(placement).__name__ == "_StridedShard" else 0


def like_parameter(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local``, a value of the local tensor, as a ``DTensor`` if ``parameter`` is one."""
    if not is_distributed(parameter):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def full_tensor_of(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of the local value ``local``; a collective of the tensor-parallel ranks."""
    value: Any = like_parameter(parameter, local)
    return value.full_tensor() if is_distributed(value) else value


def local_value(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return the local slice of a ``full`` value of ``parameter``."""
    found = local_slice_of(parameter)
    if found is None:
        return full
    local = full.reshape(found.shape)
    for axis, (begin, size) in enumerate(zip(found.offset, found.sizes, strict=True)):
        local = local.narrow(axis, begin, size)
    return local.reshape(local_tensor(parameter).shape).contiguous()


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a gradient from autograd. A collective of the tensor-parallel ranks if the
    gradient's placements differ from those of ``parameter``."""
    if not is_distributed(parameter) or not is_distributed(gradient):
        return gradient
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient._local_tensor


def check_placement(name: str, parameter: torch.Tensor, ranks: list[int]) -> None:
    """Raise ``ValueError`` if the local tensor of parameter ``name`` cannot be sharded. ``ranks`` are the
    tensor-parallel ones."""
    problem = _problem_of(parameter, ranks)
    if problem:
        raise ValueError(f"parameter '{name}': {problem}")


def _problem_of(parameter: torch.Tensor, ranks: list[int]) -> str | None:
    if not is_distributed(parameter):
        return None
    mesh = parameter.device_mesh
    if mesh.ndim != 1 or (mesh.size() > 1 and mesh.mesh.tolist() != ranks):
        return (
            f"expected a split over the tensor-parallel ranks {ranks}, got {mesh.mesh.tolist()}. Split it "
            "over mesh['tp'] of the mesh that is given to zero_ext.prepare."
        )
    if not all(type(each).__name__ in _KNOWN for each in parameter.placements):
        known = ", ".join(_KNOWN)
        return f"expected a placement of {known}, got {parameter.placements}. Split it in one of these ways."
    placement: Any = parameter.placements[0]
    blocks = _stacked_blocks(parameter)
    if blocks and parameter.shape[placement.dim] % (blocks * mesh.size()):
        return (
            f"expected {blocks} blocks side by side that divide by {mesh.size()}, got shape "
            f"{tuple(parameter.shape)}. Use another number of tensor-parallel ranks."
        )
    if is_split(parameter) and parameter.dim() > 2 and not blocks:
        return f"expected 1 or 2 dimensions where it is split, got {parameter.dim()}. Leave it whole."
    local = parameter._local_tensor
    if not local.is_contiguous() and any(local.stride()):  # which are 0 where a placeholder stands in for it
        return (
            "expected a contiguous local tensor, got another. Split it with distribute_tensor or "
            "parallelize_module."
        )
    return None
