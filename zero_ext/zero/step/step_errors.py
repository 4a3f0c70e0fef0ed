"""The errors of a step that is not made, or that left NaN or infinity: alike on all ranks, with names."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import NoReturn

import torch

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.offload import Device
from zero_ext.optim import Stepper
from zero_ext.zero.construction.rank_consistency import Hyperparameters, refuse_different_facts
from zero_ext.zero.step.finite_checks import FiniteChecks, NonFiniteState, advice_on
from zero_ext.zero.step.update_schedule import MIXTURE
from zero_ext.zero.units.collective_errors import CollectiveError

_UPDATES = ("adam_", "lamb_", "lion_")  # what the names of optimizers' ops begin with


class StepErrors:
    """Composes errors about steps. Every method but :meth:`edits` is a collective.

    ``late`` says that an error comes after further steps were launched.
    """

    def __init__(self, collectives: Collectives, checks: FiniteChecks) -> None:
        self._collectives = collectives
        self._checks = checks

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
        """Return the error of gradients that are not finite.

        Args:
            step: their step, from 1.
            how: what else is known of them.
            local: whether they are unreduced.
            mixed: whether updates were made in backward that cannot be rolled back.
            known: unit and number of the parameters that have them on this rank; None where the gradients
                are there to be looked at.
            late: see above.
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
            "gradients "
            "are lost. Call optimizer.zero_grad() and repeat the step with numbers that the ranks agree "
            f"on.{_since(late)}"
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
    """Takes what this rank's kernels recorded, and composes one error of what all ranks took.

    A device has one record for all engines on it. What an engine's updates record is its own (:meth:`claim`);
    what other kernels record, those of forward and backward, goes to the engine that looks first.
    """

    def __init__(self, collectives: Collectives, device: Device) -> None:
        self._collectives = collectives
        self._device = device
        self._claimed: torch.Tensor | None = None
        if text := ops.device_error_text(self.poll_and_wait()):
            warnings.warn(
                f"{device.device}, before this model was prepared: {text}", RuntimeWarning, stacklevel=2
            )

    def claim(self) -> None:
        """After an update of this engine: assign the recorded error to this engine's next :meth:`poll`."""
        self._claimed = self.poll()

    def poll(self) -> torch.Tensor | None:
        """Return the first error since the last call, see :func:`zero_ext.ops.pop_device_error_`.

        It is on the device, which the host does not wait for. None on a CPU, where ops raise theirs.
        """
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
        """Raise what kernels recorded before ``step``, which is not made; a collective.

        Args:
            own: what this rank took, in host memory.
            step: from 1.
            late: whether further steps were launched since.

        Raises:
            CollectiveError: An update did not run where the error was found. State is a mixture.
            RuntimeError: The error was found elsewhere.
        """
        self.poll()  # steps that were launched since found the same again
        ranks = self._collectives.world_size
        table = torch.zeros(ranks, ops.DEVICE_ERROR_WORDS, dtype=torch.int64, device="cpu")
        mine = table[self._collectives.rank]
        mine.copy_(own)
        self._collectives.gather(table.view(-1), mine, "scalars", "errors of the devices").wait()
        texts = [ops.device_error_text(row) for row in table]
        found = [f"device of rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        what = found[0] if found else "device: the error is on a rank that has another slice of the model."
        since = " Steps that were launched since changed nothing." if late else ""
        if any(text.startswith(_UPDATES) for text in texts):
            raise CollectiveError(
                f"step {step - 1}: {what} The step did not update all state. {MIXTURE}{since}"
            )
        raise RuntimeError(
            f"step {step}: {what} The step was not made, and changed nothing.{since} Fix the cause first."
        )


def _since(late: bool) -> str:
    return " Steps that were launched since changed nothing either." if late else ""
