"""Modules of the 3D parallelism demonstration, which `python examples/demo_3d.py` runs."""
