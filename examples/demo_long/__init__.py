"""Modules of the long sequence demonstration, which `python examples/demo_long.py` runs."""
