"""The optimizer step: after, inside or alongside backward; loss scale, verdict, errors, 1-bit updates."""
