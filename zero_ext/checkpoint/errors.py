"""The error of a checkpoint that cannot be saved or loaded."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A save or a load failed; the message names the rank, the file, what was seen and what to do.

    It is raised on every rank of the group, whichever rank met the problem.
    """
