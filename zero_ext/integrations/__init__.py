"""Bridges to other libraries' ways of training."""
