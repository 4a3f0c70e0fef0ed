"""Gathering and releasing units: forward hooks, the gather order, prefetching, the backward pass."""
