"""Tensor parallelism: plans, styles, random numbers, cross entropy."""
