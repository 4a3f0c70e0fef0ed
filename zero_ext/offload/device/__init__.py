"""The training device and the host memory next to it: copies, side streams, pinned buffers, NUMA."""
