"""A process group whose backend serves no tensor on the host, as NCCL's serves none."""

from __future__ import annotations

import datetime

import torch.distributed as dist

NAME = "mute"


def _make(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> object:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def mute_group() -> dist.ProcessGroup:
    """A group of all ranks of the world, which they make together.

    Its backend is registered for devices that no test has, so every collective over it raises.
    """
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["xpu"])
    group = dist.new_group(backend=NAME)
    assert isinstance(group, dist.ProcessGroup)
    return group
