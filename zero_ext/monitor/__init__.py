"""Watching a run: rows of a step's values for people and programs, times, bytes, operations, timelines."""

from .attach import attach, monitor_of, subscribe
from .comms_log import CommsLog
from .csv_file import CsvFile
from .engine_bytes import EngineBytes
from .flops import Flops, count_flops, peak_of, transformer_flops
from .json_lines import JsonLines
from .memory import file_bytes, resident_bytes
from .memory_cap import MemoryCap, capped
from .monitor import Monitor
from .progress import ProgressLine
from .step_log import StepLog
from .step_times import StepTimes
from .tensorboard import TensorBoard
from .trace import Trace
from .wandb_run import WandbRun

__all__ = [
    "CommsLog",
    "CsvFile",
    "EngineBytes",
    "Flops",
    "JsonLines",
    "MemoryCap",
    "Monitor",
    "ProgressLine",
    "StepLog",
    "StepTimes",
    "TensorBoard",
    "Trace",
    "WandbRun",
    "attach",
    "capped",
    "count_flops",
    "file_bytes",
    "monitor_of",
    "peak_of",
    "resident_bytes",
    "subscribe",
    "transformer_flops",
]
