"""Attention within the documents of packed sequences, without a mask of tokens × tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional as F


@torch._dynamo.disable
def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    *,
    is_causal: bool = True,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend within each document of packed rows, and to no other document.

    Each document is one call of torch's `scaled_dot_product_attention`, so time and memory are those of
    separate sequences. A document's output does not depend on the others, not even in its last bit.

    Args:
        query: [batch, heads, length, head dim]; a row holds one or more documents, one after the other.
        key: [batch, key heads, length, head dim].
        value: [batch, key heads, length, value dim].
        cu_seqlens: integers [documents + 1] that ascend from 0 to batch × length: the first token of each
            document in the concatenated rows, and their end. Each row begins a document. Pass a list or a
            tensor in host memory, since a tensor on a device is read in every call.
        is_causal: whether a token attends to itself and earlier tokens only.
        dropout_p: probability that a weight is dropped.
        scale: factor of the scores; default 1 / sqrt(head dim).
        enable_gqa: whether there may be fewer key heads than heads.

    Returns:
        [batch, heads, length, value dim].

    Raises:
        TypeError: `cu_seqlens` are no integers.
        ValueError: `cu_seqlens` do not start at 0, do not ascend, do not end at batch × length, or continue a
            document in the next row. Or the tensors have other shapes.

    Examples:
        >>> import torch
        >>> from zero_ext import document_attention
        >>> query, key, value = torch.randn(3, 1, 4, 10, 8)
        >>> document_attention(query, key, value, [0, 7, 10]).shape
        torch.Size([1, 4, 10, 8])
    """
    if query.ndim != 4 or not query.shape[0] == key.shape[0] == value.shape[0]:
        shapes = [tuple(each.shape) for each in (query, key, value)]
        raise ValueError(
            "query, key and value: expected [batch, heads, length, head dim] of one batch, got shapes "
            f"{shapes}. Reshape them."
        )
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        raise ValueError(
            "query, key and value: expected the same length, as documents attend to themselves, got "
            f"{query.shape[2]}, {key.shape[2]} and {value.shape[2]}. Disable the cache of keys."
        )
    groups = row_groups(cu_seqlens, query.shape[0], query.shape[2])
    rows = []
    for extent, bounds in groups:
        lengths = [stop - start for start, stop in pairwise(bounds)]
        documents = zip(*(each[extent].split(lengths, 2) for each in (query, key, value)), strict=True)
        outputs = [
            F.scaled_dot_product_attention(
                queries, keys, values, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            for queries, keys, values in documents
        ]
        rows.append(torch.cat(outputs, 2))
    return torch.cat(rows)


def row_groups(
    cu_seqlens: torch.Tensor | Sequence[int], batch: int, length: int
) -> list[tuple[slice, list[int]]]:
    """Return extents of rows with the same documents, each with their bounds in a row.

    Args:
        cu_seqlens: as of [`document_attention`][zero_ext.document_attention].
        batch: number of rows.
        length: tokens of a row.

    Returns:
        Consecutive extents, each with ascending positions from 0 to `length`.

    Raises:
        TypeError: `cu_seqlens` are no integers.
        ValueError: as `document_attention`.
    """
    bounds = _checked_bounds(cu_seqlens, batch, length)
    rows: list[list[int]] = [[] for _ in range(batch)]
    for start in bounds[:-1]:
        rows[start // length].append(start % length)
    groups: list[tuple[slice, list[int]]] = []
    for row, starts in enumerate(rows):
        if groups and groups[-1][1] == [*starts, length]:
            groups[-1] = (slice(groups[-1][0].start, row + 1), groups[-1][1])
        else:
            groups.append((slice(row, row + 1), [*starts, length]))
    return groups


def bounds_tensor(cu_seqlens: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Return `cu_seqlens` as a tensor; ``TypeError`` for what no tensor can be made of."""
    try:
        return torch.as_tensor(cu_seqlens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"cu_seqlens: expected a tensor or list of integers, got {type(cu_seqlens).__name__} ({error}). "
            "Pass the first token of each document in the concatenated rows, and their end."
        ) from error


def _checked_bounds(cu_seqlens: torch.Tensor | Sequence[int], batch: int, length: int) -> list[int]:
    tensor = bounds_tensor(cu_seqlens)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"cu_seqlens: expected integers, got {tensor.dtype}. Pass torch.int32 or int64.")
    if tensor.ndim != 1 or len(tensor) < 2:
        raise ValueError(
            "cu_seqlens: expected shape [documents + 1] with at least one document, got "
            f"{tuple(tensor.shape)}. Pass the first token of each document, and the end."
        )
    bounds: list[int] = tensor.tolist()
    fix = "Pass the first token of each document in the concatenated rows, and their end."
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens: expected 0 at the start, got {bounds[0]}. {fix}")
    for before, after in pairwise(bounds):
        if after <= before:
            raise ValueError(f"cu_seqlens: expected ascending numbers, got {after} after {before}. {fix}")
    if bounds[-1] != batch * length:
        raise ValueError(
            f"cu_seqlens: expected {batch * length} at the end, the tokens of {batch} rows of {length}, got "
            f"{bounds[-1]}. {fix}"
        )
    missing = set(range(0, batch * length, length)).difference(bounds)
    if missing:
        raise ValueError(
            f"cu_seqlens: expected every row of {length} tokens to begin a document, got none at "
            f"{min(missing)}. Split the document at the end of the row."
        )
    return bounds


def positions_in_documents(cu_seqlens: torch.Tensor | Sequence[int], batch: int, length: int) -> torch.Tensor:
    """Return the position of each token in its document.

    Args:
        cu_seqlens: as of [`document_attention`][zero_ext.document_attention].
        batch: number of rows.
        length: tokens of a row.

    Returns:
        int64 [batch, length] in host memory.

    Raises:
        TypeError: `cu_seqlens` are no integers.
        ValueError: as `document_attention`.
    """
    bounds = torch.tensor(_checked_bounds(cu_seqlens, batch, length), device="cpu")
    tokens = torch.arange(batch * length, device="cpu")
    starts = bounds[torch.bucketize(tokens, bounds, right=True) - 1]
    return (tokens - starts).view(batch, length)


def previous_attended(attended: torch.Tensor) -> torch.Tensor:
    """Return the last token of the row that is attended to before each one.

    Args:
        attended: bool [batch, length].

    Returns:
        int64 [batch, length]; -1 where there is none.
    """
    tokens = torch.arange(attended.shape[1], device=attended.device)
    last = torch.where(attended, tokens, -1).cummax(1).values
    return F.pad(last, (1, 0), value=-1)[:, :-1]


def is_discontinuous(
    position_ids: torch.Tensor, mask: torch.Tensor | None = None, padding_idx: int | None = None
) -> bool:
    """Return whether positions of a row are not those of one sequence.

    Positions of one sequence increase by 1 per attended token, or per token. Those of padding mean nothing.

    Args:
        position_ids: integers [batch, length].
        mask: [batch, length], 0 for padding. None: nothing is padding.
        padding_idx: position of padding in a model that counts positions from it, as RoBERTa does.
    """
    attended = torch.ones_like(position_ids, dtype=torch.bool) if mask is None else mask.bool()
    if padding_idx is not None:
        attended = attended & (position_ids != padding_idx)
    before = previous_attended(attended)
    step = position_ids - position_ids.gather(1, before.clamp(min=0))
    distance = torch.arange(attended.shape[1], device=attended.device) - before
    return bool((attended & (before >= 0) & (step != 1) & (step != distance)).any())


def restarts(position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tokens at which positions begin anew, as those of packed rows do.

    Positions do so where they stop to ascend, and ascend again or are back at the row's first one. Descending
    or equal positions are no documents.

    Args:
        position_ids: integers [batch, length].
        attention_mask: [batch, length]; 0 or False for padding, at which positions mean nothing.

    Returns:
        bool [batch, length].
    """
    attended = torch.ones_like(position_ids, dtype=torch.bool)
    if attention_mask is not None:
        attended = attention_mask.bool()
    before = previous_attended(attended)
    step = position_ids - position_ids.gather(1, before.clamp(min=0))
    step = torch.where(attended & (before >= 0), step, 2)  # no step, neither back nor by one
    # A token whose successor is padding has no step after it.
    after = F.pad(torch.where(attended, step, 0)[:, 1:], (0, 1))
    first = position_ids.gather(1, attended.int().argmax(1, keepdim=True))
    returned = (position_ids == first) & (step.gather(1, before.clamp(min=0)) == 1)
    return (step <= 0) & ((after == 1) | returned)


def documents_from_positions(
    position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the documents of packed rows as `cu_seqlens`.

    A document begins with each row and at each position that is not one more than the position before. Runs
    of padding are documents of their own, so that no other token attends to them.

    Args:
        position_ids: integers [batch, length].
        attention_mask: [batch, length]; 0 or False for padding.

    Returns:
        int32 [documents + 1] in host memory.

    Raises:
        ValueError: other shapes, or padding inside of a document, also where positions count on after it.

    Examples:
        >>> import torch
        >>> from zero_ext.attention import documents_from_positions
        >>> documents_from_positions(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])).tolist()
        [0, 3, 5, 7, 10]
    """
    shape = tuple(position_ids.shape)
    if len(shape) != 2 or (attention_mask is not None and tuple(attention_mask.shape) != shape):
        masked = "none" if attention_mask is None else tuple(attention_mask.shape)
        raise ValueError(
            f"position_ids and attention_mask: expected both [batch, length], got {shape} and {masked}. Pass "
            "one position and one value of the mask per token."
        )
    begins = F.pad(position_ids.diff() != 1, (1, 0), value=True)
    if attention_mask is not None:
        attended = attention_mask.bool()
        changes = F.pad(attended.diff(), (1, 0), value=True)
        document = begins.flatten().cumsum(0) - 1
        runs = attended & (changes | begins)
        # Positions that count attended tokens only do not increase at padding, and continue after it.
        before = previous_attended(attended)
        continued = position_ids == position_ids.gather(1, before.clamp(min=0)) + 1
        continued &= changes & attended & (before >= 0)
        if bool(continued.any()) or bool((torch.bincount(document[runs.flatten()]) > 1).any()):
            raise ValueError(
                "attention_mask: expected padding at the start or end of a document, got some inside of one, "
                "after which position_ids continue. Begin them at 0 with each document, or move the padding "
                "to an end of the row."
            )
        begins |= changes
    starts = begins.flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=begins.numel()).to("cpu", torch.int32)
