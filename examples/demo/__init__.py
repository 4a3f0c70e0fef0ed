"""Modules of the main demonstration, which `python examples/demo.py` runs."""
