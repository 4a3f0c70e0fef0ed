"""Which ranks do what together: those that ZeRO shards over, and those with the other parts of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

MESH_AXES = ("pp", "dp", "ep", "cp", "tp")
_DATA, _MODEL = MESH_AXES[1:4], (MESH_AXES[0], MESH_AXES[-1])


@dataclass(frozen=True)
class RankGroups:
    """Groups of this rank; None for ``data`` is all ranks, for ``model`` and ``tensor`` this rank alone.

    ``data`` hold the same part of the model and see other samples, or other parts of a sequence; ``model``
    hold the other parts of the same model, of which ``tensor`` hold other parts of the same tensors.
    ``tensor_rank`` is the rank in ``tensor``. ``whole`` are all of the mesh, None without one. Experts are
    spread over ``experts``, each of whose ranks has others; ``same_experts`` are the places in ``data`` of
    the ranks that have those of this rank.
    """

    data: dist.ProcessGroup | None
    model: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    tensor_rank: int = 0
    whole: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    same_experts: tuple[int, ...] = ()


def rank_groups(given: dist.ProcessGroup | DeviceMesh | None) -> RankGroups:
    """The groups that a mesh with dimensions "dp", "ep" and "cp" (data), "pp" and "tp" (model) makes, any of
    which may be missing, or the data-parallel group ``given``.

    Raises ``ValueError`` for a mesh with a dimension of another name, or without names.
    """
    if not isinstance(given, DeviceMesh):
        return RankGroups(given)
    names = given.mesh_dim_names or ()
    unknown = [name for name in names if name not in _DATA + _MODEL]
    if unknown or not names:
        raise ValueError(
            f"process_group: a mesh with dimensions {list(names)} given; those of make_mesh, "
            f"{list(MESH_AXES)}, are wanted. Name them so (mesh_dim_names), or pass "
            "the group of the data-parallel ranks"
        )
    tensor, data, experts = _group(given, ("tp",)), data_group(given), _group(given, ("ep",))
    return RankGroups(
        data,
        _group(given, _MODEL),
        tensor,
        dist.get_rank(tensor) if tensor is not None else 0,
        _group(given, tuple(names), always=True),
        experts,
        _same_experts(given, data) if experts is not None else (),
    )


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks of ``mesh`` that see other samples than this one, or other parts of a sequence."""
    data = _group(mesh, _DATA, always=True)
    if data is None:
        raise AssertionError("a mesh without data-parallel ranks")
    return data


def _same_experts(mesh: DeviceMesh, data: dist.ProcessGroup) -> tuple[int, ...]:
    """Where those of ``data`` stand that differ from this rank in "ep" by nothing."""
    place = (mesh.mesh_dim_names or ()).index("ep")
    alike = set(mesh.mesh.select(place, mesh.get_local_rank("ep")).flatten().tolist())
    return tuple(at for at, rank in enumerate(dist.get_process_group_ranks(data)) if rank in alike)


def _group(mesh: DeviceMesh, names: tuple[str, ...], always: bool = False) -> dist.ProcessGroup | None:
    """This rank's group over the dimensions ``names``; None for a single rank, unless ``always``."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    long = tuple(name for name in sizes if name in names and sizes[name] > 1)
    if not long:
        present = tuple(name for name in sizes if name in names)
        if not always:
            return None
        if not present:
            raise ValueError(
                f"process_group: the mesh has dimensions {list(sizes)}, but none that ZeRO could shard over; "
                "add 'dp', of length 1 if every rank has a part of the model of its own"
            )
        return mesh[present[0]].get_group()
    part = mesh[long]
    return part.get_group() if len(long) == 1 else part._flatten("_".join(long)).get_group()
