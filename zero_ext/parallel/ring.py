"""Ring attention: keys and values rotate over ranks, and each attends to them with its own queries.

A sequence is cut into 2 × ring chunks, and a rank of the ring has one from the front and its counterpart from
the back (zigzag). Under a causal mask all ranks then have the same work in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.attention.packed_documents import bounds_tensor, row_groups
from zero_ext.attention.sparse_self_attention import autocast_tensors
from zero_ext.attention.tile_attention import merge_tile, tile_kernel
from zero_ext.parallel.ulysses import SequenceExchange, check_ring, sequence_rank


def shard_indices(length: int, mesh: DeviceMesh, ring: int = 1) -> torch.Tensor:
    """Return the positions of this rank's shard in the full sequences.

    Args:
        length: tokens of a full sequence.
        mesh: has the dimension "cp".
        ring: number of ranks that keys and values rotate over. With 1, shards are consecutive.

    Returns:
        int64 [length / cp], ascending in each chunk.

    Raises:
        ValueError: the mesh has no "cp", `ring` does not divide it, or the length does not divide by cp and 2
            × ring.
    """
    rank, size = sequence_rank(mesh)
    check_ring(ring, size)
    return shard_positions(length, rank, size, ring)


def shard_positions(length: int, rank: int, size: int, ring: int) -> torch.Tensor:
    """Return the positions of the shard of a rank among ``size``; ``ValueError`` as :func:`shard_indices`."""
    cut = chunk_count(ring)
    multiple = math.lcm(size, cut)
    if length % multiple:
        factor = f"'cp' ({size})" if multiple == size else f"'cp' ({size}) and 2 × ring ({cut})"
        raise ValueError(
            f"length of sequences: expected a multiple of {factor}, got {length} tokens. Pad them to "
            f"{length + -length % multiple} tokens, with -100 as labels."
        )
    chunks = torch.arange(length, dtype=torch.int64, device="cpu").chunk(cut)
    zigzag = torch.cat([chunks[chunk] for each in range(ring) for chunk in _chunks(each, ring)])
    return zigzag.chunk(size)[rank]


def chunk_count(ring: int) -> int:
    """Return the number of chunks that sequences are cut into for a ring."""
    return 2 * ring if ring > 1 else 1


def _chunks(rank: int, ring: int) -> tuple[int, ...]:
    """Return the chunks of a rank's shard, in order."""
    return (rank, 2 * ring - 1 - rank) if ring > 1 else (0,)


class _Tile(NamedTuple):
    """Rows, this rank's queries and another rank's keys, as extents in their tensors."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool  # of the same tokens, in which a query sees the keys up to its own


class RingSchedule(NamedTuple):
    """The attention of one call: documents in groups of rows, tokens per chunk, and the kernel's options."""

    groups: Sequence[tuple[slice, list[int]]]
    chunk: int
    ring: int
    causal: bool
    scale: float

    def tiles(self, query_rank: int, key_rank: int) -> Iterator[_Tile]:
        """Yield the tiles of the queries of one rank and the keys of another."""
        for rows, bounds in self.groups:
            for query_index, query_chunk in enumerate(_chunks(query_rank, self.ring)):
                for key_index, key_chunk in enumerate(_chunks(key_rank, self.ring)):
                    if self.causal and key_chunk > query_chunk:
                        continue
                    for document in pairwise(bounds):
                        queries = self._extent(document, query_chunk, query_index)
                        keys = self._extent(document, key_chunk, key_index)
                        if queries.start < queries.stop and keys.start < keys.stop:
                            yield _Tile(rows, queries, keys, self.causal and query_chunk == key_chunk)

    def _extent(self, document: tuple[int, int], chunk: int, index: int) -> slice:
        """Return the tokens of a document in a chunk, which is the shard's chunk ``index``."""
        shift = (index - chunk) * self.chunk
        start, stop = (min(max(each, chunk * self.chunk), (chunk + 1) * self.chunk) for each in document)
        return slice(start + shift, stop + shift)


class _RingAttention(torch.autograd.Function):
    """Attention of a rank's queries to the keys of all ranks in its ring."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        exchange: SequenceExchange,
        schedule: RingSchedule,
    ) -> torch.Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
        logsumexp = output.new_full(query.shape[:3], -math.inf)
        query = query if query.stride(-1) == 1 else query.contiguous()
        kernel, rotated = tile_kernel(query), torch.stack((key, value))
        for step in range(exchange.ring):
            keys, values = rotated
            last = step == exchange.ring - 1
            wait = None if last else exchange.rotate(rotated, "keys and values of ring attention")
            for tile in schedule.tiles(exchange.ring_rank, (exchange.ring_rank - step) % exchange.ring):
                inputs = query[tile.rows, :, tile.queries], *_keys(tile, keys, values)
                found = kernel.forward(*inputs, tile.causal, schedule.scale)
                rows = tile.rows, slice(None), tile.queries
                merge_tile(output[rows], logsumexp[rows], *found)
            if wait is not None:
                rotated = wait()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.exchange, ctx.schedule = exchange, schedule
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.exchange.abort_on_error():
            return (*_backward(ctx.exchange, ctx.schedule, gradient, *ctx.saved_tensors), None, None)


def _keys(tile: _Tile, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [each[tile.rows, :, tile.keys] for each in tensors]


def _backward(
    exchange: SequenceExchange, schedule: RingSchedule, gradient: torch.Tensor, *saved: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of this rank's query, key and value.

    Keys and values rotate as in forward. Their gradients follow them one step behind, and each rank adds its
    own. One more step returns them to the rank that has the keys.
    """
    query, key, value, output, logsumexp = saved
    gradient = gradient.contiguous()
    kernel, rotated = tile_kernel(query), torch.stack((key, value))
    grad_query = torch.zeros_like(query, dtype=logsumexp.dtype)
    arriving: Callable[[], torch.Tensor] | None = None
    for step in range(exchange.ring):
        keys, values = rotated
        last = step == exchange.ring - 1
        wait = None if last else exchange.rotate(rotated, "keys and values of ring attention")
        grad_rotated = torch.zeros_like(rotated, dtype=logsumexp.dtype)
        for tile in schedule.tiles(exchange.ring_rank, (exchange.ring_rank - step) % exchange.ring):
            rows = tile.rows, slice(None), tile.queries
            inputs = gradient[rows], query[rows], *_keys(tile, keys, values), output[rows], logsumexp[rows]
            found = kernel.backward(*inputs, causal=tile.causal, scale=schedule.scale)
            totals = grad_query[rows], *_keys(tile, *grad_rotated)
            for total, each in zip(totals, found, strict=True):
                total += each  # not by an index, which would copy the sum onto itself
        if arriving is not None:
            grad_rotated += arriving()
        arriving = exchange.rotate(grad_rotated, "gradients of keys and values of ring attention")
        if wait is not None:
            rotated = wait()
    own = grad_rotated if arriving is None else arriving()
    return tuple(each.to(query.dtype) for each in (grad_query, *own))


class RingAttention:
    """Exact attention over sequences that are sharded over ranks, for any number of heads.

    [`ring_attention`][zero_ext.parallel.ring_attention] makes it.

    Args:
        exchange: of the ranks along "cp".

    Attributes:
        exchange: as given.
    """

    def __init__(self, exchange: SequenceExchange) -> None:
        self.exchange = exchange

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int] | None = None,
        *,
        is_causal: bool = True,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend to the full sequences; a collective, in backward too.

        Args:
            query: [batch, heads, length / cp, head dim], this rank's shard as
                [`shard_batch`][zero_ext.parallel.shard_batch] cuts it for the same ring.
            key: [batch, key heads, length / cp, head dim]; as many heads as `query` or a divisor of them.
            value: as `key`.
            cu_seqlens: documents of the full sequences, as of
                [`document_attention`][zero_ext.document_attention]; default one per row.
            is_causal: whether a token attends to itself and earlier tokens only.
            scale: factor of the scores; default 1 / sqrt(head dim).

        Returns:
            [batch, heads, length / cp, head dim].

        Raises:
            TypeError: on all ranks, `cu_seqlens` are no integers.
            ValueError: on all ranks, shapes, dtypes or documents differ along "cp", heads do not divide by cp
                / ring, or `cu_seqlens` are not those of the full sequences or no tensor of numbers.
        """
        query, key, value = autocast_tensors(query, key, value)
        problem, documents = "", []
        try:
            documents = [] if cu_seqlens is None else bounds_tensor(cu_seqlens).flatten().tolist()
        except TypeError as error:  # raised after the comparison, for which the other ranks wait
            problem = str(error)
        dtypes = [str(each.dtype) for each in (query, key, value)]
        hashed = documents, is_causal, scale, dtypes
        self.exchange.agree_on_shapes(query, key, value, hashed, problem)
        return self.attend(query, key, value, cu_seqlens, is_causal=is_causal, scale=scale)

    @torch._dynamo.disable
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int] | None = None,
        *,
        is_causal: bool = True,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend without comparing shapes and documents between the ranks before.

        Args:
            query: as of a call.
            key: as of a call.
            value: as of a call.
            cu_seqlens: as of a call.
            is_causal: as of a call.
            scale: as of a call.

        Returns:
            As a call.

        Raises:
            TypeError: as a call.
            ValueError: as a call, but for shapes and documents that differ along "cp".
        """
        exchange = self.exchange
        query, key, value = exchange.enter(*autocast_tensors(query, key, value))
        batch, _, shard, width = query.shape
        length, cut = shard * exchange.ring, chunk_count(exchange.ring)
        if not width == key.shape[3] == value.shape[3]:
            raise ValueError(
                f"query, key and value: expected one head dim, got {width}, {key.shape[3]} and "
                f"{value.shape[3]}. Pad the shorter ones with zeros."
            )
        if length % cut:
            raise ValueError(
                f"length of sequences: expected a multiple of 2 × ring ({cut}), got {length} tokens. Shard "
                "them with zero_ext.parallel.shard_batch and the same ring."
            )
        rows = range(0, (batch + 1) * length, length) if cu_seqlens is None else cu_seqlens
        groups = row_groups(rows, batch, length)
        scale = 1 / math.sqrt(width) if scale is None else scale
        schedule = RingSchedule(groups, length // cut, exchange.ring, is_causal, scale)
        with exchange.abort_on_error():
            attended: torch.Tensor = _RingAttention.apply(query, key, value, exchange, schedule)
        return exchange.leave(attended)


def ring_attention(
    mesh: DeviceMesh, *, ring: int | None = None, timeout_seconds: float = 600.0
) -> RingAttention:
    """Return attention over sequences that are sharded over mesh["cp"]; a collective of its ranks.

    One call serves all layers. `ring` ranks rotate keys and values, and groups of cp / ring ranks exchange
    heads, so heads divide by cp / ring only. Sequences are cut in zigzag: give
    [`shard_batch`][zero_ext.parallel.shard_batch] the same `ring`.

    Source: Liu et al., "Ring Attention" (arXiv 2310.01889); Fang and Zhao, "USP" (arXiv 2405.07719).

    Args:
        mesh: has the dimension "cp".
        ring: number of ranks in a ring, a divisor of cp; default all.
        timeout_seconds: longest wait for the other ranks.

    Returns:
        The attention on shards.

    Raises:
        ValueError: the mesh has no "cp", or `ring` does not divide it.
    """
    ring = sequence_rank(mesh)[1] if ring is None else ring
    return RingAttention(SequenceExchange(mesh, timeout_seconds, ring=ring))
