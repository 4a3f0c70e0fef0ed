"""Steps of one tensor by an optimizer's own code, and the trial of whether that is what it does with many."""

from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import optim

from zero_ext.config.config_errors import clause_of
from zero_ext.optim.elementwise import on_other_tensors
from zero_ext.optim.full_tensors.nested_state import named_state

_STEPS = 3
_COPIES = 2  # of each shape, since some optimizers stack tensors of one shape
_RATE = 1e-3
_DISTINCT_SIZES = (5, 7, 11, 13, 17)  # primes, so that a product says of which sizes it is
_LARGE = 1000.0  # gradients that a limit on the norm of all tensors would act on
_INSTEAD = "Use torch.optim.AdamW, or zero_ext.Muon for matrices."
Groups = Sequence[Mapping[str, Any]]


def step_alone(
    inner: optim.Optimizer,
    groups: Groups,
    number: int,
    value: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
) -> dict[str, Any]:
    """Step one tensor in place and return its new state.

    Args:
        inner: a copy of the user's optimizer.
        groups: settings of all param groups before the step, which stay as they are.
        number: the tensor's param group.
        value: master weights.
        gradient: of the same shape.
        state: before the step, empty before the first.
    """
    alone = without_parameters(groups)
    alone[number]["params"] = [value]
    inner.param_groups, inner.state = alone, defaultdict(dict)
    if state:
        inner.state[value] = state
    value.grad = gradient
    before = _random_states(value.device)
    try:
        inner.step()
    finally:
        value.grad = None
    if not same_values(before, _random_states(value.device)):
        raise RuntimeError(
            "random numbers: expected a step without any, got one that draws them from torch's default "
            "generator, others on every rank. Use a torch.Generator with a seed of its own."
        )
    return dict(inner.state[value]) if value in inner.state else {}


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the default generators of the host and of ``device``, in host memory."""
    host = [torch.get_rng_state()]
    return [*host, torch.cuda.get_rng_state(device)] if device.type == "cuda" else host


def groups_after(inner: optim.Optimizer, groups: Groups) -> list[dict[str, Any]]:
    """Return the param groups after a step, found by one without parameters."""
    inner.param_groups, inner.state = without_parameters(groups), defaultdict(dict)
    inner.step()
    return inner.param_groups


def without_parameters(groups: Groups) -> list[dict[str, Any]]:
    """Return copies of param groups, with tensors of their own and without parameters."""
    return [
        {"params": [], **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"}}
        for group in groups
    ]


def check_owner_steps(optimizer: optim.Optimizer) -> None:
    """Refuse with ``ValueError`` an optimizer that does not step each tensor by itself, or that keeps what a
    checkpoint cannot store; found by trial on small tensors."""
    kind = type(optimizer)
    subject = (
        f"optimizer {kind.__module__}.{kind.__qualname__}: it was declared with whole_tensors=True, but "
    )
    try:
        problem = _Trial(optimizer).problem()
    except Exception as error:
        raise ValueError(
            f"{subject}a step of small tensors from their gradients alone, without a closure, failed: "
            f"{type(error).__name__}: {clause_of(error)}. {_INSTEAD}"
        ) from error
    if problem is not None:
        raise ValueError(f"{subject}{problem}. {_INSTEAD}")


def planned_state_bytes(optimizer: optim.Optimizer, number: int, shape: Sequence[int]) -> int:
    """Return the bytes of the state of a tensor after its first step. A small tensor is stepped. Those sizes
    of its state grow that are sizes of the tensor, or products of neighboring ones.

    Args:
        optimizer: the user's.
        number: the tensor's param group.
        shape: of the tensor.
    """
    small = [_DISTINCT_SIZES[axis % len(_DISTINCT_SIZES)] for axis in range(len(shape))]
    spans = [(first, last) for last in range(len(shape) + 1) for first in range(last)]
    grown = {math.prod(small[first:last]): math.prod(shape[first:last]) for first, last in spans}
    value, gradient = _random_tensors(small, 2)
    groups = without_parameters(optimizer.param_groups)
    state = named_state(step_alone(_copy(optimizer), groups, number, value, gradient, {}), value)
    return sum(
        tensor.itemsize * math.prod(grown.get(size, size) for size in tensor.shape)
        for tensor in state.tensors.values()
    )


class _Trial:
    """A few small tensors for every param group, of the numbers of dimensions that its parameters have."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = without_parameters(optimizer.param_groups)
        for group in self._groups:
            if "lr" in group and not group["lr"]:  # as at the start of a warm-up
                group["lr"] = _RATE
        self._numbers: list[int] = []
        self._start: list[torch.Tensor] = []
        for number, group in enumerate(optimizer.param_groups):
            shapes = {parameter.dim(): tuple(parameter.shape) for parameter in group["params"]}
            for shape in shapes.values():
                self._start += _stand_ins(shape, _COPIES)
                self._numbers += [number] * _COPIES
        sets = [_stand_ins(value.shape, _STEPS, seed) for seed, value in enumerate(self._start, 7)]
        self._gradients = [
            [gradient * (_LARGE if index % 2 else 1.0) for gradient in gradients]
            for index, gradients in enumerate(sets)
        ]

    def problem(self) -> str | None:
        """Return why the optimizer cannot run at owners, None if it can."""
        if (held := _held(self._optimizer)) is not None:
            return held
        jointly, groups = self._jointly()
        trial, alone = _copy(self._optimizer), [value.clone() for value in self._start]
        attributes = _plain_attributes(trial)
        states: list[dict[str, Any]] = [{} for _ in alone]
        layouts: list[list[dict[str, tuple[Any, ...]]]] = []
        settings: Groups = self._groups
        for step in range(_STEPS):
            alone = [value.clone() for value in alone]  # as the stepper does
            for index, value in enumerate(alone):
                gradient = self._gradients[index][step].clone()
                states[index] = step_alone(
                    trial, settings, self._numbers[index], value, gradient, states[index]
                )
            settings = groups_after(trial, settings)
            try:
                found = [named_state(*pair) for pair in zip(states, alone, strict=True)]
            except ValueError as error:
                return clause_of(error)
            layouts.append([each.layout for each in found])
            states = [each.nested() for each in found]
        return (
            _difference(jointly, alone)
            or _changed("entry of its param groups", _merged(groups), _merged(settings), "other tensors")
            or _changed("attribute", attributes, _plain_attributes(trial), "earlier steps, and is not saved")
            or _late(layouts)
            or self._unmoved(alone)
        )

    def _unmoved(self, stepped: Sequence[torch.Tensor]) -> str | None:
        if not stepped or not all(map(torch.equal, self._start, stepped)):
            return None
        return "its step changes none of the tensors in its param groups, though all have gradients"

    def _jointly(self) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        trial, values = _copy(self._optimizer), [value.clone() for value in self._start]
        groups = without_parameters(self._groups)
        for number, value in zip(self._numbers, values, strict=True):
            groups[number]["params"].append(value)
        trial.param_groups, trial.state = groups, defaultdict(dict)
        for step in range(_STEPS):
            for value, gradients in zip(values, self._gradients, strict=True):
                value.grad = gradients[step].clone()
            trial.step()
        return values, groups


def _held(optimizer: optim.Optimizer) -> str | None:
    """Return which attribute reaches parameters or another optimizer, which a step of other tensors in its
    param groups would not replace; None if none does."""
    parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
    visited = {id(optimizer)}
    for name, value in vars(optimizer).items():
        pending = [] if name in ("param_groups", "state") else [value]
        while pending:
            each = pending.pop()
            if id(each) in parameters or (isinstance(each, optim.Optimizer) and each is not optimizer):
                what = "parameters" if id(each) in parameters else "another optimizer"
                return f"its attribute '{name}' holds {what}, which its step may use besides its param groups"
            if id(each) not in visited:
                visited.add(id(each))
                pending += _entries(each)
    return None


def _entries(value: Any) -> list[Any]:
    """Return what a container or an object holds."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, type | ModuleType | torch.Tensor):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _stand_ins(shape: Sequence[int], count: int, seed: int = 20) -> list[torch.Tensor]:
    return _random_tensors([max(1, min(size, 4 + axis)) for axis, size in enumerate(shape)], count, seed)


def _random_tensors(shape: Sequence[int], count: int, seed: int = 20) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator, device="cpu") for _ in range(count)]


def _copy(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Return a copy that shares none of its own attributes that a step could change."""
    made = on_other_tensors(optimizer, [])
    vars(made).update(copy.deepcopy(_plain_attributes(made)))
    return made


def _plain_attributes(optimizer: optim.Optimizer) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None), torch.Tensor, list, tuple, dict)
    own = vars(optimizer).keys() - vars(optim.SGD([torch.zeros(1, device="cpu")])).keys()
    return {
        key: copy.deepcopy(vars(optimizer)[key]) for key in own if isinstance(vars(optimizer)[key], plain)
    }


def _merged(groups: Groups) -> dict[str, Any]:
    return {
        f"{key}' of group '{number}": value
        for number, group in enumerate(groups)
        for key, value in group.items()
        if key != "params"
    }


def _difference(jointly: Sequence[torch.Tensor], alone: Sequence[torch.Tensor]) -> str | None:
    for joint, single in zip(jointly, alone, strict=True):
        if not torch.allclose(joint, single, rtol=1e-4, atol=1e-6, equal_nan=True):
            return (
                "tensors stepped together come out different from the same tensors stepped one by one (by "
                f"up to {(joint - single).abs().max():.3g}). Its update of a tensor depends on other "
                "tensors or on random numbers"
            )
    return None


def _changed(what: str, one: Mapping[str, Any], other: Mapping[str, Any], on: str) -> str | None:
    for key in {**one, **other}:
        if key not in one or key not in other or not same_values(one[key], other[key]):
            return f"{what} '{key}' depends on {on}"
    return None


def same_values(one: Any, other: Any) -> bool:
    """Return whether two numbers, tensors, or lists, tuples and dicts of them are equal."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_values, one, other))
    return bool(one == other)


def _late(layouts: Sequence[Sequence[Mapping[str, object]]]) -> str | None:
    found = map(late_entry, layouts[0], layouts[-1])
    return next((each for each in found if each is not None), None)


def late_entry(early: Mapping[str, object], late: Mapping[str, object]) -> str | None:
    """Return which entry the layout of state after a step lacks or has otherwise than after a later one,
    for which a load could not make it; None if none does."""
    for kind in {**early, **late}:
        if early.get(kind) != late.get(kind):
            return f"state entry '{kind}' appears or changes its shape or type after the first step"
    return None
