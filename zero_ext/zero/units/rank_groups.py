"""Process groups of ZeRO's ranks and of the model-parallel ranks, and what a step does over the latter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.comm import Collectives
from zero_ext.config.internal_error import zero_ext_bug

MESH_AXES = ("pp", "dp", "ep", "cp", "tp")
_DATA, _MODEL = MESH_AXES[1:4], (MESH_AXES[0], MESH_AXES[-1])


@dataclass(frozen=True)
class RankGroups:
    """Process groups of this rank."""

    # Ranks with the same parameters and other samples or other slices of a sequence; None for all.
    data: dist.ProcessGroup | None
    model: dist.ProcessGroup | None = None  # share one copy of the model; None for this rank alone
    tensor: dist.ProcessGroup | None = None  # share the same tensors; None for this rank alone
    tensor_rank: int = 0  # this rank in ``tensor``
    slices: dist.ProcessGroup | None = (
        None  # in ``data`` or ``tensor`` of one another; None without ``tensor``
    )
    mesh: dist.ProcessGroup | None = None  # all ranks of the mesh; None without a mesh
    experts: dist.ProcessGroup | None = None  # each have other experts
    same_experts: tuple[int, ...] = ()  # ranks in ``data`` that have the experts of this rank


def rank_groups(process_group: dist.ProcessGroup | DeviceMesh | None) -> RankGroups:
    """Return the groups of a mesh with any of the dimensions "dp", "ep", "cp" (data), "pp" and "tp" (model).
    A process group is the data-parallel group. Raises ``ValueError`` for a mesh with a dimension of another
    name, or without names."""
    if not isinstance(process_group, DeviceMesh):
        return RankGroups(process_group)
    mesh = process_group
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in _DATA + _MODEL]
    if unknown or not names:
        raise ValueError(
            f"process_group: expected a mesh with the dimensions of make_mesh, {list(MESH_AXES)}, got "
            f"{list(names)}. Name them so (mesh_dim_names), or pass the group of the data-parallel ranks."
        )
    tensor, data, experts = _group(mesh, ("tp",)), data_group(mesh), _group(mesh, ("ep",))
    return RankGroups(
        data,
        _group(mesh, _MODEL),
        tensor,
        dist.get_rank(tensor) if tensor is not None else 0,
        _group(mesh, (*_DATA, MESH_AXES[-1])) if tensor is not None else None,
        _group(mesh, tuple(names), always=True),
        experts,
        _same_experts(mesh, data) if experts is not None else (),
    )


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the ranks of ``mesh`` with other samples than this one, or other slices of a sequence."""
    data = _group(mesh, _DATA, always=True)
    if data is None:
        raise zero_ext_bug("a mesh without data-parallel ranks")
    return data


def mesh_lengths(mesh: DeviceMesh) -> dict[str, int]:
    """Return the length of each named dimension of ``mesh``, in its order."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _same_experts(mesh: DeviceMesh, data: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks in ``data`` that have the same "ep" coordinate as this rank."""
    axis = (mesh.mesh_dim_names or ()).index("ep")
    alike = set(mesh.mesh.select(axis, mesh.get_local_rank("ep")).flatten().tolist())
    return tuple(at for at, rank in enumerate(dist.get_process_group_ranks(data)) if rank in alike)


def _group(mesh: DeviceMesh, names: tuple[str, ...], always: bool = False) -> dist.ProcessGroup | None:
    """Return this rank's group over the dimensions ``names``; None for a single rank, unless ``always``."""
    sizes = mesh_lengths(mesh)
    long = tuple(name for name in sizes if name in names and sizes[name] > 1)
    if not long:
        present = tuple(name for name in sizes if name in names)
        if not always:
            return None
        if not present:
            raise ValueError(
                "process_group: expected a mesh with a dimension that ZeRO can shard over, got "
                f"{list(sizes)}. Add 'dp', of length 1 if every rank has a part of the model of its own."
            )
        return mesh[present[0]].get_group()
    submesh = mesh[long]
    return submesh.get_group() if len(long) == 1 else submesh._flatten("_".join(long)).get_group()


def sum_over_model(model: Collectives | None, values: torch.Tensor, label: str) -> torch.Tensor:
    """Sum ``values``, integers, in place over the ranks of ``model``, and return them."""
    return values if model is None else model.sum_(values, label)


def largest_over_model(model: Collectives | None, value: float, label: str) -> float:
    """Return the largest ``value`` of the ranks of ``model``, NaN if there is one."""
    if model is None:
        return value
    table = torch.zeros(model.world_size, dtype=torch.float64, device="cpu")
    table[model.rank] = value
    return float(model.sum_(table, label).amax())


@contextlib.contextmanager
def abort_model_parallel_on_error(collectives: Collectives) -> Iterator[None]:
    """Return a context for a step that aborts the other model-parallel ranks if this one raises. They would
    wait for it until their timeout. A ``FloatingPointError`` is raised on all of them anyway."""
    try:
        yield
    except FloatingPointError:
        raise
    except Exception as error:
        for group in (collectives.model, collectives.slices):
            if group is not None:
                group.abort(
                    f"rank {group.rank} of those with the parts of the model stopped in a step: {error}"
                )
        raise
