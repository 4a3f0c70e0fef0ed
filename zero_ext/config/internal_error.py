"""The error of a broken invariant: a bug of zero_ext, not a mistake of its caller.

In a file of its own, since all layers raise it and it needs no torch.
"""

from __future__ import annotations


def zero_ext_bug(what: str) -> AssertionError:
    """Return the error to raise where only a bug of zero_ext can lead.

    Args:
        what: What was found, with the values that show why. Without a period at the end.
    """
    return AssertionError(f"zero_ext bug: {what}. Please report it with the traceback.")
