"""The way for moments that are shared out over the ranks (stage 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from zero_ext import ops
from zero_ext.comm.compressed import SignExchange
from zero_ext.zero.step.auxiliary_state import Room
from zero_ext.zero.step.one_bit.exchange_base import Parts, Way, resting

_PIECE_ELEMENTS = 1 << 20


class ShardedSigns(Way):
    """Each rank sends the signs of its gradients to the owners of the parts, who average them, step their
    masters, and send back the signs of how far these are ahead of the parameters, which all ranks add.

    The parameters so follow the masters a step of one size a block at a time. What they still lack is in the
    next difference, so this direction needs no error of its own, but every rank keeps the parameters in
    float32 (``replica``): in low precision most of these steps would be lost to rounding.
    """

    ROOMS: ClassVar[Mapping[str, Room]] = {"gradient_error": Room.OWN, "replica": Room.SHARED}

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._follow_parameters()

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """See :class:`Way`."""
        self._follow_parameters()
        exchanges_of = {number: self._exchange(number, "the gradients") for number in self._updating()}
        idle = {number: self._idle(number, used) for number in exchanges_of}
        errors, replica = self._kept["gradient_error"], self._kept["replica"]
        for number, exchange in exchanges_of.items():
            with resting(errors[number], idle[number]):
                exchange.scatter(self._parts.gradients[number].local_sum(), errors[number], scale)
        for number, exchange in exchanges_of.items():
            self._step_shard(number, exchange, used)
            exchange.gather()
        for number, exchange in exchanges_of.items():
            messages = exchange.gathered()
            with resting(replica[number], idle[number]):
                ops.expand_signs_(replica[number], messages, 1.0, True, self._ranks)
            self._parts.masters[number].unit.flat.copy_(replica[number])

    def _step_shard(self, number: int, exchange: SignExchange, used: frozenset[str]) -> None:
        """The step of this rank's masters; ``exchange.own`` says how far they are ahead then."""
        begin, end = self._layout(number).shard_range(self._parts.collectives.rank)
        received = exchange.scattered()
        scratch = torch.empty(end - begin, dtype=torch.float32, device=received.device)
        ops.sum_signs_(scratch, received, 1 / self._ranks, False)
        runs = self._stepper.runs(number, used)
        self._stepper.average(self._stepper.state(number, "exp_avg"), scratch, 1.0, runs)
        self._stepper.descend(number, runs)
        ahead = torch.sub(
            self._stepper.state(number, "master"), self._kept["replica"][number][begin:end], out=scratch
        )
        with resting(ahead, self._idle(number, used), begin):
            ops.compress_signs_(exchange.own, torch.zeros_like(ahead), ahead, 1.0, 1)

    def restore(self) -> None:
        """See :class:`Way`."""
        for master, replica in zip(self._parts.masters, self._kept["replica"], strict=True):
            master.unit.flat.copy_(replica)

    def _follow_parameters(self) -> None:
        """Takes over parameters that something else has written since the last step: a step in full
        precision, the user, a checkpoint."""
        for master, replica in zip(self._parts.masters, self._kept["replica"], strict=True):
            for kept, live in zip(
                replica.split(_PIECE_ELEMENTS), master.unit.flat.split(_PIECE_ELEMENTS), strict=True
            ):
                torch.where(kept.to(live.dtype) == live, kept, live.float(), out=kept)
