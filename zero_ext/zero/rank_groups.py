"""Which ranks do what together: those that ZeRO shards over, and those with the other parts of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_DATA, _MODEL = ("dp", "cp"), ("pp", "tp")


@dataclass(frozen=True)
class RankGroups:
    """Groups of this rank; None for ``data`` is all ranks, for ``model`` and ``tensor`` this rank alone.

    ``data`` hold the same part of the model and see other samples, or other parts of a sequence; ``model``
    hold the other parts of the same model, of which ``tensor`` hold other parts of the same tensors.
    ``tensor_rank`` is the rank in ``tensor``. ``whole`` are all of the mesh, None without one.
    """

    data: dist.ProcessGroup | None
    model: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    tensor_rank: int = 0
    whole: dist.ProcessGroup | None = None


def rank_groups(given: dist.ProcessGroup | DeviceMesh | None) -> RankGroups:
    """The groups that a mesh with dimensions "dp" and "cp" (data), "pp" and "tp" (model) makes, any of which
    may be missing, or the data-parallel group ``given``.

    Raises ``ValueError`` for a mesh with a dimension of another name, or without names.
    """
    if not isinstance(given, DeviceMesh):
        return RankGroups(given)
    names = given.mesh_dim_names or ()
    unknown = [name for name in names if name not in _DATA + _MODEL]
    if unknown or not names:
        raise ValueError(
            f"process_group: a mesh with dimensions {list(names)} given; those of make_mesh, "
            f"{list(_MODEL[:1] + _DATA + _MODEL[1:])}, are wanted. Name them so (mesh_dim_names), or pass "
            "the group of the data-parallel ranks"
        )
    tensor = _group(given, ("tp",))
    return RankGroups(
        _group(given, _DATA, always=True),
        _group(given, _MODEL),
        tensor,
        dist.get_rank(tensor) if tensor is not None else 0,
        _group(given, tuple(names), always=True),
    )


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
