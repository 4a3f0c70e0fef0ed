"""Storage on NVMe: the tensor store, its run directory, and shards and optimizer state in it."""
