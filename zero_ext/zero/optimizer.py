"""The optimizer the user holds: a real ``torch.optim.Optimizer`` whose step runs on the shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_ext.offload import copy_of, replace
from zero_ext.optim import make_stepper
from zero_ext.zero.engine import Engine
from zero_ext.zero.partition import DTYPES


class ZeroOptimizer(torch.optim.Optimizer):
    """Steps a prepared model. ``param_groups`` are the user's own dicts, live: schedulers may change them.

    ``state_dict`` holds this rank's part and fits only the same ranks and configuration; checkpoints for
    other world sizes or stages are written by :func:`zero_ext.save_checkpoint`.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, elementwise: bool) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.engine = engine
        moments = DTYPES[engine.config.precision.moments_dtype]
        engine.attach_optimizer(
            self.param_groups,
            lambda ranges: make_stepper(optimizer, ranges, moments, elementwise, engine.tiers),
        )

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far because fp16 gradients overflowed."""
        return self.engine.skipped_steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscales, clips, updates and publishes the parameters; a collective of all ranks.

        Returns the closure's value. Raises ``RuntimeError`` without gradients or inside backward,
        ``FloatingPointError`` if clipping meets a norm that is not finite.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self.engine.step()
        return value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients; memory for them is kept. ``set_to_none`` False makes them zeros, as in
        torch."""
        if set_to_none:
            self.engine.clear_gradients()
        else:
            super().zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the model's parameters were laid out at prepare."""
        if hasattr(self, "engine"):
            raise RuntimeError(
                "add_param_group after zero_ext.prepare: give every parameter to the optimizer before "
                "prepare; "
                "a group with lr 0 can wait for later"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """This rank's optimizer state: ``shards`` by kind and parameter, ``scalars``, ``param_groups``."""
        stepper = self.engine.stepper
        if stepper is None:
            raise AssertionError("an optimizer without a stepper")
        shards: dict[str, torch.Tensor] = {}
        for number in range(len(self.engine.masters)):
            for kind, segment, values in stepper.values(number):
                shards[f"{kind}/{segment.name}/{segment.start}"] = copy_of(values)
        for master in self.engine.masters:
            for overlap in master.overlaps:
                name = master.unit.layout.specs[overlap.index].name
                shards[f"master/{name}/{overlap.parameter_start}"] = copy_of(master.part(overlap))
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        for group, live in zip(groups, self.param_groups, strict=True):
            group["params"] = [self.engine.names[parameter][0] for parameter in live["params"]]
        world = {
            "rank": self.engine.rank,
            "world_size": self.engine.world_size,
            "stage": self.engine.config.stage,
        }
        return {"shards": shards, "scalars": stepper.scalars(), "param_groups": groups, "layout": world}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` of the same rank, world size, stage and model; else ``ValueError``."""
        own = self.state_dict()
        if state_dict.get("layout") != own["layout"]:
            raise ValueError(
                f"optimizer state of {state_dict.get('layout')} cannot be loaded as {own['layout']}; use "
                "zero_ext.save_checkpoint and zero_ext.load_checkpoint to change ranks or stage"
            )
        names = [group["params"] for group in own["param_groups"]]
        if [group["params"] for group in state_dict["param_groups"]] != names:
            raise ValueError("optimizer state has other param groups or parameters than this optimizer")
        stepper = self.engine.stepper
        if stepper is None:
            raise AssertionError("an optimizer without a stepper")
        kinds: dict[str, tuple[str, ...]] = {}
        for key in state_dict["shards"]:
            kind, _, rest = key.partition("/")
            name = rest.rpartition("/")[0]
            kinds[name] = (*kinds.get(name, ()), kind)
        stepper.make_state(kinds)
        stepper.load_scalars(state_dict["scalars"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        shards = dict(state_dict["shards"])
        for number in range(len(self.engine.masters)):
            for kind, segment, values in stepper.values(number):
                replace(values, shards.pop(f"{kind}/{segment.name}/{segment.start}"))
        for master in self.engine.masters:
            for overlap in master.overlaps:
                name = master.unit.layout.specs[overlap.index].name
                replace(master.part(overlap), shards.pop(f"master/{name}/{overlap.parameter_start}"))
        if shards:
            raise ValueError(f"optimizer state has entries that this optimizer lacks: {sorted(shards)[:3]}")
        self.engine.refresh_parameters()
