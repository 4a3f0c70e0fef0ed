"""TensorBoard's event files, by the packages torch and tensorboard."""

from __future__ import annotations

from pathlib import Path

from zero_ext.monitor.metric_row import Row, scalars
from zero_ext.monitor.optional_deps import require

_FLUSH_SECONDS = 10


class TensorBoard:
    """Writes every known value of a row as a scalar of its name, by step, to event files in ``folder``.

    A thread of the package writes them out every few seconds and at close. Raises ``ModuleNotFoundError``
    without the package tensorboard.
    """

    def __init__(self, folder: str | Path) -> None:
        require("tensorboard", "TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=_FLUSH_SECONDS)

    def write(self, row: Row) -> None:
        """See :class:`Writer`."""
        step = row["step"]
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what is left."""
        self._writer.close()
