"""Parameters that are split over tensor-parallel ranks (``DTensor``): the part of one that is here.

ZeRO shards that part over the data-parallel ranks as it would any tensor; others are their own part.
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
    """Whether ``tensor`` is one that ranks hold together. Who has made none does not import what they are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """The part of ``parameter`` that is here: itself, if nobody else has others."""
    local: torch.Tensor = parameter._local_tensor if is_distributed(parameter) else parameter
    return local


def point_at(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Makes ``tensor`` the part of ``parameter`` that is here."""
    if is_distributed(parameter):
        parameter._local_tensor = tensor
    else:
        set_data(parameter, tensor)


def is_split(parameter: torch.Tensor) -> bool:
    """Whether other ranks have other parts of ``parameter``."""
    return is_distributed(parameter) and not all(each.is_replicate() for each in parameter.placements)


class Box(NamedTuple):
    """A part of ``sizes`` at ``corner`` of a tensor seen, in the same memory order, as one of ``shape``."""

    shape: tuple[int, ...]
    corner: tuple[int, ...]
    sizes: tuple[int, ...]


def box_of(parameter: torch.Tensor) -> Box | None:
    """Where the part that is here lies in ``parameter``; None if it is all of it."""
    if not (is_distributed(parameter) and is_split(parameter)):
        return None
    parts = _side_by_side(parameter)
    if parts:
        return _box_in_rows(parameter, parts)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, corner = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return Box(tuple(parameter.shape), tuple(corner), tuple(sizes))


def _side_by_side(parameter: DTensor) -> int:
    """The tensors that lie side by side in ``parameter``, each of them split; 0 for one that is split as a
    whole."""
    placement: Any = parameter.placements[0]
    return int(placement.split_factor) if type(placement).__name__ == "_StridedShard" else 0


def _box_in_rows(parameter: DTensor, parts: int) -> Box:
    """The box among rows that each hold a run of the split axis: a row for each of the ``parts`` and each
    element of the axes before."""
    placement: Any = parameter.placements[0]
    ranks, rank = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
    rows = math.prod(parameter.shape[: placement.dim]) * parts
    width = parameter.numel() // rows
    return Box((rows, width), (0, rank * width // ranks), (rows, width // ranks))


def like_parameter(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local``, a value of the part that is here, as a tensor of the kind of ``parameter``."""
    if not is_distributed(parameter):
        return local
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def whole_of(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The whole of what ``local`` is the part here of; a collective of the tensor-parallel ranks."""
    value: Any = like_parameter(parameter, local)
    whole: torch.Tensor = value.full_tensor() if is_distributed(value) else value
    return whole


def local_value(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part here of a ``whole`` value of ``parameter``."""
    box = box_of(parameter)
    if box is None:
        return whole
    part = whole.reshape(box.shape)
    for axis, (begin, size) in enumerate(zip(box.corner, box.sizes, strict=True)):
        part = part.narrow(axis, begin, size)
    return part.reshape(local_part(parameter).shape).contiguous()


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The part here of a gradient as autograd brings it; a collective of the tensor-parallel ranks where they
    have terms of a sum, or where it is split otherwise than ``parameter``."""
    if not is_distributed(parameter) or not is_distributed(gradient):
        return gradient
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    local: torch.Tensor = gradient._local_tensor
    return local


def problem_of(parameter: torch.Tensor, ranks: list[int], dtype: torch.dtype) -> str:
    """Why the part of ``parameter`` that is here cannot be sharded in ``dtype``, empty if it can; ``ranks``
    are the tensor-parallel ones."""
    if not is_distributed(parameter):
        return ""
    mesh = parameter.device_mesh
    if mesh.ndim != 1 or (mesh.size() > 1 and mesh.mesh.tolist() != ranks):
        return (
            f"is split over the ranks {mesh.mesh.tolist()}, but the tensor-parallel ones are {ranks}; split "
            "it over mesh['tp'] of the mesh that is given to zero_ext.prepare"
        )
    if parameter.dtype != dtype:
        return (
            f"is {parameter.dtype} and split already, but 'precision.dtype' wants {dtype}; convert the model "
            f"before it is split (model.to({dtype}))"
        )
    if not all(type(each).__name__ in _KNOWN for each in parameter.placements):
        return f"is placed as {parameter.placements}; one of {', '.join(_KNOWN)} wanted"
    placement: Any = parameter.placements[0]
    parts = _side_by_side(parameter)
    if parts and parameter.shape[placement.dim] % (parts * mesh.size()):
        return (
            f"of shape {tuple(parameter.shape)} is {parts} side by side, which do not divide by {mesh.size()}"
        )
    if is_split(parameter) and parameter.dim() > 2 and not parts:
        return f"has {parameter.dim()} dimensions and is split; 1 or 2 wanted"
    local = parameter._local_tensor
    if not local.is_contiguous() and any(local.stride()):  # which are 0 where a placeholder stands in for it
        return "has a part here that is not contiguous; split it with distribute_tensor or parallelize_module"
    return ""
