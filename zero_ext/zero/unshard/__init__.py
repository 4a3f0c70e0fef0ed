"""When units are gathered and released: forward hooks, the gather order, prefetching, the backward pass."""
