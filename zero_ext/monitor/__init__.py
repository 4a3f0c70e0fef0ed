"""Subscribers to an engine's events: a progress line for people, a CSV file for programs."""

from .csv_file import CsvFile
from .memory import resident_bytes
from .progress import ProgressLine

__all__ = ["CsvFile", "ProgressLine", "resident_bytes"]
