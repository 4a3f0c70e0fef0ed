"""Writers by optional packages (TensorBoard, Weights & Biases), and the error for a missing package."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_ext.config import WandbConfig
from zero_ext.monitor.sources import Row

_FLUSH_SECONDS = 10


def require(package: str, purpose: str) -> None:
    """Raise ``ModuleNotFoundError`` with the install line unless ``package`` can be imported."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{purpose}: expected the package '{package}', which is not installed. Install it with "
            f"pip install {package}, or leave it out of the monitor section of the configuration.",
            name=package,
        )


def scalars(row: Row) -> dict[str, float]:
    """Return the known values but "step" as single numbers, as TensorBoard and W&B want them: ``lr`` of
    several param groups becomes ``lr/0``, ``lr/1`` and so on.
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, tuple):
            several = len(value) > 1
            found.update({f"{name}/{index}" if several else name: one for index, one in enumerate(value)})
        elif value is not None and name != "step":
            found[name] = value
    return found


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
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Write what is left and close the files."""
        self._writer.close()


class WandbRun:
    """Log every known value of a row under its name to a run of Weights & Biases, by "step".

    Args:
        folder: files go to its subfolder wandb.
        policy: project, group, entity, name and mode of the run.
        config: shown with the run.

    Raises:
        ModuleNotFoundError: the package wandb is missing. Else as `wandb.init`.
    """

    def __init__(
        self, folder: str | Path, policy: WandbConfig, config: Mapping[str, Any] | None = None
    ) -> None:
        require("wandb", "Weights & Biases")
        import wandb

        Path(folder).mkdir(parents=True, exist_ok=True)
        # The section's keys are named as the arguments.
        self._run = wandb.init(dir=str(folder), config=dict(config or {}), **policy.model_dump())
        # A run that is resumed from an earlier checkpoint goes back in steps, which wandb's own may not.
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        """Log the values of a step.

        Args:
            row: values by name; None means unknown.
        """
        self._run.log({"step": row["step"], **scalars(row)})

    def close(self) -> None:
        """End the run."""
        self._run.finish()
