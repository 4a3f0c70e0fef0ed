"""Memory that the engine reuses: the pool, the plan of its extents, and the step replayed to size it."""
