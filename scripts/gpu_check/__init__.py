"""The check of a GPU machine: builds, tests and measures, one step after another, and writes a report.

Nothing here imports zero_ext, whose own packages may be missing on the machine: Python and torch are enough.
"""
