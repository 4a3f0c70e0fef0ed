"""Records of a run while it trains: none, unless the section is there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from zero_ext.config.schema.base_section import ConfigSection, KeyProblem, Positive
from zero_ext.config.schema.config_errors import wrong_value


def _path_or_flag(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return value
    raise KeyProblem("", wrong_value("true, false or a path", value))


Text = Annotated[str, Field(min_length=1)]
PathOrFlag = Annotated[bool | str, PlainValidator(_path_or_flag)]


class WandbConfig(ConfigSection):
    """A run of Weights & Biases, package wandb.

    Attributes:
        project: as `wandb.init` takes it; null leaves it to wandb.
        group: as `wandb.init` takes it; null leaves it to wandb.
        entity: as `wandb.init` takes it; null leaves it to wandb.
        name: as `wandb.init` takes it; null leaves it to wandb.
        mode: "offline" writes to the folder only, for `wandb sync` later; null leaves it to wandb and its
            environment variable WANDB_MODE.
    """

    project: Text | None = None
    group: Text | None = None
    entity: Text | None = None
    name: Text | None = None
    mode: Literal["online", "offline", "disabled"] | None = None


class ProgressConfig(ConfigSection):
    """A progress bar on rank 0's terminal; none where stderr is no terminal.

    Attributes:
        steps: steps of the whole run.
        tokens_per_step: tokens that all ranks together see in a step; null shows steps per second.
    """

    steps: Positive
    tokens_per_step: Positive | None = None


class FlopsConfig(ConfigSection):
    """Floating-point operations of the model, and which part of the device's peak they are (MFU).

    Attributes:
        peak: operations per second that one device can do, such as 989e12; null takes a table by the device's
            name, and leaves MFU out where it is not there.
        per_step: operations of one step on one rank; null measures the first training forward with torch's
            flop counter and adds twice as many for backward (fewer where parameters are frozen).
    """

    peak: Annotated[float, Field(gt=0)] | None = None
    per_step: Annotated[float, Field(gt=0)] | None = None


class TraceConfig(ConfigSection):
    """Steps as a timeline that Perfetto and chrome://tracing read, one file per rank.

    It has phases, waits, gathered units and memory by tier.

    Attributes:
        first_step: the first step that is recorded.
        steps: number of steps recorded.
        plot: draw the memory timeline as a PNG too, with matplotlib.
    """

    first_step: Positive = 2
    steps: Positive = 5
    plot: bool = False


class MonitorConfig(ConfigSection):
    """Files and lines that rank 0 (traces: every rank) writes while training.

    Attributes:
        output_dir: where files go that have no path of their own.
        log_interval: steps between the rows of jsonl, csv, tensorboard and wandb.
        jsonl: one JSON object a row; true for steps.jsonl in the folder, or a path.
        csv: one CSV row each; true for steps.csv in the folder, or a path.
        tensorboard: event files, package tensorboard; true for the folder itself, or another folder.
        wandb: a run of Weights & Biases.
        timing: rows, and the line of `steps_per_print`, show how a step's time divides.
        memory: they show the bytes in each tier and of the process.
        comms: bytes sent and time waited by kind of collective and step; true for comms.jsonl in the folder,
            or a path.
        flops: rows show operations per second and MFU.
        trace: a timeline of some steps.
        progress: a progress bar.
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
