"""A run of Weights & Biases, by the package wandb."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_ext.config import WandbConfig
from zero_ext.monitor.metric_row import Row, scalars
from zero_ext.monitor.optional_deps import require


class WandbRun:
    """Logs every known value of a row under its name, by "step"; ``config`` is shown with the run.

    Files go to ``folder``/wandb. Raises ``ModuleNotFoundError`` without the package wandb, and what
    `wandb.init` raises.
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
        """See :class:`Writer`."""
        self._run.log({"step": row["step"], **scalars(row)})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
