"""Limits on how much of a step is under way simultaneously, for the engine and for plans."""

REDUCTIONS_IN_FLIGHT = 2
SHARD_TRANSFERS_IN_FLIGHT = 2  # of units whose reduction has ended, what their homes still move
READS_AHEAD = 2  # pieces of gradients on NVMe that others are added to
WRITES_BEHIND = 2
