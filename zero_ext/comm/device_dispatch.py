"""One transport for host and device tensors, which dispatches on the device of the tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.comm.transport import Transport, Waitable


class DeviceDispatchTransport:
    """Hands tensors in host memory to ``host`` and all others to ``device``; see :class:`Transport`.

    Small agreements between the ranks are host tensors and so never wait for the device.
    """

    def __init__(self, host: Transport, device: Transport) -> None:
        self.rank = host.rank
        self.world_size = host.world_size
        self.staging_bytes = host.staging_bytes + device.staging_bytes
        self.host = host
        self.device = device

    def _of(self, tensor: torch.Tensor) -> Transport:
        return self.host if tensor.device.type == "cpu" else self.device

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        return self._of(flat).gather(flat, tag)

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        return self._of(sends[0]).all_to_all(receives, sends, tag)

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        return self._of(tensor).broadcast(tensor, source, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """See :class:`Transport`."""
        return self._of(tensor).all_reduce(tensor)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable] | None:
        """See :class:`Transport`."""
        return self._of(flat).reduce_scatter(flat, out)

    def rings(self, tensor: torch.Tensor) -> bool:
        """See :class:`Transport`."""
        return self._of(tensor).rings(tensor)

    def abort(self, reason: str) -> None:
        """See :class:`Transport`; the host transport first, which notifies the peers."""
        self.host.abort(reason)
        self.device.abort(reason)
