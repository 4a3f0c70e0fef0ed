"""The parts of the demonstration; `python examples/demo.py` runs them."""
