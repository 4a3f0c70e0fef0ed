"""The sections of a ZeroConfig."""
