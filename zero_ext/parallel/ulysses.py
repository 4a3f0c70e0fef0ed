"""Exchange sequence shards for full sequences of some heads around attention, and back (Ulysses).

Ranks that exchange heads may be one of several groups, around which keys and values rotate (ring attention).
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.comm.process_group import make_collectives
from zero_ext.comm.traffic_stats import TrafficStats

_HEADS, _LENGTH = 1, 2
_SHARDS = (
    "Give every rank an equal part of the same sequences: shard them with zero_ext.parallel.shard_batch, "
    "padded to a multiple of the ranks."
)


class SequenceExchange:
    """The transfers of the ranks along mesh["cp"] around attention; made in a collective call of them.

    Every rank has its shard of a sequence with all heads. Groups of cp / ring consecutive ranks exchange
    heads, after which a rank has its group's shard of the sequence with some of the heads. With ring 1 that
    is the full sequence. Keys and values rotate over `ring` ranks, one of each group.

    Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509), section 3; Liu et al., "Ring Attention"
    (arXiv 2310.01889); Fang and Zhao, "USP" (arXiv 2405.07719), section 4.

    Args:
        mesh: has the dimension "cp".
        timeout_seconds: longest wait for the other ranks.
        ring: number of ranks that keys and values rotate over; a divisor of cp.

    Attributes:
        rank: this rank's position along "cp".
        size: number of ranks along "cp".
        ring: as given.
        ring_rank: this rank's position in its ring.
        head_shards: number of ranks that exchange heads, cp / ring.

    Raises:
        ValueError: the mesh has no "cp", or `ring` does not divide it.
    """

    def __init__(self, mesh: DeviceMesh, timeout_seconds: float = 600.0, *, ring: int = 1) -> None:
        self.rank, self.size = sequence_rank(mesh)
        check_ring(ring, self.size)
        self.ring, self.head_shards = ring, self.size // ring
        self.ring_rank, head_rank = divmod(self.rank, self.head_shards)
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._collectives = make_collectives(mesh["cp"].get_group(), timeout_seconds, device)
        first = self.rank - head_rank
        self._head_group = self._collectives.among(range(first, first + self.head_shards))
        self._ring_group = self._collectives.among(range(head_rank, self.size, self.head_shards))

    @property
    def traffic(self) -> TrafficStats:
        """Elements and bytes sent so far; all-to-alls count as "sequence", rotations as "ring"."""
        return self._collectives.traffic

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceExchange:
        return self  # connections have no copies: a copied model has the same ranks

    def agree(self, numbers: Sequence[int], what: str, problem: str = "", fix: str = _SHARDS) -> None:
        """Raise on all ranks unless they give the same numbers and none has a problem; a collective.

        A few bytes in host memory are exchanged.

        Args:
            numbers: of this rank.
            what: the numbers are, for the message.
            problem: of this rank; empty if it has none.
            fix: sentences that say what to do about numbers that differ.

        Raises:
            ValueError: the numbers differ, or a rank has a problem.
        """
        table = torch.zeros(self.size, 1 + len(numbers), dtype=torch.int64, device="cpu")
        table[self.rank] = torch.tensor([bool(problem), *numbers], dtype=torch.int64, device="cpu")
        rows: list[list[int]] = self._collectives.sum_(table, "sequence agreement").tolist()
        if problem:
            raise ValueError(problem)
        refused = [rank for rank, row in enumerate(rows) if row[0]]
        if refused:
            raise ValueError(
                f"rank {refused[0]} of 'cp': it refused its shard of the sequence. See the error of that "
                "rank."
            )
        if any(row != rows[0] for row in rows):
            seen = ", ".join(f"{row[1:]} on rank {rank}" for rank, row in enumerate(rows))
            raise ValueError(f"{what}: expected the same along 'cp', got {seen}. {fix}")

    def agree_on_shapes(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hashed: object, problem: str = ""
    ) -> None:
        """Raise on all ranks unless shapes are the same and have four dimensions; a collective.

        Args:
            query: of this rank.
            key: of this rank.
            value: of this rank.
            hashed: has the same `repr` on all ranks, which is compared by its hash.
            problem: of this rank; empty if it has none.

        Raises:
            ValueError: shapes or hashes differ, or a rank has a problem.
        """
        shapes = [tuple(each.shape) for each in (query, key, value)]
        if not problem and any(len(each) != 4 for each in shapes):
            problem = (
                f"query, key and value: expected [batch, heads, length, head dim], got shapes {shapes}. "
                "Reshape them."
            )
        # All ranks exchange as many numbers, also one with a problem.
        numbers = [0] * 12 if problem else [size for each in shapes for size in each]
        what = "shapes of query, key and value, and a hash of dtypes and options"
        self.agree([*numbers, zlib.crc32(repr(hashed).encode())], what, problem)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors; a collective.

        Args:
            tensor: int64 in host memory, of one shape on all ranks.

        Returns:
            int64 of that shape.
        """
        return self._collectives.sum_(tensor, "sequence agreement")

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of all ranks' values; a collective. Its gradient is that of this rank's value.

        Means of the ranks' losses have the gradients of the loss of all of them, once ZeRO has averaged them.

        Args:
            value: floating point, of one shape on all ranks.

        Returns:
            A tensor of that shape and dtype, the same on all ranks.
        """
        averaged: torch.Tensor = _Mean.apply(value, self)
        return averaged

    def gather_sequences(self, shard: torch.Tensor, positions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return full sequences; a collective.

        Args:
            shard: [batch, length / cp, ...], of one shape on all ranks.
            positions: of the tokens of each rank in the full sequences, int64 [length / cp].

        Returns:
            [batch, length, ...], without a gradient.
        """
        shard = shard.detach().contiguous()
        flat = shard.new_empty(self.size, shard.numel())
        own = flat[self.rank].copy_(shard.view(-1))
        self._collectives.gather(flat.view(-1), own, "sequence", "gathered sequences").wait()
        order = torch.argsort(torch.cat(list(positions))).to(shard.device)
        return torch.cat([each.view_as(shard) for each in flat], 1)[:, order]

    def enter(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange shards of all heads for full sequences of some heads; differentiable.

        Shapes are the same on all ranks. With a ring the sequences are the group's shards.

        Fewer heads of keys and values than of queries are repeated until they divide by cp / ring, so that
        every rank has those of its queries, in order, as many queries to each.

        Args:
            query: [batch, heads, length / cp, head dim].
            key: [batch, key heads, length / cp, head dim].
            value: as `key`.

        Returns:
            Query, key and value [batch, heads × ring / cp, length / ring, head dim]; of repeated heads as
            many as there are.

        Raises:
            ValueError: other dimensions, or heads of queries that do not divide by cp / ring or by those of
                the keys.
        """
        if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
            shapes = [tuple(each.shape) for each in (query, key, value)]
            raise ValueError(
                f"query, key and value: expected [batch, heads, length, head dim], got shapes {shapes}. "
                "Reshape them."
            )
        heads, keys = query.shape[_HEADS], key.shape[_HEADS]
        if heads % self.head_shards:
            ranks = "'cp'" if self.ring == 1 else "'cp' / ring"
            raise ValueError(
                f"heads of queries on this rank: expected a multiple of {ranks} ({self.head_shards}), got "
                f"{heads}. Set 'cp' to a divisor of them, or use a longer ring."
            )
        if heads % keys or value.shape[_HEADS] != keys:
            raise ValueError(
                "heads of queries, keys and values: expected as many of keys as of values, a divisor of "
                f"those of queries, got {heads}, {keys} and {value.shape[_HEADS]}. Use such numbers of heads."
            )
        if query.shape[_LENGTH] != key.shape[_LENGTH]:
            raise ValueError(
                "queries and keys on this rank: expected the same length, as a sequence over ranks attends "
                f"to itself alone, got {query.shape[_LENGTH]} and {key.shape[_LENGTH]}. Disable the cache of "
                "keys."
            )
        repeats = math.lcm(keys, self.head_shards) // keys
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, _HEADS) for each in (key, value))
        full_query, full_key, full_value = (
            _moved(each, self, _LENGTH, _HEADS) for each in (query, key, value)
        )
        return full_query, full_key, full_value

    def leave(self, attended: torch.Tensor) -> torch.Tensor:
        """Undo `enter`.

        Args:
            attended: [batch, heads × ring / cp, length / ring, ...].

        Returns:
            [batch, heads, length / cp, ...].
        """
        return _moved(attended, self, _HEADS, _LENGTH)

    @contextlib.contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Abort on all ranks if what only this rank computes between two exchanges raises an error.

        Yields:
            Nothing.
        """
        try:
            yield
        except Exception as error:
            self._collectives.abort(f"rank {self.rank} of 'cp' stopped in its attention: {error}")
            raise

    def all_to_all(self, tensor: torch.Tensor, gathered: int, split: int) -> torch.Tensor:
        """Shard one dimension of a tensor over the ranks that exchange heads and gather another.

        Args:
            tensor: of one shape on all ranks.
            gathered: dimension along which the result has all ranks' shards, in rank order.
            split: dimension that is sharded over the ranks.

        Returns:
            A new tensor.
        """
        group = self._head_group
        sent = torch.stack(tensor.chunk(group.world_size, split))
        received = torch.empty_like(sent)
        received[group.rank].copy_(sent[group.rank])
        payloads = received.unbind(), sent.unbind()
        group.exchange_payloads(*payloads, "sequence", sent.numel(), "sequence exchange").wait()
        return torch.cat(received.unbind(), gathered)

    def rotate(self, tensor: torch.Tensor, label: str) -> Callable[[], torch.Tensor]:
        """Start to send a tensor to the next rank of the ring, and to receive that of the rank before.

        Args:
            tensor: contiguous, of one shape on all ranks. It must not change before the wait.
            label: names the transfer in errors, the same on all ranks.

        Returns:
            A function that waits for the transfer and returns the other rank's tensor. In a ring of one rank
            that is `tensor`.
        """
        if self.ring == 1:
            return lambda: tensor
        empty = tensor.view(-1)[:0]
        received, receives, sends = torch.empty_like(tensor), [empty] * self.ring, [empty] * self.ring
        sends[(self.ring_rank + 1) % self.ring] = tensor
        receives[self.ring_rank - 1] = received
        pending = self._ring_group.exchange(receives, sends, "ring", tensor.numel(), label)

        def wait() -> torch.Tensor:
            pending.wait()
            return received

        return wait


class _Mean(torch.autograd.Function):
    """The mean of all ranks' values; its gradient is passed on to this rank's value as it is."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, exchange: SequenceExchange) -> torch.Tensor:
        total = exchange._collectives.sum_(value.detach().reshape(-1).clone(), "mean along 'cp'")
        # Not a view, which callers could not change in place.
        return total.view_as(value) / exchange.size

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Move(torch.autograd.Function):
    """An all-to-all; its gradient is the one that moves everything back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, exchange: SequenceExchange, gathered: int, split: int
    ) -> torch.Tensor:
        ctx.exchange_args = exchange, gathered, split
        return exchange.all_to_all(tensor, gathered, split)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        exchange, gathered, split = ctx.exchange_args
        return _moved(gradients[0], exchange, split, gathered), None, None, None


@torch._dynamo.disable
def _moved(tensor: torch.Tensor, exchange: SequenceExchange, gathered: int, split: int) -> torch.Tensor:
    if exchange.head_shards == 1:
        return tensor
    moved: torch.Tensor = _Move.apply(tensor, exchange, gathered, split)
    return moved


def sequence_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the index of this rank's shard of a sequence, and their number.

    Raises ``ValueError`` for a mesh without "cp".
    """
    names = mesh.mesh_dim_names or ()
    if "cp" not in names:
        raise ValueError(
            f"mesh: expected a dimension 'cp', got {list(names)}. Make it with "
            "zero_ext.parallel.make_mesh(cp=...)."
        )
    return mesh["cp"].get_local_rank(), mesh["cp"].size()


def check_ring(ring: int, ranks: int) -> None:
    """Raise ``ValueError`` unless ``ring`` divides the number of ranks along "cp"."""
    if isinstance(ring, bool) or not isinstance(ring, int) or ring < 1 or ranks % ring:
        raise ValueError(
            f"ring: expected a divisor of 'cp' ({ranks}), got {ring!r}. Pass the number of ranks that keys "
            "and values rotate over."
        )


class SequenceAttention:
    """An attention function on full sequences, called with shards of them.

    [`sequence_attention`][zero_ext.parallel.sequence_attention] makes it.

    Args:
        function: gets full sequences of some heads.
        exchange: of the ranks along "cp".

    Attributes:
        function: as given.
        exchange: as given.
    """

    def __init__(self, function: Callable[..., torch.Tensor], exchange: SequenceExchange) -> None:
        self.function, self.exchange = function, exchange

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Attend to the full sequences; a collective.

        Args:
            query: [batch, heads, length / cp, head dim].
            key: [batch, key heads, length / cp, head dim]; as many heads as `query` or a divisor of them.
            value: as `key`.
            *args: passed on to the function.
            **kwargs: passed on to the function.

        Returns:
            [batch, heads, length / cp, head dim].

        Raises:
            ValueError: on all ranks, shapes or dtypes differ along "cp", heads do not divide, or the function
                returned another shape.
        """
        exchange = self.exchange
        exchange.agree_on_shapes(query, key, value, [str(each.dtype) for each in (query, key, value)])
        full = exchange.enter(query, key, value)
        with exchange.abort_on_error():
            attended = self.function(*full, *args, **kwargs)
            if attended.shape[:3] != full[0].shape[:3]:
                raise ValueError(
                    "output of the attention function: expected [batch, heads, length, head dim] with the "
                    f"same batch, heads and length as queries {tuple(full[0].shape)}, got "
                    f"{tuple(attended.shape)}. Return its dimensions in this order."
                )
        return exchange.leave(attended)


def sequence_attention(
    function: Callable[..., torch.Tensor], mesh: DeviceMesh, *, timeout_seconds: float = 600.0
) -> SequenceAttention:
    """Return attention over sequences that are sharded over the ranks along mesh["cp"]; a collective of them.

    One call serves all layers. Masks and biases are those of full sequences, for any head.

    Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509), section 3.

    Args:
        function: gets full sequences of some heads. It takes query, key and value [batch, heads, length, head
            dim] first and returns such a tensor: torch's scaled_dot_product_attention, or one of your own.
        mesh: has the dimension "cp".
        timeout_seconds: longest wait for the other ranks.

    Returns:
        The function on shards.

    Raises:
        ValueError: the mesh has no "cp".
    """
    return SequenceAttention(function, SequenceExchange(mesh, timeout_seconds))
