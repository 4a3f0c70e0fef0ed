"""Checkpoints in DeepSpeed's format made without DeepSpeed, to be bent; flats are put together slowly."""

from __future__ import annotations

import collections
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Edit = Callable[[int, dict[str, Any]], None]
KINDS = ("exp_avg", "exp_avg_sq")
GROUPS = [{"a.weight": (7, 5), "b.weight": (3, 11), "empty.bias": (1,)}, {"a.bias": (7,), "scale": ()}]


class LossScaler:
    __module__ = "deepspeed.runtime.fp16.loss_scaler"


class DynamicLossScaler:
    __module__ = "deepspeed.runtime.fp16.loss_scaler"


class fragment_address:
    __module__ = "deepspeed.utils.tensor_fragment"

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


class ZeroStageEnum(int):
    __module__ = "deepspeed.runtime.zero.config"

    def __reduce__(self) -> Any:
        return (ZeroStageEnum, (int(self),))


@contextmanager
def deepspeed_modules() -> Iterator[None]:
    """Modules under DeepSpeed's names for as long as pickles are written."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    for name in before:
        del sys.modules[name]
    for kind in (LossScaler, DynamicLossScaler, fragment_address, ZeroStageEnum):
        module_names = kind.__module__.split(".")
        for end in range(1, len(module_names) + 1):
            sys.modules.setdefault(
                ".".join(module_names[:end]), types.ModuleType(".".join(module_names[:end]))
            )
        setattr(sys.modules[kind.__module__], kind.__name__, kind)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
        sys.modules.update(before)


def nothing(rank: int, state: dict[str, Any]) -> None:
    """No edit."""


@dataclass
class Forged:
    """What to write: trained parameters by group, at ``stage`` by ``ranks`` ranks, and edits of the dicts
    before they are pickled. ``held`` are the values by kind and name."""

    stage: int
    ranks: int
    groups: list[dict[str, tuple[int, ...]]] = field(default_factory=lambda: GROUPS)
    alignment: int = 1
    edit_optimizer: Edit = nothing
    edit_model: Edit = nothing
    prefix: str = ""
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Writes ``folder/global_step7`` and ``latest``; the tag's folder."""
        for group in self.groups:
            for name, shape in group.items():
                for kind in ("master", *KINDS):
                    self.held[f"{kind} {name}"] = torch.randn(shape)
        self.held["master frozen"] = torch.randn(5, 3)
        tag = folder / "global_step7"
        tag.mkdir(parents=True)
        (folder / "latest").write_text("global_step7")
        with deepspeed_modules():
            for rank in range(self.ranks):
                state = self._optimizer(rank)
                self.edit_optimizer(rank, state)
                name = f"{self.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
                torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0"}, tag / name)
                if self.stage == 3 or rank == 0:
                    model = self._model(rank)
                    self.edit_model(rank, model)
                    name = "mp_rank_00_model_states.pt"
                    torch.save(model, tag / (f"zero_pp_rank_{rank}_{name}" if self.stage == 3 else name))
        return tag

    def gaps(self, group: dict[str, tuple[int, ...]]) -> list[int]:
        found, offset = [], 0
        for number, shape in enumerate(group.values()):
            offset += math.prod(shape)
            found.append(0 if number == len(group) - 1 else -offset % self.alignment)
            offset += found[-1]
        return found

    def flat(self, kind: str, group: dict[str, tuple[int, ...]], rank: int) -> torch.Tensor:
        """A rank's flat partition with all its padding."""
        padded_values = []
        for (name, shape), gap in zip(group.items(), self.gaps(group), strict=True):
            values = self.held[f"{kind} {name}"].reshape(-1)
            if self.stage == 3:
                size = -(-math.prod(shape) // self.ranks)
                values = torch.cat([values, torch.full((size * self.ranks - values.numel(),), math.nan)])
                padded_values.append(values[rank * size : (rank + 1) * size])
            else:
                padded_values += [values, torch.full((gap,), math.nan)]
        joined = torch.cat(padded_values)
        if self.stage == 3:
            return joined
        joined = torch.cat([joined, torch.full((-joined.numel() % (2 * self.ranks),), math.nan)])
        size = joined.numel() // self.ranks
        return joined[rank * size : (rank + 1) * size].clone()

    def padding(self, group: dict[str, tuple[int, ...]]) -> int:
        needed = sum(math.prod(shape) for shape in group.values()) + sum(self.gaps(group))
        return -needed % (2 * self.ranks)

    def _optimizer(self, rank: int) -> dict[str, Any]:
        masters = [self.flat("master", group, rank) for group in self.groups]
        state = {
            number: {"step": 7, **{kind: self.flat(kind, group, rank) for kind in KINDS}}
            for number, group in enumerate(self.groups)
        }
        groups = [
            {"lr": 0.1 + number, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [number]}
            | {"decoupled_weight_decay": False, "bias_correction": True}
            for number in range(len(self.groups))
        ]
        scaler = DynamicLossScaler()
        scaler.__dict__.update(
            cur_scale=512.0, cur_iter=7, last_overflow_iter=4, cur_hysteresis=2, dtype=torch.half
        )
        optimizer = {"state": state, "param_groups": groups}
        common = {"loss_scaler": scaler, "zero_stage": ZeroStageEnum(self.stage)}
        if self.stage == 3:
            own = {"fp32_flat_groups": masters, "optimizer_state_dict": optimizer}
            return {**common, "partition_count": self.ranks, **own}
        if rank == self.ranks - 1:
            masters = [
                flat[: flat.numel() - self.padding(group)]
                for flat, group in zip(masters, self.groups, strict=True)
            ]
        return {
            **common,
            "partition_count": [self.ranks] * len(self.groups),
            "single_partition_of_fp32_groups": masters,
            "base_optimizer_state": optimizer,
            "param_alignment_paddings": [self.gaps(group) for group in self.groups],
        }

    def _model(self, rank: int) -> dict[str, Any]:
        names = [name for group in self.groups for name in group]
        frozen = self.held["master frozen"]
        module = collections.OrderedDict(
            (
                name,
                torch.empty(0, dtype=torch.float16)
                if self.stage == 3
                else self.held[f"master {name}"].half(),
            )
            for name in names
        )
        module["frozen"] = frozen if self.stage < 3 else torch.empty(0)
        module["buffer"] = torch.arange(4)
        size = -(-15 // self.ranks)
        padded = torch.cat([frozen.reshape(-1), torch.full((size * self.ranks - 15,), math.nan)])
        return {
            "module": module,
            "buffer_names": ["buffer"],
            "param_shapes": [
                collections.OrderedDict((name, torch.Size(shape)) for name, shape in group.items())
                for group in self.groups
            ],
            "frozen_param_shapes": {"frozen": frozen.shape} if self.stage > 1 else None,
            "frozen_param_fragments": {"frozen": padded[rank * size : (rank + 1) * size].clone()},
            "shared_params": {"tied.weight": "a.weight"},
            "lr_scheduler": None,
            "skipped_steps": 2,
            "global_steps": 7,
            "global_samples": 70,
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": "0",
        }
