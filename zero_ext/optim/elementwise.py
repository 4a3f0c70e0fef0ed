"""torch's own element-wise optimizers, run unchanged on the segments of flat fp32 shards."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import optim

from zero_ext.config.tiers import Tier
from zero_ext.offload import MASTER, Values
from zero_ext.optim.fused_optimizers import FusedOptimizer
from zero_ext.optim.stepper import RangeStepper, Segment, StepperInputs, Update, check_saved, send_parameters


class ElementwiseStepper(RangeStepper):
    """Runs a copy of the user's optimizer over fp32 master segments, one unit's range at a time.

    Every rank keeps a segment for every parameter, empty where it owns no element, so that scalar state
    (step counts, averages' coefficients) is the same everywhere.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        super().__init__(inputs)
        self._inner = on_other_tensors(inputs.optimizer, [])
        self._tensors = [
            [owned.state.read(MASTER, segment.begin, segment.end) for segment in owned.segments]
            for owned in self._ranges
        ]
        self._snapshots: dict[int, list[dict[str, Any] | None]] = {}  # by range, of each of its segments
        for segment, value in self._all_segments():
            state = initial_state(inputs.optimizer, value, self._groups[segment.group])
            if state:
                self._inner.state[value] = state

    def _segments_of(self, index: int) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Yield the segments of a range and their master weights."""
        return zip(self._ranges[index].segments, self._tensors[index], strict=True)

    def _all_segments(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        for index in range(len(self._ranges)):
            yield from self._segments_of(index)

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`; the scaled gradient of one range exists in fp32 while it runs."""
        for update in updates:
            tier = self._ranges[update.index].state.tier
            scaled = self._staging.scaled(update.gradient, scale, tier)
            self._step_range(update.index, scaled, used)
            yield update.index

    def _step_range(self, index: int, scaled: torch.Tensor, used: frozenset[str]) -> None:
        owned = self._ranges[index]
        self._inner.param_groups = self._groups_over(index)
        for segment, value in self._segments_of(index):
            if segment.name in used:
                value.grad = scaled[segment.begin : segment.end]
        self._inner.step()
        for segment, value in self._segments_of(index):
            value.grad = None
            if self._flag is not None and segment.name in used:
                self._flag.check(value)
        stepped = [(each.begin, each.end) for each in owned.segments if each.name in used]
        send_parameters(self._staging, owned, stepped)

    def _groups_over(self, index: int) -> list[dict[str, Any]]:
        groups = [{**group, "params": []} for group in self._groups]
        for segment, value in self._segments_of(index):
            groups[segment.group]["params"].append(value)
        return groups

    def snapshot(self, index: int) -> None:
        """See :class:`Stepper`."""
        super().snapshot(index)
        self._snapshots[index] = [
            copy.deepcopy(self._inner.state[value]) if value in self._inner.state else None
            for value in self._tensors[index]
        ]

    def commit(self, index: int) -> None:
        """See :class:`Stepper`."""
        super().commit(index)
        self._snapshots.pop(index, None)

    def rollback(self, index: int) -> None:
        """See :class:`Stepper`; state that the step created is dropped."""
        super().rollback(index)
        for value, state in zip(self._tensors[index], self._snapshots.pop(index), strict=True):
            if state is not None:
                self._inner.state[value] = state
            else:
                self._inner.state.pop(value, None)

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`: every state entry that has one value an element."""
        for segment, value in self._segments_of(index):
            for name, entry in self._inner.state.get(value, {}).items():
                if per_element(entry):
                    yield name, segment, entry

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`: for every parameter its scalar entries, and which of them are tensors."""
        return {
            segment.name: plain_scalars(self._inner.state.get(value, {}))
            for segment, value in self._all_segments()
        }

    def check_scalars(self, state: Mapping[str, Any]) -> None:
        """See :class:`Stepper`."""
        check_saved_scalars(state, (segment.name for segment, _ in self._all_segments()))

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""
        for segment, value in self._all_segments():
            self._inner.state[value].update(live_scalars(state[segment.name]))

    def make_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """See :class:`Stepper`."""
        possible = [elementwise_kinds(self._inner, group) for group in self._groups]
        made: list[tuple[torch.Tensor, str]] = []
        for segment, value in self._all_segments():
            for name in possible[segment.group].intersection(kinds.get(segment.name, ())):
                if name not in self._inner.state[value]:
                    self._inner.state[value][name] = torch.zeros_like(value)
                    made.append((value, name))

        def undo() -> None:
            for value, name in made:
                del self._inner.state[value][name]

        return undo

    def state_bytes(self) -> Mapping[Tier, int]:
        """See :class:`Stepper`."""
        nbytes: Counter[Tier] = Counter()
        for owned, values in zip(self._ranges, self._tensors, strict=True):
            entries = [entry for value in values for entry in self._inner.state.get(value, {}).values()]
            nbytes[owned.state.tier] += sum(entry.nbytes for entry in entries if per_element(entry))
        return nbytes


def initial_state(
    optimizer: optim.Optimizer, value: torch.Tensor, group: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the state of ``value`` before the first step, for the classes that make it at construction, and
    for those with fused steppers, which do.
    """
    if isinstance(optimizer, FusedOptimizer):
        return {moment: torch.zeros_like(value) for moment in optimizer.MOMENTS}
    if not isinstance(optimizer, optim.Adagrad):
        return {}
    return {
        "step": torch.tensor(0.0, device="cpu"),
        "sum": torch.full_like(value, group["initial_accumulator_value"]),
    }


def was_stepped(optimizer: optim.Optimizer) -> bool:
    """Return whether ``optimizer`` holds more than the state that its class makes at construction."""
    filled = [state for state in optimizer.state.values() if state]
    return any("step" not in state or float(state["step"]) != 0 for state in filled)


def elementwise_kinds(optimizer: optim.Optimizer, group: dict[str, Any]) -> frozenset[str]:
    """Names of the state tensors, one value an element, that ``optimizer`` has after a step; by trial."""
    value = torch.zeros(2, device="cpu")
    trial = on_other_tensors(optimizer, [{**group, "params": [value]}])
    trial.state[value] = initial_state(optimizer, value, group)
    value.grad = torch.ones(2, device="cpu")
    trial.step()
    return frozenset(name for name, entry in trial.state[value].items() if per_element(entry))


def per_element(entry: object) -> bool:
    """Return whether an entry of an optimizer's state has one value an element, rather than one a
    parameter.
    """
    return isinstance(entry, torch.Tensor) and entry.dim() > 0


def scalars_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter's state that are one value each."""
    return {name: entry for name, entry in state.items() if not per_element(entry)}


def plain_scalars(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter's state that are one value each, JSON-able; see
    :func:`live_scalars`.
    """
    scalars = scalars_of(state)
    return {
        "scalars": {
            name: entry.item() if isinstance(entry, torch.Tensor) else entry
            for name, entry in scalars.items()
        },
        "zero_dim": [name for name, entry in scalars.items() if isinstance(entry, torch.Tensor)],
    }


def check_saved_scalars(saved: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ``ValueError`` for the first parameter without :func:`plain_scalars` in ``saved``."""
    check_saved(
        saved,
        names,
        "its scalars",
        lambda found: isinstance(found, Mapping) and {"scalars", "zero_dim"} <= found.keys(),
    )


def live_scalars(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`plain_scalars` was given, less the entries with one value an element."""
    return {
        name: torch.tensor(entry, device="cpu") if name in saved["zero_dim"] else entry
        for name, entry in saved["scalars"].items()
    }


def on_other_tensors(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> optim.Optimizer:
    """Return an optimizer of the same class and settings with fresh state over the tensors in ``groups``."""
    made = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name != "step":  # which schedulers set, to a method of the original
            vars(made).setdefault(name, value)  # a copy has none of the attributes of subclasses of torch's
    made.state = defaultdict(dict)
    made.param_groups = groups
    return made
