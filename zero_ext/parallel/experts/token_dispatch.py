"""Tokens on their way to the ranks that have their experts, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Expert = Callable[[torch.Tensor], torch.Tensor]


def through_experts(
    rows: torch.Tensor, counts: torch.Tensor, experts: Sequence[Expert], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return what the experts make of ``rows`` [R, width], which are sorted by expert, ``counts`` [E] int64
    of each; a collective of ``group`` with E / N experts per rank, ``experts`` those of this one.

    An expert is called once, with the rows of all ranks in their order, also where there are none, so that
    its parameters have a gradient on every rank. Without a group all experts are here. Two all-to-all
    exchanges move rows, and as many in backward (GShard, section 3.1).
    """
    if group is None:
        return torch.cat(_called(experts, rows.split(counts.tolist())))
    ranks = dist.get_world_size(group)
    sent = counts.view(ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sends, receives = sent.sum(1).tolist(), received.sum(1).tolist()
    rows = _exchanged(rows, sends, receives, group)
    # They came by rank and, of each, by expert.
    numbers = torch.arange(len(experts), device=rows.device).repeat(ranks)
    by_expert = torch.argsort(numbers.repeat_interleave(received.view(-1)), stable=True)
    outputs = torch.cat(_called(experts, rows[by_expert].split(received.sum(0).tolist())))
    back = torch.argsort(by_expert)
    return _exchanged(outputs[back], receives, sends, group)


def _called(experts: Sequence[Expert], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [expert(rows) for expert, rows in zip(experts, inputs, strict=True)]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.receives, ctx.sends, ctx.group), None, None, None


def _exchanged(
    rows: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """``sends[r]`` of ``rows`` go to each rank r, ``receives[r]`` come from it, in the order of the ranks."""
    exchanged: torch.Tensor = _AllToAll.apply(rows, sends, receives, group)
    return exchanged
