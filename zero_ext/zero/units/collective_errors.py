"""Errors of one rank, raised on all ranks: otherwise the others would wait for it in a collective."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeVar

import torch

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.config.config_errors import clause_of

Result = TypeVar("Result")

# A step sums checksums and their squares over the ranks in int64. Both fit for up to 2,896 ranks. With more,
# the sums wrap alike on all ranks, and equal checksums still compare as equal.
CHECKSUM_RANGE = (1 << 20) - 1


class CollectiveError(RuntimeError):
    """The error that every rank raises once any rank has failed; chained to this rank's own error."""


def ranks_where(collectives: Collectives, fact: bool, label: str) -> list[int]:
    """Return the ranks where ``fact`` holds; a collective."""
    flags = torch.zeros(collectives.world_size, dtype=torch.int64, device="cpu")
    flags[collectives.rank] = int(fact)
    return collectives.sum_(flags, label).nonzero().flatten().tolist()


def raise_on_all_ranks(
    collectives: Collectives, action: Callable[[], Result], what: str, advice: str = "", stored: bool = True
) -> Result:
    """Run ``action``, which does ``what``, and return its result. A collective unless it uses nothing that is
    ``stored`` on NVMe: only storage fails on one rank alone, and an agreement costs time.

    Raises :class:`CollectiveError` on all ranks if it raised on some. The error names these ranks and this
    rank's reason, and ends with ``advice``.
    """
    if not stored:
        return action()
    results: list[Result] = []
    error: Exception | None = None
    try:
        results.append(action())
    except Exception as caught:
        error = caught
    failed = ranks_where(collectives, error is not None, f"agreement on {what}")
    if failed:
        reason = f": {clause_of(error)}." if error is not None else "; look at their messages."
        raise CollectiveError(
            f"rank {collectives.rank}: {what} failed on ranks {failed}{reason} {advice}".rstrip()
        ) from error
    return results[0]


class DeferredError:
    """The first error of several actions, held back until all ranks can raise it. True once there is one."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __bool__(self) -> bool:
        return self.error is not None

    def attempt(self, action: Callable[[], object]) -> None:
        """Run ``action`` unless an earlier one failed, and hold back its error."""
        if self.error is None:
            try:
                action()
            except Exception as error:
                self.error = error

    def raise_deferred(self, collectives: Collectives, what: str, advice: str = "") -> None:
        """Raise :class:`CollectiveError` on all ranks if any has an error, see :func:`raise_on_all_ranks`."""
        raise_on_all_ranks(collectives, self._raise, what, advice)

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


def refuse_different(collectives: Collectives, what: str, flat: torch.Tensor, advice: str) -> None:
    """Raise ``RuntimeError`` on all ranks, with ``advice``, unless all have the same value ``flat`` [n],
    contiguous, after ``what``; a collective."""
    ranks = collectives.world_size
    if ranks == 1:
        return
    written = flat.view(torch.uint8).cpu()
    digests = torch.zeros(ranks, 3, dtype=torch.int64, device="cpu")
    if written.numel():
        # Two polynomials. Another seed of the same one would change all sums by one constant.
        sums = ops.crc32c(written, 0), zlib.crc32(written.numpy().data), written.numel()
        digests[collectives.rank] = torch.tensor(sums, device="cpu")
    label = f"agreement after {what}"
    collectives.gather(digests.view(-1), digests[collectives.rank], "scalars", label).wait()
    differs = [rank for rank in range(ranks) if not torch.equal(digests[rank], digests[0])]
    if differs:
        raise RuntimeError(
            f"{what}: expected the same value on all ranks, got another on ranks {differs} than on rank 0. "
            f"Nothing was changed. {advice}"
        )


def refuse_different_writes(collectives: Collectives, name: str, flat: torch.Tensor) -> None:
    """:func:`refuse_different` after a write of ``flat`` to the parameter ``name``."""
    refuse_different(
        collectives,
        f"parameter '{name}' was written to in place",
        flat,
        "Write inside 'with zero_ext.gathered(params, modifier_rank=0):', which takes the values of one "
        "rank, or seed random numbers alike.",
    )
