"""Sources of metrics: memory, traffic, step times, floating-point operations."""
