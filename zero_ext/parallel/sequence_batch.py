"""This rank's part of a batch of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from zero_ext.parallel.sequence import part_of

_IGNORED = -100


def cut_batch(batch: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """The part along the sequence that this rank of mesh["cp"] has, of a batch that all of them got whole.

    Every tensor [batch, length, ...] is cut, but for "attention_mask", which stays whole, as attention sees
    the whole sequence. "position_ids" are those of the whole sequence, made where missing, int64 [1, length /
    cp]. "labels" are shifted to the token before theirs first and are "shift_labels" then, too;
    "shift_labels" given are only cut. With them comes "num_items_in_batch", float: the tokens of the whole
    batch whose label is not -100 (or the "num_items_in_batch" given) over cp. So the sum of a rank's losses
    over this number, averaged over the ranks, is the mean over all tokens, wherever those with -100 are;
    models of transformers compute it by themselves, ``model(**cut_batch(batch, mesh)).loss``. Their mean over
    a rank's own tokens would not be.

    Raises ``ValueError`` for a batch without "input_ids" or "inputs_embeds", a length that does not divide by
    the ranks, a mask or labels of another shape, and positions that begin anew (packed sequences) without a
    mask [batch, 1, length, length] that says so.
    """
    rank, size = part_of(mesh)
    whole = dict(batch)
    tokens = whole.get("input_ids", whole.get("inputs_embeds"))
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        raise ValueError(
            f"the batch has {sorted(whole)}; wanted 'input_ids' [batch, length] or 'inputs_embeds' "
            "[batch, length, width]"
        )
    length = tokens.shape[1]
    if length % size:
        raise ValueError(
            f"sequences of {length} tokens do not divide by cp {size}; pad them to {length + -length % size} "
            f"tokens, with {_IGNORED} as labels"
        )
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(length, dtype=torch.int64, device=tokens.device)[None]
    _check(whole, tokens)
    labels = whole.get("shift_labels")
    if labels is None and whole.get("labels") is not None:
        labels = F.pad(whole["labels"], (0, 1), value=_IGNORED)[:, 1:]
    if labels is not None:
        whole["labels"] = whole["shift_labels"] = labels
        given = whole.get("num_items_in_batch")
        whole["num_items_in_batch"] = ((labels != _IGNORED).sum() if given is None else given) / size
    mask = whole.pop("attention_mask", None)
    part = slice(rank * length // size, (rank + 1) * length // size)
    found = {
        name: each[:, part].contiguous() if _has_length(each, length) else each
        for name, each in whole.items()
    }
    return found if mask is None else {**found, "attention_mask": mask}


def _has_length(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == length


def _check(whole: Mapping[str, Any], tokens: torch.Tensor) -> None:
    batch, length = tokens.shape[:2]
    for name in ("labels", "shift_labels"):
        found = whole.get(name)
        if found is not None and tuple(found.shape) != (batch, length):
            raise ValueError(f"'{name}' has shape {tuple(found.shape)}, wanted {(batch, length)}")
    mask = whole.get("attention_mask")
    square = mask is not None and mask.ndim == 4 and tuple(mask.shape[2:]) == (length, length)
    if mask is not None and not square and tuple(mask.shape) != (batch, length):
        raise ValueError(
            f"'attention_mask' has shape {tuple(mask.shape)}, wanted {(batch, length)} or "
            f"{(batch, 1, length, length)}: that of the whole sequence"
        )
    positions = whole["position_ids"]
    if tuple(positions.shape) not in ((1, length), (batch, length)):
        raise ValueError(f"'position_ids' has shape {tuple(positions.shape)}, wanted {(batch, length)}")
    if not square and bool((positions.diff() != 1).any()):
        raise ValueError(
            "'position_ids' do not count on by 1: several sequences in one row need an attention_mask "
            f"{(batch, 1, length, length)} that keeps them apart"
        )
