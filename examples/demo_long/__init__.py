"""The parts of the demonstration of long sequences; `python examples/demo_long.py` runs them."""
