"""From the configuration's ``monitor`` section to a monitor of a prepared model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from zero_ext.config import MonitorConfig, ZeroConfig
from zero_ext.config.events import Subscriber
from zero_ext.monitor.metric_row import Source, Writer
from zero_ext.monitor.optional_deps import require
from zero_ext.monitor.run_monitor import Monitor
from zero_ext.monitor.sources.engine_bytes import EngineBytes
from zero_ext.monitor.sources.flops import Flops
from zero_ext.monitor.sources.step_times import StepTimes
from zero_ext.monitor.trace import Trace
from zero_ext.monitor.writers.comms_log import CommsLog
from zero_ext.monitor.writers.csv_file import CsvFile
from zero_ext.monitor.writers.json_lines import JsonLines
from zero_ext.monitor.writers.progress import ProgressLine, on_a_terminal
from zero_ext.monitor.writers.step_log import StepLog
from zero_ext.monitor.writers.tensorboard import TensorBoard
from zero_ext.monitor.writers.wandb_run import WandbRun
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.engine import Engine
from zero_ext.zero.units.collective_errors import raise_on_all_ranks

_NOTHING = MonitorConfig(jsonl=False, timing=False, memory=False)


def check_packages(policy: MonitorConfig | None) -> None:
    """Raise ``ModuleNotFoundError`` with the install line for a package that ``policy`` needs and that is
    not there. On every rank alike, before anything else happens."""
    if policy is None:
        return
    if policy.tensorboard:
        require("tensorboard", "monitor.tensorboard")
    if policy.wandb is not None:
        require("wandb", "monitor.wandb")
    if policy.trace is not None and policy.trace.plot:
        require("matplotlib", "monitor.trace.plot")


def attach(
    model: nn.Module, policy: MonitorConfig | None = None, *, steps_per_print: int | None = None
) -> Monitor | None:
    """Open what `policy` asks for on this rank and subscribe it to the engine of `model`; a collective.

    Rank 0 writes rows, lines and the progress bar, every rank its trace. `prepare` and `initialize` call
    it with the configuration's `monitor` section. The monitor closes itself when the model goes and at
    exit.

    Args:
        model: a prepared model.
        policy: what to write; default nothing but `steps_per_print`.
        steps_per_print: steps from line to line on stderr; default no lines.

    Returns:
        The monitor; None on ranks with nothing to do.

    Raises:
        ModuleNotFoundError: a package is missing, with the install line.
        RuntimeError: something cannot be opened on some rank, on all of them.
        ValueError: the model has a monitor already.
    """
    engine = engine_of(model)
    check_packages(policy)
    if monitor_of(model) is not None:
        raise ValueError(
            "model: expected no open monitor, got a model that has one. Close it first: "
            "monitor_of(model).close()."
        )
    return raise_on_all_ranks(
        engine.collectives,
        lambda: _open(engine, policy or _NOTHING, steps_per_print),
        "opening the monitors",
        "Training did not begin.",
    )


def monitor_of(model: nn.Module) -> Monitor | None:
    """Return the monitor that `prepare`, `initialize` or `attach` gave to `model` on this rank.

    Args:
        model: a prepared model.

    Returns:
        The monitor; None if there is none.
    """
    return next((each for each in engine_of(model).subscribers if isinstance(each, Monitor)), None)


def subscribe(model: nn.Module, *subscribers: Subscriber) -> None:
    """Publish the events of a prepared model on this rank to `subscribers` from now on.

    Args:
        model: a prepared model.
        *subscribers: called with each event.

    Examples:
        >>> from zero_ext.monitor import CsvFile, subscribe
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3})
        >>> with CsvFile("steps.csv") as csv:
        ...     subscribe(model, csv)
        ...     model(torch.ones(2, 4)).sum().backward()
        ...     optimizer.step()
        >>> csv.path.read_text().splitlines()[0]
        'step,loss,grad_norm,lr,skipped,loss_scale,seconds'
    """
    engine = engine_of(model)
    for subscriber in subscribers:
        engine.subscribe(subscriber)


def _open(engine: Engine, policy: MonitorConfig, steps_per_print: int | None) -> Monitor | None:
    folder = Path(policy.output_dir)
    subscribers: list[Subscriber] = []
    writers: list[Writer] = []
    sources: list[Source] = []
    if engine.rank == 0:
        if policy.timing:
            sources.append(StepTimes())
        if policy.memory:
            sources.append(EngineBytes(engine))
        if policy.flops is not None:
            sources.append(Flops(engine, policy.flops.peak, policy.flops.per_step))
        if steps_per_print is not None:
            subscribers.append(StepLog(steps_per_print, sources))
        if policy.progress is not None and on_a_terminal():
            subscribers.append(
                ProgressLine(policy.progress.steps, tokens_per_step=policy.progress.tokens_per_step)
            )
        if policy.comms:
            subscribers.append(CommsLog(_path_or(policy.comms, folder / "comms.jsonl")))
        writers = _writers(policy, folder, engine.config)
    if policy.trace is not None:
        subscribers.append(Trace(engine, folder, policy.trace))
    if not writers and not subscribers:
        return None
    return Monitor(engine, writers, sources, subscribers, policy.log_interval)


def _writers(policy: MonitorConfig, folder: Path, config: ZeroConfig) -> list[Writer]:
    writers: list[Writer] = []
    if policy.jsonl:
        writers.append(JsonLines(_path_or(policy.jsonl, folder / "steps.jsonl")))
    if policy.csv:
        writers.append(CsvFile(_path_or(policy.csv, folder / "steps.csv")))
    if policy.tensorboard:
        writers.append(TensorBoard(_path_or(policy.tensorboard, folder)))
    if policy.wandb is not None:
        settings: Mapping[str, Any] = config.to_mapping()
        writers.append(WandbRun(folder, policy.wandb, settings))
    return writers


def _path_or(wanted: bool | str, otherwise: Path) -> Path:
    return Path(wanted) if isinstance(wanted, str) else otherwise
