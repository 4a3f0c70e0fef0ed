"""Shard a batch of sequences over the ranks of sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from zero_ext.attention.packed_documents import (
    documents_from_positions,
    is_discontinuous,
    positions_in_documents,
    row_groups,
)
from zero_ext.parallel.ring import shard_indices
from zero_ext.parallel.ulysses import sequence_rank

_IGNORED = -100


def shard_batch(
    batch: Mapping[str, Any],
    mesh: DeviceMesh,
    *,
    shift_labels: bool = True,
    padding_idx: int | None = None,
    ring: int = 1,
    packed: bool = False,
) -> dict[str, Any]:
    """Return this rank's chunk of a batch of sequences, which all ranks along mesh["cp"] hold in full.

    The sum of a rank's losses over "num_items_in_batch", averaged over the ranks, is the mean over all tokens
    with a label, whatever rank they are on. The mean over a rank's own tokens is not. Models of transformers
    compute the sum by themselves: `model(**shard_batch(batch, mesh)).loss`.

    Args:
        batch: Tensors [batch, length, ...], among them "input_ids" or "inputs_embeds". They are cut along the
            length, but for "attention_mask", which stays full, as attention sees the full sequence.
        mesh: A mesh with the dimension "cp".
        shift_labels: Whether "labels" are moved to the token before theirs, as causal models need. They are
            "shift_labels" then, too. "shift_labels" in `batch` are never moved. Give False for models that
            predict masked tokens, with labels at the token itself.
        padding_idx: The token of padding where a model counts positions from it, as RoBERTa does
            (`model.config.pad_token_id`). Tokens of padding have it as their position, and others count on
            from the number behind it.
        ring: The length of the ring, as of [`ring_attention`][zero_ext.parallel.ring_attention]. Over 1,
            sequences are cut in zigzag.
        packed: Whether a row may hold several documents. Documents are given by "cu_seq_lens_q" of the full
            batch, or else by "position_ids" that begin anew. Labels that a token of another document would
            predict become -100, also given "shift_labels" of a token that precedes another document.

    Returns:
        The chunks, and also "position_ids" of the full sequence where they are missing, int64 [1 or
        batch, length / cp]. With labels also "num_items_in_batch", float: the labels of the full batch that
        are not -100 (or the "num_items_in_batch" of `batch`), divided by cp. With `ring` over 1 or `packed`
        also "cu_seq_lens_q", int32 [documents + 1]: the documents of the full batch, in place of
        "attention_mask". Runs of padding are documents of their own. Attention must be given them. Over
        several ranks also "sequence_ring", int64 []: `ring`, which models compare with their own.

    Raises:
        ValueError: For a batch without tokens, a length that does not divide by the ranks or twice the ring,
            a mask, labels, documents or positions of another shape, and positions that begin anew (packed
            sequences) without `packed` or a mask [batch, 1, length, length] that keeps them apart.
    """
    size = sequence_rank(mesh)[1]
    full = dict(batch)
    tokens = full.get("input_ids", full.get("inputs_embeds"))
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        raise ValueError(
            "batch: expected 'input_ids' [batch, length] or 'inputs_embeds' [batch, length, width], got "
            f"{sorted(full)}. Add one of them."
        )
    length = tokens.shape[1]
    indices = shard_indices(length, mesh, ring).to(tokens.device)
    documents = full.get("cu_seq_lens_q")
    if documents is not None and not packed:
        raise ValueError(
            f"'cu_seq_lens_q': expected none without packed, got {len(documents) - 1} documents. Pass "
            "packed=True."
        )
    if full.get("position_ids") is None:
        full["position_ids"] = _positions(tokens, padding_idx, documents)
    _check_shapes(full, tokens)
    if not packed:
        _refuse_packed(full, tokens, padding_idx)
    if packed or ring > 1:
        full |= _documents(full, tokens, padding_idx)
        if size > 1:
            full["sequence_ring"] = torch.tensor(ring, device="cpu")
    labels = full.get("shift_labels")
    if labels is not None and packed:
        labels = full["shift_labels"] = mask_last_labels(
            labels, full["cu_seq_lens_q"], batch.get("attention_mask")
        )
    if labels is None and full.get("labels") is not None:
        labels = full["labels"]
        if shift_labels:
            if packed:
                attended = batch.get("attention_mask")
                labels = mask_first_labels(labels, full["cu_seq_lens_q"], attended)
            labels = full["shift_labels"] = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
    if labels is not None:
        full["labels"] = labels
        items = full.get("num_items_in_batch")
        full["num_items_in_batch"] = ((labels != _IGNORED).sum() if items is None else items) / size
    mask = full.pop("attention_mask", None)
    for name, each in full.items():
        if isinstance(each, torch.Tensor) and each.ndim >= 2 and each.shape[1] == length:
            full[name] = each[:, indices]
    return full if mask is None else {**full, "attention_mask": mask}


def _positions(tokens: torch.Tensor, padding_idx: int | None, documents: torch.Tensor | None) -> torch.Tensor:
    """Return the positions of full sequences, int64 [1 or batch, length]."""
    batch, length = tokens.shape[:2]
    if documents is not None:
        first = 0 if padding_idx is None else padding_idx + 1
        return positions_in_documents(documents, batch, length).to(tokens.device) + first
    counted = torch.arange(length, dtype=torch.int64, device=tokens.device)[None]
    if padding_idx is None:
        return counted
    if tokens.is_floating_point():  # embeddings, which do not say what is padding
        return counted + padding_idx + 1
    there = (tokens != padding_idx).long()
    return there.cumsum(1) * there + padding_idx


def _documents(full: dict[str, Any], tokens: torch.Tensor, padding_idx: int | None) -> dict[str, Any]:
    """Return the documents of full sequences, in place of a mask."""
    mask, documents = full.get("attention_mask"), full.get("cu_seq_lens_q")
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"'attention_mask': expected [batch, length] with packed or a ring, got {tuple(mask.shape)}. "
            "Give documents by position_ids that begin anew."
        )
    if documents is None:
        positions = full["position_ids"].expand(tokens.shape[:2])
        if mask is None and padding_idx is not None:
            mask = positions != padding_idx
        documents = documents_from_positions(positions, mask)
    elif mask is not None and not bool(mask.all()):
        raise ValueError(
            "'cu_seq_lens_q': expected no padding with them, got an attention_mask with some. Remove one of "
            "the two."
        )
    row_groups(documents, *tokens.shape[:2])
    return {"cu_seq_lens_q": documents.to("cpu"), "attention_mask": None}


def mask_first_labels(
    labels: torch.Tensor, cu_seqlens: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Return labels [batch, length] with -100 at the first token of each document.

    Another document would predict them. Padding is no document: its first token may be the end of one.
    """
    starts = cu_seqlens[:-1].long().to(labels.device)
    if attention_mask is not None:
        attended = attention_mask.flatten().to(starts.device)[starts] != 0
        starts = starts[attended | (starts % labels.shape[1] == 0)]
    labels = labels.clone(memory_format=torch.contiguous_format)
    labels.view(-1)[starts] = _IGNORED
    return labels


def mask_last_labels(
    shift_labels: torch.Tensor, cu_seqlens: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Return shifted labels [batch, length] with -100 at tokens that precede another document in their row.

    Padding is no other document: the token before it may have the end of its own as label.
    """
    starts = cu_seqlens[1:-1].long().to(shift_labels.device)
    starts = starts[starts % shift_labels.shape[1] != 0]
    if attention_mask is not None:
        starts = starts[attention_mask.flatten().to(starts.device)[starts] != 0]
    shift_labels = shift_labels.clone(memory_format=torch.contiguous_format)
    shift_labels.view(-1)[starts - 1] = _IGNORED
    return shift_labels


def _check_shapes(full: Mapping[str, Any], tokens: torch.Tensor) -> None:
    batch, length = tokens.shape[:2]
    for name in ("labels", "shift_labels"):
        found = full.get(name)
        if found is not None and tuple(found.shape) != (batch, length):
            raise ValueError(
                f"'{name}': expected shape {(batch, length)}, got {tuple(found.shape)}. Pass labels of the "
                "full sequences."
            )
    mask = full.get("attention_mask")
    square = mask is not None and mask.ndim == 4 and tuple(mask.shape[2:]) == (length, length)
    if mask is not None and not square and tuple(mask.shape) != (batch, length):
        raise ValueError(
            f"'attention_mask': expected shape {(batch, length)} or {(batch, 1, length, length)}, got "
            f"{tuple(mask.shape)}. Pass the mask of the full sequence."
        )
    positions = full["position_ids"]
    if tuple(positions.shape) not in ((1, length), (batch, length)):
        raise ValueError(
            f"'position_ids': expected shape {(batch, length)}, got {tuple(positions.shape)}. Pass the "
            "positions of the full sequence."
        )


def _refuse_packed(full: Mapping[str, Any], tokens: torch.Tensor, padding_idx: int | None) -> None:
    batch, length = tokens.shape[:2]
    positions, mask = full["position_ids"].expand(batch, length), full.get("attention_mask")
    if mask is not None and mask.ndim == 4:
        return
    if is_discontinuous(positions, mask, padding_idx):
        raise ValueError(
            "'position_ids': expected ones that increase by 1, got others, as of several sequences in one "
            "row. For those, pass packed=True, or an attention_mask "
            f"[batch, 1, {length}, {length}] that keeps them apart."
        )
