"""How much of a step may be under way at once: what the engine does, and what plans count on."""

REDUCTIONS_IN_FLIGHT = 2
SHARD_TRANSFERS_IN_FLIGHT = 2  # of units whose reduction has ended, what their homes still move
READS_AHEAD = 2  # pieces of gradients on NVMe that others are added to
WRITES_BEHIND = 2
