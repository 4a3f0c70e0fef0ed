"""An order of reductions and gathers in a backward pass that is equal on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from zero_ext.comm import Collectives


class ReductionSchedule:
    """How many reductions begin before each gather of a backward pass.

    Gathers and reductions of a device share one communicator, so ranks must begin them in one order. The
    gathers have one, and so have the reductions, but where these fall among those depends on when a rank's
    gradients arrive. So all ranks keep to what they agreed on: at gather ``n`` every rank has begun the first
    ``due[n]`` reductions, and no more. A reduction that is early waits. One that is late begins with what has
    arrived, and what comes later is reduced after the next agreement on gradients.

    The positions are learned in a pass whose order of reductions is final. There they begin when they are
    ready, and before each gather the ranks that are behind catch up with the one that has begun most,
    which they agree on. The same happens where a pass has more gathers than those before. ``ahead`` is
    how many reductions a rank may begin meanwhile: it must not wait on the host for one that others have
    not begun, as they wait for the agreement. After the last gather that was learned there is no such
    limit, if none is expected any more.
    """

    def __init__(self, collectives: Collectives, ahead: int = sys.maxsize) -> None:
        self._collectives = collectives
        self._ahead = ahead
        self._due: list[int] | None = None  # until a pass was learned
        self._trace: list[int] = []
        self._expects: Callable[[], bool] = lambda: False

    def begin(self, expects: Callable[[], bool]) -> None:
        """A backward pass begins that reduces; ``expects`` says whether gathers are still to come in it."""
        self._trace, self._expects = [], expects

    @property
    def most(self) -> int:
        """How many reductions may have begun before the next gather."""
        known, position = self._due or [], len(self._trace)
        if position < len(known):
            return known[position]
        if self._ahead == sys.maxsize or (self._due is not None and not self._expects()):
            return sys.maxsize
        return self._ahead + (self._trace[-1] if self._trace else 0)

    def at_gather(self, begun: int) -> int:
        """Return how many reductions begin before the gather that comes now, where ``begun`` have on this
        rank; a collective where it is not known."""
        known, position = self._due or [], len(self._trace)
        due = known[position] if position < len(known) else self._largest(begun)
        self._trace.append(due)
        return due

    def learn(self) -> None:
        """The pass has ended, and the next ones will be like it."""
        if self._due is None or len(self._trace) > len(self._due):
            self._due = self._trace

    def _largest(self, begun: int) -> int:
        # Among the gathers, whose order is the same on all ranks already.
        ranks = self._collectives.world_size
        counts = torch.zeros(ranks, dtype=torch.int64, device="cpu")
        own = counts.chunk(ranks)[self._collectives.rank].fill_(begun)
        label = "agreement on where reductions begin"
        self._collectives.gather(counts, own, "scalars", label).wait()
        return int(counts.amax())
