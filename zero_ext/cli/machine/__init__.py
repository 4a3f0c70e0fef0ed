"""Commands that describe, measure and prepare this machine."""
