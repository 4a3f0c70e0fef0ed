"""A fake of a backend that runs on a device, as NCCL does. It records its calls and uses gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        """Nothing is under way."""


class FakeBackend:
    """Has the methods of a backend of torch's that :class:`DeviceTransport` calls, with its checks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.calls: list[tuple[Any, ...]] = []
        self.aborted = False
        self.shut_down = False

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def abort(self) -> None:
        self.aborted = True

    def shutdown(self) -> None:
        self.shut_down = True

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor) -> Done:
        assert output.numel() == input.numel() * self.size() and output.is_contiguous()
        self.calls.append(("allgather", output.numel(), output.dtype))
        full = torch.empty_like(output)
        self._group._allgather_base(full, input.clone()).wait()
        output.copy_(full)
        return Done()

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Done:
        assert len(outputs) == len(inputs) == self.size()
        assert len({each.dtype for each in (*outputs, *inputs)}) == 1
        self.calls.append(("alltoall", [each.numel() for each in outputs], [each.numel() for each in inputs]))
        works = [self._group.recv([each], rank, 0) for rank, each in enumerate(outputs) if each.numel()]
        works += [self._group.send([each], rank, 0) for rank, each in enumerate(inputs) if each.numel()]
        for work in works:
            work.wait()
        return Done()

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor) -> Done:
        self.calls.append(("reduce_scatter", output.numel(), input.dtype))
        full = input.clone()
        self._group.allreduce([full]).wait()
        output.copy_(full.chunk(self.size())[self.rank()])
        return Done()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Done:
        self.calls.append(("broadcast", tensor.numel(), root))
        self._group.broadcast(tensor, root).wait()
        return Done()

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Done:
        self.calls.append(("allreduce", tensors[0].numel(), tensors[0].dtype))
        self._group.allreduce(list(tensors)).wait()
        return Done()
