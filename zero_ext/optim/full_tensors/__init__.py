"""Optimizers that need full tensors, run at the ranks that own the tensors."""
