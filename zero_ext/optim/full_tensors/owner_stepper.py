"""Any optimizer that needs full tensors, run unchanged on each tensor at the rank that owns it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_ext.config.config_errors import clause_of
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import Tier
from zero_ext.offload import MASTER, Values
from zero_ext.optim.elementwise import on_other_tensors
from zero_ext.optim.full_tensors.nested_state import NamedState, named_state
from zero_ext.optim.full_tensors.owner_trial import (
    Groups,
    groups_after,
    late_entry,
    same_values,
    step_alone,
    without_parameters,
)
from zero_ext.optim.stepper import (
    RangeStepper,
    Segment,
    StepperInputs,
    UnshardedState,
    Update,
    check_saved,
    send_parameters,
)


def owner_cost(shape: Sequence[int]) -> int:
    """Return what a tensor costs its owner: m² + n² of an m × n matrix, as the state of Shampoo, else its
    elements."""
    return shape[0] ** 2 + shape[1] ** 2 if len(shape) == 2 else math.prod(shape)


class OwnerStepper(RangeStepper):
    """Runs a copy of the user's optimizer over full fp32 tensors, one at a time, each at its owner.

    Master weights and gradients stay sharded. In a step their slices travel to the tensor's owner, and the
    new master weights back: 12 bytes per element. The optimizer's state is only at the owner, in the tier of
    the master weights and on their device. Ranks that have all master weights step all tensors, and nothing
    travels.

    A param group's own entries, such as a count of steps, change once per step, alike on all ranks.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        super().__init__(inputs)
        if inputs.exchange is None or inputs.total is None:
            raise zero_ext_bug("full tensors without what makes them")
        self._total = inputs.total
        self._owners = inputs.exchange.dealt_by(owner_cost)
        self._inner = on_other_tensors(inputs.optimizer, [])
        self._segments = {segment.name: segment for owned in self._ranges for segment in owned.segments}
        self._tiers: dict[str, Tier] = {
            segment.name: owned.state.tier for owned in self._ranges for segment in owned.segments
        }
        self._states: dict[str, NamedState] = {}  # by parameter that this rank owns
        self._stepped: set[str] = set()  # the parameters with state, the same on all ranks

    def is_collective(self, index: int) -> bool:
        """See :class:`Stepper`."""
        return True

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`; a collective. While it runs, this rank's gradients exist in fp32, and the
        gradients and master weights of its own tensors in full."""
        gradients: dict[int, torch.Tensor] = {}

        def collect() -> torch.Tensor:
            gradients.update((each.index, self._scaled(each, scale)) for each in updates)
            return torch.empty(0, dtype=torch.int64, device="cpu")

        self._total(collect)
        mine = {name for name in used.intersection(self._segments) if math.prod(self._segments[name].shape)}
        before = without_parameters(self._groups)
        errors: list[tuple[str, Exception]] = []
        indices = [update.index for update in updates]
        for tier in sorted({self._ranges[index].state.tier for index in indices}):
            chosen = [index for index in indices if self._ranges[index].state.tier == tier]
            self._step_tensors({index: gradients[index] for index in chosen}, mine, before, errors)
        self._finish(before, errors, sorted(mine))
        for update in updates:
            self._send(update.index, used)
            yield update.index

    def _scaled(self, update: Update, scale: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a range times ``scale``, fp32 [n] where its master weights are."""
        state = self._ranges[update.index].state
        scaled = torch.empty(state.numel, dtype=torch.float32, device=state.read(MASTER, 0, 0).device)
        for chunk in self._staging.chunks(state.tier, update.gradient, None):
            scaled[chunk.begin : chunk.end] = chunk.gradient
        return scaled.mul_(scale.to(scaled.device))

    def _step_tensors(
        self,
        gradients: Mapping[int, torch.Tensor],
        used: Collection[str],
        groups: Groups,
        errors: list[tuple[str, Exception]],
    ) -> None:
        """Step the tensors of the ranges in ``gradients``, all of one tier, at their owners. An error of the
        optimizer's code goes to ``errors``: the other ranks wait for this one."""
        states = {self._ranges[index]: self._ranges[index].state for index in gradients}
        masters = {owned: state.read(MASTER, 0, state.numel) for owned, state in states.items()}
        sent = self._owners.start(dict(zip(masters, gradients.values(), strict=True)), used)
        pending = self._owners.start(masters, used)
        own_gradients = sent.full_tensors()

        def stepped(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            # Not in place: a tensor that this rank alone has is a view of what the results are copied to.
            masters = {name: master.clone() for name, master in tensors.items()}
            for name, master in masters.items():
                try:
                    self._step_tensor(name, master, own_gradients[name], groups)
                except Exception as error:
                    errors.append((name, error))
                    break
            return masters

        pending.apply(stepped)
        pending.send_results()
        pending.finish()

    def _step_tensor(self, name: str, master: torch.Tensor, gradient: torch.Tensor, groups: Groups) -> None:
        state = self._states[name].nested() if name in self._states else {}
        # The state may keep the gradient itself, which may be a part of a larger tensor.
        state = step_alone(self._inner, groups, self._segments[name].group, master, gradient.clone(), state)
        found = named_state(state, master)
        if name in self._states and (late := late_entry(self._states[name].layout, found.layout)):
            raise RuntimeError(late)
        self._states[name] = found

    def _finish(
        self, before: Groups, errors: Sequence[tuple[str, Exception]], stepped: Sequence[str]
    ) -> None:
        """Raise on all ranks what the optimizer raised on some, else change the param groups' own entries,
        and agree on which of the parameters ``stepped`` have state."""

        def agree() -> torch.Tensor:
            for name, error in errors:
                reason = f"{type(error).__name__}: {clause_of(error)}"
                raise RuntimeError(f"parameter '{name}': {reason}. Correct the optimizer's step.") from error
            for group, after in zip(self._groups, groups_after(self._inner, before), strict=True):
                changed = {
                    key for key in after if key not in group or not same_values(group[key], after[key])
                }
                group.update({key: after[key] for key in changed - {"params"}})
            has_state = [name in self._states and bool(self._states[name].tensors) for name in stepped]
            return torch.tensor(has_state, dtype=torch.int64, device="cpu")

        counts = self._total(agree, fallible=True).tolist()
        found = {name for name, count in zip(stepped, counts, strict=True) if count}
        self._stepped = self._stepped.difference(stepped) | found

    def _send(self, index: int, used: frozenset[str]) -> None:
        owned = self._ranges[index]
        chosen = [segment for segment in owned.segments if segment.name in used]
        master = owned.state.read(MASTER, 0, owned.state.numel)
        if self._flag is not None:
            for segment in chosen:
                self._flag.check(master[segment.begin : segment.end])
        send_parameters(self._staging, owned, [(segment.begin, segment.end) for segment in chosen])

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`: all state has shapes of its own."""
        return iter(())

    def unsharded_values(self) -> Iterator[UnshardedState]:
        """See :class:`Stepper`: the state of the tensors that this rank owns."""
        owned = self._owners.own_tensors()
        for name in sorted(self._states):
            for kind, tensor in self._states[name].tensors.items():
                yield UnshardedState(kind, name, tensor, replicated=owned[name])

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`: for every parameter whether it has state."""
        return {name: {"has_state": name in self._stepped} for name in self._segments}

    def check_scalars(self, state: Mapping[str, Any]) -> None:
        """See :class:`Stepper`."""
        check_saved(
            state,
            self._segments,
            "has_state, true or false",
            lambda found: isinstance(found, Mapping) and isinstance(found.get("has_state"), bool),
        )

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""
        self._stepped = {name for name in self._segments if state[name]["has_state"]}

    def make_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """See :class:`Stepper`; a step of a stand-in gives shapes and dtypes."""
        before = self._states
        self._states = {}
        for name in self._owners.own_tensors():
            if name in self._segments and set(kinds.get(name, ())) - {MASTER}:
                self._states[name] = before[name] if name in before else self._stand_in(name)

        def undo() -> None:
            self._states = before

        return undo

    def _stand_in(self, name: str) -> NamedState:
        segment = self._segments[name]
        owned = next(each for each in self._ranges if segment in each.segments)
        device = owned.state.read(MASTER, 0, 0).device
        generator = torch.Generator().manual_seed(20)
        value, gradient = (
            torch.empty_strided(segment.shape, segment.stride, device=device).copy_(
                torch.randn(segment.shape, generator=generator, device="cpu")
            )
            for _ in range(2)
        )
        state = step_alone(self._inner, self._groups, segment.group, value, gradient, {})
        return named_state(state, value).copy()

    def state_bytes(self) -> Mapping[Tier, int]:
        """See :class:`Stepper`."""
        nbytes: Counter[Tier] = Counter()
        for name, state in self._states.items():
            nbytes[self._tiers[name]] += sum(tensor.nbytes for tensor in state.tensors.values())
        return nbytes
