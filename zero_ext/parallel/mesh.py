"""Make torch's device meshes, with one dimension per axis of parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping as Sizes

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.parallel.rank_mapping import RankMapping, naive_mapping
from zero_ext.zero.units.rank_groups import MESH_AXES


def make_mesh(
    sizes: Sizes[str, int] | None = None,
    *,
    mapping: RankMapping | None = None,
    device_type: str | None = None,
    **lengths: int,
) -> DeviceMesh:
    """Make a mesh of all ranks with one dimension per axis of parallelism; a collective of all ranks.

    The dimensions are "pp" (pipeline stages), "dp" (replicas that ZeRO shards over), "cp" (shards of a
    sequence) and "tp" (shards of a tensor), those of length 1 too. Where it is given, "ep" is between "dp"
    and "cp" (ranks with different experts, over which ZeRO shards all else too). Ranks count with "tp"
    fastest, then "cp", "dp", "pp", so that tensor parallelism stays inside a node, unless `mapping` places
    them otherwise.

    Args:
        sizes: lengths by axis. "dp" takes what is left over where it is not given.
        mapping: places ranks, as [`best_mapping`][zero_ext.parallel.best_mapping] returns it.
        device_type: default the accelerator's, or "cpu" where there is none.
        **lengths: more lengths by axis: `make_mesh(pp=2, tp=2)`.

    Returns:
        The mesh.

    Raises:
        ValueError: on all ranks alike, an unknown axis, a length below 1, lengths that do not multiply to the
            number of ranks, or a `mapping` of other lengths.
        RuntimeError: torch.distributed is not initialized.

    Examples:
        On four ranks:

        ```python
        from zero_ext.parallel import make_mesh

        mesh = make_mesh(tp=2)  # "dp" takes the other two
        assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
        assert mesh.shape == (1, 2, 1, 2)
        ```
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "make_mesh: expected torch.distributed to be initialized, got no process group. Call "
            "torch.distributed.init_process_group() first, in a script that torchrun started."
        )
    world_size = dist.get_world_size()
    full = full_sizes({**(sizes or {}), **lengths}, world_size)
    if mapping is None:
        mapping = naive_mapping(full)
    elif {axis: mapping.sizes.get(axis, 1) for axis in full} != full or set(mapping.axes) - set(full):
        raise ValueError(
            f"mapping: expected one of the lengths {full}, got one of {mapping.sizes}. Make it for these "
            "lengths."
        )
    else:
        mapping = RankMapping(tuple(full), mapping.digits)
    ranks = torch.tensor(mapping.grid().ranks, dtype=torch.int64, device="cpu").view(*full.values())
    return DeviceMesh(device_type or _device_type(), ranks, mesh_dim_names=tuple(full))


def full_sizes(sizes: Sizes[str, int], world_size: int) -> dict[str, int]:
    """``sizes`` on all axes, on "ep" if it is given; "dp" is what the others leave over where it is not
    given. ``ValueError`` as :func:`make_mesh`."""
    unknown = sorted(set(sizes) - set(MESH_AXES))
    if unknown:
        raise ValueError(f"axis: expected one of {list(MESH_AXES)}, got {unknown[0]!r}. Use one of these.")
    for axis, length in sizes.items():
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(
                f"axis '{axis}': expected an integer of at least 1, got {length!r}. Pass the length of the "
                "axis."
            )
    others = math.prod(length for axis, length in sizes.items() if axis != "dp")
    lengths = {axis: sizes.get(axis, 1) for axis in MESH_AXES if axis != "ep" or axis in sizes}
    if "dp" not in sizes:
        lengths["dp"] = max(1, world_size // others)
    if math.prod(lengths.values()) != world_size:
        product = " × ".join(f"{axis} {length}" for axis, length in lengths.items())
        raise ValueError(
            f"lengths of the axes: expected a product of {world_size}, the number of ranks, got {product} = "
            f"{math.prod(lengths.values())}. Change one of them or the number of ranks."
        )
    return lengths


def _device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type
