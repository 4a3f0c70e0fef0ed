"""Forward passes through all stages, not on a schedule of torch's: those in a V cannot leave out backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zero_ext.parallel.pipeline.stages.stage_module import StageModule

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)
_HEADER = 10  # dtype, number of dimensions, and their lengths


class ForwardPasses:
    """Sends micro-batches through a pipeline, stage by stage, over ``group``, its ranks.

    ``run`` is called with the number of a stage on this rank and its inputs. Activations are tensors or
    tuples of them, on ``device``.
    """

    def __init__(
        self,
        module: StageModule,
        run: Callable[..., Any],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._module, self._run, self._group, self._device = module, run, group, device
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def outputs(self, micro_batches: Sequence[tuple[torch.Tensor, ...]]) -> list[Any]:
        """Return the last stage's outputs for each of ``micro_batches``, inputs that are read where the first
        stage is; empty on the other ranks.
        """
        last, found = len(self._module.ranges) - 1, []
        local: list[Any] = []  # what a stage on this rank made for the next one, which is here too
        sending: list[tuple[dist.Work | None, torch.Tensor]] = []
        for chunk, stage in enumerate(self._module.stages):
            source, target = (self._module.kind.rank_of(near, self._ranks) for near in (stage - 1, stage + 1))
            local_inputs, local = local, []
            for number, inputs in enumerate(micro_batches):
                if stage > 0:
                    inputs = local_inputs[number] if source == self._rank else self._receive(source)
                values = self._run(chunk, *inputs)
                if stage == last:
                    found.append(values)
                elif target == self._rank:
                    local.append(values if isinstance(values, tuple) else (values,))
                else:
                    sending += self._send(values, target)
        for work, _ in sending:
            if work is not None:
                work.wait()
        return found

    def _send(self, values: Any, target: int) -> list[tuple[dist.Work | None, torch.Tensor]]:
        tensors = values if isinstance(values, tuple) else (values,)
        payloads = [torch.tensor([len(tensors)], dtype=torch.int64, device=self._device)]
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
                raise TypeError(
                    f"output of a stage: expected tensors or a tuple of them, got {type(tensor).__name__}. "
                    "Return tensors from the last layer of each stage."
                )
            header = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
            header += [0] * (_HEADER - len(header))
            payloads += [torch.tensor(header, dtype=torch.int64, device=self._device), tensor.contiguous()]
        return [(dist.isend(each, group=self._group, group_dst=target), each) for each in payloads]

    def _receive(self, source: int) -> tuple[torch.Tensor, ...]:
        count = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(count, group=self._group, group_src=source)
        found = []
        for _ in range(int(count)):
            header = torch.zeros(_HEADER, dtype=torch.int64, device=self._device)
            dist.recv(header, group=self._group, group_src=source)
            dtype, dimensions, *shape = header.tolist()
            tensor = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=self._device)
            dist.recv(tensor, group=self._group, group_src=source)
            found.append(tensor)
        return tuple(found)
