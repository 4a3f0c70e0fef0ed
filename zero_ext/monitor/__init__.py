"""Watching a run: rows of a step's values for people and programs, times, bytes, operations, timelines."""

from zero_ext.monitor.dashboards import TensorBoard, WandbRun
from zero_ext.monitor.file_writers import CommsLog, CsvFile, JsonLines
from zero_ext.monitor.flops import Flops, count_flops, peak_of, transformer_flops
from zero_ext.monitor.process_memory import MemoryCap, capped, file_bytes, resident_bytes
from zero_ext.monitor.progress import ProgressLine, StepLog
from zero_ext.monitor.run_monitor import Monitor, attach, monitor_of, subscribe
from zero_ext.monitor.sources import EngineBytes, StepTimes
from zero_ext.monitor.trace import Trace

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
