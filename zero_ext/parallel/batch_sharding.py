"""Shard a batch of sequences over the ranks of sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from zero_ext.parallel.ulysses import sequence_rank

_IGNORED = -100


def shard_batch(
    batch: Mapping[str, Any], mesh: DeviceMesh, *, shift_labels: bool = True, padding_idx: int | None = None
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

    Returns:
        The chunks, and also "position_ids" of the full sequence where they are missing, int64 [1 or
        batch, length / cp]. With labels also "num_items_in_batch", float: the labels of the full batch that
        are not -100 (or the "num_items_in_batch" of `batch`), divided by cp.

    Raises:
        ValueError: For a batch without tokens, a length that does not divide by the ranks, a mask, labels or
            positions of another shape, and positions that begin anew (packed sequences) without a mask
            [batch, 1, length, length] that keeps them apart.
    """
    rank, size = sequence_rank(mesh)
    full = dict(batch)
    tokens = full.get("input_ids", full.get("inputs_embeds"))
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        raise ValueError(
            "batch: expected 'input_ids' [batch, length] or 'inputs_embeds' [batch, length, width], got "
            f"{sorted(full)}. Add one of them."
        )
    length = tokens.shape[1]
    if length % size:
        raise ValueError(
            f"length of sequences: expected a multiple of 'cp' ({size}), got {length} tokens. Pad them to "
            f"{length + -length % size} tokens, with {_IGNORED} as labels."
        )
    if full.get("position_ids") is None:
        full["position_ids"] = _positions(tokens, padding_idx)
    _check(full, tokens, padding_idx)
    labels = full.get("shift_labels")
    if labels is None and full.get("labels") is not None:
        labels = full["labels"]
        if shift_labels:
            labels = full["shift_labels"] = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
    if labels is not None:
        full["labels"] = labels
        items = full.get("num_items_in_batch")
        full["num_items_in_batch"] = ((labels != _IGNORED).sum() if items is None else items) / size
    mask = full.pop("attention_mask", None)
    extent = slice(rank * length // size, (rank + 1) * length // size)
    for name, each in full.items():
        if isinstance(each, torch.Tensor) and each.ndim >= 2 and each.shape[1] == length:
            full[name] = each[:, extent].contiguous()
    return full if mask is None else {**full, "attention_mask": mask}


def _positions(tokens: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """Return the positions of full sequences, int64 [1 or batch, length]."""
    length = tokens.shape[1]
    counted = torch.arange(length, dtype=torch.int64, device=tokens.device)[None]
    if padding_idx is None:
        return counted
    if tokens.is_floating_point():  # embeddings, which do not say what is padding
        return counted + padding_idx + 1
    there = (tokens != padding_idx).long()
    return there.cumsum(1) * there + padding_idx


def _check(full: Mapping[str, Any], tokens: torch.Tensor, padding_idx: int | None) -> None:
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
    begun = positions.diff() != 1
    if padding_idx is not None:
        begun &= (positions != padding_idx)[:, 1:] & (positions != padding_idx)[:, :-1]
    if not square and bool(begun.any()):
        raise ValueError(
            "'position_ids': expected ones that increase by 1, got others, as of several sequences in one "
            f"row. For those, pass an attention_mask {(batch, 1, length, length)} that keeps them apart."
        )
