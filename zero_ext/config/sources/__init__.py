"""Readers of configurations: files, mappings and the environment."""
