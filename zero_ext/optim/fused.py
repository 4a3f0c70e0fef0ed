"""Adam and AdamW in one pass over flat shards (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_ext import ops
from zero_ext.optim.stepper import OwnedRange, Segment


class AdamStepper:
    """Fused Adam over owned ranges: unscale, clip, update, cast to compute precision in one pass of memory.

    Hyper-parameters are read from the live ``groups`` at each step; every parameter counts its own steps,
    as torch's do. Moments are fp32 or bf16.
    """

    def __init__(
        self, groups: list[dict[str, Any]], ranges: Sequence[OwnedRange], moments_dtype: torch.dtype
    ) -> None:
        self._groups = groups
        self._ranges = tuple(ranges)
        self._steps = {segment.name: 0 for owned in ranges for segment in owned.segments}
        self._moments = [
            tuple(
                ops.host_buffer(owned.master.numel() * moments_dtype.itemsize).view(moments_dtype)
                for _ in range(2)
            )
            for owned in ranges
        ]

    def step(self, index: int, gradient: torch.Tensor, scale: torch.Tensor, used: frozenset[str]) -> None:
        """See :class:`Stepper`. ``gradient`` may be fp32, bf16 or fp16."""
        owned = self._ranges[index]
        for name in {segment.name for segment in owned.segments if segment.name in used}:
            self._steps[name] += 1
        bounds: list[list[int]] = []
        rows: list[list[float]] = []
        for segment in owned.segments:
            if segment.name not in used or not segment.numel:
                continue
            row = self._hyper_parameters(segment)
            begin, end = segment.begin, segment.begin + segment.numel
            if rows and rows[-1] == row and bounds[-1][1] == begin:
                bounds[-1][1] = end
            else:
                bounds.append([begin, end])
                rows.append(row)
        if rows:
            exp_avg, exp_avg_sq = self._moments[index]
            ops.adam_step_(
                owned.master,
                exp_avg,
                exp_avg_sq,
                gradient,
                owned.output,
                torch.tensor(bounds, dtype=torch.int64),
                torch.tensor(rows, dtype=torch.float64),
                scale,
            )

    def _hyper_parameters(self, segment: Segment) -> list[float]:
        group = self._groups[segment.group]
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", False)
        return [
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            float(self._steps[segment.name]),
            float(bool(decoupled)),
            float(bool(group["maximize"])),
        ]

    def tensors(self, index: int) -> Iterator[tuple[str, Segment, torch.Tensor]]:
        """See :class:`Stepper`: ``exp_avg`` and ``exp_avg_sq``."""
        for name, moment in zip(("exp_avg", "exp_avg_sq"), self._moments[index], strict=True):
            for segment in self._ranges[index].segments:
                yield name, segment, moment[segment.begin : segment.begin + segment.numel]

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`: the number of steps of every parameter."""
        return {"step": dict(self._steps)}

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""
        for name in self._steps:
            self._steps[name] = int(state["step"][name])

    def make_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """See :class:`Stepper`; the moments exist from the start."""
        return lambda: None

    def state_bytes(self) -> int:
        """See :class:`Stepper`."""
        return sum(moment.nbytes for moments in self._moments for moment in moments)
