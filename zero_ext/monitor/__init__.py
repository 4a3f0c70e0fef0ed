"""Subscribers to an engine's events: a progress line for people, a CSV file for programs; memory of processes
and caps on it."""

from .csv_file import CsvFile
from .memory import resident_bytes
from .memory_cap import MemoryCap, capped
from .progress import ProgressLine

__all__ = ["CsvFile", "MemoryCap", "ProgressLine", "capped", "resident_bytes"]
