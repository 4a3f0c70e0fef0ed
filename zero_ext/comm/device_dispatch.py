"""One exchange for tensors in host memory and on a device: each goes the way that its memory allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.comm.transport import Exchange, Waitable


class ExchangeByDevice:
    """Hands tensors in host memory to ``host`` and all others to ``device``; see :class:`Exchange`.

    Small agreements between the ranks are host tensors and so never wait for the device.
    """

    def __init__(self, host: Exchange, device: Exchange) -> None:
        self.rank = host.rank
        self.world_size = host.world_size
        self.staging_bytes = host.staging_bytes + device.staging_bytes
        self.host = host
        self.device = device

    def _of(self, tensor: torch.Tensor) -> Exchange:
        return self.host if tensor.device.type == "cpu" else self.device

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        return self._of(flat).gather(flat, tag)

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        return self._of(sends[0]).all_to_all(receives, sends, tag)

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        return self._of(tensor).broadcast(tensor, source, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """See :class:`Exchange`."""
        return self._of(tensor).all_reduce(tensor)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable] | None:
        """See :class:`Exchange`."""
        return self._of(flat).reduce_scatter(flat, out)

    def rings(self, tensor: torch.Tensor) -> bool:
        """See :class:`Exchange`."""
        return self._of(tensor).rings(tensor)

    def give_up(self, reason: str) -> None:
        """See :class:`Exchange`; first where peers hear of it."""
        self.host.give_up(reason)
        self.device.give_up(reason)
