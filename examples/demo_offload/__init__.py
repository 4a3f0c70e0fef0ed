"""Modules of the offload demonstration, which `python examples/demo_offload.py` runs."""
