"""1-bit exchange for moments that are sharded over the ranks (stage 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from zero_ext import ops
from zero_ext.comm.onebit_all_reduce import OneBitAllReduce
from zero_ext.zero.step.one_bit.exchange_base import ExchangeStrategy, OneBitContext, temporarily_zeroed
from zero_ext.zero.step.update_schedule import Ownership

_CHUNK_ELEMENTS = 1 << 20


class ShardedExchange(ExchangeStrategy):
    """Each rank sends the signs of its gradients to the owners of the shards. The owners average them, update
    their masters, and send the signs of how far these are ahead of the parameters, which all ranks add.

    The parameters so follow the masters a step of one size a block at a time. What they still lack is in the
    next difference, so this direction needs no error of its own, but every rank keeps the parameters in
    float32 (``replica``): in low precision most of these steps would be lost to rounding.
    """

    OWNERSHIP: ClassVar[Mapping[str, Ownership]] = {
        "gradient_error": Ownership.OWN,
        "replica": Ownership.SHARED,
    }

    def __init__(self, context: OneBitContext) -> None:
        super().__init__(context)
        self._follow_parameters()

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """See :class:`ExchangeStrategy`."""
        self._follow_parameters()
        exchanges_of = {number: self._exchange(number, "the gradients") for number in self._updating()}
        idle = {number: self._idle(number, used) for number in exchanges_of}
        errors, replica = self._state["gradient_error"], self._state["replica"]
        for number, exchange in exchanges_of.items():
            with temporarily_zeroed(errors[number], idle[number]):
                exchange.scatter(self._context.gradients[number].local_sum(), errors[number], scale)
        for number, exchange in exchanges_of.items():
            self._step_shard(number, exchange, used)
            exchange.gather()
        for number, exchange in exchanges_of.items():
            messages = exchange.gathered()
            with temporarily_zeroed(replica[number], idle[number]):
                ops.decompress_1bit_(replica[number], messages, 1.0, True, self._ranks)
            self._context.masters[number].unit.flat.copy_(replica[number])

    def _step_shard(self, number: int, exchange: OneBitAllReduce, used: frozenset[str]) -> None:
        """Step this rank's masters; ``exchange.own`` says how far they are ahead then."""
        begin, end = self._layout(number).shard_range(self._context.collectives.rank)
        received = exchange.scattered()
        scratch = torch.empty(end - begin, dtype=torch.float32, device=received.device)
        ops.sum_1bit_(scratch, received, 1 / self._ranks, False)
        runs = self._stepper.hyper_ranges(number, used)
        self._stepper.average(self._stepper.state(number, "exp_avg"), scratch, 1.0, runs)
        self._stepper.descend(number, runs)
        ahead = torch.sub(
            self._stepper.state(number, "master"), self._state["replica"][number][begin:end], out=scratch
        )
        with temporarily_zeroed(ahead, self._idle(number, used), begin):
            # The errors of this direction are discarded. What the signs lose is
            # part of the next difference.
            ops.compress_1bit_(exchange.own, torch.zeros_like(ahead), ahead, 1.0, 1)

    def restore(self) -> None:
        """See :class:`ExchangeStrategy`."""
        for master, replica in zip(self._context.masters, self._state["replica"], strict=True):
            master.unit.flat.copy_(replica)

    def _follow_parameters(self) -> None:
        """Take over parameters that something else has written since the last step: a step in full
        precision, the user, a checkpoint."""
        for master, replica in zip(self._context.masters, self._state["replica"], strict=True):
            for stored, live in zip(
                replica.split(_CHUNK_ELEMENTS), master.unit.flat.split(_CHUNK_ELEMENTS), strict=True
            ):
                # Equal after rounding means that nobody wrote, and the float32 value keeps its low bits.
                torch.where(stored.to(live.dtype) == live, stored, live.float(), out=stored)
