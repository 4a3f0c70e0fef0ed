"""The parts of the demonstration of the tiers; `python examples/demo_offload.py` runs them."""
