"""What one rank's optimizer file holds: flat masters, the optimizer's state of each, settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_ext.checkpoint.dtypes import SAFETENSORS_CODES
from zero_ext.integrations.deepspeed.checkpoint_fields import Fields, is_flat
from zero_ext.integrations.deepspeed.checkpoint_pickle import StubFragment, StubScaler, read_pickled

_BY_STAGE = {
    1: ("single_partition_of_fp32_groups", "base_optimizer_state"),
    2: ("single_partition_of_fp32_groups", "base_optimizer_state"),
    3: ("fp32_flat_groups", "optimizer_state_dict"),
}


@dataclass(frozen=True)
class RankState:
    """One rank's file. ``masters`` [flats] are its fp32 partitions, one for each param group (stages 1 and 2)
    or sub-group (stage 3), ``moments`` the tensors of the optimizer's state beside each, as long or longer by
    padding, ``scalars`` the rest of that state. ``flat_groups`` tells the param group of every flat."""

    path: Path
    stage: int
    ranks: int
    masters: list[torch.Tensor]
    moments: list[dict[str, torch.Tensor]]
    scalars: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    flat_groups: list[int]
    gaps: list[list[int]] | None
    slices: list[dict[str, tuple[int, int]]] | None
    scaler: dict[str, Any] | None

    @property
    def sizes(self) -> list[int]:
        """Elements of every flat."""
        return [flat.numel() for flat in self.masters]

    def plain(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        return {
            "stage": self.stage,
            "partition_count": self.ranks,
            "number of flat groups": len(self.masters),
            "param groups": self.groups,
            "optimizer state besides tensors": self.scalars,
            "kinds of optimizer state": [sorted(moments) for moments in self.moments],
            "alignment paddings": self.gaps,
        }


def read_rank(path: Path) -> RankState:
    """Reads the table of an ``*_optim_states.pt`` file; tensors stay in the file until they are used.

    CheckpointError naming the file and the field for anything that is not as DeepSpeed writes it.
    """
    state = Fields(read_pickled(path), path).inner("optimizer_state_dict")
    # The optimizer of plain bf16 runs does not say that it partitions as stage 1 does.
    stage = (
        1 if "zero_stage" not in state.values and path.name.startswith("bf16_") else state.count("zero_stage")
    )
    if stage not in _BY_STAGE:
        raise state.error("zero_stage", f"is {stage}; 1, 2 or 3 wanted")
    masters_key, optimizer_key = _BY_STAGE[stage]
    masters = state.flats(masters_key)
    if isinstance(state.values.get(optimizer_key), list):
        raise state.error(
            optimizer_key, "has no param groups, as 'elastic_checkpoint' leaves them out: save without it"
        )
    optimizer = state.inner(optimizer_key)
    groups, flat_groups = _groups(optimizer, len(masters))
    ranks = _partition_count(state)
    moments, scalars = _states(optimizer, masters, ranks)
    for number, flat in enumerate((*masters, *(each for held in moments for each in held.values()))):
        if flat.dtype not in SAFETENSORS_CODES:
            raise state.error(masters_key, f"or its state holds {flat.dtype} (tensor {number}), not readable")
    return RankState(
        path=path,
        stage=stage,
        ranks=ranks,
        masters=masters,
        moments=moments,
        scalars=scalars,
        groups=groups,
        flat_groups=flat_groups,
        gaps=_gaps(state, len(masters)) if stage < 3 else None,
        slices=_slices(state, len(masters)) if stage < 3 else None,
        scaler=_scaler(state),
    )


def _partition_count(state: Fields) -> int:
    counts = state.values.get("partition_count")
    if isinstance(counts, list):
        if len(set(map(repr, counts))) != 1:
            raise state.error(
                "partition_count",
                f"is {counts!r:.80}: groups over different ranks, as of experts",
            )
        counts = counts[0]
    return Fields({"partition_count": counts}, state.path, state.where).count("partition_count")


def _groups(optimizer: Fields, flats: int) -> tuple[list[dict[str, Any]], list[int]]:
    """The param groups without their parameters, and the group of every flat."""
    groups: list[dict[str, Any]] = []
    flat_groups: list[int] = []
    for number, group in enumerate(optimizer.get("param_groups", list)):
        fields = Fields(group, optimizer.path, f"{optimizer.where}.param_groups[{number}]")
        held = fields.get("params", list)
        wanted = list(range(len(flat_groups), len(flat_groups) + len(held)))
        if held != wanted:
            raise fields.error("params", f"is {held!r:.80}, {wanted!r:.80} wanted")
        flat_groups += [number] * len(held)
        groups.append({key: value for key, value in fields.values.items() if key != "params"})
    if len(flat_groups) != flats:
        raise optimizer.error("param_groups", f"have {len(flat_groups)} flat tensors, the masters {flats}")
    return groups, flat_groups


def _states(
    optimizer: Fields, masters: list[torch.Tensor], ranks: int
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, Any]]]:
    states = optimizer.inner("state")
    unknown = set(states.values) - set(range(len(masters)))
    if unknown:
        raise states.error(next(iter(unknown)), f"is none of the {len(masters)} flat tensors")
    moments: list[dict[str, torch.Tensor]] = []
    scalars: list[dict[str, Any]] = []
    for number, master in enumerate(masters):
        entries = states.inner(number).values if number in states.values else {}
        moments.append({})
        scalars.append({})
        for key, value in entries.items():
            where = f"{number}.{key}"
            if type(key) is not str or not key or key in ("master", "buffer"):
                raise states.error(where, "is no name of optimizer state")
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                scalars[-1][key] = value.item() if isinstance(value, torch.Tensor) else value
            # Partitions are padded to a multiple of twice the ranks, of which the masters are saved without.
            elif is_flat(value) and 0 <= value.numel() - master.numel() < 2 * ranks:
                moments[-1][key] = value
            else:
                raise states.error(
                    where,
                    f"has shape {tuple(value.shape)}, the {master.numel()} elements of the master wanted",
                )
    return moments, scalars


def _gaps(state: Fields, flats: int) -> list[list[int]] | None:
    """Elements left free after each parameter of every group; None before DeepSpeed wrote them down."""
    found = state.optional("param_alignment_paddings", list)
    if found is None:
        return None
    sound = len(found) == flats and all(
        isinstance(gaps, list) and all(type(gap) is int and gap >= 0 for gap in gaps) for gaps in found
    )
    if not sound:
        raise state.error("param_alignment_paddings", f"is {found!r:.80}, {flats} lists of numbers wanted")
    return found


def _slices(state: Fields, flats: int) -> list[dict[str, tuple[int, int]]] | None:
    """Begin and elements of each parameter's fragment in this rank's partitions; None if not written down."""
    found = state.optional("param_slice_mappings", list)
    if found is None:
        return None
    if len(found) != flats:
        raise state.error("param_slice_mappings", f"has {len(found)} entries, {flats} wanted")
    tables: list[dict[str, tuple[int, int]]] = []
    for table in found:
        if not isinstance(table, Mapping):
            raise state.error("param_slice_mappings", f"holds a {type(table).__name__}, dicts wanted")
        tables.append({})
        for name, address in table.items():
            values = vars(address) if isinstance(address, StubFragment) else {}
            begin, numel = values.get("start"), values.get("numel")
            if type(begin) is not int or type(numel) is not int:
                raise state.error("param_slice_mappings", f"gives {name!r} no fragment address")
            if numel:
                tables[-1][name] = (begin, numel)
    return tables


def _scaler(state: Fields) -> dict[str, Any] | None:
    scaler = state.values.get("loss_scaler")
    if scaler is None:
        return None
    if not isinstance(scaler, StubScaler):
        raise state.error("loss_scaler", f"is a {type(scaler).__name__}, a loss scaler wanted")
    return dict(vars(scaler))
