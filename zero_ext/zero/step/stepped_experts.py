"""The experts of mixtures that an optimizer step updates, with units.update_experts "routed"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.zero.construction.grouping import OwnedParameter, routed_experts
from zero_ext.zero.units.expert_ranges import Ranges, is_stacked, merged
from zero_ext.zero.units.flat_layout import ParameterSpec
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.expert_routing import stacked_experts


class _Stack(NamedTuple):
    """A parameter [experts, ...], and the names of the modules that own it."""

    modules: tuple[str, ...]
    experts: int


class SteppedExperts:
    """The experts that backward passes reached since the gradients were cleared, by name of the parameter.

    They follow the gradients: a step updates them as long as their gradients exist. ``stacks`` are the
    parameters with a slice per expert, by name. Without any, steps update all elements.
    """

    def __init__(self, stacks: Mapping[str, _Stack]) -> None:
        self._stacks = stacks
        self._names = defaultdict[str, list[str]](list)  # of the stacks of each module
        for name, stack in stacks.items():
            for module in dict.fromkeys(stack.modules):
                self._names[module].append(name)
        self._reached: dict[str, frozenset[int]] = {}

    @staticmethod
    def of(model: nn.Module, owned: Iterable[OwnedParameter], config: ZeroConfig) -> SteppedExperts:
        """Return those of ``model`` with the parameters ``owned``, where ``config`` asks for them."""
        if config.units.update_experts == "all":
            return SteppedExperts({})
        names = {module: name for name, module in routed_experts(model).items()}
        stacks: dict[str, _Stack] = {}
        for item in owned:
            owners = [owner for owner in item.owners if owner in names]
            counts = {found.experts for owner in owners if (found := stacked_experts(owner)) is not None}
            if len(counts) == 1 and len(owners) == len(item.owners) and is_stacked(item.spec, *counts):
                stacks[item.spec.name] = _Stack(tuple(names[owner] for owner in owners), *counts)
        return SteppedExperts(stacks)

    def units_by_module(self, model: nn.Module, units: Iterable[Unit]) -> dict[nn.Module, list[Unit]]:
        """Return the ``units`` with stacked parameters of each module of ``model`` that has some."""
        found: dict[nn.Module, list[Unit]] = defaultdict(list)
        for unit in units:
            stacks = [self._stacks[spec.name] for spec in unit.layout.specs if spec.name in self._stacks]
            for name in dict.fromkeys(name for stack in stacks for name in stack.modules):
                found[model.get_submodule(name)].append(unit)
        return dict(found)

    def add(self, module: str, experts: frozenset[int]) -> None:
        """Note that backward runs through a call of ``module`` with tokens of any rank on ``experts``."""
        for name in self._names.get(module, ()):
            self._reached[name] = self._reached.get(name, frozenset()) | experts

    def clear(self) -> None:
        """Forget all experts, as their gradients are cleared."""
        self._reached.clear()

    def forget(self, name: str) -> None:
        """Forget the experts of the parameter ``name``, as its gradient is cleared."""
        self._reached.pop(name, None)

    def ranges_in(self, owned: MasterShard, assigned: Collection[int]) -> Ranges | None:
        """Return the element ranges of ``owned`` that a step updates, None for all.

        The gradients of the parameters numbered ``assigned`` were assigned, so all their experts are stepped.
        """
        layout = owned.unit.layout
        if not self._stacks or not any(spec.name in self._stacks for spec in layout.specs):
            return None
        found: list[tuple[int, int]] = []
        for number, (spec, offset) in enumerate(zip(layout.specs, layout.offsets, strict=True)):
            own = [(0, spec.numel)] if number in assigned else self._ranges_of(spec)
            found += [(offset + begin, offset + end) for begin, end in own]
        inside = [(max(begin, owned.begin), min(end, owned.end)) for begin, end in merged(found)]
        return [(begin - owned.begin, end - owned.begin) for begin, end in inside if begin < end]

    def _ranges_of(self, spec: ParameterSpec) -> Sequence[tuple[int, int]]:
        stack = self._stacks.get(spec.name)
        if stack is None:
            return [(0, spec.numel)]
        size = spec.numel // stack.experts
        reached = sorted(self._reached.get(spec.name, ()))
        return [(number * size, (number + 1) * size) for number in reached]
