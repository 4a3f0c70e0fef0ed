"""Benchmarks on one GPU. `python -m scripts.gpu_check` runs them all; each is a program of its own."""
