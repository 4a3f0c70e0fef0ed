"""Subscribers to an engine's events: a progress line for people, a CSV file for programs; memory of processes
and caps on it."""

from .csv_file import CsvFile
from .memory import file_bytes, resident_bytes
from .memory_cap import MemoryCap, capped
from .progress import ProgressLine

__all__ = ["CsvFile", "MemoryCap", "ProgressLine", "capped", "file_bytes", "resident_bytes"]
