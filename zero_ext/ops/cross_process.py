"""Transfers between the processes of one host: the receiver copies directly from the sender's memory."""

from __future__ import annotations

from torch import Tensor

from zero_ext.ops.load_library import op


def cross_process_open(handle: int, name: str, rank: int, world_size: int, create: bool) -> None:
    """Join the shared memory segment `name`; the rank with `create` makes it before the others join.

    `handle` is any number. One that this process uses already is closed first. Raises RuntimeError naming the
    segment and the kernel's reason.
    """
    op("cross_process_open")(handle, name, rank, world_size, create)


def cross_process_connect(handle: int) -> bool:
    """Return whether every other rank's memory can be read; call it once all ranks have joined."""
    return bool(op("cross_process_connect")(handle))


def cross_process_unlink(name: str) -> None:
    """Remove the segment's name. Ranks that have joined keep the segment."""
    op("cross_process_unlink")(name)


def cross_process_send(handle: int, peer: int, tensor: Tensor, tag: int) -> None:
    """Offer a contiguous CPU tensor to rank `peer`; it must not change until the send was waited for."""
    op("cross_process_send")(handle, peer, tensor, tag)


def cross_process_receive(handle: int, peer: int, tensor: Tensor, tag: int) -> None:
    """Will fill a contiguous CPU tensor with the next message of rank `peer`, which must be as long and have
    the same tag."""
    op("cross_process_receive")(handle, peer, tensor, tag)


def cross_process_wait(handle: int, peer: int, count: int, receiving: bool, timeout_seconds: float) -> None:
    """Return when the first `count` messages from (`receiving`) or to rank `peer` are complete.

    Raises RuntimeError after `timeout_seconds`, when the peer's process has ended, or when it sent a message
    of another size or tag.
    """
    op("cross_process_wait")(handle, peer, count, receiving, timeout_seconds)


def cross_process_abort(handle: int, reason: str) -> None:
    """Abort the transport of this rank: ranks that wait for it, now or later, raise ``reason``.

    So does this rank when it waits. Only the first 1023 bytes are raised. What it sent before still arrives.
    """
    op("cross_process_abort")(handle, reason)


def cross_process_close(handle: int) -> None:
    """Close the transport, once the peers have read what was sent (at most 5 seconds later)."""
    op("cross_process_close")(handle)
