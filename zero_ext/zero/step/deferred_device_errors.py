"""Errors that kernels record on the ranks' devices, raised on all ranks."""

from __future__ import annotations

import warnings
from typing import NoReturn

import torch

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.offload import Device
from zero_ext.zero.step.update_schedule import MIXTURE
from zero_ext.zero.units.collective_errors import CollectiveError

_UPDATES = ("adam_", "lamb_", "lion_")  # what the names of optimizers' ops begin with


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

        It is on the device, which the host does not wait for. None on a CPU, whose ops raise theirs.
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
        what = found[0] if found else "The error is on a rank that holds another part of the model."
        since = " Steps that were launched since changed nothing." if late else ""
        if any(text.startswith(_UPDATES) for text in texts):
            raise CollectiveError(f"{what} Step {step - 1} did not update all state. {MIXTURE}{since}")
        raise RuntimeError(f"{what} Step {step} was not made, and changed nothing.{since}")
