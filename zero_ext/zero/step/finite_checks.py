"""Checks that gradients, master weights and moments are finite, and the names of those that are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.offload import MASTER, copy_of
from zero_ext.optim import Stepper
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.gradient_storage import Squares
from zero_ext.zero.units.collective_errors import CollectiveError, raise_on_all_ranks
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.model_parallel_sync import sum_over_model
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.unit import Unit

_NAMES = 3  # parameters that an error names before it counts the rest
_CHUNK_ELEMENTS = 4 << 20


class NonFiniteState(CollectiveError, FloatingPointError):
    """Raised on all ranks when an update left NaN or infinity in master weights or moments."""


@dataclass(frozen=True)
class NonFiniteNames:
    """Parameters of this rank's slice of the model, in order, with values not finite on any rank."""

    gradients: tuple[str, ...]
    weights: tuple[str, ...]
    moments: tuple[str, ...]
    elsewhere: bool  # whether other ranks hold other parts of the model

    def describe(self, names: Sequence[str]) -> str:
        """Return the first of ``names`` and the number of the others, or where to look for names."""
        if not names:
            return (
                "parameters that other ranks hold (see their messages)" if self.elsewhere else "a sum of them"
            )
        text = ", ".join(names[:_NAMES])
        rest = len(names) - _NAMES
        return f"{text} and {rest} more parameter{'s' if rest > 1 else ''}" if rest > 0 else text


@dataclass(frozen=True)
class _Verdict:
    """The flag of what a gradient's memory held, and how to recognize that it holds it still."""

    flag: torch.Tensor
    written: tuple[int, torch.dtype, int, int]


def _written(gradients: UnitGradients, memory: torch.Tensor) -> tuple[int, torch.dtype, int, int]:
    """Return what changes with every write to a gradient in ``memory``."""
    return memory.data_ptr(), memory.dtype, memory._version, gradients.changes


class FiniteChecks:
    """Checks the reduced gradients of this rank's shards and agrees with the other ranks on what it finds.

    A gradient is checked when its reduction ends (:meth:`look_at`), while it is in the caches. The step
    checks again what was written to since, which version counters and counts of changes show.
    """

    def __init__(
        self,
        masters: Sequence[MasterShard],
        gradients: Mapping[Unit, UnitGradients],
        collectives: Collectives,
    ) -> None:
        self._masters = tuple(masters)
        self._gradients = tuple(gradients[master.unit] for master in masters)
        self._collectives = collectives
        self._flags: dict[UnitGradients, torch.Tensor] = {}
        self._verdicts: dict[UnitGradients, _Verdict] = {}

    # -- looking ------------------------------------------------------------------------------------------

    def look_at(self, gradients: UnitGradients) -> bool:
        """Check a gradient after its reduction has ended; return False if it is known not to be finite.

        Gradients in an accelerator's memory are left to the flags of the update, which are read a step later:
        the host would have to wait. A gradient on NVMe was looked at on its way there.
        """
        storage = gradients.storage
        if storage.tier == "nvme":
            return storage.failure is not None or self._stored_is_finite(gradients)
        if not storage.valid:
            return True
        return self._in_memory_is_finite(gradients)

    def gradients_are_finite(self) -> bool:
        """Return whether all reduced gradients in host memory or on NVMe are finite in this rank's shards."""
        return all(self._is_finite(gradients) for gradients in self._gradients if gradients.contributed)

    def _is_finite(self, gradients: UnitGradients) -> bool:
        storage = gradients.storage
        if not storage.valid:
            return True
        if storage.tier == "nvme":
            return self._stored_is_finite(gradients)
        return self._in_memory_is_finite(gradients)

    def _in_memory_is_finite(self, gradients: UnitGradients) -> bool:
        slices = gradients.storage.visit(0, gradients.unit.layout.shard_numel)
        return not any(
            values.device.type == "cpu" and bool(self._flag_of(gradients, values)) for values in slices
        )

    def _stored_is_finite(self, gradients: UnitGradients) -> bool:
        squares = Squares()
        gradients.add_squared_norm(squares)
        return not squares.count_non_finite()

    def _flag_of(self, gradients: UnitGradients, memory: torch.Tensor) -> torch.Tensor:
        verdict = self._verdicts.get(gradients)
        if verdict is None or verdict.written != _written(gradients, memory):
            flag = self._flags.get(gradients)
            if flag is None or flag.device != memory.device:
                flag = torch.zeros(1, dtype=torch.int32, device=memory.device)
                self._flags[gradients] = flag
            flag.zero_()
            ops.flag_non_finite_(memory, flag)
            verdict = _Verdict(flag, _written(gradients, memory))
            self._verdicts[gradients] = verdict
        return verdict.flag

    # -- agreement ----------------------------------------------------------------------------------------

    def agree(self, facts: Sequence[bool], what: str) -> list[bool]:
        """Return which of ``facts`` hold on any rank, also of those with other parts of the model; a
        collective."""
        flags = torch.tensor(list(map(int, facts)), dtype=torch.int64, device="cpu")
        flags = self._collectives.sum_(flags, f"agreement on {what}")
        sum_over_model(self._collectives.model, flags, f"agreement on {what} over the model")
        return [bool(count) for count in flags.tolist()]

    def names(
        self,
        stepper: Stepper | None = None,
        local: bool = False,
        found_before: Collection[tuple[int, int]] | None = None,
    ) -> NonFiniteNames:
        """Return the names of what is not finite on any rank that shares the state; a collective.

        Args:
            stepper: its moments are checked, too; None leaves them aside.
            local: whether to look at unreduced gradients rather than reduced ones.
            found_before: unit and number of the parameters with gradients that this rank found not to be
                finite, where these are gone; None where they are there to be looked at.
        """
        tiers = {master.state.tier for master in self._masters} | {
            each.storage.tier for each in self._gradients
        }
        found: torch.Tensor
        if "nvme" in tiers:
            found = raise_on_all_ranks(
                self._collectives,
                lambda: self._table(stepper, local, found_before),
                "looking for values that are not finite",
            )
        else:
            found = self._table(stepper, local, found_before)
        found = self._collectives.sum_(found, "names of what is not finite")
        specs = [
            (spec.name, bool(expert_ranks(parameter)))
            for gradients in self._gradients
            for spec, parameter in zip(gradients.unit.layout.specs, gradients.unit.parameters, strict=True)
        ]
        gradients, weights, moments = (
            tuple(_described(*spec) for spec, count in zip(specs, column, strict=True) if count)
            for column in found.T.tolist()
        )
        return NonFiniteNames(gradients, weights, moments, self._collectives.model is not None)

    def _table(
        self, stepper: Stepper | None, local: bool, found_before: Collection[tuple[int, int]] | None
    ) -> torch.Tensor:
        """For each parameter whether its gradient, its weights and its moments are not finite here."""
        look = _local_is_finite if local else _reduced_is_finite
        rows = []
        for index, (master, gradients) in enumerate(zip(self._masters, self._gradients, strict=True)):
            moments = _bad_moments(stepper, index) if stepper is not None else frozenset()
            rows += [
                (
                    not look(gradients, number) if found_before is None else (index, number) in found_before,
                    not _weights_are_finite(master, number),
                    spec.name in moments,
                )
                for number, spec in enumerate(gradients.unit.layout.specs)
            ]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), 3)


def _described(name: str, expert: bool) -> str:
    return f"'{name}'" + (" (or the expert in its place on another rank)" if expert else "")


def _reduced_is_finite(gradients: UnitGradients, number: int) -> bool:
    if number not in gradients.contributed or not gradients.storage.valid:
        return True
    squares = Squares()
    gradients.add_squared_norm(squares, number)
    return not squares.count_non_finite()


def _local_is_finite(gradients: UnitGradients, number: int) -> bool:
    layout, local = gradients.unit.layout, gradients.local
    if not gradients.has_local or local is None:
        return True
    first = layout.offsets[number]
    values = gradients.local_sum()[first : first + layout.specs[number].numel]
    return bool(torch.isfinite(values).all())


def _weights_are_finite(master: MasterShard, number: int) -> bool:
    """Return whether this rank's master weights of a parameter are finite, in compute precision too."""
    layout = master.unit.layout
    segment = master.owned.get(layout.specs[number].name)
    if segment is None:
        return True
    for begin in range(segment.begin, segment.end, _CHUNK_ELEMENTS):
        values = master.state.read(MASTER, begin, min(begin + _CHUNK_ELEMENTS, segment.end))
        if not torch.isfinite(values.to(layout.dtype)).all():
            return False
    return True


def _bad_moments(stepper: Stepper, index: int) -> frozenset[str]:
    return frozenset(
        segment.name
        for _, segment, values in stepper.values(index)
        if segment.numel and not torch.isfinite(copy_of(values)).all()
    )


def advice_on(names: NonFiniteNames) -> str:
    """Return what to do about gradients that are not finite."""
    damaged = [name for name in names.gradients if name in names.weights] or names.weights
    if damaged:
        return (
            f"The weights of {names.describe(damaged)} are not finite either, so the cause is an earlier "
            "step or the values that the model started with. Load a checkpoint from before it."
        )
    return (
        "Call optimizer.zero_grad() to go on without this step. If it happens again, look for a division by "
        "zero, a logarithm of zero or an overflow in the loss or in the data; "
        "torch.autograd.set_detect_anomaly(True) names the operation."
    )
