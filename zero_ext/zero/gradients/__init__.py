"""Gradients: accumulated, reduced, stored as shards until the step, and their norms."""
