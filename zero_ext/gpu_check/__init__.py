"""The check of a GPU machine: builds, tests and benchmarks, one step after another, and writes a report."""
