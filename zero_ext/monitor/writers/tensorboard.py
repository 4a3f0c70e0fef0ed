"""TensorBoard's event files, by the packages torch and tensorboard."""

from __future__ import annotations

from pathlib import Path

from zero_ext.monitor.metric_row import Row, scalars
from zero_ext.monitor.optional_deps import require

_FLUSH_SECONDS = 10


class TensorBoard:
    """Write every known value of a row as a scalar of its name, by step.

    A thread of the package writes event files every few seconds and at close.

    Args:
        folder: of the event files.

    Raises:
        ModuleNotFoundError: the package tensorboard is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        require("tensorboard", "TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=_FLUSH_SECONDS)

    def write(self, row: Row) -> None:
        """Write the values of a step.

        Args:
            row: values by name; None means unknown.
        """
        step = row["step"]
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left and close the files."""
        self._writer.close()
