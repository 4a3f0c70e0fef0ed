"""Benchmarks on one GPU. `python -m zero_ext.gpu_check` runs them all; each is a program of its own."""
