"""The parts of the demonstration of compressed communication: `python examples/demo_compressed.py`."""
