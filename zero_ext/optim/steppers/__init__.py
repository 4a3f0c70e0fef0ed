"""Optimizers on flat shards: the stepper protocol, fused and element-wise steppers, moments."""
