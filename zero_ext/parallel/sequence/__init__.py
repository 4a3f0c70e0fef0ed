"""Sequence parallelism (Ulysses): batches sharded by sequence, attention by heads."""
