"""Files under a checkpoint: safe opening, one seam for every change to the disk, raw buffers, I/O threads."""
