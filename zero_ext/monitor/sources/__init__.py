"""Where metrics come from: memory, traffic, step times, floating-point operations."""
