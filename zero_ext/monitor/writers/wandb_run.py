"""A run of Weights & Biases, by the package wandb."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_ext.config import WandbConfig
from zero_ext.monitor.metric_row import Row, scalars
from zero_ext.monitor.optional_deps import require


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
        self._run = wandb.init(
            project=policy.project,
            group=policy.group,
            entity=policy.entity,
            name=policy.name,
            mode=policy.mode,
            dir=str(folder),
            config=dict(config or {}),
        )
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
