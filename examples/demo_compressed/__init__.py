"""Modules of the compressed communication demonstration, which `python examples/demo_compressed.py` runs."""
