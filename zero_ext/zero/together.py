"""What may fail on one rank alone, so that it fails on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from zero_ext.comm import Collectives

Result = TypeVar("Result")


class FailedTogether(RuntimeError):
    """Some rank failed; every rank raises this, the failed one from its own error."""


def together(collectives: Collectives, action: Callable[[], Result], what: str, advice: str = "") -> Result:
    """The result of ``action`` on this rank, once all ranks have theirs; a collective.

    Raises :class:`FailedTogether` on all ranks if ``action`` raised on any: it says what failed on which
    ranks, this rank's own reason, and ``advice``.
    """
    results: list[Result] = []
    error: Exception | None = None
    try:
        results.append(action())
    except Exception as caught:
        error = caught
    flags = torch.zeros(collectives.world_size, dtype=torch.int64, device="cpu")
    flags[collectives.rank] = int(error is not None)
    failed = collectives.sum_(flags, f"agreement on {what}").nonzero().flatten().tolist()
    if failed:
        reason = f": {error}." if error is not None else "; look at their messages."
        raise FailedTogether(
            f"rank {collectives.rank}: {what} failed on ranks {failed}{reason} {advice}".rstrip()
        ) from error
    return results[0]
