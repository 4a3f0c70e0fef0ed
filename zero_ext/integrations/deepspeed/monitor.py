"""``deepspeed.monitor``: named values by step, written from rank 0 as the JSON's sections ask."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.integrations.deepspeed.unsupported import names_of
from zero_ext.monitor.dashboards import require

_Event = tuple[str, Any, int]
_JOB = "DeepSpeedJobName"


class Monitor:
    """A writer of events (name, value, step). ``enabled`` is what the section says."""

    def __init__(self, section: Mapping[str, Any] | object) -> None:
        self._section = _as_mapping(section)
        self.enabled = bool(self._section.get("enabled", False))

    def write_events(self, event_list: Iterable[_Event]) -> None:
        """Write the events, on rank 0, if enabled."""
        if self.enabled and _rank() == 0:
            self._write(list(event_list))

    def _write(self, events: list[_Event]) -> None:
        raise zero_ext_bug("a monitor without a file")

    def _folder(self, default: str) -> Path:
        root = Path(self._section.get("output_path") or Path.home() / default)
        return root / str(self._section.get("job_name") or _JOB)


class csvMonitor(Monitor):
    """A CSV file for each name, with columns step and name, under ``output_path/job_name``."""

    def _write(self, events: list[_Event]) -> None:
        folder = self._folder("csv_monitor")
        folder.mkdir(parents=True, exist_ok=True)
        for name, value, step in events:
            path = folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            fresh = not path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if fresh:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([step, float(value)])


class TensorBoardMonitor(Monitor):
    """Scalars for TensorBoard under ``output_path/job_name``."""

    _writer: Any = None

    def _write(self, events: list[_Event]) -> None:
        if self._writer is None:
            require("tensorboard", "TensorBoard")
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(self._folder("tensorboard")))
        for name, value, step in events:
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()


class WandbMonitor(Monitor):
    """Scalars for Weights & Biases, with the section's project, group and team."""

    _run: Any = None

    def _write(self, events: list[_Event]) -> None:
        if self._run is None:
            require("wandb", "Weights & Biases")
            import wandb

            section = self._section
            self._run = wandb.init(
                project=section.get("project"), group=section.get("group"), entity=section.get("team")
            )
        for name, value, step in events:
            self._run.log({name: float(value)}, step=step)


class MonitorMaster:
    """All of a JSON's monitors, its sections ``csv_monitor``, ``tensorboard`` and ``wandb``."""

    def __init__(self, monitor_config: Mapping[str, Any] | object) -> None:
        config = _as_mapping(monitor_config)
        self.csv_monitor = csvMonitor(config.get("csv_monitor") or {})
        self.tb_monitor = TensorBoardMonitor(config.get("tensorboard") or {})
        self.wandb_monitor = WandbMonitor(config.get("wandb") or {})
        self._all: tuple[Monitor, ...] = (self.csv_monitor, self.tb_monitor, self.wandb_monitor)

    @property
    def enabled(self) -> bool:
        """Return whether any of them is."""
        return any(monitor.enabled for monitor in self._all)

    def write_events(self, event_list: Iterable[_Event]) -> None:
        """Write the events with each that is enabled."""
        events = list(event_list)
        for monitor in self._all:
            monitor.write_events(events)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _as_mapping(section: object) -> Mapping[str, Any]:
    if isinstance(section, Mapping):
        return section
    found = getattr(section, "values", None)
    return found if isinstance(found, Mapping) else dict(vars(section))


__getattr__ = names_of("deepspeed.monitor")
