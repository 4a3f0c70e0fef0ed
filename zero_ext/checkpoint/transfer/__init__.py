"""Between memory and files: chunk readers, stream writers, shard files, the plan of a read."""
