"""Records of a run while it trains. There are none without this section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from zero_ext.config.base_section import ConfigSection, KeyProblem, Positive
from zero_ext.config.config_errors import wrong_value


def _path_or_flag(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return value
    raise KeyProblem("", wrong_value("true, false or a path", value))


Text = Annotated[str, Field(min_length=1)]
PathOrFlag = Annotated[bool | str, PlainValidator(_path_or_flag)]


class WandbConfig(ConfigSection):
    """A run of Weights & Biases, package wandb.

    Attributes:
        project: project of the run, as in `wandb.init`. `null` leaves the choice to wandb.
        group: group of the run, as in `wandb.init`. `null` leaves the choice to wandb.
        entity: entity of the run, as in `wandb.init`. `null` leaves the choice to wandb.
        name: name of the run, as in `wandb.init`. `null` leaves the choice to wandb.
        mode: mode of the run, as in `wandb.init`. "offline" writes only to the folder, for a later `wandb
            sync`. `null` leaves the choice to wandb and its environment variable WANDB_MODE.
    """

    project: Text | None = None
    group: Text | None = None
    entity: Text | None = None
    name: Text | None = None
    mode: Literal["online", "offline", "disabled"] | None = None


class ProgressConfig(ConfigSection):
    """A progress bar on the terminal of rank 0. There is none if stderr is not a terminal.

    Attributes:
        steps: number of steps of the full run.
        tokens_per_step: number of tokens per step over all ranks. `null` shows steps per second.
    """

    steps: Positive
    tokens_per_step: Positive | None = None


class FlopsConfig(ConfigSection):
    """Floating-point operations of the model, and their rate as a fraction of the device's peak (MFU).

    Attributes:
        peak: peak rate of one device in floating-point operations per second, such as 989e12. `null` looks up
            the name of the device in a table. MFU is left out if the table does not list the device.
        per_step: number of floating-point operations per step on one rank. `null` counts those of the first
            training forward with torch's flop counter and adds twice as many for backward (fewer if
            parameters are frozen).
    """

    peak: Annotated[float, Field(gt=0)] | None = None
    per_step: Annotated[float, Field(gt=0)] | None = None


class TraceConfig(ConfigSection):
    """Steps as a timeline that Perfetto and chrome://tracing read, one file per rank.

    The timeline shows phases, waits, gathered units and memory by tier.

    Attributes:
        first_step: first step that is recorded.
        steps: number of steps that are recorded.
        plot: whether to also draw the memory timeline as a PNG. It requires package matplotlib.
    """

    first_step: Positive = 2
    steps: Positive = 5
    plot: bool = False


class MonitorConfig(ConfigSection):
    """Files and lines that rank 0 writes while training. Every rank writes traces.

    Attributes:
        output_dir: folder of the files that have no path of their own.
        log_interval: number of steps per row of jsonl, csv, tensorboard and wandb.
        jsonl: whether to write one JSON object per row to steps.jsonl in the folder, or the path of another
            file.
        csv: whether to write one line per row to steps.csv in the folder, or the path of another file.
        tensorboard: whether to write event files to the folder, or the path of another folder. It requires
            package tensorboard.
        wandb: run of Weights & Biases.
        timing: whether rows and the line of `steps_per_print` show how the time of a step divides.
        memory: whether rows and the line of `steps_per_print` show the bytes in each tier and of the process.
        comms: whether to write bytes sent and seconds waited, by kind of collective and step, to comms.jsonl
            in the folder, or the path of another file.
        flops: operations per second and MFU in the rows.
        trace: timeline of some steps.
        progress: progress bar.
    """

    output_dir: Text = "zero_ext_runs"
    log_interval: Positive = 1
    jsonl: PathOrFlag = True
    csv: PathOrFlag = False
    tensorboard: PathOrFlag = False
    wandb: WandbConfig | None = None
    timing: bool = True
    memory: bool = True
    comms: PathOrFlag = False
    flops: FlopsConfig | None = None
    trace: TraceConfig | None = None
    progress: ProgressConfig | None = None
