"""The content of one rank's optimizer file: flat masters, the optimizer's state of each, settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_fields import (
    OptimizerFile,
    damaged,
    is_flat,
    seen,
)
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_pickle import read_pickled


@dataclass(frozen=True)
class RankState:
    """One rank's ``file`` at ``path``. Its masters are one for each param group (stages 1 and 2) or sub-group
    (stage 3), ``moments`` the tensors of the optimizer's state besides each, as long or longer by padding,
    ``scalars`` the rest of that state. ``groups`` are settings, ``flat_groups`` the group of every flat."""

    path: Path
    file: OptimizerFile
    moments: list[dict[str, torch.Tensor]]
    scalars: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    flat_groups: list[int]

    @property
    def sizes(self) -> list[int]:
        """Elements of every flat."""
        return [flat.numel() for flat in self.file.masters]

    def plain(self) -> dict[str, Any]:
        """Return what has to be the same on all ranks."""
        return {
            "stage": self.file.zero_stage,
            "partition_count": self.file.partition_count,
            "number of flat groups": len(self.file.masters),
            "param groups": self.groups,
            "optimizer state besides tensors": self.scalars,
            "kinds of optimizer state": [sorted(moments) for moments in self.moments],
            "alignment paddings": self.file.param_alignment_paddings,
        }


def read_rank(path: Path) -> RankState:
    """Read the table of an ``*_optim_states.pt`` file; tensors stay in the file until they are used.

    CheckpointError naming the file and the field for anything that is not as DeepSpeed writes it.
    """
    values = read_pickled(path).get("optimizer_state_dict")
    if isinstance(values, dict) and path.name.startswith("bf16_"):
        # The optimizer of plain bf16 runs does not say that it partitions as stage 1 does.
        values = {"zero_stage": 1, **values}
    file = OptimizerFile.of(values, path, "optimizer_state_dict")
    for key in ("param_alignment_paddings", "param_slice_mappings"):
        entries = getattr(file, key)
        if entries is not None and len(entries) != len(file.masters):
            raise damaged(
                path, key, f"expected one for each of {len(file.masters)} masters, got {len(entries)}"
            )
    groups, flat_groups = _groups(file, path)
    moments, scalars = _states(file, path)
    return RankState(path, file, moments, scalars, groups, flat_groups)


def _groups(file: OptimizerFile, path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the param groups without their parameters, and the group of every flat."""
    groups: list[dict[str, Any]] = []
    flat_groups: list[int] = []
    for number, group in enumerate(file.optimizer.param_groups):
        held = group.get("params")
        if not isinstance(held, list) or held != list(range(len(flat_groups), len(flat_groups) + len(held))):
            raise damaged(path, f"param_groups.{number}.params", f"expected the next flats, got {held!r:.80}")
        flat_groups += [number] * len(held)
        groups.append({key: value for key, value in group.items() if key != "params"})
    if len(flat_groups) != len(file.masters):
        raise damaged(path, "param_groups", f"have {len(flat_groups)} flat tensors of {len(file.masters)}")
    return groups, flat_groups


def _states(file: OptimizerFile, path: Path) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, Any]]]:
    unknown = file.optimizer.state.keys() - set(range(len(file.masters)))
    if unknown:
        raise damaged(path, "state", f"expected {len(file.masters)} flat tensors, got {seen(unknown.pop())}")
    moments: list[dict[str, torch.Tensor]] = []
    scalars: list[dict[str, Any]] = []
    for number, master in enumerate(file.masters):
        moments.append({})
        scalars.append({})
        state = file.optimizer.state.get(number, {})
        if not isinstance(state, dict):
            raise damaged(path, f"state.{number}", f"expected a dict, got {seen(state)}")
        for key, value in state.items():
            where = f"state.{number}.{key}"
            if type(key) is not str or key in ("", "master", "buffer"):
                raise damaged(path, where, "is no name of optimizer state")
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                scalars[-1][key] = value.item() if isinstance(value, torch.Tensor) else value
            # Partitions are padded to a multiple of twice the ranks, of which the masters are saved without.
            elif is_flat(value) and 0 <= value.numel() - master.numel() < 2 * file.partition_count:
                moments[-1][key] = value
            else:
                found = f"{value.dtype} of shape {tuple(value.shape)}"
                raise damaged(path, where, f"expected the {master.numel()} floats of the master, got {found}")
    return moments, scalars
