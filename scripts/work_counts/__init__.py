"""Counts of the work on hot paths, compared with a committed baseline."""
