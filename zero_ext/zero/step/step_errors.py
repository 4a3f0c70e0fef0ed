"""Checks that state is finite, and the errors of steps that are not made or leave NaN: alike on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.config.optimizer_traits import OPTIMIZERS
from zero_ext.config.tiers import is_stored
from zero_ext.offload import MASTER, Device, copy_of
from zero_ext.optim import Stepper
from zero_ext.zero.construction.rank_consistency import Hyperparameters, of_all_ranks, refuse_different_facts
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.gradient_storage import Squares
from zero_ext.zero.step.update_schedule import MIXTURE
from zero_ext.zero.units.collective_errors import CollectiveError, raise_on_all_ranks
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.rank_groups import sum_over_model

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


class FiniteChecks:
    """Checks the reduced gradients of this rank's shards and agrees with the other ranks on what it finds. A
    gradient is checked when its reduction ends (:meth:`look_at`), while it is in the caches. The step checks
    again what was written to since, which version counters and counts of changes show."""

    def __init__(
        self,
        masters: Sequence[MasterShard],
        gradients: Sequence[UnitGradients],
        collectives: Collectives,
    ) -> None:
        self._masters, self._gradients, self._collectives = masters, gradients, collectives
        self._flag = torch.zeros(1, dtype=torch.int32, device="cpu")
        # Whether a gradient in host memory was finite, and what changes with every write to it.
        self._verdicts: dict[UnitGradients, tuple[bool, tuple[object, ...]]] = {}

    # -- looking ------------------------------------------------------------------------------------------

    def look_at(self, gradients: UnitGradients) -> bool:
        """Check a gradient after its reduction has ended; return False if it is known not to be finite.

        Gradients in an accelerator's memory are left to the flags of the update, which are read a step later:
        the host would have to wait. A gradient on NVMe was looked at on its way there.
        """
        # The next agreement on gradients raises a failure.
        return gradients.storage.failure is not None or self._is_finite(gradients)

    def gradients_are_finite(self) -> bool:
        """Return whether all reduced gradients in host memory or on NVMe are finite in this rank's shards."""
        return all(self._is_finite(gradients) for gradients in self._gradients if gradients.contributed)

    def _is_finite(self, gradients: UnitGradients) -> bool:
        storage = gradients.storage
        if not storage.valid:
            return True
        if is_stored(storage.tier):
            squares = Squares()
            gradients.add_squared_norm(squares)
            return not squares.count_non_finite()
        slices = storage.visit(0, gradients.unit.layout.shard_numel)
        return all(
            values.device.type != "cpu" or self._slice_is_finite(gradients, values) for values in slices
        )

    def _slice_is_finite(self, gradients: UnitGradients, values: torch.Tensor) -> bool:
        written = values.data_ptr(), values.dtype, values._version, gradients.changes
        found = self._verdicts.get(gradients)
        if found is None or found[1] != written:
            self._flag.zero_()
            ops.flag_non_finite_(values, self._flag)
            found = self._verdicts[gradients] = (not self._flag.item(), written)
        return found[0]

    # -- agreement ----------------------------------------------------------------------------------------

    def agree(self, facts: Sequence[bool], what: str) -> list[bool]:
        """Return which of ``facts`` hold on any rank that has a slice of the model; a collective."""
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
        """Return the names of what is not finite on any rank that shares the state; a collective. Moments are
        those of ``stepper``. Gradients are reduced or ``local`` ones, or ``found_before`` on this rank (unit
        and number of the parameters) where they are gone."""
        tiers = {
            *(master.state.tier for master in self._masters),
            *(each.storage.tier for each in self._gradients),
        }
        found = raise_on_all_ranks(
            self._collectives,
            lambda: self._table(stepper, local, found_before),
            "looking for values that are not finite",
            stored=is_stored(*tiers),
        )
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
        "zero, a logarithm of zero or an overflow in the loss or in the data. "
        "torch.autograd.set_detect_anomaly(True) names the operation."
    )


class StepErrors:
    """Composes errors about steps. Every method but :meth:`edits` is a collective. ``late`` says that an
    error comes after further steps were launched."""

    def __init__(self, collectives: Collectives, checks: FiniteChecks) -> None:
        self._collectives, self._checks = collectives, checks

    def gradients(
        self,
        step: int,
        how: str,
        *,
        local: bool,
        mixed: bool = False,
        known: Collection[tuple[int, int]] | None = None,
        late: bool = False,
    ) -> FloatingPointError:
        """Return the error of gradients of ``step`` (from 1) that are not finite, ``local``: unreduced ones.

        ``how`` says what else is known of them, ``mixed`` that updates were made in backward that cannot be
        rolled back, ``known`` which parameters (unit and number) have them on this rank; None where the
        gradients are there to be looked at.
        """
        names = self._checks.names(local=local, found_before=known)
        outcome = (
            "Units with earlier gradients were updated during backward (offload.update_mode is "
            f"'in_backward'). {MIXTURE} With gradient_clipping such updates are rolled back."
            if mixed
            else f"No parameter or optimizer state was changed.{_since(late)}"
        )
        return FloatingPointError(
            f"rank {self._collectives.rank}: gradients of step {step}: expected finite values, got "
            f"NaN or infinity in {names.describe(names.gradients)}{how}. {outcome} {advice_on(names)}"
        )

    def overflow(self, local: bool) -> str:
        """Return which gradients overflowed, unreduced ones or not, and what to do."""
        names = self._checks.names(local=local)
        found = f"NaN or infinity in {names.describe(names.gradients)}."
        return f"{found} {advice_on(names)}" if names.weights else found

    def state(self, step: int, stepper: Stepper | None) -> NonFiniteState:
        """Return the error of weights or moments that are not finite after the update of ``step``."""
        names = self._checks.names(stepper)
        what, found = ("weights", names.weights) if names.weights else ("moments", names.moments)
        return NonFiniteState(
            f"rank {self._collectives.rank}: {what} after step {step}: expected finite values, got NaN or "
            f"infinity in {names.describe(found)}. The step was made, and its gradients were finite: the "
            "update overflowed or divided by zero, or the weights were not finite before it. Load the last "
            "checkpoint, and lower the learning rate or raise eps."
        )

    def edits(self, last: str, late: bool) -> RuntimeError:
        """Return the error of gradients that the ranks changed differently, as ``last`` says on this one."""
        return RuntimeError(
            "changes of param.grad: expected the same calls with the same numbers on all ranks, as each "
            f"changes its own part, got others on some (last on this one: {last or 'nothing'}). The "
            "gradients are lost. Call optimizer.zero_grad() and repeat the step with numbers that the ranks "
            f"agree on.{_since(late)}"
        )

    def raise_settings(self, step: int, settings: Hyperparameters, *, mixed: bool, late: bool) -> NoReturn:
        """Raise ``RuntimeError`` with the first of the ranks' ``settings`` that differed in ``step``."""
        outcome = MIXTURE if mixed else f"Nothing was updated.{_since(late)}"
        advice = f"{outcome} Give all ranks the same value. A scheduler needs a metric that they agree on."
        refuse_different_facts(self._collectives, list(settings.facts()), advice)
        raise RuntimeError(
            f"param groups of the optimizer in step {step}: expected the same settings on all ranks, got "
            f"others on some. {advice}"
        )


class DeviceErrors:
    """Takes what this rank's kernels recorded, and composes one error of what all ranks took. A device has
    one record for all engines on it. What an engine's updates record is its own (:meth:`claim`); what other
    kernels record, those of forward and backward, goes to the engine that looks first."""

    def __init__(self, collectives: Collectives, device: Device) -> None:
        self._collectives, self._device = collectives, device
        self._claimed: torch.Tensor | None = None
        if text := ops.device_error_text(self.poll_and_wait()):
            warnings.warn(
                f"{device.device}, before this model was prepared: {text}", RuntimeWarning, stacklevel=2
            )

    def claim(self) -> None:
        """After an update of this engine: assign the recorded error to this engine's next :meth:`poll`."""
        self._claimed = self.poll()

    def poll(self) -> torch.Tensor | None:
        """Return the first error since the last call, see :func:`zero_ext.ops.pop_device_error_`. It is on
        the device, which the host does not wait for. None on a CPU, where ops raise theirs."""
        if not self._device.is_accelerator:
            return None
        record = torch.empty(ops.DEVICE_ERROR_WORDS, dtype=torch.int64, device=self._device.device)
        ops.pop_device_error_(record)
        claimed, self._claimed = self._claimed, None
        return record if claimed is None else torch.where(claimed[:1] != 0, claimed, record)

    def poll_and_wait(self) -> torch.Tensor:
        """Return the first error since the last call, in host memory; zeros without one."""
        record = self.poll()
        if record is None:
            return torch.zeros(ops.DEVICE_ERROR_WORDS, dtype=torch.int64, device="cpu")
        return record.cpu()

    def refuse(self, own: torch.Tensor, step: int, late: bool = False) -> NoReturn:
        """Raise what kernels recorded before ``step`` (from 1), which is not made; a collective. ``own`` is
        what this rank took, in host memory. Raises :class:`CollectiveError` if an update did not run, so that
        state is a mixture, and ``RuntimeError`` for an error found elsewhere."""
        self.poll()  # steps that were launched since found the same again
        table = of_all_ranks(self._collectives, own, "errors of the devices")
        texts = [ops.device_error_text(row) for row in table]
        found = [f"device of rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        what = found[0] if found else "device: the error is on a rank that has another slice of the model."
        since = " Steps that were launched since changed nothing." if late else ""
        updates = tuple(f"{name.lower()}_" for name in OPTIMIZERS)  # the names of their ops begin so
        if any(text.startswith(updates) for text in texts):
            raise CollectiveError(
                f"step {step - 1}: {what} The step did not update all state. {MIXTURE}{since}"
            )
        raise RuntimeError(
            f"step {step}: {what} The step was not made, and changed nothing.{since} Fix the cause first."
        )


def _since(late: bool) -> str:
    return " Steps that were launched since changed nothing either." if late else ""
