"""What the benchmarks share: model shapes, teams of ranks, statistics, memory readings, reports."""
