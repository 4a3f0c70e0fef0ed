"""Watching a run: rows of a step's values for people and programs, times, bytes, operations, timelines."""

from zero_ext.monitor.sources.engine_bytes import EngineBytes
from zero_ext.monitor.sources.flops import Flops, count_flops, peak_of, transformer_flops
from zero_ext.monitor.sources.process_memory import file_bytes, resident_bytes
from zero_ext.monitor.sources.step_times import StepTimes
from zero_ext.monitor.writers.comms_log import CommsLog
from zero_ext.monitor.writers.csv_file import CsvFile
from zero_ext.monitor.writers.json_lines import JsonLines
from zero_ext.monitor.writers.progress import ProgressLine
from zero_ext.monitor.writers.step_log import StepLog
from zero_ext.monitor.writers.tensorboard import TensorBoard
from zero_ext.monitor.writers.wandb_run import WandbRun

from .attach import attach, monitor_of, subscribe
from .memory_cap import MemoryCap, capped
from .run_monitor import Monitor
from .trace import Trace

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
