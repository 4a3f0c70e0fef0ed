"""Reports under DeepSpeed's names: its log, memory in use, monitors of values by step, and its memory
estimators with the bytes that this engine keeps (``zero_ext.plan``)."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.monitor.dashboards import require
from zero_ext.monitor.process_memory import resident_bytes
from zero_ext.plan import TrainingState, model_state_bytes

_Event = tuple[str, Any, int]
_JOB = "DeepSpeedJobName"
_GIB = 2**30
logger = logging.getLogger("zero_ext")
_LOGGED: set[str] = set()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on these ranks; None or -1 among them for all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` as :func:`log_dist` does, the first time that this process asks for it."""
    if message not in _LOGGED:
        _LOGGED.add(message)
        log_dist(message, ranks, level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level by its name. ``ValueError`` for an unknown one."""
    (custom_logger or logger).setLevel(log_level_str.upper())


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """Log the resident memory of the process, if ``force``."""
    if force:
        log_dist(f"{message}: {resident_bytes() / _GIB:.2f} GiB resident", ranks)


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


class _Option(NamedTuple):
    """A placement to print: ``offload`` the optimizer to host memory, ``params`` too."""

    offload: bool
    params: bool

    @property
    def words(self) -> str:
        optimizer = "offload_optimizer=cpu " if self.offload else "offload_optimizer=none"
        return f"offload_param={'cpu ' if self.params else 'none'}, {optimizer}"


_STAGE_2 = (_Option(True, False), _Option(False, False))
_STAGE_3 = (_Option(True, True), *_STAGE_2)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int, int]:
    """Return bytes of a host, of a GPU, and of the largest layer gathered with its gradient; 16-bit training
    with Adam.

    Bytes of a host and of a GPU are model states times ``additional_buffer_factor``; a GPU's hold the
    largest layer too. Without ``zero_init`` every rank builds the whole model in host memory first.
    """
    layer = 4 * largest_layer_params
    option = _Option(cpu_offload, cpu_offload_params)
    host, device = _needs(3, total_params, num_gpus_per_node, num_nodes, option)
    if not zero_init:
        host = max(host, 4 * total_params * num_gpus_per_node)
    return int(host * additional_buffer_factor), int(device * additional_buffer_factor) + layer, layer


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int]:
    """Return bytes of a host and of a GPU in stage 2; 16-bit training with Adam."""
    host, device = _needs(2, total_params, num_gpus_per_node, num_nodes, _Option(cpu_offload, False))
    host = max(host, 4 * total_params * num_gpus_per_node)
    return int(host * additional_buffer_factor), int(device * additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print stage 2's needs of ``model`` for every placement."""
    total, _ = _sizes(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print stage 2's needs of a model of ``total_params`` parameters for every placement."""
    sizes = (total_params, num_gpus_per_node, num_nodes)
    rows = [
        (
            *estimate_zero2_model_states_mem_needs(*sizes, each.offload, additional_buffer_factor),
            each.words.partition(", ")[2],
        )
        for each in _STAGE_2
    ]
    _print(total_params, 0, num_nodes, num_gpus_per_node, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print stage 3's needs of ``model`` for every placement."""
    total, largest = _sizes(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print stage 3's needs of a model of these sizes for every placement."""
    sizes = (total_params, largest_layer_params, num_gpus_per_node, num_nodes)
    rows = [
        (
            *estimate_zero3_model_states_mem_needs(*sizes, *each, built, additional_buffer_factor)[:2],
            f"{each.words}, zero_init={int(built)}",
        )
        for each in _STAGE_3
        for built in (True, False)
    ]
    _print(total_params, largest_layer_params, num_nodes, num_gpus_per_node, rows)


def _needs(stage: int, total: int, gpus: int, nodes: int, option: _Option) -> tuple[int, int]:
    """Return bytes of model states on a host and on one of its GPUs."""
    rank = model_state_bytes(stage, gpus * nodes, TrainingState(trainable={"bf16": total}))
    far = 0
    if option.offload:
        # With the optimizer gradients go to the host as well.
        far += rank.optimizer + rank.grads
    if option.offload and option.params:
        far += rank.params
    return far * gpus, rank.total - far


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Parameters of the model, and of the module that owns most."""
    owned = (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(p.numel() for p in model.parameters()), max(owned, default=0)


def _print(total: int, largest: int, nodes: int, gpus: int, rows: list[tuple[int, int, str]]) -> None:
    layer = f", largest layer {largest / 1e6:,.1f}M" if largest else ""
    print(f"Model states of {total / 1e6:,.1f}M parameters{layer} on {nodes} node(s) of {gpus} GPU(s):")
    print("  per CPU  |  per GPU  |  Options")
    for host, device, words in rows:
        print(f"  {host / _GIB:6.2f}GB | {device / _GIB:7.2f}GB | {words}")
