"""Python face of the optimizer ops."""
